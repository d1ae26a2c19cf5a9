"""The move `reopen`: a FAILED or CANCELLED task gets a new budget of attempts under the same id."""

from __future__ import annotations

from typing import Final

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.moves.guard import (
    Asked,
    Changed,
    NotPossible,
    Unknown,
    lock_job,
    move_job,
    target_of,
)
from app.lifecycle.moves.submit import forget_expiries
from app.lifecycle.states import TERMINAL_JOBS, JobKind, JobStatus
from app.plumbing.database import Database

_PARENT_ID: Final = text("SELECT parent_id FROM job_info WHERE id = :id")
_LOCK_PARENT: Final = {
    sqlite: text(f"SELECT kind, status FROM job_info WHERE id = :id{lock}")
    for sqlite, lock in ((True, ""), (False, " FOR UPDATE"))
}


async def reopen_job(
    connection: AsyncConnection, database: Database, asked: Asked
) -> Changed | NotPossible | Unknown:
    """Make an ended task due now, as if no attempt had been made; `trigger_ts` goes on growing.

    A child of an ended group stays ended: the group has summed it up.
    """
    # The parent first, as every move that locks both does.
    group_ended = await _group_ended(connection, database, asked.job_id)
    job = await lock_job(connection, database, asked, "retry")
    if not isinstance(job, RowMapping):
        return job
    if group_ended:
        return NotPossible(JobStatus(job["status"]), ())
    if job["expires_at"] is not None:
        await forget_expiries(connection, [(job["expires_at"], job["id"])])
    changes = {
        "attempt": 0,
        "returned": 0,
        "error_code": None,
        "error_message": None,
        "finished_at": None,
        "expires_at": None,
        "next_trigger_time": job["now_ms"],
    }
    await move_job(connection, job, asked, target_of("retry", job), changes)
    return Changed(job["queue_id"], job["priority"], job["now_ms"])


async def _group_ended(connection: AsyncConnection, database: Database, job_id: int) -> bool:
    parent_id = (await connection.execute(_PARENT_ID, {"id": job_id})).scalar_one_or_none()
    if parent_id is None:
        return False
    parent = (
        await connection.execute(_LOCK_PARENT[database.is_sqlite], {"id": parent_id})
    ).one_or_none()
    return parent is not None and parent.kind == JobKind.GROUP and parent.status in TERMINAL_JOBS
