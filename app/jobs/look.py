"""Looking at a job: now, or once it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from app.access.caller import Caller
from app.edge.paging import decode_cursor, encode_cursor
from app.edge.problems import Problem
from app.jobs.views import execution_view, job_view
from app.jobs.wait import Waiters
from app.jobs.watch import LetsOn
from app.lifecycle.reads import JobRecord, read_executions, read_job, read_results
from app.lifecycle.states import TERMINAL_JOBS
from app.plumbing.database import Database

EXECUTIONS_SHOWN: Final = 5


async def look_at_job(
    database: Database,
    waiters: Waiters,
    caller: Caller,
    job_id: int,
    *,
    wait_seconds: float,
    lets_on: LetsOn,
) -> dict[str, Any]:
    """Return the job, as soon as it is terminal or after `wait_seconds`, whichever is first.

    Raises:
        Problem: `job_not_found`, or `unauthorized` if the key ends while it is waited.
    """
    if wait_seconds <= 0:
        return job_view(await find_job(database, caller, job_id))
    deadline = time.monotonic() + wait_seconds
    event = waiters.enter(job_id)
    try:
        while True:
            event.clear()
            record = await find_job(database, caller, job_id)
            left = deadline - time.monotonic()
            if record.job["status"] in TERMINAL_JOBS or left <= 0 or waiters.closed:
                return job_view(record)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await event.wait()
            if not await lets_on():
                raise Problem("unauthorized", "The key has ended while the request waited.")
    finally:
        waiters.leave(job_id, event)


async def list_executions(
    database: Database, caller: Caller, job_id: int, *, limit: int, cursor: str | None
) -> dict[str, Any]:
    """Return a page of a job's executions, newest first.

    Raises:
        Problem: `job_not_found`, or `validation_failed` for a foreign cursor.
    """
    before = decode_cursor(cursor)

    async def read(connection: AsyncConnection) -> dict[str, Any] | None:
        if await read_job(connection, job_id, tenant_id=caller.tenant_id, executions=0) is None:
            return None
        rows = await read_executions(connection, job_id, before=before, limit=limit + 1)
        page = rows[:limit]
        results = await read_results(connection, page)
        return {
            "items": [execution_view(row, results) for row in page],
            "nextCursor": encode_cursor(page[-1]["id"]) if len(rows) > limit else None,
        }

    found = await database.read(read)
    if found is None:
        raise no_such_job(job_id)
    return found


async def find_job(database: Database, caller: Caller, job_id: int) -> JobRecord:
    """Return a job with its newest executions.

    Raises:
        Problem: `job_not_found`.
    """
    record = await find_job_or_none(database, caller, job_id)
    if record is None:
        raise no_such_job(job_id)
    return record


async def find_job_or_none(database: Database, caller: Caller, job_id: int) -> JobRecord | None:
    """Return a job with its newest executions, None when the caller has no such job."""
    return await database.read(
        lambda connection: read_job(
            connection, job_id, tenant_id=caller.tenant_id, executions=EXECUTIONS_SHOWN
        )
    )


def no_such_job(job_id: int) -> Problem:
    """Say that a job is not there, or not the caller's."""
    return Problem("job_not_found", f"No job has the id {job_id}, or it is past its retention.")
