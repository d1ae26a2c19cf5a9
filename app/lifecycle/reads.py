"""Reads of jobs, executions and queues. Nothing here scans: each has its key or index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import RowMapping, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.states import TERMINAL_JOBS, JobKind, JobStatus, in_list
from app.plumbing.database import Database

JOB_COLUMNS: Final = (
    "id, tenant_id, client_request_id, request_digest, submit_token, parent_id, kind, job_name, "
    "job_handler, queue_id, status, priority, next_trigger_time, trigger_ts, owner_worker_id, "
    "execution_id, attempt, max_retry, retry_interval_ms, retry_backoff, timeout_ms, "
    "callback_url, callback_events, callback_headers, "
    "params, params_in_payload, error_code, error_message, version, revision, "
    "created_at, updated_at, finished_at, expires_at, nominal_time, secret, concurrency_key, "
    "concurrency_limit, rate_key, rate_per_second"
)
SCHEDULE_COLUMNS: Final = (
    "id, cron_expr, cron_dialect, timezone, dst_gap, dst_fold, interval_ms, interval_mode, "
    "start_at, end_at, max_fires, jitter_ms, misfire_policy, misfire_cap, misfire_spacing_ms, "
    "catch_up_ms, overlap_policy, fires, trigger_ts"
)
EXECUTION_COLUMNS: Final = (
    "id, execution_id, job_id, attempt, trigger_ts, worker_id, term, status, claimed_at, "
    "accepted_at, started_at, finished_at, error_code, error_message, reason, result, "
    "result_in_payload, stale_at, stale_status, progress, progress_text, progress_at"
)


async def read_now(connection: AsyncConnection, database: Database) -> int:
    """Return the database's time inside this transaction, epoch milliseconds."""
    return int((await connection.exec_driver_sql(f"SELECT {database.now_ms}")).scalar_one())


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job with its newest executions (newest first) and its bodies as JSON text."""

    job: RowMapping | dict[str, Any]
    executions: tuple[RowMapping, ...]
    params: str | None
    results: dict[str, str]
    """Result of each execution that has one, by execution id."""
    current: RowMapping | None = None
    """The current execution, where `executions` are left out."""
    schedule: RowMapping | None = None
    """What makes it a schedule, if it is one: `SCHEDULE_COLUMNS`."""


async def read_handler(connection: AsyncConnection, job_id: int, *, tenant_id: int) -> str | None:
    """Return the name of the handler of a job of the tenant, None when there is no such job."""
    found = await connection.execute(
        text("SELECT job_handler FROM job_info WHERE id = :id AND tenant_id = :tenant"),
        {"id": job_id, "tenant": tenant_id},
    )
    name: str | None = found.scalar_one_or_none()
    return name


async def read_job(
    connection: AsyncConnection, job_id: int, *, tenant_id: int, executions: int
) -> JobRecord | None:
    """Return one job of the tenant with up to `executions` of its newest executions."""
    job = (
        (
            await connection.execute(
                text(f"SELECT {JOB_COLUMNS} FROM job_info WHERE id = :id AND tenant_id = :tenant"),
                {"id": job_id, "tenant": tenant_id},
            )
        )
        .mappings()
        .one_or_none()
    )
    if job is None:
        return None
    newest: Sequence[RowMapping] = []
    if job["attempt"] or job["execution_id"]:
        newest = await read_executions(connection, job_id, before=None, limit=executions)
    bodies = await _bodies(connection, [job], newest)
    params = bodies.get((job_id, "params"), job["params"])
    schedule = None
    if job["kind"] == JobKind.SCHEDULE:
        schedule = (await read_schedules(connection, [job_id])).get(job_id)
    return JobRecord(job, tuple(newest), params, results_of(newest, bodies), schedule=schedule)


_SCHEDULES: Final = text(f"SELECT {SCHEDULE_COLUMNS} FROM job_info WHERE id IN :ids").bindparams(
    bindparam("ids", expanding=True)
)


async def read_schedules(
    connection: AsyncConnection, job_ids: Sequence[int]
) -> dict[int, RowMapping]:
    """Return what makes each of these jobs a schedule, by id."""
    if not job_ids:
        return {}
    rows = await connection.execute(_SCHEDULES, {"ids": list(job_ids)})
    return {row["id"]: row for row in rows.mappings()}


async def job_exists(connection: AsyncConnection, job_id: int, *, tenant_id: int) -> bool:
    """Tell whether the tenant has this job."""
    found = await connection.execute(
        text("SELECT id FROM job_info WHERE id = :id AND tenant_id = :tenant"),
        {"id": job_id, "tenant": tenant_id},
    )
    return found.one_or_none() is not None


async def live_children(connection: AsyncConnection, schedule_id: int) -> list[int]:
    """Return the children of a schedule that have not ended, those that wait first."""
    rows = await connection.execute(
        text(
            "SELECT child_id FROM schedule_live WHERE schedule_id = :schedule "
            "ORDER BY waits DESC, child_id DESC"
        ),
        {"schedule": schedule_id},
    )
    return [row.child_id for row in rows]


async def read_executions(
    connection: AsyncConnection, job_id: int, *, before: int | None, limit: int
) -> Sequence[RowMapping]:
    """Return up to `limit` executions of a job, newest first, older than the log id `before`."""
    older = "" if before is None else "AND id < :before "
    rows = await connection.execute(
        text(
            f"SELECT {EXECUTION_COLUMNS} FROM job_log WHERE job_id = :job {older}"
            "ORDER BY id DESC LIMIT :limit"
        ),
        {"job": job_id, "limit": limit} | ({} if before is None else {"before": before}),
    )
    return rows.mappings().all()


async def read_results(
    connection: AsyncConnection, executions: Sequence[RowMapping]
) -> dict[str, str]:
    """Return the result of each execution that has one, by execution id, as JSON text."""
    return results_of(executions, await _bodies(connection, [], executions))


def results_of(
    executions: Iterable[RowMapping], bodies: dict[tuple[int, str], str]
) -> dict[str, str]:
    """Pick the results of `executions` from their rows and from the long bodies."""
    found = {}
    for row in executions:
        body = bodies.get((row["job_id"], row["execution_id"]), row["result"])
        if body is not None:
            found[row["execution_id"]] = body
    return found


async def _bodies(
    connection: AsyncConnection, jobs: Sequence[Any], executions: Sequence[Any]
) -> dict[tuple[int, str], str]:
    wanted = [(row["id"], "params") for row in jobs if row["params_in_payload"]] + [
        (row["job_id"], row["execution_id"]) for row in executions if row["result_in_payload"]
    ]
    return await read_payloads(connection, wanted)


_PAYLOADS: Final = text(
    "SELECT job_id, slot, body FROM job_payload WHERE job_id IN :jobs AND slot IN :slots"
).bindparams(bindparam("jobs", expanding=True), bindparam("slots", expanding=True))


async def read_payloads(
    connection: AsyncConnection, wanted: Sequence[tuple[int, str]]
) -> dict[tuple[int, str], str]:
    """Return long bodies by (job id, slot)."""
    if not wanted:
        return {}
    rows = await connection.execute(
        _PAYLOADS,
        {"jobs": sorted({job for job, _ in wanted}), "slots": sorted({slot for _, slot in wanted})},
    )
    return {(job_id, slot): body for job_id, slot, body in rows}


_ENDED: Final = text(
    f"SELECT id FROM job_info WHERE id IN :ids AND status IN ({in_list(TERMINAL_JOBS)})"
).bindparams(bindparam("ids", expanding=True))


async def read_ended(connection: AsyncConnection, job_ids: Sequence[int]) -> list[int]:
    """Return those of the jobs that are terminal."""
    return [row[0] for row in await connection.execute(_ENDED, {"ids": list(job_ids)})]


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A queue: the tasks of one handler, label requirement, tenant and partition."""

    queue_id: int
    tenant_id: int
    job_handler: str
    requirement: str
    partition: int = 0


async def read_queues(connection: AsyncConnection, *, after_id: int) -> list[QueueRow]:
    """Return the queues with a higher id: a row for each that `QueueRow` tells apart."""
    rows = await connection.execute(
        text(
            "SELECT id, tenant_id, job_handler, requirement, partition_no FROM queue "
            "WHERE id > :after"
        ),
        {"after": after_id},
    )
    return [QueueRow(*row) for row in rows]


async def ensure_queue(
    connection: AsyncConnection,
    database: Database,
    *,
    tenant_id: int,
    job_handler: str,
    requirement: str,
    partition: int = 0,
) -> int:
    """Return the id of a queue, which is created when it is new."""
    key = {
        "tenant": tenant_id,
        "handler": job_handler,
        "requirement": requirement,
        "partition": partition,
    }
    find = text(
        "SELECT id FROM queue WHERE job_handler = :handler AND requirement = :requirement "
        "AND tenant_id = :tenant AND partition_no = :partition"
    )
    found = (await connection.execute(find, key)).scalar_one_or_none()
    if found is None:
        await connection.execute(
            text(
                "INSERT INTO queue (tenant_id, job_handler, requirement, partition_no) "
                "VALUES (:tenant, :handler, :requirement, :partition) "
                + database.keep_first("tenant_id")
            ),
            key,
        )
        found = (await connection.execute(find, key)).scalar_one()
    return int(found)


@dataclass(frozen=True, slots=True)
class TaskCounts:
    """How many tasks are in hand; each part is counted up to the limit that was given."""

    waiting: int
    due: int
    running: int


async def count_tasks(connection: AsyncConnection, database: Database, *, limit: int) -> TaskCounts:
    """Count tasks by the claim index, looking at no more than `limit` rows of each status."""
    counts = []
    for condition, due in (
        (f"status = {int(JobStatus.WAITING)}", "1 = 1"),
        (f"status = {int(JobStatus.WAITING)}", f"next_trigger_time <= {database.now_ms}"),
        (f"status = {int(JobStatus.RUNNING)}", "1 = 1"),
    ):
        rows = await connection.exec_driver_sql(
            "SELECT COUNT(*) FROM (SELECT next_trigger_time FROM job_info "
            f"WHERE {condition} LIMIT {int(limit)}) AS looked_at WHERE {due}"
        )
        counts.append(int(rows.scalar_one()))
    return TaskCounts(*counts)
