"""The move `block` by keys that callers choose: `concurrencyKey` and `rateKey`.

Of a batch that is about to be claimed some may begin. It costs the same statements whatever the
number of its keys; only jobs with a key come here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.bulk import ColumnType, rows_json, select_by_rows, update_from_rows
from app.lifecycle.moves.follow import Claimable
from app.lifecycle.moves.limit_keys import (
    CONCURRENCY,
    KEY_COLUMNS,
    RATE,
    Key,
    concurrency_key,
    forget_slots,
    list_slots,
    lock_keys,
    named,
    read_holders,
    slot,
)
from app.lifecycle.states import JobKind, JobStatus, in_list, sources
from app.plumbing.database import Database

BLOCKED_TOGETHER: Final = 500
"""So many tasks are looked at behind one that must wait, for others of the same key."""
MOST_LATE_US: Final = 1_000_000
"""A run that is this late, or less, still counts as having begun at its time."""
_BLOCKABLE: Final = in_list(sources("block", JobKind.TASK))


@dataclass(slots=True)
class Within:
    """What the keys allow: `kept` may be claimed now, `later` are tasks with a new due time."""

    kept: list[Mapping[str, Any]]
    later: list[Claimable] = field(default_factory=list)


@dataclass(slots=True)
class Rate:
    """What has been given of a rate key: the next free time, and when runs that begin have room.

    Times are microseconds. They are given ahead, so that nothing looks at a job before its own;
    those that pass unused, in an outage, must not make a burst. So what begins is measured as
    well, by the virtual scheduling algorithm (GCRA, ITU-T I.371) with a tolerance: in any t
    seconds at most `rate * (t + MOST_LATE) + 1` runs begin.
    """

    next_at: int
    begins_at: int

    def time_for(self, may_begin: int, *, step: int, has_time: bool) -> int:
        """Return when a run begins that may begin then: that moment itself, or its new time."""
        begins = may_begin if has_time else self._next(may_begin, step)
        # Less than a millisecond is not worth another claim.
        if begins >= may_begin + 1000:
            return begins
        room = self.begins_at - MOST_LATE_US
        if room > may_begin:
            return self._next(max(room, may_begin + 1000), step)
        self.begins_at = max(self.begins_at, may_begin) + step
        return may_begin

    def _next(self, earliest: int, step: int) -> int:
        begins = max(self.next_at, earliest)
        self.next_at = begins + step
        return begins


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
_NEXT: Final = {
    sqlite: select_by_rows(
        sqlite=sqlite,
        columns=KEY_COLUMNS,
        select="k.tenant_id, k.name, k.next_at, k.begins_at",
        join=f"{join} limit_key AS k ON k.tenant_id = v.v_tenant_id "
        f"AND k.kind = {RATE} AND k.name = v.v_name{lock}",
    )
    for sqlite, join, lock in (
        (True, "CROSS JOIN", ""),
        # MySQL cannot lock the rows of JSON_TABLE; MariaDB knows no OF, and skips the comment.
        (False, "STRAIGHT_JOIN", " FOR UPDATE /*!80000 OF k */"),
    )
}
_RATE: Final[dict[str, ColumnType]] = {**KEY_COLUMNS, "next": "BIGINT", "begins": "BIGINT"}
_SET_NEXT: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="limit_key",
        key="name",
        columns=_RATE,
        assignments="next_at = v.v_next, begins_at = v.v_begins",
        guard=f"j.tenant_id = v.v_tenant_id AND j.kind = {RATE}",
    )
    for sqlite in (True, False)
}


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
    await lock_keys(connection, keys, CONCURRENCY)
    held = await read_holders(connection, keys)
    await forget_slots(connection, held.gone)
    kept, over, new = [], [], []
    for row in rows:
        key = concurrency_key(row)
        if key is None:
            kept.append(row)
        elif held.count[key] < row["concurrency_limit"]:
            held.count[key] += 1
            new.append(slot(key, row, waits=0))
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
        new += [
            slot(Key(row["tenant_id"], row["concurrency_key"]), row, waits=1) for row in ordered
        ]
    await list_slots(connection, new)
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
    rated = [row for row in rows if row["rate_key"] is not None]
    if not rated:
        return Within(list(rows))
    keys = sorted({Key(row["tenant_id"], row["rate_key"]) for row in rated})
    rates = await _lock_rates(connection, keys, sqlite=database.is_sqlite)
    later: list[Mapping[str, Any]] = []
    for row in rated:
        rate = rates[Key(row["tenant_id"], row["rate_key"])]
        may_begin = max(now, row["next_trigger_time"]) * 1000
        begins = rate.time_for(
            may_begin,
            step=round(1_000_000 / row["rate_per_second"]),
            has_time=row["rate_due"] == row["next_trigger_time"],
        )
        if begins > may_begin:
            later.append({**_moved(row), "due": math.ceil(begins / 1000), "row": row})
    times = [
        {**key._asdict(), "next": rates[key].next_at, "begins": rates[key].begins_at}
        for key in keys
    ]
    await connection.execute(_SET_NEXT[database.is_sqlite], {"rows": rows_json(_RATE, times)})
    if not later:
        return Within(list(rows))
    later.sort(key=lambda one: int(one["id"]))
    await connection.execute(_PUT_OFF[database.is_sqlite], {"rows": rows_json(_MOVED, later)})
    off = {one["id"] for one in later}
    return Within(
        [row for row in rows if row["id"] not in off],
        [Claimable(one["row"]["queue_id"], one["row"]["priority"], one["due"]) for one in later],
    )


async def _lock_rates(
    connection: AsyncConnection, keys: Sequence[Key], *, sqlite: bool
) -> dict[Key, Rate]:
    """Lock the rows of these rate keys and return what has been given of each."""
    found: dict[Key, Rate] = {}
    while len(found) < len(keys):
        rows = await connection.execute(_NEXT[sqlite], {"rows": named(keys)})
        found = {
            Key(row.tenant_id, row.name): Rate(int(row.next_at), int(row.begins_at)) for row in rows
        }
        if new := [key for key in keys if key not in found]:
            await lock_keys(connection, new, RATE)
    return found


def _moved(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "version": row["version"]}
