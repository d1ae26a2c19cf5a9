"""What the database knows of why a job does not run: a few reads, each by a key or index.

None of them grows with the number of jobs: executions are bounded, the jobs before this one are
counted only up to a limit in each priority, and workers are as many as the fleet has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.callback_body import END_TYPES
from app.lifecycle.callbacks import read_callbacks
from app.lifecycle.limits import count_running_of
from app.lifecycle.nodes import Node, read_node, read_nodes
from app.lifecycle.reads import read_executions
from app.lifecycle.states import TERMINAL_JOBS, DeliveryStatus, JobKind, JobStatus, in_list
from app.plumbing.database import NOW_MS, Database

ATTEMPTS_TOLD: Final = 20
COUNTED_AHEAD: Final = 500
"""In each range of the claim index; there are at most eleven."""
WORKERS_READ: Final = 10_000
READS_AGAIN: Final = 2
CHILDREN_TOLD: Final = 10

# Everything here is found by a primary or unique key.
_JOB: Final = {
    sqlite: text(
        f"SELECT {now} AS now_ms, j.id, j.kind, j.status, j.job_handler, j.queue_id, j.priority, "
        "j.next_trigger_time, j.trigger_ts, j.owner_worker_id, j.execution_id, "
        "j.stopping_execution_id, j.expires_at, j.attempt, j.returned, j.max_retry, j.timeout_ms, "
        "j.callback_url, j.error_code, j.error_message, j.version, j.updated_at, j.finished_at, "
        "j.tenant_id, j.concurrency_key, j.concurrency_limit, j.rate_key, j.rate_per_second, "
        "j.rate_due, l.running_jobs, l.may_borrow, "
        "COALESCE(v.waits, 0) AS behind_another_fire, "
        "j.parent_id, p.kind AS parent_kind, p.status AS parent_status, "
        "j.nominal_time, j.child_key, j.created_at, p.client_request_id AS parent_request_id, "
        "p.jitter_ms AS parent_jitter_ms, p.misfire_policy AS parent_misfire_policy, "
        # What was made in the range of a backfill after that was asked for is of the backfill.
        "(SELECT MAX(b.id) FROM schedule_backfill AS b WHERE b.schedule_id = j.parent_id "
        "AND j.nominal_time BETWEEN b.from_time AND b.to_time "
        "AND b.created_at <= j.created_at) AS of_backfill, "
        "q.requirement, COALESCE(q.partition_no, 0) AS partition_no, t.term, "
        "t.since AS term_since, s.worker_id AS stopping_worker_id "
        "FROM job_info AS j "
        "LEFT JOIN job_info AS p ON p.id = j.parent_id "
        "LEFT JOIN schedule_live AS v ON v.schedule_id = j.parent_id AND v.child_id = j.id "
        "LEFT JOIN queue AS q ON q.id = j.queue_id "
        "LEFT JOIN tenant_limits AS l ON l.tenant_id = j.tenant_id "
        "LEFT JOIN dispatch_term AS t ON t.partition_no = COALESCE(q.partition_no, 0) "
        "LEFT JOIN stopping_execution AS s ON s.execution_id = j.stopping_execution_id "
        "WHERE j.id = :id AND j.tenant_id = :tenant"
    )
    for sqlite, now in NOW_MS.items()
}
_SCHEDULE: Final = text(
    "SELECT j.trigger_ts, j.cron_expr, j.cron_dialect, j.timezone, j.dst_gap, j.dst_fold, "
    "j.interval_ms, j.interval_mode, j.anchor_at, j.start_at, j.end_at, j.jitter_ms, "
    "j.max_fires, j.fires, "
    "j.overlap_policy, j.misfire_policy, j.skip_reason, s.from_time, s.to_time, "
    "s.count AS skipped "
    "FROM job_info AS j "
    "LEFT JOIN schedule_skip AS s ON s.schedule_id = j.id AND s.from_time = j.skip_from "
    "WHERE j.id = :id"
)
_GOING: Final = text(
    "SELECT c.id FROM schedule_live AS l JOIN job_info AS c ON c.id = l.child_id "
    f"WHERE l.schedule_id = :id AND (c.status NOT IN ({in_list(TERMINAL_JOBS)}) "
    "OR c.stopping_execution_id IS NOT NULL) "
    f"ORDER BY l.child_id LIMIT {CHILDREN_TOLD + 1}"
)
_HOLDERS: Final = text(
    "SELECT s.job_id FROM concurrency_slot AS s JOIN job_info AS j ON j.id = s.job_id "
    "WHERE s.tenant_id = :tenant AND s.name = :name AND s.waits = 0 "
    f"AND (j.status = {int(JobStatus.RUNNING)} AND j.concurrency_key = s.name "
    "OR j.stopping_execution_id IS NOT NULL) "
    f"ORDER BY s.job_id LIMIT {CHILDREN_TOLD + 1}"
)
_VERSION: Final = text("SELECT version FROM job_info WHERE id = :id")


@dataclass(frozen=True, slots=True)
class Ahead:
    """Due jobs of the same queue that come first; each priority is counted up to a limit."""

    higher: int = 0
    same: int = 0
    at_least: bool = False
    """True when there may be more than were counted."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A job and what has to do with it, as they were at one moment (`job["now_ms"]`)."""

    job: RowMapping
    executions: Sequence[RowMapping] = ()
    more_executions: bool = False
    callback: RowMapping | None = None
    nodes: Sequence[Node] = field(default_factory=list)
    ahead: Ahead = Ahead()
    schedule: RowMapping | None = None
    """What makes it a schedule, with the ledger row of its last time if that did not run."""
    going: Sequence[int] = ()
    """The first children of a schedule that have not ended."""
    holders: Sequence[int] = ()
    """The first jobs that hold the concurrency key that this one waits for."""
    running_of_tenant: int | None = None
    """How many tasks of its tenant run, where that is limited."""

    @property
    def is_due(self) -> bool:
        """Whether the job waits for nothing but its turn."""
        due = self.job["next_trigger_time"]
        return self.is_waiting and (due is None or bool(due <= self.job["now_ms"]))

    @property
    def is_waiting(self) -> bool:
        """Whether the job is a task that waits to be claimed."""
        return bool(self.job["kind"] == JobKind.TASK and self.job["status"] == JobStatus.WAITING)


async def read_evidence(
    connection: AsyncConnection, database: Database, job_id: int, *, tenant_id: int
) -> Evidence | None:
    """Read all that explains one job of the tenant: at most six statements, eight with a quota.

    When the job moves on meanwhile, they are read again, so that they tell one story.
    """
    evidence = await _read(connection, database, job_id, tenant_id=tenant_id)
    for _ in range(READS_AGAIN):
        if evidence is None:
            return None
        version = (await connection.execute(_VERSION, {"id": job_id})).scalar_one_or_none()
        if version == evidence.job["version"]:
            break
        evidence = await _read(connection, database, job_id, tenant_id=tenant_id)
    return evidence


async def _read(
    connection: AsyncConnection, database: Database, job_id: int, *, tenant_id: int
) -> Evidence | None:
    found = await connection.execute(_JOB[database.is_sqlite], {"id": job_id, "tenant": tenant_id})
    job = found.mappings().one_or_none()
    if job is None:
        return None
    executions: Sequence[RowMapping] = []
    if job["attempt"] or job["execution_id"]:
        executions = await read_executions(connection, job_id, before=None, limit=ATTEMPTS_TOLD + 1)
    callbacks: Sequence[RowMapping] = []
    if job["status"] in TERMINAL_JOBS and job["callback_url"] is not None:
        callbacks = await read_callbacks(connection, job_id, before=None, limit=1)
    schedule, going = None, ()
    if job["kind"] == JobKind.SCHEDULE:
        schedule = (await connection.execute(_SCHEDULE, {"id": job_id})).mappings().one()
        going = tuple((await connection.execute(_GOING, {"id": job_id})).scalars())
    holders: Sequence[int] = ()
    if job["status"] == JobStatus.BLOCKED and job["concurrency_key"] is not None:
        named = {"tenant": job["tenant_id"], "name": job["concurrency_key"]}
        holders = tuple((await connection.execute(_HOLDERS, named)).scalars())
    evidence = Evidence(
        holders=holders,
        schedule=schedule,
        going=going,
        job=job,
        executions=executions[:ATTEMPTS_TOLD],
        more_executions=len(executions) > ATTEMPTS_TOLD,
        callback=callbacks[0] if callbacks and callbacks[0]["event_type"] in END_TYPES else None,
    )
    return await _with_fleet(connection, database, evidence)


async def _with_fleet(
    connection: AsyncConnection, database: Database, evidence: Evidence
) -> Evidence:
    """Add the workers that matter, and for a due job how many come first."""
    job, nodes, ahead = evidence.job, evidence.nodes, evidence.ahead
    if evidence.is_due and job["stopping_execution_id"] is None:
        nodes = await read_nodes(connection, include_down=True, limit=WORKERS_READ)
        ahead = await _count_ahead(connection, database, job)
        if job["running_jobs"] is not None:
            running = await count_running_of(connection, job["tenant_id"])
            evidence = replace(evidence, running_of_tenant=running)
    elif _waits_for_a_worker(evidence):
        nodes = await read_nodes(connection, include_down=True, limit=WORKERS_READ)
    elif (worker_id := job["owner_worker_id"] or job["stopping_worker_id"]) is not None:
        node = await read_node(connection, worker_id)
        nodes = [] if node is None else [node]
    return replace(evidence, nodes=nodes, ahead=ahead)


def _waits_for_a_worker(evidence: Evidence) -> bool:
    """Whether the callback of this end is owed and no worker has it."""
    row = evidence.callback
    if row is None or row["status"] != DeliveryStatus.PENDING:
        return False
    return bool(row["owner_worker_id"] is None or row["next_try_at"] <= evidence.job["now_ms"])


def ahead_sql(database: Database, job: RowMapping) -> str:
    """Build the bounded count of due jobs before this one; every value in it is an integer.

    Each part is one range of the claim index, so that it ends where its limit or its range does.
    """
    hint = "" if database.is_sqlite else "FORCE INDEX (ix_job_info_claim) "
    due, own, priority = int(job["next_trigger_time"]), int(job["id"]), int(job["priority"])
    ranges = [
        (priority, f"next_trigger_time < {due}"),
        (priority, f"next_trigger_time = {due} AND id < {own}"),
        *((one, f"next_trigger_time <= {int(job['now_ms'])}") for one in range(priority + 1, 10)),
    ]
    return " UNION ALL ".join(
        f"SELECT {one} AS priority, COUNT(*) AS found FROM ("
        f"SELECT id FROM job_info {hint}WHERE status = {int(JobStatus.WAITING)} "
        f"AND queue_id = {int(job['queue_id'])} AND priority = {one} AND {earlier} "
        f"LIMIT {COUNTED_AHEAD + 1}) AS counted{number}"
        for number, (one, earlier) in enumerate(ranges)
    )


async def _count_ahead(connection: AsyncConnection, database: Database, job: RowMapping) -> Ahead:
    if job["next_trigger_time"] is None:
        return Ahead()
    rows = (await connection.exec_driver_sql(ahead_sql(database, job))).all()
    same = sum(row.found for row in rows if row.priority == job["priority"])
    return Ahead(
        higher=sum(row.found for row in rows if row.priority > job["priority"]),
        same=same,
        at_least=any(row.found > COUNTED_AHEAD for row in rows),
    )
