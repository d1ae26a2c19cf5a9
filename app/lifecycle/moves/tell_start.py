"""The callback of an attempt that a worker has accepted: for jobs that ask for `started` alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.moves.owe import insert_starts, started_row
from app.lifecycle.states import JobStatus
from app.plumbing.database import NOW_MS, Database

_LOCK: Final = {
    sqlite: text(
        f"SELECT {NOW_MS[sqlite]} AS now_ms, id, tenant_id, client_request_id, job_name, attempt, "
        "execution_id, trigger_ts, callback_url, callback_events, callback_headers, version, "
        "nominal_time "
        f"FROM job_info {hint}WHERE id IN :ids AND status = {int(JobStatus.RUNNING)} "
        f"ORDER BY id{lock}"
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite, hint, lock in (
        (True, "", ""),
        (False, "FORCE INDEX (PRIMARY) ", " FOR UPDATE"),
    )
}


async def tell_starts(
    connection: AsyncConnection, database: Database, accepted: Mapping[int, str]
) -> int:
    """Owe the callbacks of executions (by job id) that were accepted and run still.

    One that has ended meanwhile owes it by its end. Safe to repeat. Returns how many are owed.
    """
    locked = await connection.execute(_LOCK[database.is_sqlite], {"ids": sorted(accepted)})
    rows = [
        started_row(
            job,
            execution_id=job["execution_id"],
            trigger_ts=job["trigger_ts"],
            started_at=None,
            now=int(job["now_ms"]),
        )
        for job in locked.mappings()
        if job["execution_id"] == accepted[job["id"]]
    ]
    owed = [row for row in rows if row is not None]
    await insert_starts(connection, owed)
    return len(owed)
