"""How many jobs there are, and for how long the finished ones are kept: a tenant's own view."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.access.caller import Caller
from app.edge.bodies import parse_object
from app.edge.problems import invalid, pointer_to, validation_problem
from app.edge.wire import StatusWord, Wire
from app.ground import Ground
from app.lifecycle.audit import record_deed
from app.lifecycle.counts import Count, Counts, count_jobs
from app.lifecycle.keep import DAY_MS, LEAST_DAYS, default_keeps
from app.lifecycle.policies import read_policy, write_policy
from app.lifecycle.reads import read_now
from app.lifecycle.states import TERMINAL_JOBS, JobStatus
from app.plumbing.database import Database

MOST_COUNTED: Final = 10_000
_FIELDS: Final = {status: f"{status.name.lower()}Days" for status in sorted(TERMINAL_JOBS)}


class StatusCount(Wire):
    """How many jobs are in a state."""

    status: StatusWord
    count: int
    at_least: bool = Field(description="There may be more: no more than `upTo` were counted.")


class DueCount(Wire):
    """How many of the WAITING jobs that were counted could run now."""

    count: int
    at_least: bool


class JobCounts(Wire):
    """How many jobs are in each state."""

    items: list[StatusCount]
    due: DueCount


Days = Annotated[
    float | None,
    Field(gt=0, strict=True, description="Days from its end; null: as the server's settings say."),
]


class KeepJobs(Wire):
    """For how many days finished jobs are kept, by how they ended."""

    succeeded_days: Days = None
    failed_days: Days = None
    cancelled_days: Days = None


class DefaultDays(Wire):
    """What holds where nothing is chosen."""

    succeeded_days: float
    failed_days: float
    cancelled_days: float


class Keeping(KeepJobs):
    """What was chosen, and what holds where nothing is."""

    defaults: DefaultDays


async def counted(database: Database, caller: Caller, *, most: int) -> dict[str, Any]:
    """Count the caller's jobs by state, up to `most` of each."""
    counts = await database.read(
        lambda connection: count_jobs(connection, database, tenant_id=caller.tenant_id, most=most)
    )
    return _counts_view(counts)


async def kept_for(ground: Ground, caller: Caller) -> dict[str, Any]:
    """Return what was chosen for the caller's jobs, and what holds where nothing was."""
    chosen = await ground.database.read(
        lambda connection: read_policy(connection, caller.tenant_id)
    )
    return _keeping_view(ground, chosen)


async def keep_for(ground: Ground, caller: Caller, body: bytes) -> dict[str, Any]:
    """Replace what was chosen for the caller's jobs.

    Raises:
        Problem: `invalid_json` or `validation_failed`.
    """
    chosen = _chosen(body, ground.settings.retention_most_days)

    async def write(connection: AsyncConnection) -> None:
        before = await read_policy(connection, caller.tenant_id)
        await write_policy(connection, caller.tenant_id, chosen)
        await record_deed(
            connection,
            caller.doing("retention.set"),
            f"tenant:{caller.tenant_id}",
            tenant_id=caller.tenant_id,
            now_ms=await read_now(connection, ground.database),
            old=_days(before),
            new=_days(chosen),
        )

    await ground.database.write(write)
    return _keeping_view(ground, chosen)


def _chosen(body: bytes, most_days: float) -> dict[JobStatus, int]:
    try:
        asked = KeepJobs.model_validate(parse_object(body)).model_dump(by_alias=True)
    except ValidationError as error:
        raise validation_problem(list(error.errors(include_url=False)), KeepJobs) from None
    chosen: dict[JobStatus, int] = {}
    for status, field in _FIELDS.items():
        days = asked[field]
        if days is None:
            continue
        if not LEAST_DAYS <= days <= most_days:
            raise invalid(f"{LEAST_DAYS:g} to {most_days:g} days, or null", pointer_to(field))
        chosen[status] = int(days * DAY_MS)
    return chosen


def _days(chosen: dict[JobStatus, int]) -> dict[str, float]:
    return {_FIELDS[status]: kept / DAY_MS for status, kept in chosen.items()}


def _counts_view(counts: Counts) -> dict[str, Any]:
    return {
        "items": [
            {"status": status.name, **_count_view(count)}
            for status, count in counts.of_status.items()
        ],
        "due": _count_view(counts.due),
    }


def _count_view(count: Count) -> dict[str, Any]:
    return {"count": count.count, "atLeast": count.at_least}


def _keeping_view(ground: Ground, chosen: Mapping[JobStatus, int]) -> dict[str, Any]:
    settings = ground.settings
    defaults = default_keeps(settings.retention_days, settings.retention)
    return {
        **{
            field: chosen[status] / DAY_MS if status in chosen else None
            for status, field in _FIELDS.items()
        },
        "defaults": {field: defaults[status] / DAY_MS for status, field in _FIELDS.items()},
    }
