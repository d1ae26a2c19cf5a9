"""Reads of callbacks, by the indexes of their job and of their delivery id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

CALLBACK_COLUMNS: Final = (
    "id, delivery_id, job_id, event_type, url, status, tries, last_status_code, last_error, "
    "owner_worker_id, next_try_at, created_at, ended_at"
)


async def read_callbacks(
    connection: AsyncConnection, job_id: int, *, before: int | None, limit: int
) -> Sequence[RowMapping]:
    """Return up to `limit` callbacks of a job, newest first, older than the row `before`."""
    older = "" if before is None else "AND id < :before "
    rows = await connection.execute(
        text(
            f"SELECT {CALLBACK_COLUMNS} FROM callback_delivery WHERE job_id = :job {older}"
            "ORDER BY id DESC LIMIT :limit"
        ),
        {"job": job_id, "limit": limit} | ({} if before is None else {"before": before}),
    )
    return rows.mappings().all()


async def read_callback(
    connection: AsyncConnection, delivery_id: str, *, tenant_id: int
) -> RowMapping | None:
    """Return one callback of the tenant."""
    rows = await connection.execute(
        text(
            f"SELECT {CALLBACK_COLUMNS} FROM callback_delivery "
            "WHERE delivery_id = :delivery AND tenant_id = :tenant"
        ),
        {"delivery": delivery_id, "tenant": tenant_id},
    )
    return rows.mappings().one_or_none()
