"""Jobs with all that belongs to them, as they are written down before they are deleted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.dependents import (
    JOBS,
    Dependent,
    forced,
    in_chunks,
    keys_of,
    select_of,
    tables_of,
)
from app.plumbing.database import Database

_JOBS: Final = {
    sqlite: f"SELECT * FROM job_info {forced('PRIMARY', sqlite=sqlite)} WHERE id IN :keys"
    for sqlite in (True, False)
}


async def read_whole(
    connection: AsyncConnection, database: Database, job_ids: Sequence[int], *, schedules: bool
) -> list[dict[str, Any]]:
    """Return for each job its rows by table, in the order of ids: `{"jobId", "rows"}`."""
    sqlite = database.is_sqlite
    keys = await keys_of(connection, database, job_ids, schedules=schedules)
    jobs = await in_chunks(connection, _JOBS[sqlite], sorted(job_ids))
    whole: dict[int, dict[str, list[dict[str, Any]]]] = {row["id"]: {JOBS: [row]} for row in jobs}
    # Of each table: whose job the row with this key is.
    job_of: dict[tuple[str, str], dict[Any, int]] = {(JOBS, "id"): {one: one for one in whole}}
    for one in tables_of(schedules=schedules):
        rows = await in_chunks(connection, select_of(one, "*", sqlite=sqlite), keys[one.table])
        owners = job_of[one.owner, one.key]
        for key in _keys_used_of(one, schedules=schedules):
            job_of[one.table, key] = {row[key]: owners[row[one.column]] for row in rows}
        by_job: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            by_job[owners[row[one.column]]].append(row)
        for job_id, own in by_job.items():
            whole[job_id][one.table] = own
    return [{"jobId": job_id, "rows": whole[job_id]} for job_id in sorted(whole)]


def _keys_used_of(owner: Dependent, *, schedules: bool) -> set[str]:
    return {one.key for one in tables_of(schedules=schedules) if one.owner == owner.table}
