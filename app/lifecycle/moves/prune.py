"""The end of retention: finished jobs leave, by primary key, in small ordered batches.

They are looked for by plain reads, without locks, and lock nothing but their own rows when they
leave: claims and submissions never wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.dependents import delete_dependents, forced, in_chunks, with_keys
from app.lifecycle.moves.submit import forget_expiries
from app.lifecycle.states import TERMINAL_JOBS, DeliveryStatus, JobKind, JobStatus, in_list
from app.plumbing.database import Database

MOST_LOG_BYTES: Final = 32 * 1024 * 1024
"""Of log lines that leave in one transaction; one job may have more."""

_COLUMNS: Final = "id, tenant_id, root_id, kind, status, version, revision, finished_at, expires_at"
_BOTH: Final = (True, False)


class Finished(NamedTuple):
    """A job as it was when it was found; it leaves only if it is still the same."""

    id: int
    tenant_id: int
    root_id: int | None
    kind: int
    status: int
    version: int
    revision: int
    finished_at: int
    expires_at: int | None


class Walked(NamedTuple):
    """Rows in the order in which they finished, and behind which to go on; None at the end."""

    rows: Sequence[Finished]
    onward: tuple[int, int] | None


def _walk(condition: str, *, sqlite: bool) -> str:
    hint = forced("ix_job_info_finished", sqlite=sqlite)
    return (
        f"SELECT {_COLUMNS} FROM job_info {hint} WHERE tenant_id = :tenant AND {condition} "
        "ORDER BY finished_at, id LIMIT :limit"
    )


WALKS: Final = {
    sqlite: (
        _walk("finished_at = :at AND id > :after", sqlite=sqlite),
        _walk("finished_at > :at AND finished_at < :before", sqlite=sqlite),
    )
    for sqlite in _BOTH
}
"""The rest of what finished in one millisecond, and what finished later."""
SAME_AGAIN: Final = {
    sqlite: f"SELECT {_COLUMNS} FROM job_info {forced('PRIMARY', sqlite=sqlite)} WHERE id IN :keys"
    for sqlite in _BOTH
}
# A retry or a redelivery locks the job first too: what it holds is left for the next pass.
LOCK: Final = {
    sqlite: f"{SAME_AGAIN[sqlite]} ORDER BY id{'' if sqlite else ' FOR UPDATE SKIP LOCKED'}"
    for sqlite in _BOTH
}
# A thread that goes on after its end still holds its keys, and what stands behind it waits.
LIVE: Final = {
    sqlite: f"SELECT id FROM job_info {forced('PRIMARY', sqlite=sqlite)} WHERE id IN :keys "
    f"AND (status NOT IN ({in_list(TERMINAL_JOBS)}) OR stopping_execution_id IS NOT NULL)"
    for sqlite in _BOTH
}
OWED: Final = {
    sqlite: "SELECT DISTINCT job_id FROM callback_delivery "
    f"{forced('ix_callback_delivery_job_id', sqlite=sqlite)} "
    f"WHERE job_id IN :keys AND status = {int(DeliveryStatus.PENDING)}"
    for sqlite in _BOTH
}
ANY_CHILD: Final = "SELECT id FROM job_info WHERE parent_id = :parent LIMIT 1"
EXECUTIONS: Final = {
    sqlite: f"SELECT id, job_id FROM job_log {forced('ix_job_log_job_id_id', sqlite=sqlite)} "
    "WHERE job_id IN :keys"
    for sqlite in _BOTH
}
LOG_SIZES: Final = {
    sqlite: "SELECT log_id, head_bytes + tail_bytes AS size FROM execution_log "
    f"{forced('PRIMARY', sqlite=sqlite)} WHERE log_id IN :keys"
    for sqlite in _BOTH
}
DELETE_JOBS: Final = {
    True: f"DELETE FROM job_info WHERE id IN :keys AND status IN ({in_list(TERMINAL_JOBS)})",
    False: "DELETE d FROM job_info AS d FORCE INDEX (PRIMARY) "
    f"WHERE d.id IN :keys AND d.status IN ({in_list(TERMINAL_JOBS)})",
}


async def find_finished(
    connection: AsyncConnection,
    database: Database,
    *,
    tenant_id: int,
    after: tuple[int, int],
    before_ms: int,
    limit: int,
) -> Walked:
    """Return up to `limit` of a tenant's jobs behind `after` that finished before `before_ms`."""
    at, last = after
    rows: list[Finished] = []
    for statement in WALKS[database.is_sqlite]:
        if len(rows) < limit:
            found = await connection.execute(
                text(statement),
                {
                    "tenant": tenant_id,
                    "at": at,
                    **({"after": last} if ":after" in statement else {"before": before_ms}),
                    "limit": limit - len(rows),
                },
            )
            rows += [Finished(*row) for row in found]
    onward = (rows[-1].finished_at, rows[-1].id) if len(rows) == limit else None
    return Walked(rows, onward)


async def find_again(
    connection: AsyncConnection, database: Database, job_ids: Iterable[int]
) -> list[Finished]:
    """Return those of the jobs that are terminal, as they are now."""
    rows = await in_chunks(connection, SAME_AGAIN[database.is_sqlite], sorted(job_ids))
    found = [Finished(**row) for row in rows]
    return [job for job in found if JobStatus(job.status) in TERMINAL_JOBS]


async def fit_together(
    connection: AsyncConnection, database: Database, jobs: Sequence[Finished]
) -> list[Finished]:
    """Return the first of the jobs whose log lines are not too many for one transaction.

    A job without lines costs nothing more than to be looked up.
    """
    sqlite = database.is_sqlite
    executions = await in_chunks(connection, EXECUTIONS[sqlite], [job.id for job in jobs])
    job_of = {row["id"]: row["job_id"] for row in executions}
    sizes: dict[int, int] = {}
    for row in await in_chunks(connection, LOG_SIZES[sqlite], sorted(job_of)):
        job_id = job_of[row["log_id"]]
        sizes[job_id] = sizes.get(job_id, 0) + row["size"]
    fit: list[Finished] = []
    total = 0
    for job in jobs:
        total += sizes.get(job.id, 0)
        if fit and total > MOST_LOG_BYTES:
            break
        fit.append(job)
    return fit


async def drop_jobs(
    connection: AsyncConnection, database: Database, jobs: Sequence[Finished]
) -> list[int]:
    """Delete those of the jobs that are as they were found, with all that belongs to them.

    A job stays while a callback of it is owed, while a run or the root of it goes on, while it
    has children, or while somebody else holds it. Returns the ids of those that left.
    """
    free = await _free(connection, database, jobs, LOCK[database.is_sqlite])
    tasks = [job for job in free if job.kind == JobKind.TASK]
    left = [job.id for job in tasks]
    await _delete(connection, database, tasks)
    # What has children is younger than none of them: the innermost group has the highest id.
    for job in sorted(free, key=lambda one: -one.id):
        if job.kind == JobKind.TASK:
            continue
        if not await _has_children(connection, job):
            await _delete(connection, database, [job])
            left.append(job.id)
    return sorted(left)


async def may_leave(
    connection: AsyncConnection, database: Database, jobs: Sequence[Finished]
) -> list[Finished]:
    """Return those of the jobs that `drop_jobs` would delete, as it looks now; lock nothing."""
    free = await _free(connection, database, jobs, SAME_AGAIN[database.is_sqlite])
    return [
        job for job in free if job.kind == JobKind.TASK or not await _has_children(connection, job)
    ]


async def _has_children(connection: AsyncConnection, job: Finished) -> bool:
    found = await connection.execute(text(ANY_CHILD), {"parent": job.id})
    return found.first() is not None


async def _free(
    connection: AsyncConnection, database: Database, jobs: Sequence[Finished], read_again: str
) -> list[Finished]:
    """Read the jobs again, and return those that nothing keeps, in order."""
    sqlite = database.is_sqlite
    found = {job.id: job for job in jobs}
    rows = await in_chunks(connection, read_again, sorted(found))
    same = [job for row in rows if (job := Finished(**row)) == found[job.id]]
    own = [job.id for job in same]
    with_roots = sorted({*own, *(job.root_id for job in same if job.root_id is not None)})
    live = {row["id"] for row in await in_chunks(connection, LIVE[sqlite], with_roots)}
    owed = {row["job_id"] for row in await in_chunks(connection, OWED[sqlite], own)}
    kept = live | owed
    return sorted(job for job in same if job.root_id not in live and job.id not in kept)


async def _delete(
    connection: AsyncConnection, database: Database, jobs: Sequence[Finished]
) -> None:
    if not jobs:
        return
    ids = [job.id for job in jobs]
    await with_keys(connection, DELETE_JOBS[database.is_sqlite], ids)
    schedules = any(job.kind == JobKind.SCHEDULE for job in jobs)
    await delete_dependents(connection, database, ids, schedules=schedules)
    await forget_expiries(
        connection, [(job.expires_at, job.id) for job in jobs if job.expires_at is not None]
    )


class PrunedSkips(NamedTuple):
    """How far one batch of the ledger got: where to go on, how many left, whether more may."""

    cursor: int
    deleted: int
    more: bool


WALK_SKIPS: Final = (
    "SELECT id, from_time, to_time FROM schedule_skip WHERE id > :cursor ORDER BY id LIMIT :limit"
)
_DELETE_SKIPS: Final = text(
    "DELETE FROM schedule_skip WHERE id IN :ids AND to_time < :before"
).bindparams(bindparam("ids", expanding=True))


async def prune_skips(
    connection: AsyncConnection, *, cursor: int, before_ms: int, limit: int
) -> PrunedSkips:
    """Delete those of the next `limit` rows of the schedules' ledger that lie before `before_ms`.

    Their ids grow with the time they were written, so the walk ends where all are newer.
    """
    rows = (await connection.execute(text(WALK_SKIPS), {"cursor": cursor, "limit": limit})).all()
    old = [row.id for row in rows if row.to_time < before_ms]
    if old:
        await connection.execute(_DELETE_SKIPS, {"ids": old, "before": before_ms})
    return PrunedSkips(
        cursor=rows[-1].id if rows else cursor,
        deleted=len(old),
        more=len(rows) == limit and any(row.from_time < before_ms for row in rows),
    )
