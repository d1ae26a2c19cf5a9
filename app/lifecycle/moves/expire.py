"""The move `expire`: a job that no attempt was begun of by its `expiresAt` ends as FAILED.

`job_expiry` says when to look; the row of the job decides. The claim has the same guard, so a
job that has expired is not begun, however late this move comes. A run that had begun and was
given back uncounted has met the deadline: its settlement takes the deadline away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import RowMapping, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.moves.follow import NOTHING, Followed, follow_ends
from app.lifecycle.moves.free_keys import free_keys
from app.lifecycle.moves.limit_keys import concurrency_key
from app.lifecycle.moves.owe import callback_row, insert_callbacks
from app.lifecycle.moves.submit import insert_expiries
from app.lifecycle.states import TERMINAL_JOBS, JobKind, JobStatus, in_list, sources
from app.plumbing.database import NOW_MS, Database

CODE: Final = "expired"
MESSAGE: Final = "No attempt had begun by expiresAt."
LOOK_AGAIN_MS: Final = 5000
"""A first attempt that is under way may still be given back before it began: look again then."""

_EXPIRABLE: Final = in_list(sources("expire", JobKind.TASK))
_LOOKS: Final = {
    sqlite: text(
        f"SELECT {NOW_MS[sqlite]} AS now_ms, look_at, job_id FROM job_expiry "
        f"WHERE look_at <= {NOW_MS[sqlite]} ORDER BY look_at, job_id LIMIT :limit"
    )
    for sqlite in (True, False)
}
_LOCK: Final = {
    sqlite: text(
        "SELECT id, tenant_id, client_request_id, parent_id, kind, job_name, status, attempt, "
        "execution_id, trigger_ts, next_trigger_time, callback_url, callback_events, "
        "callback_headers, version, expires_at, concurrency_key, nominal_time "
        f"FROM job_info {hint}WHERE id IN :ids ORDER BY id{lock}"
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite, hint, lock in (
        (True, "", ""),
        (False, "FORCE INDEX (PRIMARY) ", " FOR UPDATE"),
    )
}
_EXPIRE: Final = {
    sqlite: text(
        f"UPDATE job_info {hint}SET status = {int(JobStatus.FAILED)}, version = version + 1, "
        "error_code = :code, error_message = :message, finished_at = :now, updated_at = :now "
        f"WHERE id IN :ids AND status IN ({_EXPIRABLE}) AND attempt = 0 AND expires_at <= :now"
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite, hint in ((True, ""), (False, "FORCE INDEX (PRIMARY) "))
}
_LOOKED: Final = text("DELETE FROM job_expiry WHERE look_at = :look_at AND job_id = :job_id")


@dataclass(frozen=True, slots=True)
class Expired:
    """What one look found: the jobs that ended, whether one owes a callback, and if more is due."""

    job_ids: list[int]
    owed: bool
    more: bool
    followed: Followed = NOTHING


async def is_expiry_due(connection: AsyncConnection, database: Database) -> bool:
    """Tell, without a lock, whether `expire_jobs` would find anything to look at."""
    found = await connection.execute(_LOOKS[database.is_sqlite], {"limit": 1})
    return found.first() is not None


async def expire_jobs(connection: AsyncConnection, database: Database, *, limit: int) -> Expired:
    """End up to `limit` jobs whose time has come; safe to repeat and to do from two processes."""
    found = await connection.execute(_LOOKS[database.is_sqlite], {"limit": limit})
    looks = found.mappings().all()
    if not looks:
        return Expired([], owed=False, more=False)
    now = int(looks[0]["now_ms"])
    rows = await connection.execute(
        _LOCK[database.is_sqlite], {"ids": sorted({look["job_id"] for look in looks})}
    )
    jobs = rows.mappings().all()
    over = [job for job in jobs if _has_expired(job, now)]
    if over:
        await _end(connection, database, over, now)
    await insert_expiries(
        connection,
        database,
        [(again, job["id"]) for job in jobs if (again := _next_look(job, now)) is not None],
    )
    await connection.execute(
        _LOOKED, [{"look_at": look["look_at"], "job_id": look["job_id"]} for look in looks]
    )
    children = [job["id"] for job in over if job["parent_id"] is not None]
    followed = await follow_ends(connection, children)
    keys = {key for job in over if (key := concurrency_key(job)) is not None}
    if keys:
        followed += Followed(tuple(await free_keys(connection, keys)))
    return Expired(
        [job["id"] for job in over],
        owed=any(job["callback_url"] is not None for job in over),
        more=len(looks) == limit,
        followed=followed,
    )


def _has_expired(job: RowMapping, now: int) -> bool:
    return (
        JobStatus(job["status"]) in sources("expire", JobKind.TASK)
        and job["attempt"] == 0
        and job["expires_at"] is not None
        and job["expires_at"] <= now
    )


def _next_look(job: RowMapping, now: int) -> int | None:
    """Return when the job could expire after all, or None: it ended, or has begun."""
    if job["expires_at"] is None or job["status"] in TERMINAL_JOBS:
        return None
    if job["expires_at"] > now:
        return int(job["expires_at"])
    first_is_under_way = job["status"] == JobStatus.RUNNING and job["attempt"] <= 1
    return now + LOOK_AGAIN_MS if first_is_under_way else None


async def _end(
    connection: AsyncConnection, database: Database, jobs: Sequence[RowMapping], now: int
) -> None:
    ended = await connection.execute(
        _EXPIRE[database.is_sqlite],
        {"ids": [job["id"] for job in jobs], "code": CODE, "message": MESSAGE, "now": now},
    )
    if ended.rowcount != len(jobs):
        raise RuntimeError("a locked job changed while it expired")
    callbacks = [
        callback_row(
            job,
            JobStatus.FAILED,
            execution_id=job["execution_id"],
            trigger_ts=job["trigger_ts"] or job["next_trigger_time"] or now,
            started_at=None,
            finished_at=now,
            error_code=CODE,
            error_message=MESSAGE,
            now=now,
        )
        for job in jobs
    ]
    await insert_callbacks(connection, [row for row in callbacks if row is not None])
