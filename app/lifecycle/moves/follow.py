"""What the end of a schedule's child brings about, in the transaction of that end.

A fixed delay gets its next time, and of the children that wait for each other (BLOCKED) the first
may run. Locks are taken child first, then the rows of `schedule_live`; whoever adds such rows
holds the schedule's own row, so what is read under them is true until the commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import Row, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.bulk import ColumnType, rows_json, update_from_rows
from app.lifecycle.states import TERMINAL_JOBS, JobKind, JobStatus, in_list, sources


class Claimable(NamedTuple):
    """A task that may be claimed from `due_ms` on."""

    queue_id: int
    priority: int
    due_ms: int


@dataclass(frozen=True, slots=True)
class Followed:
    """What became possible: tasks to claim, and whether schedules are to be looked at.

    They are when a fixed delay has got its next time, or a run of a backfill has ended.
    """

    claimable: tuple[Claimable, ...] = ()
    schedules: bool = False

    def __add__(self, other: Followed) -> Followed:
        """Join what two ends brought about."""
        return Followed(self.claimable + other.claimable, self.schedules or other.schedules)


NOTHING: Final = Followed()
_BLOCKED: Final = in_list(sources("unblock", JobKind.TASK))
_NEXT_SET: Final = in_list(frozenset({JobStatus.SCHEDULED, JobStatus.PAUSED}))

_CHILDREN: Final = text(
    "SELECT c.id, c.parent_id, c.nominal_time, c.child_key, c.status, c.finished_at, "
    "c.stopping_execution_id, p.interval_mode, p.interval_ms, p.overlap_policy, l.backfill_id "
    "FROM job_info AS c JOIN job_info AS p ON p.id = c.parent_id "
    "LEFT JOIN schedule_live AS l ON l.schedule_id = c.parent_id AND l.child_id = c.id "
    f"WHERE c.id IN :ids AND p.kind = {int(JobKind.SCHEDULE)} ORDER BY c.id"
).bindparams(bindparam("ids", expanding=True))
_NEXT: Final[dict[str, ColumnType]] = {"id": "BIGINT", "due": "BIGINT", "nominal": "BIGINT"}
_SET_NEXT: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="job_info",
        key="id",
        columns=_NEXT,
        assignments="next_trigger_time = v.v_due, version = j.version + 1",
        guard=(
            f"j.status IN ({_NEXT_SET}) AND j.interval_mode = 'fixedDelay' "
            "AND j.next_trigger_time IS NULL AND j.trigger_ts = v.v_nominal"
        ),
    )
    for sqlite in (True, False)
}
_LOCK_LIVE: Final = {
    sqlite: text(
        f"SELECT schedule_id, child_id, waits, backfill_id FROM schedule_live {hint}"
        f"WHERE schedule_id IN :ids ORDER BY schedule_id, child_id{lock}"
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite, hint, lock in (
        (True, "", ""),
        (False, "FORCE INDEX (PRIMARY) ", " FOR UPDATE"),
    )
}
_STATES: Final = text(
    "SELECT id, status, stopping_execution_id, nominal_time, queue_id, priority, "
    "next_trigger_time FROM job_info WHERE id IN :ids"
).bindparams(bindparam("ids", expanding=True))
_FORGET: Final = text(
    "DELETE FROM schedule_live WHERE schedule_id IN :schedules AND child_id IN :children"
).bindparams(bindparam("schedules", expanding=True), bindparam("children", expanding=True))
_UNBLOCK: Final = text(
    f"UPDATE job_info SET status = {int(JobStatus.WAITING)}, version = version + 1 "
    f"WHERE id = :id AND status IN ({_BLOCKED})"
)
_WAITS_NO_MORE: Final = text(
    "UPDATE schedule_live SET waits = 0 WHERE schedule_id = :schedule AND child_id = :child"
)


@dataclass(frozen=True, slots=True)
class Live:
    """The children of a schedule's own fires that have not ended, or whose run has not.

    `waiting` are those that wait for another (BLOCKED), in their order; `going` all others, also
    those that are BLOCKED by their concurrency key.
    """

    going: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


async def follow_ends(connection: AsyncConnection, child_ids: Sequence[int]) -> Followed:
    """Do what the ends of these jobs bring about; jobs without a schedule bring about nothing."""
    if not child_ids:
        return NOTHING
    children = (await connection.execute(_CHILDREN, {"ids": sorted(child_ids)})).all()
    if not children:
        return NOTHING
    delays = [
        {
            "id": child.parent_id,
            "due": child.finished_at + child.interval_ms,
            "nominal": child.nominal_time,
        }
        for child in children
        if child.interval_mode == "fixedDelay"
        and not child.child_key
        and child.stopping_execution_id is None
        and _is_over(child)
    ]
    if delays:
        rows = rows_json(_NEXT, sorted(delays, key=lambda row: int(row["id"])))
        await connection.execute(_SET_NEXT[connection.dialect.name == "sqlite"], {"rows": rows})
    alone = [child for child in children if child.overlap_policy == "allow"]
    gone = [child for child in alone if child.stopping_execution_id is None and _is_over(child)]
    await _forget({child.parent_id for child in gone}, [child.id for child in gone], connection)
    others = {child.parent_id for child in children} - {child.parent_id for child in alone}
    claimable = await free_next(connection, others)
    return Followed(
        claimable,
        any(child.interval_mode == "fixedDelay" or child.backfill_id for child in children),
    )


async def free_next(
    connection: AsyncConnection, schedule_ids: Iterable[int]
) -> tuple[Claimable, ...]:
    """Let the first waiting child of each schedule run, where no other is going on."""
    ids = sorted(schedule_ids)
    if not ids:
        return ()
    freed: list[Claimable] = []
    for schedule_id, (live, rows) in (await _look_at_live(connection, ids)).items():
        if live.going or not live.waiting:
            continue
        first = live.waiting[0]
        done = await connection.execute(_UNBLOCK, {"id": first})
        if done.rowcount:
            await connection.execute(_WAITS_NO_MORE, {"schedule": schedule_id, "child": first})
            row = rows[first]
            freed.append(Claimable(row.queue_id, row.priority, row.next_trigger_time))
    return tuple(freed)


async def free_all(connection: AsyncConnection, schedule_id: int) -> tuple[Claimable, ...]:
    """Let all children run that wait for another one: the schedule, held, lets them overlap now."""
    freed: list[Claimable] = []
    for live, rows in (await _look_at_live(connection, [schedule_id])).values():
        for child_id in live.waiting:
            await connection.execute(_UNBLOCK, {"id": child_id})
            await connection.execute(_WAITS_NO_MORE, {"schedule": schedule_id, "child": child_id})
            row = rows[child_id]
            freed.append(Claimable(row.queue_id, row.priority, row.next_trigger_time))
    return tuple(freed)


async def lock_live(connection: AsyncConnection, schedule_ids: Sequence[int]) -> dict[int, Live]:
    """Return what goes on for each schedule; it stays so, but for ends, until the commit."""
    if not schedule_ids:
        return {}
    found = await _look_at_live(connection, sorted(schedule_ids))
    return {schedule_id: live for schedule_id, (live, _) in found.items()}


async def _look_at_live(
    connection: AsyncConnection, ids: Sequence[int]
) -> dict[int, tuple[Live, dict[int, Row[Any]]]]:
    sqlite = connection.dialect.name == "sqlite"
    listed = (await connection.execute(_LOCK_LIVE[sqlite], {"ids": list(ids)})).all()
    if not listed:
        return {}
    states = await connection.execute(_STATES, {"ids": [one.child_id for one in listed]})
    rows = {row.id: row for row in states}
    gone = [
        one
        for one in listed
        if (row := rows.get(one.child_id)) is None
        or (row.status in TERMINAL_JOBS and row.stopping_execution_id is None)
    ]
    await _forget({one.schedule_id for one in gone}, [one.child_id for one in gone], connection)
    dead = {one.child_id for one in gone}
    found: dict[int, tuple[Live, dict[int, Row[Any]]]] = {}
    for schedule_id in sorted({one.schedule_id for one in listed}):
        mine = [
            one
            for one in listed
            if one.schedule_id == schedule_id and one.child_id not in dead and not one.backfill_id
        ]
        behind = {
            one.child_id
            for one in mine
            if one.waits and rows[one.child_id].status == JobStatus.BLOCKED
        }
        waiting = sorted((rows[one] for one in behind), key=lambda row: (row.nominal_time, row.id))
        going = [one.child_id for one in mine if one.child_id not in behind]
        found[schedule_id] = Live(tuple(going), tuple(row.id for row in waiting)), rows
    return found


async def _forget(
    schedules: set[int], children: Sequence[int], connection: AsyncConnection
) -> None:
    if children:
        await connection.execute(
            _FORGET, {"schedules": sorted(schedules), "children": sorted(children)}
        )


def _is_over(child: Row[Any]) -> bool:
    return child.status in TERMINAL_JOBS and child.finished_at is not None
