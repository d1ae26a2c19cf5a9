"""How many jobs of a tenant are in each state, by the claim index, and never more than a bound.

A tenant's tasks lie in its queues, so its part of a state is a range for each. Schedules of all
tenants lie in one queue: of these the first ones are looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.states import JobStatus
from app.plumbing.database import Database

_CLAIM_INDEX = "ix_job_info_claim"
_OF_SCHEDULES = (JobStatus.SCHEDULED, JobStatus.PAUSED, JobStatus.SUCCEEDED, JobStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class Count:
    """So many jobs or, when the bound was reached, at least so many."""

    count: int
    at_least: bool


@dataclass(frozen=True, slots=True)
class Counts:
    """Jobs by state; `due` are those among the WAITING that were counted whose time has come."""

    of_status: Mapping[JobStatus, Count]
    due: Count


def counts_sql(database: Database) -> str:
    """Write the one statement that counts all; `:tenant`, and `:most` rows of each state."""
    parts = [_tasks(database, status) for status in JobStatus if status != JobStatus.SCHEDULED]
    parts += [_schedules(database, status) for status in _OF_SCHEDULES]
    return " UNION ALL ".join(parts)


async def count_jobs(
    connection: AsyncConnection, database: Database, *, tenant_id: int, most: int
) -> Counts:
    """Count a tenant's jobs, looking at no more than `most` rows of each state."""
    found = await connection.execute(
        text(counts_sql(database)), {"tenant": tenant_id, "most": most}
    )
    own, full, due = dict.fromkeys(JobStatus, 0), set[JobStatus](), 0
    for row in found:
        status = JobStatus(row.status)
        own[status] += int(row.own or 0)
        due += int(row.due or 0)
        if row.looked_at >= most:
            full.add(status)
    return Counts(
        {status: Count(min(own[status], most), status in full) for status in JobStatus},
        Count(due, JobStatus.WAITING in full),
    )


def _tasks(database: Database, status: JobStatus) -> str:
    due = f"next_trigger_time <= {database.now_ms}" if status == JobStatus.WAITING else "1 = 0"
    # The queues first: the optimizer must not begin with all jobs of the state.
    job = (
        f"queue AS q CROSS JOIN job_info AS j INDEXED BY {_CLAIM_INDEX}"
        if database.is_sqlite
        else f"queue AS q STRAIGHT_JOIN job_info AS j FORCE INDEX ({_CLAIM_INDEX})"
    )
    on = "" if database.is_sqlite else f"ON j.queue_id = q.id AND j.status = {int(status)} "
    and_on = f" AND j.queue_id = q.id AND j.status = {int(status)}" if database.is_sqlite else ""
    return (
        f"SELECT {int(status)} AS status, COUNT(*) AS looked_at, COUNT(*) AS own, "
        f"SUM(CASE WHEN {due} THEN 1 ELSE 0 END) AS due FROM (SELECT j.next_trigger_time "
        f"FROM {job} {on}WHERE q.tenant_id = :tenant{and_on} LIMIT :most) AS t{int(status)}"
    )


def _schedules(database: Database, status: JobStatus) -> str:
    hint = "INDEXED BY {}" if database.is_sqlite else "FORCE INDEX ({})"
    return (
        f"SELECT {int(status)} AS status, COUNT(*) AS looked_at, "
        "SUM(CASE WHEN tenant_id = :tenant THEN 1 ELSE 0 END) AS own, 0 AS due FROM "
        f"(SELECT tenant_id FROM job_info {hint.format(_CLAIM_INDEX)} "
        f"WHERE status = {int(status)} AND queue_id = 0 LIMIT :most) AS s{int(status)}"
    )
