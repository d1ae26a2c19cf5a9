"""Backfills: past fires that a caller wants run after all, in slices, from a row that lasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from sqlalchemy import RowMapping, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.audit import Deed, job_target, record_deed
from app.lifecycle.moves.fire import PLAN_COLUMNS, Born, child_row, spawn_children
from app.lifecycle.moves.follow import lock_live
from app.lifecycle.states import TERMINAL_JOBS, JobStatus, in_list
from app.plumbing.database import NOW_MS, Database
from app.plumbing.times import rfc3339

OPEN: Final = 0
DONE: Final = 1
STOPPED: Final = 2
WORDS: Final = {OPEN: "OPEN", DONE: "DONE", STOPPED: "STOPPED"}
MOST_OPEN: Final = 100
COLUMNS: Final = (
    "id, schedule_id, token, status, cursor_time, from_time, to_time, max_concurrent, spawned, "
    "created_at, ended_at"
)


@dataclass(frozen=True, slots=True)
class NewBackfill:
    """A range of nominal times (epoch ms, both included); `token` tells a repeat of the commit."""

    schedule_id: int
    token: str
    from_ms: int
    to_ms: int
    max_concurrent: int
    tenant_id: int = 0
    deed: Deed | None = None


_BY_TOKEN: Final = text(f"SELECT {COLUMNS} FROM schedule_backfill WHERE token = :token")
_INSERT: Final = {
    sqlite: (
        "INSERT INTO schedule_backfill (schedule_id, token, status, cursor_time, from_time, "
        f"to_time, max_concurrent, spawned, created_at) VALUES (:schedule, :token, {OPEN}, "
        f":cursor, :from_ms, :to_ms, :most, 0, {NOW_MS[sqlite]}) "
    )
    for sqlite in (True, False)
}


async def insert_backfill(
    connection: AsyncConnection, database: Database, new: NewBackfill
) -> RowMapping:
    """Insert a backfill once, with who asked for it, and return its row."""
    known = (await connection.execute(_BY_TOKEN, {"token": new.token})).mappings().one_or_none()
    if known is not None:
        return known  # by an earlier try of this transaction
    await connection.execute(
        text(_INSERT[database.is_sqlite] + database.keep_first("created_at")),
        {
            "schedule": new.schedule_id,
            "token": new.token,
            "cursor": new.from_ms - 1,
            "from_ms": new.from_ms,
            "to_ms": new.to_ms,
            "most": new.max_concurrent,
        },
    )
    row = (await connection.execute(_BY_TOKEN, {"token": new.token})).mappings().one()
    if new.deed is not None:
        await record_deed(
            connection,
            new.deed,
            job_target(new.schedule_id),
            tenant_id=new.tenant_id,
            now_ms=row["created_at"],
            new={
                "backfillId": row["id"],
                "from": rfc3339(new.from_ms),
                "to": rfc3339(new.to_ms),
                "maxConcurrent": new.max_concurrent,
            },
        )
    return row


_COUNT_LIVE: Final = (
    "SELECT COUNT(*) FROM schedule_live AS l JOIN job_info AS j ON j.id = l.child_id "
    "WHERE l.schedule_id = {schedule} AND l.backfill_id = {backfill} "
    f"AND (j.status NOT IN ({in_list(TERMINAL_JOBS)}) OR j.stopping_execution_id IS NOT NULL)"
)
_FIND: Final = text(
    f"SELECT b.id, s.id IS NULL OR s.status = {int(JobStatus.CANCELLED)} OR b.max_concurrent > "
    f"({_COUNT_LIVE.format(schedule='b.schedule_id', backfill='b.id')}) AS may_go_on "
    "FROM schedule_backfill AS b LEFT JOIN job_info AS s ON s.id = b.schedule_id "
    f"WHERE b.status = {OPEN} AND b.id > :after ORDER BY b.id LIMIT {MOST_OPEN}"
)


class Open(NamedTuple):
    """An open backfill; it may go on if it has room for a run, or if its schedule is over."""

    id: int
    may_go_on: bool


async def find_backfills(connection: AsyncConnection, *, after: int) -> list[Open]:
    """Return `MOST_OPEN` open backfills behind one, in order: one step of an index if none is."""
    rows = await connection.execute(_FIND, {"after": after})
    return [Open(row.id, bool(row.may_go_on)) for row in rows]


async def list_backfills(
    connection: AsyncConnection, schedule_id: int, *, before: int | None, limit: int
) -> Sequence[RowMapping]:
    """Return the backfills of a schedule, newest first."""
    older = "" if before is None else "AND id < :before "
    rows = await connection.execute(
        text(
            f"SELECT {COLUMNS} FROM schedule_backfill WHERE schedule_id = :schedule {older}"
            "ORDER BY id DESC LIMIT :limit"
        ),
        {"schedule": schedule_id, "limit": limit} | ({} if before is None else {"before": before}),
    )
    return rows.mappings().all()


_SCHEDULE: Final = {
    sqlite: text(
        f"SELECT {PLAN_COLUMNS}, {NOW_MS[sqlite]} AS now_ms FROM job_info WHERE id = :id{lock}"
    )
    for sqlite, lock in ((True, ""), (False, " FOR UPDATE"))
}
_BACKFILL: Final = {
    sqlite: text(
        f"SELECT {COLUMNS} FROM schedule_backfill WHERE id = :id AND status = {OPEN}{lock}"
    )
    for sqlite, lock in ((True, ""), (False, " FOR UPDATE"))
}
_LIVE: Final = text(_COUNT_LIVE.format(schedule=":schedule", backfill=":backfill"))


async def lock_schedule(
    connection: AsyncConnection, database: Database, schedule_id: int
) -> RowMapping | None:
    """Return what a schedule's times are made from, locked, or None if it is gone."""
    found = await connection.execute(_SCHEDULE[database.is_sqlite], {"id": schedule_id})
    return found.mappings().one_or_none()


async def lock_backfill(
    connection: AsyncConnection, database: Database, backfill_id: int
) -> tuple[RowMapping, RowMapping | None, int] | None:
    """Return an open backfill, its schedule and how many children of it go on, all locked."""
    peek = await connection.execute(
        text("SELECT schedule_id FROM schedule_backfill WHERE id = :id"), {"id": backfill_id}
    )
    schedule_id = peek.scalar_one_or_none()
    if schedule_id is None:
        return None
    # The schedule first, as every transaction does that adds children to it.
    schedule = await lock_schedule(connection, database, schedule_id)
    row = await connection.execute(_BACKFILL[database.is_sqlite], {"id": backfill_id})
    backfill = row.mappings().one_or_none()
    if backfill is None:
        return None
    await lock_live(connection, [schedule_id])
    live = await connection.execute(_LIVE, {"schedule": schedule_id, "backfill": backfill_id})
    return backfill, schedule, int(live.scalar_one())


async def has_open_backfill(connection: AsyncConnection, schedule_id: int) -> bool:
    """Tell whether a backfill of a schedule, which is locked, goes on."""
    found = await connection.execute(
        text(
            f"SELECT id FROM schedule_backfill WHERE status = {OPEN} AND schedule_id = :schedule "
            "LIMIT 1"
        ),
        {"schedule": schedule_id},
    )
    return found.first() is not None


_GO_ON: Final = text(
    "UPDATE schedule_backfill SET cursor_time = :cursor, spawned = spawned + :spawned, "
    f"status = :status, ended_at = :ended WHERE id = :id AND status = {OPEN} "
    "AND cursor_time = :before"
)


async def go_on(
    connection: AsyncConnection,
    database: Database,
    backfill: RowMapping,
    *,
    nominal_times: Sequence[int],
    cursor_ms: int,
    status: int,
    token: str,
    now_ms: int,
) -> Born:
    """Spawn some of a locked backfill's fires and move its cursor; what exists stays as it is."""
    born = await spawn_children(
        connection,
        database,
        [
            child_row(backfill["schedule_id"], nominal, now_ms, backfill_id=backfill["id"])
            for nominal in nominal_times
        ],
        token=token,
        now_ms=now_ms,
    )
    moved = await connection.execute(
        _GO_ON,
        {
            "id": backfill["id"],
            "before": backfill["cursor_time"],
            "cursor": cursor_ms,
            "spawned": len(born.ids),
            "status": status,
            "ended": None if status == OPEN else now_ms,
        },
    )
    if moved.rowcount != 1:
        raise RuntimeError("a locked backfill changed under its step")
    return born


_EXISTING: Final = text(
    "SELECT nominal_time FROM job_info WHERE parent_id = :schedule AND nominal_time IN :times "
    "AND shard_index = 0 AND child_key = ''"
).bindparams(bindparam("times", expanding=True))


async def existing_times(
    connection: AsyncConnection, schedule_id: int, times: Sequence[int]
) -> set[int]:
    """Return those of the nominal times that have a child."""
    if not times:
        return set()
    rows = await connection.execute(_EXISTING, {"schedule": schedule_id, "times": list(times)})
    return {row.nominal_time for row in rows}
