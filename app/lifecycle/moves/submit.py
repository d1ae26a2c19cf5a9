"""The move `submit`: new jobs enter the database, repeated ones are recognised, in one commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import RowMapping, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.reads import JOB_COLUMNS, read_now
from app.lifecycle.states import JobKind, JobStatus
from app.lifecycle.tables import INLINE_BYTES
from app.plumbing.database import Database

PARAMS_SLOT: Final = "params"


@dataclass(frozen=True, slots=True)
class NewJob:
    """A one-off or delayed task to insert. `due_ms` is absolute, `delay_ms` counts from the commit.

    `submit_token` is drawn anew for each request: it tells a row that this request inserted,
    perhaps by a commit whose answer was lost, from one that was there before.
    """

    tenant_id: int
    client_request_id: str
    request_digest: str
    submit_token: str
    job_name: str
    job_handler: str
    queue_id: int
    priority: int
    max_retry: int
    retry_interval_ms: int
    retry_backoff: str
    due_ms: int | None = None
    delay_ms: int = 0
    timeout_ms: int | None = None
    callback_url: str | None = None
    params: str | None = None
    labels: dict[str, str] = field(default_factory=dict)


_COLUMNS: Final = (
    "tenant_id",
    "client_request_id",
    "request_digest",
    "submit_token",
    "kind",
    "job_name",
    "job_handler",
    "queue_id",
    "status",
    "priority",
    "next_trigger_time",
    "max_retry",
    "retry_interval_ms",
    "retry_backoff",
    "timeout_ms",
    "callback_url",
    "params",
    "params_in_payload",
    "created_at",
    "updated_at",
)
_INSERT: Final = (
    f"INSERT INTO job_info ({', '.join(_COLUMNS)}) "
    f"VALUES ({', '.join(':' + name for name in _COLUMNS)}) "
)
_SELECT_BY_KEY: Final = text(
    f"SELECT {JOB_COLUMNS} FROM job_info "
    "WHERE tenant_id = :tenant AND client_request_id IN :request_ids"
).bindparams(bindparam("request_ids", expanding=True))


async def insert_jobs(
    connection: AsyncConnection, database: Database, jobs: Sequence[NewJob]
) -> dict[tuple[int, str], RowMapping]:
    """Insert the jobs that are new and return the row of each (tenant, clientRequestId)."""
    now = await read_now(connection, database)
    in_key_order = sorted(jobs, key=lambda job: (job.tenant_id, job.client_request_id))
    await connection.execute(
        # No read of the row count: the SELECT by key tells what happened.
        text(_INSERT + database.keep_first("id")),
        [_job_row(job, now) for job in in_key_order],
    )
    found = await find_by_request(
        connection, [(job.tenant_id, job.client_request_id) for job in in_key_order]
    )
    own = [
        (found[key]["id"], job)
        for job in in_key_order
        if found[key := (job.tenant_id, job.client_request_id)]["submit_token"] == job.submit_token
    ]
    await _insert_extras(connection, database, own)
    return found


async def find_by_request(
    connection: AsyncConnection, keys: Sequence[tuple[int, str]]
) -> dict[tuple[int, str], RowMapping]:
    """Return the job of each (tenant, clientRequestId) that exists."""
    found: dict[tuple[int, str], RowMapping] = {}
    for tenant in {tenant for tenant, _ in keys}:
        request_ids = sorted({request_id for owner, request_id in keys if owner == tenant})
        rows = await connection.execute(
            _SELECT_BY_KEY, {"tenant": tenant, "request_ids": request_ids}
        )
        found.update({(tenant, row["client_request_id"]): row for row in rows.mappings()})
    return found


def _job_row(job: NewJob, now: int) -> dict[str, Any]:
    inline = job.params is None or len(job.params.encode()) <= INLINE_BYTES
    return {
        "tenant_id": job.tenant_id,
        "client_request_id": job.client_request_id,
        "request_digest": job.request_digest,
        "submit_token": job.submit_token,
        "kind": int(JobKind.TASK),
        "job_name": job.job_name,
        "job_handler": job.job_handler,
        "queue_id": job.queue_id,
        "status": int(JobStatus.WAITING),
        "priority": job.priority,
        "next_trigger_time": now + job.delay_ms if job.due_ms is None else job.due_ms,
        "max_retry": job.max_retry,
        "retry_interval_ms": job.retry_interval_ms,
        "retry_backoff": job.retry_backoff,
        "timeout_ms": job.timeout_ms,
        "callback_url": job.callback_url,
        "params": job.params if inline else None,
        "params_in_payload": not inline,
        "created_at": now,
        "updated_at": now,
    }


async def _insert_extras(
    connection: AsyncConnection, database: Database, own: Sequence[tuple[int, NewJob]]
) -> None:
    """Insert long params and labels; a repeat after an unknown commit finds them there."""
    payloads = [
        {"job_id": job_id, "slot": PARAMS_SLOT, "body": job.params}
        for job_id, job in own
        if job.params is not None and len(job.params.encode()) > INLINE_BYTES
    ]
    await insert_payloads(connection, database, payloads)
    labels = [
        {"job_id": job_id, "name": name, "value": value}
        for job_id, job in own
        for name, value in sorted(job.labels.items())
    ]
    if labels:
        await connection.execute(
            text(
                "INSERT INTO job_label (job_id, name, value) VALUES (:job_id, :name, :value) "
                + database.keep_first("name")
            ),
            labels,
        )


async def insert_payloads(
    connection: AsyncConnection, database: Database, payloads: Sequence[dict[str, Any]]
) -> None:
    """Insert bodies (`job_id`, `slot`, `body`) that are too long for their row, once."""
    if payloads:
        await connection.execute(
            text(
                "INSERT INTO job_payload (job_id, slot, body) VALUES (:job_id, :slot, :body) "
                + database.keep_first("slot")
            ),
            list(payloads),
        )
