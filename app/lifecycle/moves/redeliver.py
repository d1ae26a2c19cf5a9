"""The move `redeliver`: a callback is due again now, whatever became of it."""

from __future__ import annotations

from typing import Final

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.audit import Deed, job_target, record_deed
from app.lifecycle.callbacks import failed_sql, read_callback
from app.lifecycle.moves.guard import Asked, Changed, NotPossible, Unknown
from app.lifecycle.reads import read_now
from app.lifecycle.states import DeliveryStatus, JobKind, JobStatus, possible_verbs
from app.plumbing.database import NOW_MS, Database

# Retention deletes a job with its callbacks under the lock of the job.
_LOCK_JOB: Final = {
    sqlite: text(
        f"SELECT {NOW_MS[sqlite]} AS now_ms, id, kind, status, queue_id, priority FROM job_info "
        f"WHERE id = :job AND tenant_id = :tenant{lock}"
    )
    for sqlite, lock in ((True, ""), (False, " FOR UPDATE"))
}
_AGAIN: Final = (
    f"UPDATE callback_delivery SET status = {int(DeliveryStatus.PENDING)}, next_try_at = :now, "
    "owed_since = :now, owner_worker_id = NULL, ended_at = NULL"
)
_REDELIVER: Final = text(f"{_AGAIN} WHERE id = :id")
_REDELIVER_FAILED: Final = text(f"{_AGAIN} WHERE job_id = :job AND {failed_sql(':now')}")


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
    one. If this one fails too, the schedule goes on from where its time stands. Safe to repeat.
    """
    found = await read_callback(connection, delivery_id, tenant_id=tenant_id)
    if found is None:
        return None
    await connection.execute(
        _LOCK_JOB[database.is_sqlite], {"job": found["job_id"], "tenant": tenant_id}
    )
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


async def redeliver_failed(
    connection: AsyncConnection, database: Database, asked: Asked
) -> tuple[Changed | NotPossible | Unknown, int]:
    """Make all callbacks of a job that have failed due now; say how many.

    Those that were given up (also by a 410), and those that wait for their next try after one that
    failed; what a worker tries right now, or is due already, is left alone. A job without such ones
    is not changed, and so `NotPossible`. Safe to repeat.
    """
    locked = await connection.execute(
        _LOCK_JOB[database.is_sqlite], {"job": asked.job_id, "tenant": asked.tenant_id}
    )
    job = locked.mappings().one_or_none()
    if job is None:
        return Unknown(), 0
    again = await connection.execute(_REDELIVER_FAILED, {"job": asked.job_id, "now": job["now_ms"]})
    if not again.rowcount:
        status = JobStatus(job["status"])
        return NotPossible(status, possible_verbs(JobKind(job["kind"]), status)), 0
    if asked.deed is not None:
        await record_deed(
            connection,
            asked.deed,
            job_target(asked.job_id),
            tenant_id=asked.tenant_id,
            now_ms=job["now_ms"],
            new={"redelivered": again.rowcount},
        )
    return Changed(job["queue_id"], job["priority"], owed=True), again.rowcount
