"""The moves `pause` and `resume`: a job is kept from being claimed, and let go again."""

from __future__ import annotations

from typing import Literal

from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.moves.follow import NOTHING, Followed
from app.lifecycle.moves.free_keys import free_keys
from app.lifecycle.moves.guard import (
    Asked,
    Changed,
    NotPossible,
    OfSchedule,
    Unknown,
    WrongKind,
    lock_job,
    move_job,
    target_of,
    tasks_alone,
)
from app.lifecycle.moves.limit_keys import concurrency_key
from app.lifecycle.states import JobKind, JobStatus
from app.plumbing.database import Database


async def hold_job(
    connection: AsyncConnection,
    database: Database,
    asked: Asked,
    verb: Literal["pause", "resume"],
    *,
    resume_schedule: OfSchedule = tasks_alone,
    of_schedules: tuple[str, ...] = (),
) -> Changed | NotPossible | Unknown | WrongKind:
    """Pause or resume a job; its due time stays, so what is due meanwhile runs on resume.

    `of_schedules` names the fields of the request that mean something for schedules alone.
    """
    job = await lock_job(connection, database, asked, verb)
    if not isinstance(job, RowMapping):
        return job
    if verb == "resume" and job["kind"] == JobKind.SCHEDULE:
        return await resume_schedule(connection, job)
    if of_schedules:
        return WrongKind(of_schedules)
    target = target_of(verb, job)
    await move_job(connection, job, asked, target, {})
    due = job["next_trigger_time"] if target is JobStatus.WAITING else None
    followed = NOTHING
    if verb == "pause" and (key := concurrency_key(job)) is not None:
        # It may have been let go by its key, and was not claimed yet.
        followed = Followed(tuple(await free_keys(connection, [key])))
    return Changed(job["queue_id"], job["priority"], due, followed=followed)
