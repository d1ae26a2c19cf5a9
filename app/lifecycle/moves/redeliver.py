"""The move `redeliver`: a callback is due again now, whatever became of it."""

from __future__ import annotations

from typing import Final

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.audit import Deed, record_deed
from app.lifecycle.callbacks import read_callback
from app.lifecycle.reads import read_now
from app.lifecycle.states import DeliveryStatus
from app.plumbing.database import Database

# Retention deletes a job with its callbacks under the lock of the job.
_LOCK_JOB: Final = {
    sqlite: text(f"SELECT id FROM job_info WHERE id = :job{lock}")
    for sqlite, lock in ((True, ""), (False, " FOR UPDATE"))
}
_REDELIVER: Final = text(
    f"UPDATE callback_delivery SET status = {int(DeliveryStatus.PENDING)}, next_try_at = :now, "
    "owner_worker_id = NULL, ended_at = NULL WHERE id = :id"
)


async def redeliver(
    connection: AsyncConnection,
    database: Database,
    delivery_id: str,
    *,
    tenant_id: int,
    deed: Deed | None = None,
) -> RowMapping | None:
    """Make a callback of the tenant due now under its old id, and return it as it is then.

    The tries go on being counted, so that the result of an earlier try is not taken for a new
    one. Safe to repeat.
    """
    found = await read_callback(connection, delivery_id, tenant_id=tenant_id)
    if found is None:
        return None
    await connection.execute(_LOCK_JOB[database.is_sqlite], {"job": found["job_id"]})
    now = await read_now(connection, database)
    await connection.execute(_REDELIVER, {"id": found["id"], "now": now})
    if deed is not None:
        await record_deed(
            connection,
            deed,
            f"callback:{delivery_id}",
            tenant_id=tenant_id,
            now_ms=now,
            old={"status": DeliveryStatus(found["status"]).name},
            new={"status": DeliveryStatus.PENDING.name, "jobId": found["job_id"]},
        )
    return await read_callback(connection, delivery_id, tenant_id=tenant_id)
