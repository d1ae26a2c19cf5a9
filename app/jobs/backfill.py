"""Backfills for callers: what would be run, and to have it run."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from app.access.caller import Caller
from app.edge.bodies import parse_object
from app.edge.paging import decode_cursor, encode_cursor
from app.edge.problems import Problem, validation_problem
from app.ground import Ground
from app.jobs.look import no_such_job
from app.jobs.requests import BackfillJobs
from app.jobs.schedule_fields import at_field
from app.jobs.views import backfill_view, skip_view
from app.lifecycle.lists import list_skips
from app.lifecycle.moves.backfill import (
    NewBackfill,
    existing_times,
    insert_backfill,
    list_backfills,
    lock_schedule,
)
from app.lifecycle.moves.fire import find_schedule
from app.lifecycle.states import JobKind, JobStatus
from app.lifecycle.token import new_token
from app.plumbing.bus import FIRE
from app.plumbing.database import Database
from app.plumbing.times import epoch_ms, rfc3339
from app.schedules.backfill import MOST_FIRES, backfill_times, count_times
from app.schedules.decide import FIXED_DELAY


async def backfill(ground: Ground, caller: Caller, job_id: int, body: bytes) -> dict[str, Any]:
    """Have past fires of a schedule run, or only tell which these would be.

    Raises:
        Problem: `invalid_json`, `validation_failed`, `job_not_found` or `verb_not_possible`.
    """
    try:
        request = BackfillJobs.model_validate(parse_object(body))
    except ValidationError as error:
        raise validation_problem(list(error.errors(include_url=False)), BackfillJobs) from None
    database = ground.database
    schedule = await _schedule(database, caller, job_id)
    if request.dry_run:
        return await database.read(lambda connection: _dry_run(connection, schedule, request))
    token = new_token()

    async def insert(connection: AsyncConnection) -> dict[str, Any]:
        # Under its lock: the times that are counted are those that will be walked.
        locked = await lock_schedule(connection, database, job_id)
        if locked is None:
            raise no_such_job(job_id)
        found = await _range(connection, _live(locked), request)
        new = NewBackfill(
            job_id,
            token,
            found.from_ms,
            found.until_ms,
            request.max_concurrent,
            tenant_id=caller.tenant_id,
            deed=caller.doing("job.backfill"),
        )
        row = await insert_backfill(connection, database, new)
        return backfill_view(row) | found.counted

    view = await database.write(insert)
    ground.bus.publish(FIRE, [])
    return view


@dataclass(frozen=True, slots=True)
class _Range:
    """The nominal times that a backfill is asked for, in epoch ms, and which of them have a job."""

    from_ms: int
    until_ms: int
    times: Sequence[int]
    existing: Set[int]

    @property
    def counted(self) -> dict[str, int]:
        return {"total": len(self.times), "existing": len(self.existing)}


async def _range(
    connection: AsyncConnection, schedule: RowMapping, request: BackfillJobs
) -> _Range:
    """Find the times of a schedule that a request names.

    Raises:
        Problem: `validation_failed`.
    """
    from_ms, to_ms = epoch_ms(request.from_), epoch_ms(request.to)
    decided_ms = int(schedule["trigger_ts"])
    if to_ms < from_ms:
        raise at_field("to", "must not be before from")
    if from_ms > decided_ms:
        raise at_field(
            "from",
            f"must not be after decidedUntil, {rfc3339(decided_ms)}: later times are still the "
            "schedule's own",
        )
    until = min(to_ms, decided_ms)
    total = count_times(schedule, after_ms=from_ms - 1, until_ms=until)
    if total > MOST_FIRES:
        raise at_field(
            "to", f"the range has {total} fires, and a backfill at most {MOST_FIRES}: split it"
        )
    times = list(backfill_times(schedule, after_ms=from_ms - 1, until_ms=until))
    existing = await existing_times(connection, schedule["id"], times)
    return _Range(from_ms, until, times, existing)


async def _dry_run(
    connection: AsyncConnection, schedule: RowMapping, request: BackfillJobs
) -> dict[str, Any]:
    found = await _range(connection, schedule, request)
    return {
        "backfillId": None,
        "scheduleId": schedule["id"],
        "status": "DRY_RUN",
        "from": rfc3339(found.from_ms),
        "to": rfc3339(found.until_ms),
        "maxConcurrent": request.max_concurrent,
        **found.counted,
        "spawned": 0,
        "nominalTimes": [rfc3339(time) for time in found.times if time not in found.existing],
        "createdAt": None,
        "endedAt": None,
    }


async def list_backfills_page(
    database: Database, caller: Caller, job_id: int, *, limit: int, cursor: str | None
) -> dict[str, Any]:
    """Return a page of a schedule's backfills, newest first.

    Raises:
        Problem: `job_not_found`, or `validation_failed`.
    """
    before = decode_cursor(cursor)
    await _find(database, caller, job_id)
    rows = await database.read(
        lambda connection: list_backfills(connection, job_id, before=before, limit=limit + 1)
    )
    page = rows[:limit]
    return {
        "items": [backfill_view(row) for row in page],
        "nextCursor": encode_cursor(page[-1]["id"]) if len(rows) > limit else None,
    }


async def list_skips_page(
    database: Database, caller: Caller, job_id: int, *, limit: int, cursor: str | None
) -> dict[str, Any]:
    """Return a page of the fires of a schedule that did not run, latest first.

    Raises:
        Problem: `job_not_found`, or `validation_failed` for a foreign cursor.
    """
    before = decode_cursor(cursor)
    await _find(database, caller, job_id)
    rows = await database.read(
        lambda connection: list_skips(connection, job_id, before=before, limit=limit + 1)
    )
    page = rows[:limit]
    return {
        "items": [skip_view(row) for row in page],
        "nextCursor": encode_cursor(page[-1]["from_time"]) if len(rows) > limit else None,
    }


async def _find(database: Database, caller: Caller, job_id: int) -> RowMapping | None:
    """Return the row of a schedule, or None for a job that is none.

    Raises:
        Problem: `job_not_found`.
    """

    async def read(connection: AsyncConnection) -> RowMapping | None:
        return await find_schedule(connection, database, job_id, tenant_id=caller.tenant_id)

    row = await database.read(read)
    if row is None:
        raise no_such_job(job_id)
    return row if row["kind"] == JobKind.SCHEDULE else None


async def _schedule(database: Database, caller: Caller, job_id: int) -> RowMapping:
    row = await _find(database, caller, job_id)
    if row is None:
        raise Problem("validation_failed", f"Job {job_id} is no schedule: send the id of one.")
    if row["interval_mode"] == FIXED_DELAY:
        raise Problem(
            "validation_failed",
            "A fixed delay has no times of its own that could be run after all: use trigger.",
        )
    return _live(row)


def _live(schedule: RowMapping) -> RowMapping:
    """Return the row of a schedule that has not been cancelled.

    Raises:
        Problem: `verb_not_possible`.
    """
    if schedule["status"] == JobStatus.CANCELLED:
        raise Problem(
            "verb_not_possible",
            f"Job {schedule['id']} is CANCELLED: a backfill is not possible.",
            jobId=schedule["id"],
            jobStatus="CANCELLED",
            possible=[],
        )
    return schedule
