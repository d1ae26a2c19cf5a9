"""The recovery of schedules: what an end of a child should have brought about, and did not.

Every end does that in its own transaction. This finds what a dispatcher of an older version has
left, and a policy that was changed while a child ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.moves.follow import Claimable, free_next
from app.lifecycle.states import TERMINAL_JOBS, JobStatus, in_list
from app.plumbing.database import NOW_MS, Database

MOST: Final = 500
_STUCK_DELAYS: Final = {
    sqlite: text(
        " UNION ALL ".join(
            "SELECT s.id, s.trigger_ts, c.finished_at FROM job_info AS s "
            f"{hint}LEFT JOIN job_info AS c ON c.parent_id = s.id "
            "AND c.nominal_time = s.trigger_ts AND c.shard_index = 0 AND c.child_key = '' "
            f"WHERE s.status = {int(JobStatus.SCHEDULED)} AND s.queue_id = 0 "
            f"AND s.priority = {priority} AND s.next_trigger_time IS NULL "
            f"AND (c.id IS NULL OR (c.status IN ({in_list(TERMINAL_JOBS)}) "
            "AND c.stopping_execution_id IS NULL))"
            for priority in range(10)
        )
    )
    for sqlite, hint in ((True, ""), (False, "FORCE INDEX (ix_job_info_claim) "))
}
_SET_NEXT: Final = {
    sqlite: text(
        f"UPDATE job_info SET next_trigger_time = COALESCE(:ended, {NOW_MS[sqlite]}) "
        "+ interval_ms, version = version + 1 WHERE id = :id "
        f"AND status = {int(JobStatus.SCHEDULED)} AND interval_mode = 'fixedDelay' "
        "AND next_trigger_time IS NULL AND trigger_ts = :nominal"
    )
    for sqlite in (True, False)
}
_WAITING: Final = text(
    "SELECT DISTINCT schedule_id FROM schedule_live WHERE waits = 1 AND schedule_id > :after "
    "ORDER BY schedule_id LIMIT :most"
)


@dataclass(frozen=True, slots=True)
class Mended:
    """The waiting children that may run now, and behind which schedule to look on; 0 at the end."""

    claimable: tuple[Claimable, ...] = ()
    onward: int = 0


async def mend_schedules(database: Database, *, after: int = 0) -> Mended:
    """Set times that are missing, and free what waits of `MOST` schedules behind one."""

    async def look(connection: AsyncConnection) -> tuple[list[tuple[int, int, int]], list[int]]:
        stuck = await connection.execute(_STUCK_DELAYS[database.is_sqlite])
        waiting = await connection.execute(_WAITING, {"after": after, "most": MOST})
        return [(row[0], row[1], row[2]) for row in stuck], [row[0] for row in waiting]

    stuck, waiting = await database.read(look)
    # Most wait with reason, and must not keep the others from being looked at.
    onward = waiting[-1] if len(waiting) == MOST else 0
    if not stuck and not waiting:
        return Mended()

    async def mend(connection: AsyncConnection) -> tuple[Claimable, ...]:
        for schedule_id, nominal, ended in sorted(stuck)[:MOST]:
            await connection.execute(
                _SET_NEXT[database.is_sqlite],
                {"id": schedule_id, "nominal": nominal, "ended": ended},
            )
        return await free_next(connection, waiting)

    return Mended(await database.write(mend), onward)
