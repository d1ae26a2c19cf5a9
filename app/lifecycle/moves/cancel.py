"""The move `cancel`: a job ends because a caller wants it, whatever its worker does.

A run that was under way is over for the job at once, but not for its worker: until that is known
to have stopped, or is dead, the run stays noted as stopping, so that a job that is retried does
not run twice at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.moves.follow import NOTHING, Followed, follow_ends
from app.lifecycle.moves.free_keys import free_keys
from app.lifecycle.moves.guard import (
    Asked,
    Changed,
    NotPossible,
    Unknown,
    lock_job,
    move_job,
    target_of,
)
from app.lifecycle.moves.limit_keys import concurrency_key
from app.lifecycle.moves.owe import callback_row, insert_callbacks
from app.lifecycle.moves.release import note_stopping
from app.lifecycle.states import OPEN_EXECUTIONS, ExecutionStatus, JobKind, JobStatus, in_list
from app.plumbing.database import Database

CODE: Final = "cancelled"
MESSAGE: Final = "A caller cancelled the job."

_END_LOG: Final = text(
    f"UPDATE job_log SET status = {int(ExecutionStatus.CANCELLED)}, finished_at = :now, "
    "error_code = :code, error_message = :message, reason = :message "
    f"WHERE execution_id = :execution AND status IN ({in_list(OPEN_EXECUTIONS)})"
)
_STARTED: Final = text("SELECT started_at FROM job_log WHERE execution_id = :execution")


CloseSchedule = Callable[[AsyncConnection, RowMapping], Awaitable[Mapping[str, Any]]]
"""Puts on record what a schedule will not decide any more; returns the columns that change."""


async def _tasks_alone(_connection: AsyncConnection, job: RowMapping) -> Mapping[str, Any]:
    """Stand for it where the caller knows that it cancels tasks alone."""
    raise RuntimeError(f"job {job['id']} is a schedule")


async def cancel_job(
    connection: AsyncConnection,
    database: Database,
    asked: Asked,
    *,
    message: str = MESSAGE,
    close_schedule: CloseSchedule = _tasks_alone,
) -> Changed | NotPossible | Unknown:
    """End a job as CANCELLED; one that is so already stays as it is.

    A schedule owes no callback: its `callbackUrl` is that of its children.
    """
    job = await lock_job(connection, database, asked, "cancel")
    if not isinstance(job, RowMapping):
        return job
    now = job["now_ms"]
    running = job["status"] == JobStatus.RUNNING and job["execution_id"] is not None
    changes: dict[str, Any] = {
        "error_code": CODE,
        "error_message": message,
        "finished_at": now,
        "owner_worker_id": None,
    }
    if running:
        changes["stopping_execution_id"] = job["execution_id"]
    if job["kind"] == JobKind.SCHEDULE:
        changes |= await close_schedule(connection, job)
    await move_job(connection, job, asked, target_of("cancel", job), changes)
    if job["kind"] == JobKind.SCHEDULE:
        return Changed(job["queue_id"], job["priority"])
    stopped = await _end_run(connection, database, job, message) if running else None
    callback = callback_row(
        job,
        JobStatus.CANCELLED,
        execution_id=job["execution_id"],
        trigger_ts=job["trigger_ts"] or job["next_trigger_time"] or now,
        started_at=await _started_at(connection, job) if running else None,
        finished_at=now,
        error_code=CODE,
        error_message=message,
        now=now,
    )
    await insert_callbacks(connection, [] if callback is None else [callback])
    followed = NOTHING
    if job["parent_id"] is not None:
        followed = await follow_ends(connection, [job["id"]])
    if not running and (key := concurrency_key(job)) is not None:
        # It may have been let go by its key, and was not claimed yet.
        followed += Followed(tuple(await free_keys(connection, [key])))
    return Changed(
        job["queue_id"],
        job["priority"],
        stopped=stopped,
        owed=callback is not None,
        # The run before may have timed out, and not be over yet.
        goes_on=running or job["stopping_execution_id"] is not None,
        followed=followed,
    )


async def _end_run(
    connection: AsyncConnection, database: Database, job: RowMapping, message: str
) -> tuple[str, str]:
    await connection.execute(
        _END_LOG,
        {
            "now": job["now_ms"],
            "code": CODE,
            "message": message,
            "execution": job["execution_id"],
        },
    )
    await note_stopping(
        connection,
        database,
        [
            {
                "execution_id": job["execution_id"],
                "job_id": job["id"],
                "trigger_ts": job["trigger_ts"],
                "worker_id": job["owner_worker_id"],
            }
        ],
    )
    return job["owner_worker_id"], job["execution_id"]


async def _started_at(connection: AsyncConnection, job: RowMapping) -> int | None:
    found = await connection.execute(_STARTED, {"execution": job["execution_id"]})
    started_at: int | None = found.scalar_one_or_none()
    return started_at
