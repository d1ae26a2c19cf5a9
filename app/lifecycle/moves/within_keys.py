"""The moves `block` and `unblock` by keys that callers choose: `concurrencyKey` and `rateKey`.

Who counts or changes what a key limits holds its row of `limit_key`, which comes after the rows of
jobs in the order of locks. `concurrency_slot` lists the jobs that hold a concurrency key, and those
that wait for it; the state of a listed job is looked at whenever it matters, so a row too many is
harmless, and none is too few: it is written with the claim. So an end and a claim of the same
key cannot miss each other: whichever is second sees the other.

Only jobs with a key come here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.bulk import ColumnType, rows_json, select_by_rows, update_from_rows
from app.lifecycle.moves.follow import Claimable
from app.lifecycle.states import JobKind, JobStatus, in_list, sources
from app.plumbing.database import Database

CONCURRENCY: Final = 0
RATE: Final = 1
BLOCKED_TOGETHER: Final = 500
"""So many tasks are looked at behind one that must wait, for others of the same key."""
LOOKED_AT: Final = 20
"""Waiting tasks that are read beyond those that there is room for: some may have ended."""
_BLOCKABLE: Final = in_list(sources("block", JobKind.TASK))
_UNBLOCKABLE: Final = in_list(sources("unblock", JobKind.TASK))
_JOIN: Final = {True: "CROSS JOIN", False: "STRAIGHT_JOIN"}


class Key(NamedTuple):
    """A key of a tenant."""

    tenant_id: int
    name: str


@dataclass(slots=True)
class Within:
    """What the keys allow: `kept` may be claimed now, `later` are tasks with a new due time."""

    kept: list[Mapping[str, Any]]
    later: list[Claimable] = field(default_factory=list)


_LOCK: Final = (
    "INSERT INTO limit_key (tenant_id, kind, name, next_at) VALUES (:tenant, :kind, :name, 0) "
)
_LOCKED: Final = {
    sqlite: text(
        _LOCK
        + (
            "ON CONFLICT DO NOTHING"
            if sqlite
            # The row is locked, there or not.
            else "ON DUPLICATE KEY UPDATE tenant_id = VALUES(tenant_id)"
        )
    )
    for sqlite in (True, False)
}
_KEYS: Final[dict[str, ColumnType]] = {"tenant": "BIGINT", "name": "TEXT"}
_HOLDERS: Final = {
    sqlite: select_by_rows(
        sqlite=sqlite,
        columns=_KEYS,
        select=(
            "s.tenant_id, s.name, s.waits, s.turn, s.due, s.job_id, j.status, "
            "j.stopping_execution_id"
        ),
        join=f"{_JOIN[sqlite]} concurrency_slot AS s ON s.tenant_id = v.v_tenant "
        "AND s.name = v.v_name AND s.waits = 0 LEFT JOIN job_info AS j ON j.id = s.job_id",
    )
    for sqlite in (True, False)
}
_FORGET: Final = text(
    "DELETE FROM concurrency_slot WHERE tenant_id = :tenant AND name = :name "
    "AND waits = :waits AND turn = :turn AND due = :due AND job_id = :job"
)
_LIST: Final = (
    "INSERT INTO concurrency_slot (tenant_id, name, waits, turn, due, job_id) "
    "VALUES (:tenant, :name, :waits, :turn, :due, :job) "
)
_MOVED: Final[dict[str, ColumnType]] = {"id": "BIGINT", "version": "BIGINT", "due": "BIGINT"}
_BLOCK: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="job_info",
        key="id",
        columns=_MOVED,
        assignments=f"status = {int(JobStatus.BLOCKED)}, version = j.version + 1",
        guard=f"j.status = {_BLOCKABLE} AND j.version = v.v_version",
    )
    for sqlite in (True, False)
}
_PUT_OFF: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="job_info",
        key="id",
        columns=_MOVED,
        assignments="next_trigger_time = v.v_due, rate_due = v.v_due, version = j.version + 1",
        guard=f"j.status = {_BLOCKABLE} AND j.version = v.v_version",
    )
    for sqlite in (True, False)
}
_BEHIND: Final = {
    sqlite: text(
        "SELECT id, version, tenant_id, concurrency_key, priority, next_trigger_time FROM ("
        "SELECT id, version, tenant_id, concurrency_key, concurrency_limit, priority, "
        f"next_trigger_time FROM job_info {hint}WHERE status = {int(JobStatus.WAITING)} "
        "AND queue_id = :queue AND priority = :priority AND next_trigger_time <= :now "
        f"ORDER BY next_trigger_time, id LIMIT {BLOCKED_TOGETHER}) AS first_ones "
        "WHERE concurrency_key IN :names AND id NOT IN :known"
    ).bindparams(bindparam("names", expanding=True), bindparam("known", expanding=True))
    for sqlite, hint in ((True, ""), (False, "FORCE INDEX (ix_job_info_claim) "))
}
_WAITING: Final = text(
    "SELECT s.turn, s.due, s.job_id, j.status, j.queue_id, j.priority, j.next_trigger_time, "
    "j.concurrency_limit FROM concurrency_slot AS s LEFT JOIN job_info AS j ON j.id = s.job_id "
    "WHERE s.tenant_id = :tenant AND s.name = :name AND s.waits = 1 "
    "ORDER BY s.turn, s.due, s.job_id LIMIT :most"
)
_UNBLOCK: Final = text(
    f"UPDATE job_info SET status = {int(JobStatus.WAITING)}, version = version + 1 "
    f"WHERE id = :id AND status IN ({_UNBLOCKABLE})"
)
_GONE: Final = text(
    "DELETE FROM limit_key WHERE tenant_id = :tenant AND kind = :kind AND name = :name "
    "AND NOT EXISTS (SELECT 1 FROM concurrency_slot WHERE tenant_id = :tenant AND name = :name)"
)
_NEXT: Final = text(
    "SELECT next_at FROM limit_key WHERE tenant_id = :tenant AND kind = :kind AND name = :name"
)
_SET_NEXT: Final = text(
    "UPDATE limit_key SET next_at = :next WHERE tenant_id = :tenant AND kind = :kind "
    "AND name = :name"
)


async def keep_within(
    connection: AsyncConnection,
    database: Database,
    rows: Sequence[Mapping[str, Any]],
    *,
    now: int,
) -> Within:
    """Keep those of these locked, waiting tasks that their keys let begin now.

    What would exceed a concurrency key is BLOCKED, and others of the key behind it with it; what
    is too early for a rate key gets its time. The order is by priority, due time, id.
    """
    in_turn = sorted(rows, key=lambda row: (-row["priority"], row["next_trigger_time"], row["id"]))
    within = await _within_rates(connection, database, in_turn, now=now)
    kept = await _within_concurrency(connection, database, within.kept, now=now)
    chosen = {row["id"] for row in kept}
    within.kept = [row for row in rows if row["id"] in chosen]
    return within


async def free_keys(connection: AsyncConnection, keys: Iterable[Key]) -> list[Claimable]:
    """Let those that wait for these keys run where there is room now, in their order."""
    sqlite = connection.dialect.name == "sqlite"
    wanted = sorted(set(keys))
    if not wanted:
        return []
    await _lock(connection, wanted, CONCURRENCY)
    holders = await _holders(connection, wanted, sqlite=sqlite)
    freed: list[Claimable] = []
    for key in wanted:
        freed += await _free(connection, key, holders[key])
    return freed


class KeysInUse(NamedTuple):
    """A page of keys: concurrency keys that are waited for, rate keys of no more use.

    `last` is (tenant, kind, name) to go on behind, None at the end.
    """

    waited_for: list[Key]
    idle_rates: list[Key]
    last: tuple[int, int, str] | None


_PAGE: Final = text(
    "SELECT k.tenant_id, k.kind, k.name, k.next_at, EXISTS (SELECT 1 FROM concurrency_slot AS s "
    "WHERE s.tenant_id = k.tenant_id AND s.name = k.name AND s.waits = 1) AS waited_for "
    "FROM limit_key AS k WHERE k.tenant_id > :tenant OR (k.tenant_id = :tenant AND "
    "(k.kind > :kind OR (k.kind = :kind AND k.name > :name))) "
    "ORDER BY k.tenant_id, k.kind, k.name LIMIT :limit"
)


async def look_through_keys(
    connection: AsyncConnection, after: tuple[int, int, str], *, idle_before_ms: float, limit: int
) -> KeysInUse:
    """Look at `limit` keys behind one; a rate is idle if its next time is long past."""
    tenant, kind, name = after
    rows = (
        await connection.execute(
            _PAGE, {"tenant": tenant, "kind": kind, "name": name, "limit": limit}
        )
    ).all()
    last = rows[-1] if len(rows) == limit else None
    return KeysInUse(
        [
            Key(one.tenant_id, one.name)
            for one in rows
            if one.kind == CONCURRENCY and one.waited_for
        ],
        [
            Key(one.tenant_id, one.name)
            for one in rows
            if one.kind == RATE and one.next_at < idle_before_ms * 1000
        ],
        None if last is None else (last.tenant_id, last.kind, last.name),
    )


async def forget_rates(
    connection: AsyncConnection, keys: Sequence[Key], *, idle_before_ms: float
) -> None:
    """Forget rate keys, unless one was used meanwhile: a new one has no next time either."""
    await connection.execute(
        text(
            "DELETE FROM limit_key WHERE tenant_id = :tenant AND kind = 1 AND name = :name "
            "AND next_at < :before"
        ),
        [_named(key) | {"before": round(idle_before_ms * 1000)} for key in sorted(keys)],
    )


async def _within_concurrency(
    connection: AsyncConnection,
    database: Database,
    rows: Sequence[Mapping[str, Any]],
    *,
    now: int,
) -> list[Mapping[str, Any]]:
    keys = sorted({key for row in rows if (key := concurrency_key(row)) is not None})
    if not keys:
        return list(rows)
    await _lock(connection, keys, CONCURRENCY)
    holders = await _holders(connection, keys, sqlite=database.is_sqlite)
    kept, over, new = [], [], []
    for row in rows:
        key = concurrency_key(row)
        if key is None:
            kept.append(row)
        elif holders[key] < row["concurrency_limit"]:
            holders[key] += 1
            new.append(_slot(row, waits=0))
            kept.append(row)
        else:
            over.append(row)
    if over:
        over += await _behind(connection, database, over, rows, now=now)
        ordered = sorted(over, key=lambda row: int(row["id"]))
        await connection.execute(
            _BLOCK[database.is_sqlite],
            {"rows": rows_json(_MOVED, [{**_moved(row), "due": None} for row in ordered])},
        )
        new += [_slot(row, waits=1) for row in ordered]
    if new:
        await connection.execute(text(_LIST + database.keep_first("waits")), new)
    return kept


async def _behind(
    connection: AsyncConnection,
    database: Database,
    over: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    *,
    now: int,
) -> list[Mapping[str, Any]]:
    """Find others of the same keys that stand next in the same lines: they must wait as well."""
    lanes: dict[tuple[int, int], set[str]] = defaultdict(set)
    for row in over:
        lanes[(row["queue_id"], row["priority"])].add(row["concurrency_key"])
    found: list[Mapping[str, Any]] = []
    for (queue_id, priority), names in sorted(lanes.items()):
        more = await connection.execute(
            _BEHIND[database.is_sqlite],
            {
                "queue": queue_id,
                "priority": priority,
                "now": now,
                "names": sorted(names),
                "known": [row["id"] for row in rows],
            },
        )
        found += [dict(row) for row in more.mappings()]
    return found


async def _within_rates(
    connection: AsyncConnection,
    database: Database,
    rows: Sequence[Mapping[str, Any]],
    *,
    now: int,
) -> Within:
    # One that was given its time has paid for it.
    asking = [
        row
        for row in rows
        if row["rate_key"] is not None and row["rate_due"] != row["next_trigger_time"]
    ]
    if not asking:
        return Within(list(rows))
    next_of: dict[Key, int] = {}
    keys = sorted({Key(row["tenant_id"], row["rate_key"]) for row in asking})
    await _lock(connection, keys, RATE)
    for key in keys:
        found = await connection.execute(_NEXT, _named(key) | {"kind": RATE})
        next_of[key] = int(found.scalar_one())
    later: list[Mapping[str, Any]] = []
    for row in asking:
        key = Key(row["tenant_id"], row["rate_key"])
        may_begin = max(now, row["next_trigger_time"]) * 1000
        begins = max(next_of[key], may_begin)
        if begins > may_begin:
            later.append({**_moved(row), "due": math.ceil(begins / 1000), "row": row})
        next_of[key] = begins + round(1_000_000 / row["rate_per_second"])
    for key in keys:
        await connection.execute(_SET_NEXT, _named(key) | {"kind": RATE, "next": next_of[key]})
    if not later:
        return Within(list(rows))
    later.sort(key=lambda one: int(one["id"]))
    await connection.execute(_PUT_OFF[database.is_sqlite], {"rows": rows_json(_MOVED, later)})
    off = {one["id"] for one in later}
    return Within(
        [row for row in rows if row["id"] not in off],
        [Claimable(one["row"]["queue_id"], one["row"]["priority"], one["due"]) for one in later],
    )


def concurrency_key(row: Any) -> Key | None:
    """Return the concurrency key of a row of `job_info`, if it has one."""
    name = row["concurrency_key"]
    return None if name is None else Key(row["tenant_id"], name)


async def _lock(connection: AsyncConnection, keys: Sequence[Key], kind: int) -> None:
    await connection.execute(
        _LOCKED[connection.dialect.name == "sqlite"],
        [_named(key) | {"kind": kind} for key in keys],
    )


async def _holders(
    connection: AsyncConnection, keys: Sequence[Key], *, sqlite: bool
) -> dict[Key, int]:
    """Count who holds each locked key, and forget those that are listed and do not."""
    listed = await connection.execute(
        _HOLDERS[sqlite],
        {"rows": rows_json(_KEYS, [{"tenant": key.tenant_id, "name": key.name} for key in keys])},
    )
    holders = dict.fromkeys(keys, 0)
    gone = []
    for row in listed.mappings():
        if row["status"] == JobStatus.RUNNING or row["stopping_execution_id"] is not None:
            holders[Key(row["tenant_id"], row["name"])] += 1
        else:
            gone.append(
                {
                    "tenant": row["tenant_id"],
                    "name": row["name"],
                    "waits": 0,
                    "turn": row["turn"],
                    "due": row["due"],
                    "job": row["job_id"],
                }
            )
    if gone:
        await connection.execute(_FORGET, gone)
    return holders


async def _free(connection: AsyncConnection, key: Key, holders: int) -> list[Claimable]:
    freed: list[Claimable] = []
    more = True
    while more:
        rows = (
            (await connection.execute(_WAITING, {**_named(key), "most": LOOKED_AT}))
            .mappings()
            .all()
        )
        more = len(rows) == LOOKED_AT
        for row in rows:
            if row["status"] == JobStatus.BLOCKED and holders >= row["concurrency_limit"]:
                return freed
            if row["status"] == JobStatus.BLOCKED:
                await connection.execute(_UNBLOCK, {"id": row["job_id"]})
                holders += 1
                freed.append(Claimable(row["queue_id"], row["priority"], row["next_trigger_time"]))
            await connection.execute(
                _FORGET,
                {
                    **_named(key),
                    "waits": 1,
                    "turn": row["turn"],
                    "due": row["due"],
                    "job": row["job_id"],
                },
            )
    await connection.execute(_GONE, {**_named(key), "kind": CONCURRENCY})
    return freed


def _named(key: Key) -> dict[str, Any]:
    return {"tenant": key.tenant_id, "name": key.name}


def _moved(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "version": row["version"]}


def _slot(row: Mapping[str, Any], *, waits: int) -> dict[str, Any]:
    return {
        "tenant": row["tenant_id"],
        "name": row["concurrency_key"],
        "waits": waits,
        "turn": 9 - row["priority"] if waits else 0,
        "due": row["next_trigger_time"] if waits else 0,
        "job": row["id"],
    }
