"""The callback that the end of a job owes: its row is written in the transaction of that end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import uuid_utils
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.bulk import ColumnType, insert_from_rows, rows_json
from app.lifecycle.callback_body import EVENT_TYPES, CallbackJob, render_callback
from app.lifecycle.states import DeliveryStatus, JobStatus

DELIVERY_LEASE_MS: Final = 60_000
"""How long a worker has for one try of a callback; its heartbeats extend it."""

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
}
_OWE: Final = {
    sqlite: insert_from_rows(
        sqlite=sqlite,
        table="callback_delivery",
        columns=_COLUMNS,
        values={name: f"v.v_{name}" for name in _COLUMNS},
    )
    for sqlite in (True, False)
}


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
    now: int,
) -> dict[str, Any] | None:
    """Return the callback of a job that ends now, or None if it asked for none.

    With an `owner` the first try is that worker's, which has it at once. Times are epoch ms.
    """
    if job["callback_url"] is None:
        return None
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
            result=result,
            error_code=error_code,
            error_message=error_message,
        )
    )
    return {
        "delivery_id": str(uuid_utils.uuid7()),
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
    }


async def insert_callbacks(connection: AsyncConnection, rows: Sequence[dict[str, Any]]) -> None:
    """Insert callbacks that are owed."""
    if rows:
        sqlite = connection.dialect.name == "sqlite"
        await connection.execute(_OWE[sqlite], {"rows": rows_json(_COLUMNS, rows)})
