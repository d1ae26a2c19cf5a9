"""The callback that a job owes: its row is written in the transaction of what it tells."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final

import uuid_utils
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.bulk import ColumnType, RowsInsert
from app.lifecycle.callback_body import EVENT_TYPES, CallbackJob, render_callback, wants
from app.lifecycle.states import DeliveryStatus, JobStatus
from oncue.addresses import callback_host
from oncue.protocol import DELIVERY_LEASE_SECONDS

DELIVERY_LEASE_MS: Final = DELIVERY_LEASE_SECONDS * 1000
"""How long a worker has for one try of a callback; its heartbeats extend it."""
STARTS: Final = uuid.UUID("5a0d7b9e-3c55-4a53-9a0e-6f6e637565d1")
"""The namespace of the ids of `job.started`: one for each execution, however often it is owed."""

_COLUMNS: Final[dict[str, ColumnType]] = {
    "delivery_id": "TEXT",
    "tenant_id": "BIGINT",
    "job_id": "BIGINT",
    "execution_id": "TEXT",
    "event_type": "TEXT",
    "url": "TEXT",
    "body": "TEXT",
    "status": "BIGINT",
    "tries": "BIGINT",
    "owner_worker_id": "TEXT",
    "next_try_at": "BIGINT",
    "created_at": "BIGINT",
    "host": "TEXT",
    "headers": "TEXT",
}


def _owe(keep_first: str) -> RowsInsert:
    return RowsInsert(
        table="callback_delivery",
        columns=_COLUMNS,
        values=lambda _sqlite: (
            {name: f"v.v_{name}" for name in _COLUMNS} | {"owed_since": "v.v_created_at"}
        ),
        keep_first=keep_first,
    )


_OWE: Final = _owe("")
_OWE_ONCE: Final = _owe("created_at")


def callback_row(
    job: RowMapping,
    status: JobStatus,
    *,
    execution_id: str | None,
    trigger_ts: int,
    started_at: int | None,
    finished_at: int,
    result: str | None = None,
    error_code: str | None = None,
    error_message: str | None = None,
    owner: str | None = None,
    next_trigger_at: int | None = None,
    now: int,
) -> dict[str, Any] | None:
    """Return the callback of a job whose move to `status` is made now, None if it wants none.

    `job` is its row before the move. With an `owner` the first try is that worker's, which has
    it at once. Times are epoch ms.
    """
    if job["callback_url"] is None or not wants(job["callback_events"], status):
        return None
    started = status is JobStatus.RUNNING
    body = render_callback(
        CallbackJob(
            job_id=job["id"],
            client_request_id=job["client_request_id"],
            job_name=job["job_name"],
            execution_id=execution_id,
            status=status,
            attempt=job["attempt"],
            trigger_ts=trigger_ts,
            started_at=started_at,
            finished_at=finished_at,
            # The move adds one; what has started was moved by its claim.
            sequence=job["version"] + (not started),
            result=result,
            error_code=error_code,
            error_message=error_message,
            next_trigger_at=next_trigger_at,
            nominal_time=job["nominal_time"],
        )
    )
    delivery_id = uuid.uuid5(STARTS, str(execution_id)) if started else uuid_utils.uuid7()
    return {
        "delivery_id": str(delivery_id),
        "tenant_id": job["tenant_id"],
        "job_id": job["id"],
        "execution_id": execution_id,
        "event_type": EVENT_TYPES[status],
        "url": job["callback_url"],
        "body": body,
        "status": int(DeliveryStatus.PENDING),
        "tries": 0 if owner is None else 1,
        "owner_worker_id": owner,
        "next_try_at": now if owner is None else now + DELIVERY_LEASE_MS,
        "created_at": now,
        "host": callback_host(job["callback_url"]),
        "headers": job["callback_headers"],
    }


def started_row(
    job: RowMapping, *, execution_id: str, trigger_ts: int, started_at: int | None, now: int
) -> dict[str, Any] | None:
    """Return the callback of an attempt that has begun, None if the job wants none.

    Its id is the execution's: it may be owed again, and is then the same.
    """
    return callback_row(
        job,
        JobStatus.RUNNING,
        execution_id=execution_id,
        trigger_ts=trigger_ts,
        started_at=started_at,
        finished_at=now if started_at is None else started_at,
        now=now,
    )


async def insert_callbacks(connection: AsyncConnection, rows: Sequence[dict[str, Any]]) -> None:
    """Insert callbacks that are owed."""
    if rows:
        await _OWE.run(connection, rows)


async def insert_starts(connection: AsyncConnection, rows: Sequence[dict[str, Any]]) -> None:
    """Insert callbacks of begun attempts; one that is there already stays as it is."""
    if rows:
        await _OWE_ONCE.run(connection, rows)
