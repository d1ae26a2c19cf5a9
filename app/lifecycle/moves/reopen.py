"""The move `reopen`: a FAILED or CANCELLED task gets a new budget of attempts under the same id."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Row, RowMapping, text
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
_LIVE_AGAIN: Final = (
    "INSERT INTO schedule_live (schedule_id, child_id, waits, backfill_id) "
    "VALUES (:schedule, :child, 0, 0) "
)
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
    parent = await _lock_parent(connection, database, asked.job_id)
    job = await lock_job(connection, database, asked, "retry")
    if not isinstance(job, RowMapping):
        return job
    if parent is not None and parent.kind == JobKind.GROUP and parent.status in TERMINAL_JOBS:
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
    if parent is not None and parent.kind == JobKind.SCHEDULE:
        await connection.execute(
            text(_LIVE_AGAIN + database.keep_first("child_id")),
            {"schedule": job["parent_id"], "child": job["id"]},
        )
    return Changed(job["queue_id"], job["priority"], job["now_ms"])


async def _lock_parent(
    connection: AsyncConnection, database: Database, job_id: int
) -> Row[tuple[int, int]] | None:
    """Return the kind and status of a job's parent, locked, if it has one."""
    parent_id = (await connection.execute(_PARENT_ID, {"id": job_id})).scalar_one_or_none()
    if parent_id is None:
        return None
    found = await connection.execute(_LOCK_PARENT[database.is_sqlite], {"id": parent_id})
    return found.one_or_none()
