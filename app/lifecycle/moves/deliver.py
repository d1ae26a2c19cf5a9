"""The outbox of callbacks: what is due at which host, who tries it, and what came of a try.

Every range is one of a host: what is owed to a host that is dead is never read on the way to
what is owed to others.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import RowMapping, TextClause, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.bulk import ColumnType, RowsInsert, rows_json, update_from_rows
from app.lifecycle.moves.ending import OwedDelivery
from app.lifecycle.moves.owe import DELIVERY_LEASE_MS
from app.lifecycle.reads import read_now
from app.lifecycle.retry import longest_wait_ms, next_try_pause_ms
from app.lifecycle.states import DeliveryStatus
from app.plumbing.database import NOW_MS, Database
from app.plumbing.sealed import BODY_OPENS, MASK
from oncue.protocol import DeliveryResult

_PENDING: Final = int(DeliveryStatus.PENDING)
# `+status` keeps SQLite from taking the index of hosts for rows that are named by their keys: it
# has no statistics, and would read all that is owed.
HOST_INDEX: Final = "ix_callback_delivery_host"

# MySQL and MariaDB jump from host to host in the index for this GROUP BY; SQLite reads all of it
# for that, and jumps by the recursion.
_HOSTS_MYSQL: Final = (
    f"SELECT {NOW_MS[False]} AS now_ms, host, MIN(next_try_at) AS due_ms FROM callback_delivery "
    f"FORCE INDEX ({HOST_INDEX}) WHERE status = {_PENDING} AND host {{behind}} :after "
    "GROUP BY status, host ORDER BY status, host LIMIT :limit"
)
_FIRST_HOST: Final = (
    f"(SELECT host FROM callback_delivery INDEXED BY {HOST_INDEX} WHERE status = {_PENDING} "
    "AND host {behind} {after} ORDER BY host LIMIT 1)"
)
_HOSTS_SQLITE: Final = (
    "WITH RECURSIVE hosts (host, place) AS ("
    f"SELECT {_FIRST_HOST.format(behind='{behind}', after=':after')}, 1 UNION ALL "
    f"SELECT {_FIRST_HOST.format(behind='>', after='hosts.host')}, place + 1 FROM hosts "
    "WHERE hosts.host IS NOT NULL AND place < :limit) "
    f"SELECT {NOW_MS[True]} AS now_ms, host, (SELECT d.next_try_at FROM callback_delivery AS d "
    f"INDEXED BY {HOST_INDEX} WHERE d.status = {_PENDING} AND d.host = hosts.host "
    "ORDER BY d.next_try_at LIMIT 1) AS due_ms FROM hosts WHERE host IS NOT NULL"
)


def due_hosts_sql(database: Database, *, first: bool) -> str:
    """Build the read of a page of hosts, the first one or one behind `:after`."""
    behind = ">=" if first else ">"
    return (_HOSTS_SQLITE if database.is_sqlite else _HOSTS_MYSQL).format(behind=behind)


@dataclass(frozen=True, slots=True)
class OwedHosts:
    """A page of the hosts to which callbacks are owed, with the earliest time of each, epoch ms.

    That is when the first is due, or when the lease of one that a worker has ends.
    """

    now_ms: int
    due_ms: Mapping[str, int]


async def read_owed_hosts(
    connection: AsyncConnection, database: Database, *, after: str | None, limit: int
) -> OwedHosts:
    """Return up to `limit` hosts behind `after` in the order of their names."""
    rows = (
        await connection.execute(
            text(due_hosts_sql(database, first=after is None)),
            {"after": after or "", "limit": limit},
        )
    ).all()
    now = rows[0].now_ms if rows else 0
    return OwedHosts(int(now), {row.host: int(row.due_ms) for row in rows})


_TAKEN: Final[dict[str, ColumnType]] = {"id": "BIGINT", "seen": "BIGINT", "worker": "TEXT"}
_TAKE: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="callback_delivery",
        key="id",
        columns=_TAKEN,
        assignments=("owner_worker_id = v.v_worker, tries = j.tries + 1, next_try_at = :lease_end"),
        guard=f"+j.status = {_PENDING} AND j.next_try_at = v.v_seen",
    )
    for sqlite in (True, False)
}
_LOCK_DUE: Final = {
    sqlite: text(
        f"SELECT id, delivery_id, tries, url, body, next_try_at, host, tenant_id, headers "
        f"FROM callback_delivery {hint}WHERE id IN :ids AND +status = {_PENDING} "
        f"AND next_try_at <= :now ORDER BY id{lock}"
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite, hint, lock in (
        (True, "", ""),
        (False, "FORCE INDEX (PRIMARY) ", " FOR UPDATE SKIP LOCKED"),
    )
}


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A callback leased to a worker for one try."""

    worker_id: str
    delivery: OwedDelivery
    host: str


def _by_host(database: Database) -> str:
    return f"INDEXED BY {HOST_INDEX}" if database.is_sqlite else f"FORCE INDEX ({HOST_INDEX})"


def due_sql(database: Database, count: int) -> str:
    """Build the read of what is due at so many hosts, each an indexed range of its own."""
    arms = [
        f"SELECT id FROM callback_delivery {_by_host(database)} WHERE status = {_PENDING} "
        f"AND host = :host{number} AND next_try_at <= :now ORDER BY next_try_at, id "
        f"LIMIT :share{number}"
        for number in range(count)
    ]
    return " UNION ALL ".join(
        f"SELECT * FROM ({arm}) AS range{number}" for number, arm in enumerate(arms)
    )


async def take_due(
    connection: AsyncConnection,
    database: Database,
    workers_of: Mapping[str, Sequence[str]],
    *,
    limit: int,
    most: Mapping[str, int] | None = None,
) -> list[HandedOver]:
    """Lease up to `limit` due callbacks, as many of each host, to that host's workers in turn.

    `most` bounds those of some hosts further.

    The last owner is not preferred: a lease that ran out says that it could not.
    """
    hosts = list(workers_of)
    if not hosts:
        return []
    now = await read_now(connection, database)
    share = max(1, limit // len(hosts))
    found = await connection.execute(
        text(due_sql(database, len(hosts))),
        {f"host{number}": host for number, host in enumerate(hosts)}
        | {
            f"share{number}": min(share, (most or {}).get(host, share))
            for number, host in enumerate(hosts)
        }
        | {"now": now},
    )
    ids = sorted(row.id for row in found)
    if not ids:
        return []
    locked = await connection.execute(_LOCK_DUE[database.is_sqlite], {"ids": ids, "now": now})
    rows = locked.mappings().all()
    if not rows:
        return []
    owners = _deal(rows, workers_of)
    await connection.execute(
        _TAKE[database.is_sqlite],
        {
            "rows": rows_json(
                _TAKEN,
                [
                    {"id": row["id"], "seen": row["next_try_at"], "worker": owner}
                    for row, owner in zip(rows, owners, strict=True)
                ],
            ),
            "lease_end": now + DELIVERY_LEASE_MS,
        },
    )
    return [
        HandedOver(
            owner,
            OwedDelivery(
                row["delivery_id"],
                row["tries"] + 1,
                row["url"],
                row["body"],
                row["tenant_id"],
                row["headers"],
            ),
            row["host"],
        )
        for row, owner in zip(rows, owners, strict=True)
    ]


def _deal(rows: Sequence[RowMapping], workers_of: Mapping[str, Sequence[str]]) -> list[str]:
    turn = random.randrange(1_000_000)
    owners = []
    for row in rows:
        workers = workers_of[row["host"]]
        owners.append(workers[turn % len(workers)])
        turn += 1
    return owners


# Without the hint MySQL may walk, and lock, a table that is still small for a batch of ids.
_BY_DELIVERY_ID: Final = {True: "", False: "FORCE INDEX (uq_callback_delivery_delivery_id) "}
_GIVE_BACK: Final = {
    sqlite: text(
        f"UPDATE callback_delivery {hint}SET next_try_at = :due, tries = tries - 1, "
        "owner_worker_id = NULL WHERE delivery_id IN :ids AND owner_worker_id = :worker "
        f"AND +status = {_PENDING}"
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite, hint in _BY_DELIVERY_ID.items()
}


async def give_back(
    connection: AsyncConnection,
    database: Database,
    worker_id: str,
    delivery_ids: Sequence[str],
    *,
    pause_ms: int,
) -> None:
    """Make callbacks that a worker would not take due again after a pause; no try is counted."""
    if delivery_ids:
        now = await read_now(connection, database)
        await connection.execute(
            _GIVE_BACK[database.is_sqlite],
            {"due": now + pause_ms, "ids": sorted(delivery_ids), "worker": worker_id},
        )


_ORPHAN: Final = text(
    "UPDATE callback_delivery SET next_try_at = :now, owner_worker_id = NULL "
    f"WHERE id IN :ids AND owner_worker_id = :worker AND +status = {_PENDING}"
).bindparams(bindparam("ids", expanding=True))


async def find_deliveries_of(
    connection: AsyncConnection, database: Database, worker_id: str, *, limit: int
) -> list[int]:
    """Return the callbacks that are owed and that a worker holds, among all that are owed."""
    rows = await connection.execute(
        text(
            f"SELECT id FROM callback_delivery {_by_host(database)} WHERE status = {_PENDING} "
            "AND owner_worker_id = :worker LIMIT :limit"
        ),
        {"worker": worker_id, "limit": limit},
    )
    return sorted(row.id for row in rows)


async def release_deliveries(
    connection: AsyncConnection, database: Database, worker_id: str, ids: Sequence[int]
) -> None:
    """Make these callbacks of a dead worker due at once, if it still holds them."""
    if ids:
        now = await read_now(connection, database)
        await connection.execute(_ORPHAN, {"now": now, "ids": ids, "worker": worker_id})


_EXTEND: Final = {
    sqlite: text(
        f"UPDATE callback_delivery {hint}SET next_try_at = :lease_end WHERE delivery_id IN :ids "
        f"AND owner_worker_id = :worker AND +status = {_PENDING}"
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite, hint in _BY_DELIVERY_ID.items()
}


async def extend_leases(
    connection: AsyncConnection, database: Database, worker_id: str, delivery_ids: Sequence[str]
) -> None:
    """Extend the leases of the callbacks that a worker still holds."""
    if delivery_ids:
        now = await read_now(connection, database)
        await connection.execute(
            _EXTEND[database.is_sqlite],
            {
                "lease_end": now + DELIVERY_LEASE_MS,
                "ids": sorted(delivery_ids),
                "worker": worker_id,
            },
        )


def _sends_secrets(row: str) -> str:
    """Build the condition of a callback that has something secret in it; `row` ends in a dot."""
    return (
        f"(SUBSTR({row}body, 1, {len(BODY_OPENS)}) = '{BODY_OPENS}' "
        f"OR INSTR(COALESCE({row}headers, ''), '{{\"sealed\"') > 0)"
    )


_TOLD: Final[dict[str, ColumnType]] = {
    "delivery_id": "TEXT",
    "number": "BIGINT",
    "at": "BIGINT",
    "code": "BIGINT",
    "latency": "BIGINT",
    "answer": "TEXT",
}


def _end_sql(*, sqlite: bool) -> TextClause:
    now = NOW_MS[sqlite]
    greatest, least = ("MAX", "MIN") if sqlite else ("GREATEST", "LEAST")
    # As in `_tried_at`.
    tried_at = (
        f"{least}({greatest}(COALESCE(v.v_at, {now} - v.v_latency), j.created_at), "
        f"{greatest}({now}, j.created_at))"
    )
    return update_from_rows(
        sqlite=sqlite,
        table="callback_delivery",
        key="delivery_id",
        index="uq_callback_delivery_delivery_id",
        columns=_TOLD,
        assignments=(
            f"status = {int(DeliveryStatus.DELIVERED)}, ended_at = {now}, "
            "last_status_code = v.v_code, last_error = NULL, last_latency_ms = v.v_latency, "
            f"success_try = v.v_number, success_at = {tried_at}, success_worker_id = :worker, "
            "success_status_code = v.v_code, success_latency_ms = v.v_latency, "
            # A receiver may send back what it was sent.
            f"success_answer = CASE WHEN LENGTH(v.v_answer) > 0 AND {_sends_secrets('j.')} "
            "THEN :mask ELSE v.v_answer END"
        ),
        guard=(
            f"+j.status = {_PENDING} AND j.tries = v.v_number "
            "AND j.owner_worker_id = :worker AND j.success_try IS NULL"
        ),
    )


_END: Final = {sqlite: _end_sql(sqlite=sqlite) for sqlite in (True, False)}
_TRIED: Final = {
    sqlite: text(
        f"SELECT {NOW_MS[sqlite]} AS now_ms, id, delivery_id, job_id, status, tries, "
        "owner_worker_id, created_at, owed_since, success_try, "
        f"{_sends_secrets('')} AS sends_secrets "
        f"FROM callback_delivery {hint}WHERE delivery_id IN :ids"
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite, hint in _BY_DELIVERY_ID.items()
}


class _Tried(NamedTuple):
    """A row of `_TRIED`."""

    now_ms: int
    id: int
    delivery_id: str
    job_id: int
    status: int
    tries: int
    owner_worker_id: str | None
    created_at: int
    owed_since: int
    success_try: int | None
    sends_secrets: bool


_NOTED: Final[dict[str, ColumnType]] = {
    "id": "BIGINT",
    "tries": "BIGINT",
    "status": "BIGINT",
    "next": "BIGINT",
    "uncounted": "BIGINT",
    "code": "BIGINT",
    "error": "TEXT",
    "latency": "BIGINT",
    "ended": "BIGINT",
}
_NOTE: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="callback_delivery",
        key="id",
        columns=_NOTED,
        assignments=(
            "status = v.v_status, next_try_at = v.v_next, tries = j.tries - v.v_uncounted, "
            "last_status_code = CASE WHEN v.v_uncounted = 1 THEN j.last_status_code "
            "ELSE v.v_code END, "
            "last_error = v.v_error, last_latency_ms = v.v_latency, ended_at = v.v_ended, "
            f"owner_worker_id = CASE WHEN v.v_status = {_PENDING} THEN NULL "
            "ELSE j.owner_worker_id END"
        ),
        guard=(
            f"+j.status = {_PENDING} AND (v.v_status = {int(DeliveryStatus.DELIVERED)} "
            "OR (j.tries = v.v_tries AND j.owner_worker_id = :worker))"
        ),
    )
    for sqlite in (True, False)
}
_RECORDED: Final[dict[str, ColumnType]] = {
    "job": "BIGINT",
    "delivery": "BIGINT",
    "number": "BIGINT",
    "at": "BIGINT",
    "delivered": "BIGINT",
    "code": "BIGINT",
    "latency": "BIGINT",
    "error": "TEXT",
    "answer": "TEXT",
}
_RECORD: Final = RowsInsert(
    table="callback_try",
    columns=_RECORDED,
    values=lambda _sqlite: {
        "job_id": "v.v_job",
        "delivery_key": "v.v_delivery",
        "try_number": "v.v_number",
        "tried_at": "v.v_at",
        "worker_id": ":worker",
        "delivered": "v.v_delivered",
        "status_code": "v.v_code",
        "latency_ms": "v.v_latency",
        "error": "v.v_error",
        "answer": "v.v_answer",
    },
    keep_first="try_number",
)


_FAILED: Final = text(
    "SELECT delivery_key, COUNT(*) AS failed FROM callback_try WHERE job_id IN :jobs "
    "AND delivery_key IN :deliveries AND delivered = 0 GROUP BY delivery_key"
).bindparams(bindparam("jobs", expanding=True), bindparam("deliveries", expanding=True))


_RECORDED_TRIES: Final = text(
    "SELECT delivery_key, try_number FROM callback_try WHERE job_id IN :jobs "
    "AND delivery_key IN :deliveries AND delivered = 1"
).bindparams(bindparam("jobs", expanding=True), bindparam("deliveries", expanding=True))


async def note_tries(
    connection: AsyncConnection,
    database: Database,
    results: Sequence[DeliveryResult],
    *,
    worker_id: str,
    schedule_seconds: tuple[float, ...],
) -> int | None:
    """Write what came of tries, and return the earliest next try, epoch ms.

    A success ends the delivery whichever try it was, but once only: told again it does not undo a
    redelivery. A failure counts only for the newest try,
    while it is its worker's: another may be under way, or a redelivery may have been asked for.
    What was not tried is due again, uncounted, unless it has been owed for longer than all pauses
    of the schedule: then it is given up.
    """
    results = await _end_at_once(connection, database, results, worker_id)
    if not results:
        return None
    found = await connection.execute(
        _TRIED[database.is_sqlite], {"ids": sorted({one.delivery_id for one in results})}
    )
    rows = {row.delivery_id: row for row in map(_Tried._make, found)}
    if not rows:
        return None
    now = next(iter(rows.values())).now_ms
    repeated = await _recorded(connection, _superseded(results, rows, worker_id))
    await _record(connection, results, rows, worker_id)
    newest: dict[str, DeliveryResult] = {}
    for result in sorted(results, key=lambda one: (one.delivered, one.try_number)):
        if (result.delivery_id, result.try_number) not in repeated:
            newest[result.delivery_id] = result
    counted = [
        (row, newest[delivery_id])
        for delivery_id, row in rows.items()
        if delivery_id in newest
        and row.status == _PENDING
        and (newest[delivery_id].delivered or _is_current(row, newest[delivery_id], worker_id))
    ]
    failed = await _count_failed(
        connection,
        [row for row, one in counted if not (one.delivered or one.gone or one.not_tried)],
    )
    changes = [
        _after_try(row, one, now, schedule_seconds, failed=failed.get(row.id, 0))
        for row, one in sorted(counted, key=lambda each: each[0].id)
    ]
    if changes:
        await connection.execute(
            _NOTE[database.is_sqlite],
            {"rows": rows_json(_NOTED, changes), "worker": worker_id},
        )
    return min((change["next"] for change in changes if change["status"] == _PENDING), default=None)


async def _end_at_once(
    connection: AsyncConnection,
    database: Database,
    results: Sequence[DeliveryResult],
    worker_id: str,
) -> Sequence[DeliveryResult]:
    """End deliveries whose newest try succeeded, with its record; return what is left to note.

    That is the first success of a delivery, told by the try's own worker: it needs no row in
    `callback_try`. If one of them is something else, all are left: what has been ended is seen.
    """
    done: list[DeliveryResult] = []
    others: list[DeliveryResult] = []
    for one in results:
        is_plain = one.delivered and one.error is None and not one.not_tried
        (done if is_plain else others).append(one)
    if not done:
        return results
    # In the order in which leases are extended too, by `delivery_id`.
    told = [
        {
            "delivery_id": one.delivery_id,
            "number": one.try_number,
            "at": one.tried_at,
            "code": one.status_code,
            "latency": one.latency_ms,
            "answer": one.answer,
        }
        for one in sorted(done, key=lambda one: one.delivery_id)
    ]
    ended = await connection.execute(
        _END[database.is_sqlite],
        {"rows": rows_json(_TOLD, told), "worker": worker_id, "mask": MASK},
    )
    return others if ended.rowcount == len(done) else results


def _superseded(
    results: Sequence[DeliveryResult], rows: Mapping[str, _Tried], worker_id: str
) -> list[tuple[_Tried, int]]:
    """Return the deliveries that are owed still and had a success, by a try that is not the newest.

    Of these a repeat must be told from news: the first ends the delivery, the second would undo a
    redelivery that was asked for since.
    """
    return [
        (row, one.try_number)
        for one in results
        if one.delivered
        and (row := rows.get(one.delivery_id)) is not None
        and row.status == _PENDING
        and not _is_current(row, one, worker_id)
    ]


async def _recorded(
    connection: AsyncConnection, tries: Sequence[tuple[_Tried, int]]
) -> set[tuple[str, int]]:
    """Return those of the tries, as (delivery id, number), that are on record as successes."""
    if not tries:
        return set()
    found = await connection.execute(
        _RECORDED_TRIES,
        {
            "jobs": sorted({row.job_id for row, _ in tries}),
            "deliveries": sorted({row.id for row, _ in tries}),
        },
    )
    known = {(row.delivery_key, row.try_number) for row in found}
    return {
        (row.delivery_id, number)
        for row, number in tries
        if number == row.success_try or (row.id, number) in known
    }


def _is_current(row: _Tried, result: DeliveryResult, worker_id: str) -> bool:
    return row.tries == result.try_number and row.owner_worker_id == worker_id


async def _count_failed(connection: AsyncConnection, rows: Sequence[_Tried]) -> dict[int, int]:
    """Count the tries that are known to have failed, this one too.

    Others may have begun and never ended, with a worker that was lost: they used up nothing.
    """
    if not rows:
        return {}
    found = await connection.execute(
        _FAILED,
        {
            "jobs": sorted({row.job_id for row in rows}),
            "deliveries": sorted(row.id for row in rows),
        },
    )
    return {row.delivery_key: row.failed for row in found}


async def _record(
    connection: AsyncConnection,
    results: Sequence[DeliveryResult],
    rows: Mapping[str, _Tried],
    worker_id: str,
) -> None:
    """Insert the record of each try that was made; one that is there already stays."""
    tries = [
        {
            "job": row.job_id,
            "delivery": row.id,
            "number": one.try_number,
            "at": _tried_at(one, row),
            "delivered": int(one.delivered),
            "code": one.status_code,
            "latency": one.latency_ms,
            "error": one.error,
            # A receiver may send back what it was sent.
            "answer": MASK if row.sends_secrets and one.answer else one.answer,
        }
        for one in results
        if not one.not_tried
        and (row := rows.get(one.delivery_id)) is not None
        and row.success_try != one.try_number
    ]
    if tries:
        tries.sort(key=lambda one: (one["job"], one["delivery"], one["number"]))
        await _RECORD.run(connection, tries, worker=worker_id[:128])


def _tried_at(result: DeliveryResult, row: _Tried) -> int:
    """Fit the worker's own time of the try between the callback's making and now."""
    given = row.now_ms - result.latency_ms if result.tried_at is None else result.tried_at
    return min(max(given, row.created_at), max(row.now_ms, row.created_at))


def _after_try(
    row: _Tried,
    result: DeliveryResult,
    now: int,
    schedule_seconds: tuple[float, ...],
    *,
    failed: int,
) -> dict[str, Any]:
    """Return what a try makes of its delivery, a row of `_NOTE`."""
    pause: int | None
    if result.not_tried:
        owed_for = now - (row.owed_since or row.created_at)
        too_long = owed_for > longest_wait_ms(schedule_seconds)
        pause = None if too_long else result.retry_after_ms or 0
    else:
        pause = next_try_pause_ms(
            schedule_seconds,
            tries=failed,
            owed_ms=now - row.created_at,
            retry_after_ms=result.retry_after_ms,
            jitter=random.random(),
        )
    if result.delivered:
        status = DeliveryStatus.DELIVERED
    elif result.gone:
        status = DeliveryStatus.GONE
    else:
        status = DeliveryStatus.EXHAUSTED if pause is None else DeliveryStatus.PENDING
    return {
        "id": row.id,
        "tries": result.try_number,
        "status": int(status),
        "next": now + (pause or 0),
        "uncounted": int(result.not_tried),
        "code": result.status_code,
        "error": result.error,
        "latency": result.latency_ms,
        "ended": None if status is DeliveryStatus.PENDING else now,
    }
