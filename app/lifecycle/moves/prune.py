"""The end of retention: finished jobs leave, by primary key, in small ordered batches."""

from __future__ import annotations

from typing import Final, NamedTuple

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.moves.submit import forget_expiries
from app.lifecycle.states import TERMINAL_JOBS, DeliveryStatus, JobKind, in_list
from app.plumbing.database import Database


class Pruned(NamedTuple):
    """How far one batch got: where to go on, how many left, and whether newer jobs remain."""

    cursor: int
    deleted: int
    more: bool


_WALK: Final = text(
    "SELECT id, root_id, kind, status, finished_at, created_at, expires_at FROM job_info "
    "WHERE id > :cursor ORDER BY id LIMIT :limit"
)
# A retry or a redelivery locks the job first too: what it holds is left for the next pass.
_LOCK: Final = {
    sqlite: text(
        f"SELECT id FROM job_info {hint}WHERE id IN :ids "
        f"AND status IN ({in_list(TERMINAL_JOBS)}) AND finished_at < :before ORDER BY id{lock}"
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite, hint, lock in (
        (True, "", ""),
        (False, "FORCE INDEX (PRIMARY) ", " FOR UPDATE SKIP LOCKED"),
    )
}
_LIVE_ROOTS: Final = text(
    f"SELECT id FROM job_info WHERE id IN :ids AND status NOT IN ({in_list(TERMINAL_JOBS)})"
).bindparams(bindparam("ids", expanding=True))
_OWED: Final = text(
    "SELECT DISTINCT job_id FROM callback_delivery "
    f"WHERE job_id IN :ids AND +status = {int(DeliveryStatus.PENDING)}"
).bindparams(bindparam("ids", expanding=True))
_DELETES: Final = tuple(
    text(f"DELETE FROM {table} WHERE {column} IN :ids").bindparams(bindparam("ids", expanding=True))
    for table, column in (
        ("callback_delivery", "job_id"),
        ("callback_try", "job_id"),
        ("job_log", "job_id"),
        ("job_payload", "job_id"),
        ("job_label", "job_id"),
    )
)
_DELETES_OF_SCHEDULES: Final = tuple(
    text(f"DELETE FROM {table} WHERE schedule_id IN :ids").bindparams(
        bindparam("ids", expanding=True)
    )
    for table in ("schedule_skip", "schedule_live", "schedule_backfill")
)
_EXECUTIONS: Final = text("SELECT id, job_id FROM job_log WHERE job_id IN :ids").bindparams(
    bindparam("ids", expanding=True)
)
_LOG_SIZES: Final = text(
    "SELECT log_id, head_bytes + tail_bytes AS size FROM execution_log WHERE log_id IN :ids"
).bindparams(bindparam("ids", expanding=True))
_DELETE_LOGS: Final = tuple(
    text(f"DELETE FROM {table} WHERE log_id IN :ids").bindparams(bindparam("ids", expanding=True))
    for table in ("log_chunk", "execution_log")
)
MOST_LOG_BYTES: Final = 32 * 1024 * 1024
"""Of log lines that leave in one transaction; one job may have more."""
IDS_AT_ONCE: Final = 1000
_DELETE_JOBS: Final = text(
    f"DELETE FROM job_info WHERE id IN :ids AND status IN ({in_list(TERMINAL_JOBS)})"
).bindparams(bindparam("ids", expanding=True))


async def prune_batch(
    connection: AsyncConnection, database: Database, *, cursor: int, before_ms: int, limit: int
) -> Pruned:
    """Delete those of the next `limit` jobs that ended before `before_ms`.

    A job stays while a callback of it is owed or its root is not terminal. Ids grow with the
    time of creation, so the walk ends at the first job created after `before_ms`.
    """
    rows = (await connection.execute(_WALK, {"cursor": cursor, "limit": limit})).all()
    old = [row for row in rows if row.created_at < before_ms]
    ended = {
        row.id: row.root_id
        for row in old
        if row.status in TERMINAL_JOBS
        and row.finished_at is not None
        and row.finished_at < before_ms
    }
    if ended:
        locked = await connection.execute(
            _LOCK[database.is_sqlite], {"ids": sorted(ended), "before": before_ms}
        )
        free = {row.id for row in locked}
        ended = {job_id: root for job_id, root in ended.items() if job_id in free}
    if ended:
        roots = sorted({root for root in ended.values() if root is not None})
        live = (
            {row[0] for row in await connection.execute(_LIVE_ROOTS, {"ids": roots})}
            if roots
            else set()
        )
        owed = {row[0] for row in await connection.execute(_OWED, {"ids": sorted(ended)})}
        leaving = sorted(
            job_id for job_id, root in ended.items() if root not in live and job_id not in owed
        )
    else:
        leaving = []
    fit = await _delete_logs(connection, leaving) if leaving else []
    if fit:
        for statement in (_DELETE_JOBS, *_DELETES):
            await connection.execute(statement, {"ids": fit})
        expiry_of = {row.id: row.expires_at for row in rows if row.expires_at is not None}
        await forget_expiries(
            connection, [(expiry_of[job_id], job_id) for job_id in fit if job_id in expiry_of]
        )
        kinds = {row.id: row.kind for row in rows}
        schedules = [job_id for job_id in fit if kinds[job_id] == JobKind.SCHEDULE]
        for statement in _DELETES_OF_SCHEDULES if schedules else ():
            await connection.execute(statement, {"ids": schedules})
    if len(fit) < len(leaving):
        return Pruned(cursor=fit[-1], deleted=len(fit), more=True)
    return Pruned(
        cursor=rows[-1].id if rows else cursor,
        deleted=len(fit),
        more=len(rows) == limit and len(old) == len(rows),
    )


_WALK_SKIPS: Final = text(
    "SELECT id, from_time, to_time FROM schedule_skip WHERE id > :cursor ORDER BY id LIMIT :limit"
)
_DELETE_SKIPS: Final = text(
    "DELETE FROM schedule_skip WHERE id IN :ids AND to_time < :before"
).bindparams(bindparam("ids", expanding=True))


async def prune_skips(
    connection: AsyncConnection, *, cursor: int, before_ms: int, limit: int
) -> Pruned:
    """Delete those of the next `limit` rows of the schedules' ledger that lie before `before_ms`.

    Their ids grow with the time they were written, so the walk ends where all are newer.
    """
    rows = (await connection.execute(_WALK_SKIPS, {"cursor": cursor, "limit": limit})).all()
    old = [row.id for row in rows if row.to_time < before_ms]
    if old:
        await connection.execute(_DELETE_SKIPS, {"ids": old, "before": before_ms})
    return Pruned(
        cursor=rows[-1].id if rows else cursor,
        deleted=len(old),
        more=len(rows) == limit and any(row.from_time < before_ms for row in rows),
    )


async def _delete_logs(connection: AsyncConnection, leaving: list[int]) -> list[int]:
    """Delete the lines of the first of these jobs, as many as one transaction may, and name them.

    A job without lines costs nothing more than to be looked up.
    """
    job_of = {row.id: row.job_id for row in await connection.execute(_EXECUTIONS, {"ids": leaving})}
    sizes: dict[int, int] = {}
    logs: dict[int, list[int]] = {}
    log_ids = sorted(job_of)
    for start in range(0, len(log_ids), IDS_AT_ONCE):
        chunk = log_ids[start : start + IDS_AT_ONCE]
        for row in await connection.execute(_LOG_SIZES, {"ids": chunk}):
            job_id = job_of[row.log_id]
            sizes[job_id] = sizes.get(job_id, 0) + row.size
            logs.setdefault(job_id, []).append(row.log_id)
    fit: list[int] = []
    total = 0
    for job_id in leaving:
        total += sizes.get(job_id, 0)
        if fit and total > MOST_LOG_BYTES:
            break
        fit.append(job_id)
    gone = sorted(log_id for job_id in fit for log_id in logs.get(job_id, ()))
    for start in range(0, len(gone), IDS_AT_ONCE):
        for statement in _DELETE_LOGS:
            await connection.execute(statement, {"ids": gone[start : start + IDS_AT_ONCE]})
    return fit
