"""The moves `fire` and `finish`: schedules go on to their next time, and spawn what is due.

The cursors go first, each guarded by status, version and the holder's term; then the children of
those cursors and the ledger of what does not run, in the same transaction. A child is unique by
(parent, nominal time, shard, key), so that no fire is spawned twice, whoever tries.

A schedule's row: `trigger_ts` is its cursor, the last nominal time that is decided;
`next_trigger_time` is the next one with its spread, or NULL while a fixed delay waits for the
end of a run. It lies in the queue 0, so that the claim index tells what is due.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import Row, RowMapping, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.bulk import (
    ColumnType,
    insert_from_rows,
    rows_json,
    select_by_rows,
    update_from_rows,
)
from app.lifecycle.moves.cancel import cancel_job
from app.lifecycle.moves.follow import Claimable, Followed, Live, lock_live
from app.lifecycle.moves.guard import Asked, Changed
from app.lifecycle.moves.submit import PARAMS_SLOT, insert_payloads
from app.lifecycle.states import JobKind, JobStatus, in_list, sources
from app.lifecycle.tables import INLINE_BYTES
from app.plumbing.database import NOW_MS, Database, keep_first

SCHEDULES_QUEUE: Final = 0
"""The queue of all schedules: no worker serves it, and no task is in it."""
PRIORITIES: Final = range(10)
REPLACED: Final = "A later fire of its schedule took its place."

_JOIN: Final = {True: "CROSS JOIN", False: "STRAIGHT_JOIN"}
"""Joins that begin with the rows given: no optimizer turns them round."""
_DUE: Final = in_list(sources("fire", JobKind.SCHEDULE))
PLAN_COLUMNS: Final = (
    "id, tenant_id, client_request_id, status, version, next_trigger_time, trigger_ts, cron_expr, "
    "cron_dialect, timezone, interval_ms, interval_mode, dst_gap, dst_fold, misfire_policy, "
    "misfire_cap, misfire_spacing_ms, catch_up_ms, overlap_policy, jitter_ms, max_fires, fires, "
    "start_at, end_at, anchor_at, skip_from, skip_reason, params_in_payload"
)
"""What a plan is made from; times are epoch ms."""


class Fenced(Exception):
    """Another dispatcher holds the lock: nothing was written."""


class Spawn(NamedTuple):
    """A child to insert; one that `waits` stands behind another of its schedule."""

    nominal_ms: int
    due_ms: int
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Skip:
    """Consecutive fires that do not run. `from_ms` may be the start of a row that is there."""

    from_ms: int
    to_ms: int
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fire:
    """What is decided for one locked schedule; no `next_ms` and `ended` is its end."""

    schedule: RowMapping
    cursor_ms: int
    next_ms: int | None
    ended: bool = False
    spawns: tuple[Spawn, ...] = ()
    skips: tuple[Skip, ...] = ()
    replaced: tuple[int, ...] = ()
    last_skip: Skip | None = None
    """The ledger row that the cursor lies in, if its fire did not run."""


@dataclass(frozen=True, slots=True)
class Fired:
    """What a transaction of fires has done.

    `cancelled` are (job, execution), `stopped` (worker, execution) to be stopped, `ended` are
    schedules that have no fire left.
    """

    claimable: tuple[Claimable, ...] = ()
    spawned: tuple[int, ...] = ()
    cancelled: tuple[tuple[int, str], ...] = ()
    stopped: tuple[tuple[str, str], ...] = ()
    owed: bool = False
    ended: tuple[int, ...] = ()


class Waiting(NamedTuple):
    """A schedule and its next time, as a plain read saw it at a time of the database (epoch ms)."""

    id: int
    due_ms: int
    now_ms: int


def due_sql(database: Database, *, limit: int | None, ahead_ms: int = 0) -> str:
    """Build the read of what is due by now or so much later; without a limit of the next of all.

    One indexed range a priority; a priority in which nothing is costs one step of the index.
    """
    hint = "" if database.is_sqlite else "FORCE INDEX (ix_job_info_claim) "
    until = "> 0" if limit is None else f"BETWEEN 1 AND {database.now_ms} + {int(ahead_ms)}"
    arms = [
        f"SELECT id, next_trigger_time, {database.now_ms} AS now_ms FROM job_info {hint}"
        f"WHERE status = {_DUE} "
        f"AND queue_id = {SCHEDULES_QUEUE} AND priority = {priority} "
        f"AND next_trigger_time {until} ORDER BY next_trigger_time, id LIMIT {limit or 1}"
        for priority in PRIORITIES
    ]
    return " UNION ALL ".join(
        f"SELECT * FROM ({arm}) AS range{number}" for number, arm in enumerate(arms)
    )


async def find_next(connection: AsyncConnection, database: Database) -> Waiting | None:
    """Return the schedule that is due next, or None: ten steps of the index."""
    rows = await connection.exec_driver_sql(due_sql(database, limit=None))
    return min((_waiting(row) for row in rows), key=_place, default=None)


async def find_due(
    connection: AsyncConnection, database: Database, *, limit: int, ahead_ms: int = 0
) -> list[Waiting]:
    """Return up to `limit` schedules that are due, or will be in a moment, the longest due first.

    Without locks.
    """
    rows = await connection.exec_driver_sql(due_sql(database, limit=limit, ahead_ms=ahead_ms))
    return sorted((_waiting(row) for row in rows), key=_place)[:limit]


def _waiting(row: Row[Any]) -> Waiting:
    return Waiting(row.id, row.next_trigger_time, row.now_ms)


def _place(one: Waiting) -> tuple[int, int]:
    return one.due_ms, one.id


_LOCK: Final = {
    sqlite: text(
        f"SELECT {PLAN_COLUMNS}, {NOW_MS[sqlite]} AS now_ms FROM job_info {hint}"
        f"WHERE id IN :ids AND status = {_DUE} "
        f"AND next_trigger_time <= {NOW_MS[sqlite]} + :ahead ORDER BY id{lock}"
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite, hint, lock in (
        (True, "NOT INDEXED ", ""),
        (False, "FORCE INDEX (PRIMARY) ", " FOR UPDATE SKIP LOCKED"),
    )
}
_READ: Final = {
    sqlite: text(f"SELECT {PLAN_COLUMNS}, {NOW_MS[sqlite]} AS now_ms FROM job_info WHERE id = :id")
    for sqlite in (True, False)
}


async def lock_due(
    connection: AsyncConnection, database: Database, ids: Collection[int], *, ahead_ms: int = 0
) -> Sequence[RowMapping]:
    """Return those of the schedules that are due (or so much later) and free, locked."""
    rows = await connection.execute(
        _LOCK[database.is_sqlite], {"ids": sorted(ids), "ahead": ahead_ms}
    )
    return rows.mappings().all()


async def read_plan_row(
    connection: AsyncConnection, database: Database, schedule_id: int
) -> RowMapping:
    """Return what a plan of a schedule is made from; its row is locked already."""
    row = await connection.execute(_READ[database.is_sqlite], {"id": schedule_id})
    return row.mappings().one()


async def find_schedule(
    connection: AsyncConnection, database: Database, job_id: int, *, tenant_id: int
) -> RowMapping | None:
    """Return what a plan of a tenant's job is made from, and its kind, without a lock."""
    found = await connection.execute(
        text(
            f"SELECT {PLAN_COLUMNS}, kind, {database.now_ms} AS now_ms FROM job_info "
            "WHERE id = :id AND tenant_id = :tenant"
        ),
        {"id": job_id, "tenant": tenant_id},
    )
    return found.mappings().one_or_none()


_LISTED: Final = text(
    "SELECT schedule_id, child_id FROM schedule_live WHERE schedule_id IN :ids AND backfill_id = 0"
).bindparams(bindparam("ids", expanding=True))
_LOCK_CHILDREN: Final = text(
    "SELECT id FROM job_info FORCE INDEX (PRIMARY) WHERE id IN :ids ORDER BY id FOR UPDATE"
).bindparams(bindparam("ids", expanding=True))


async def read_live(
    connection: AsyncConnection, database: Database, schedules: Sequence[RowMapping]
) -> dict[int, Live]:
    """Return what goes on for each of these locked schedules, where that matters to its fires."""
    caring = {row["id"]: row for row in schedules if row["overlap_policy"] != "allow"}
    if not caring:
        return {}
    listed = (await connection.execute(_LISTED, {"ids": sorted(caring)})).all()
    replaced = sorted(
        one.child_id for one in listed if caring[one.schedule_id]["overlap_policy"] == "replace"
    )
    if replaced and not database.is_sqlite:
        # Children before the rows of schedule_live, as every end of a child does.
        await connection.execute(_LOCK_CHILDREN, {"ids": replaced})
    return await lock_live(connection, sorted({one.schedule_id for one in listed}))


_CURSORS: Final[dict[str, ColumnType]] = {
    "id": "BIGINT",
    "version": "BIGINT",
    "status": "BIGINT",
    "cursor": "BIGINT",
    "next": "BIGINT",
    "fires": "BIGINT",
    "skip": "BIGINT",
    "reason": "TEXT",
    "finished": "BIGINT",
}
_ADVANCE: Final = {
    (sqlite, fenced): update_from_rows(
        sqlite=sqlite,
        table="job_info",
        key="id",
        columns=_CURSORS,
        assignments=(
            "status = v.v_status, version = j.version + 1, trigger_ts = v.v_cursor, "
            "next_trigger_time = v.v_next, fires = j.fires + v.v_fires, skip_from = v.v_skip, "
            "skip_reason = v.v_reason, finished_at = v.v_finished, updated_at = :now"
        ),
        guard=(
            f"+j.status = {_DUE} AND j.version = v.v_version"  # the sign: by id, not by status
            + (
                " AND EXISTS (SELECT 1 FROM dispatch_term WHERE partition_no = 0 AND term = :term)"
                if fenced
                else ""
            )
        ),
    )
    for sqlite in (True, False)
    for fenced in (True, False)
}
_CHILD: Final[dict[str, ColumnType]] = {
    "parent": "BIGINT",
    "nominal": "BIGINT",
    "key": "TEXT",
    "due": "BIGINT",
    "status": "BIGINT",
    "request": "TEXT",
    "digest": "TEXT",
    "own": "BIGINT",
    "params": "TEXT",
    "long": "BIGINT",
}
_INHERITED: Final = (
    *("tenant_id", "job_name", "job_handler", "priority", "max_retry", "retry_interval_ms"),
    *("retry_backoff", "timeout_ms", "callback_url", "callback_events", "callback_headers"),
    *("secret", "concurrency_key", "concurrency_limit", "rate_key", "rate_per_second"),
)
_SPAWN: Final = {
    sqlite: insert_from_rows(
        sqlite=sqlite,
        table="job_info",
        columns=_CHILD,
        join=f"{_JOIN[sqlite]} job_info AS p ON p.id = v.v_parent",
        values={
            **{name: f"p.{name}" for name in _INHERITED},
            "client_request_id": "v.v_request",
            "request_digest": "v.v_digest",
            "submit_token": ":token",
            "parent_id": "p.id",
            "nominal_time": "v.v_nominal",
            "child_key": "v.v_key",
            "kind": str(int(JobKind.TASK)),
            "queue_id": "p.child_queue_id",
            "status": "v.v_status",
            "next_trigger_time": "v.v_due",
            "params": "CASE WHEN v.v_own = 1 THEN v.v_params ELSE p.params END",
            "params_in_payload": (
                "CASE WHEN v.v_own = 1 THEN v.v_long ELSE p.params_in_payload END"
            ),
            "created_at": ":now",
            "updated_at": ":now",
        },
        keep_first=keep_first(sqlite, "job_info.created_at"),
    )
    for sqlite in (True, False)
}
_SPAWNED: Final = {
    sqlite: select_by_rows(
        sqlite=sqlite,
        columns=_CHILD,
        select=(
            "j.id, j.parent_id, j.nominal_time, j.child_key, j.queue_id, j.priority, j.status, "
            "j.next_trigger_time, j.submit_token"
        ),
        join=f"{_JOIN[sqlite]} job_info AS j ON "
        "j.parent_id = v.v_parent AND j.nominal_time = v.v_nominal AND j.shard_index = 0 "
        "AND j.child_key = v.v_key",
    )
    for sqlite in (True, False)
}
_COPY_LABELS: Final = {
    sqlite: text(
        "INSERT INTO job_label (job_id, name, value) SELECT c.id, l.name, l.value "
        "FROM job_info AS c JOIN job_label AS l ON l.job_id = c.parent_id WHERE c.id IN :ids "
        + keep_first(sqlite, "job_label.name")
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite in (True, False)
}
_COPY_PARAMS: Final = {
    sqlite: text(
        "INSERT INTO job_payload (job_id, slot, body, byte_count) "
        "SELECT c.id, b.slot, b.body, b.byte_count "
        "FROM job_info AS c JOIN job_payload AS b ON b.job_id = c.parent_id "
        f"WHERE b.slot = '{PARAMS_SLOT}' AND c.id IN :ids AND c.params_in_payload = 1 "
        + keep_first(sqlite, "job_payload.slot")
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite in (True, False)
}
_SKIPPED: Final[dict[str, ColumnType]] = {
    "schedule": "BIGINT",
    "from": "BIGINT",
    "to": "BIGINT",
    "count": "BIGINT",
    "reason": "TEXT",
}
_LEDGER: Final = {
    sqlite: insert_from_rows(
        sqlite=sqlite,
        table="schedule_skip",
        columns=_SKIPPED,
        values={
            "schedule_id": "v.v_schedule",
            "from_time": "v.v_from",
            "to_time": "v.v_to",
            "count": "v.v_count",
            "reason": "v.v_reason",
        },
        keep_first=(
            "ON CONFLICT (schedule_id, from_time) DO UPDATE SET to_time = excluded.to_time, "
            "count = schedule_skip.count + excluded.count"
            if sqlite
            else "ON DUPLICATE KEY UPDATE schedule_skip.to_time = v.v_to, "
            "schedule_skip.count = schedule_skip.count + v.v_count"
        ),
    )
    for sqlite in (True, False)
}


_PUT_OFF: Final = text(
    "UPDATE job_info SET next_trigger_time = :until, version = version + 1 "
    f"WHERE id = :id AND status = {_DUE} AND version = :version"
)


async def put_off(
    connection: AsyncConnection, schedules: Sequence[RowMapping], *, until_ms: int
) -> None:
    """Look at locked schedules again later; what is due for them stays so."""
    if schedules:
        await connection.execute(
            _PUT_OFF,
            [{"id": row["id"], "version": row["version"], "until": until_ms} for row in schedules],
        )


async def fire(
    connection: AsyncConnection,
    database: Database,
    fires: Sequence[Fire],
    *,
    token: str,
    now_ms: int,
    term: int | None,
) -> Fired:
    """Carry out what is decided for locked schedules; `term` is the holder's, None for a caller.

    Raises:
        Fenced: the term is over; the transaction must be rolled back.
    """
    if not fires:
        return Fired()
    moved = await connection.execute(
        _ADVANCE[database.is_sqlite, term is not None],
        {
            "rows": rows_json(_CURSORS, [_cursor_row(one, now_ms) for one in fires]),
            "now": now_ms,
            **({} if term is None else {"term": term}),
        },
    )
    if moved.rowcount != len(fires):
        raise Fenced
    done = await _replace(connection, database, fires, token)
    children = [
        child_row(
            one.schedule["id"],
            spawn.nominal_ms,
            spawn.due_ms,
            waits=spawn.waits or one.schedule["id"] in done.busy,
            inherits_long=bool(one.schedule["params_in_payload"]),
        )
        for one in fires
        for spawn in one.spawns
    ]
    born = await spawn_children(connection, database, children, token=token, now_ms=now_ms)
    await write_ledger(
        connection, database, [(one.schedule["id"], skip) for one in fires for skip in one.skips]
    )
    return Fired(
        claimable=born.claimable + done.followed.claimable,
        spawned=born.ids,
        cancelled=tuple(done.cancelled),
        stopped=tuple(done.stopped),
        owed=done.owed,
        ended=tuple(one.schedule["id"] for one in fires if one.ended),
    )


class _Replacing:
    """What the cancelling of replaced children has brought about."""

    def __init__(self) -> None:
        self.cancelled: list[tuple[int, str]] = []
        self.stopped: list[tuple[str, str]] = []
        self.busy: set[int] = set()
        self.owed = False
        self.followed = Followed()


async def _replace(
    connection: AsyncConnection, database: Database, fires: Sequence[Fire], token: str
) -> _Replacing:
    """Cancel what later fires replace; a schedule is busy while a run of it is yet to stop."""
    done = _Replacing()
    for one in fires:
        schedule = one.schedule
        for child_id in one.replaced:
            asked = Asked(child_id, schedule["tenant_id"], token)
            answer = await cancel_job(connection, database, asked, message=REPLACED)
            if not isinstance(answer, Changed) or answer.repeated:
                done.busy.add(schedule["id"])  # it has ended before, and its run goes on
                continue
            done.cancelled.append((child_id, "" if answer.stopped is None else answer.stopped[1]))
            done.owed = done.owed or answer.owed
            done.followed += answer.followed
            if answer.stopped is not None:
                done.stopped.append(answer.stopped)
            if answer.goes_on:
                done.busy.add(schedule["id"])
    return done


@dataclass(frozen=True, slots=True)
class Born:
    """The children that were inserted by this call, and those of them that may be claimed."""

    ids: tuple[int, ...] = ()
    claimable: tuple[Claimable, ...] = ()


def child_row(
    parent_id: int,
    nominal_ms: int,
    due_ms: int,
    *,
    waits: bool = False,
    key: str = "",
    backfill_id: int = 0,
    request_id: str | None = None,
    digest: str | None = None,
    own_params: bool = False,
    params: str | None = None,
    inherits_long: bool = True,
) -> dict[str, Any]:
    """Return a child for `spawn_children`; without `own_params` it has those of its schedule.

    `params` is JSON text; `inherits_long` is false where those of the schedule are in its row.
    """
    long = params is not None and len(params.encode()) > INLINE_BYTES
    return {
        "parent": parent_id,
        "nominal": nominal_ms,
        "key": key,
        "due": due_ms,
        "status": int(JobStatus.BLOCKED if waits else JobStatus.WAITING),
        "backfill": backfill_id,
        "request": request_id,
        "digest": digest,
        "own": int(own_params),
        "copies": inherits_long and not own_params,
        "params": None if long else params,
        "long": int(long),
        "body": params if long else None,
    }


async def spawn_children(
    connection: AsyncConnection,
    database: Database,
    children: Sequence[dict[str, Any]],
    *,
    token: str,
    now_ms: int,
) -> Born:
    """Insert children of locked schedules with what they inherit; those that exist stay."""
    if not children:
        return Born()
    sqlite = database.is_sqlite
    in_order = sorted(children, key=lambda one: (one["parent"], one["nominal"], one["key"]))
    rows = rows_json(_CHILD, in_order)
    await connection.execute(_SPAWN[sqlite], {"rows": rows, "token": token, "now": now_ms})
    found = (await connection.execute(_SPAWNED[sqlite], {"rows": rows})).all()
    own = [row for row in found if row.submit_token == token]
    if not own:
        return Born()
    ids = sorted(row.id for row in own)
    await connection.execute(_COPY_LABELS[sqlite], {"ids": ids})
    given = {(one["parent"], one["nominal"], one["key"]): one for one in in_order}
    asked = {row.id: given[row.parent_id, row.nominal_time, row.child_key] for row in own}
    if heirs := [job_id for job_id in ids if asked[job_id]["copies"]]:
        await connection.execute(_COPY_PARAMS[sqlite], {"ids": heirs})
    await insert_payloads(
        connection,
        database,
        [
            {"job_id": job_id, "slot": PARAMS_SLOT, "body": asked[job_id]["body"]}
            for job_id in ids
            if asked[job_id]["long"]
        ],
    )
    await connection.execute(
        text(
            "INSERT INTO schedule_live (schedule_id, child_id, waits, backfill_id) "
            "VALUES (:schedule, :child, :waits, :backfill) " + database.keep_first("child_id")
        ),
        [
            {
                "schedule": row.parent_id,
                "child": row.id,
                "waits": int(row.status == JobStatus.BLOCKED),
                "backfill": asked[row.id]["backfill"],
            }
            for row in sorted(own, key=lambda row: (row.parent_id, row.id))
        ],
    )
    return Born(
        tuple(ids),
        tuple(
            Claimable(row.queue_id, row.priority, row.next_trigger_time)
            for row in own
            if row.status == JobStatus.WAITING
        ),
    )


async def write_ledger(
    connection: AsyncConnection, database: Database, skips: Sequence[tuple[int, Skip]]
) -> None:
    """Put on record what does not run; a row that begins at the same time grows."""
    if skips:
        rows = [
            {
                "schedule": schedule_id,
                "from": skip.from_ms,
                "to": skip.to_ms,
                "count": skip.count,
                "reason": skip.reason,
            }
            for schedule_id, skip in sorted(skips, key=lambda one: (one[0], one[1].from_ms))
        ]
        await connection.execute(_LEDGER[database.is_sqlite], {"rows": rows_json(_SKIPPED, rows)})


def _cursor_row(one: Fire, now_ms: int) -> dict[str, Any]:
    return {
        "id": one.schedule["id"],
        "version": one.schedule["version"],
        "status": int(JobStatus.SUCCEEDED if one.ended else JobStatus.SCHEDULED),
        "cursor": one.cursor_ms,
        "next": one.next_ms,
        "fires": len(one.spawns),
        "skip": None if one.last_skip is None else one.last_skip.from_ms,
        "reason": None if one.last_skip is None else one.last_skip.reason,
        "finished": now_ms if one.ended else None,
    }
