"""What is running, for the holder of the dispatch lock: to start from, and to recover."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.moves.claim import TASK_COLUMNS, Claimed, claimed_row
from app.lifecycle.reads import read_payloads
from app.lifecycle.states import ExecutionStatus, JobKind, JobStatus
from app.plumbing.database import Database


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A RUNNING task and its execution; `accepted` is false while no worker is known to have it."""

    job_id: int
    execution_id: str
    worker_id: str
    trigger_ts: int
    attempt: int
    timeout_ms: int | None
    claimed_at: int
    started_at: int | None
    accepted: bool
    queue_id: int = 0


_RUNNING: Final = (
    "SELECT j.id, j.execution_id, j.owner_worker_id, j.trigger_ts, j.attempt, j.timeout_ms, "
    "l.claimed_at, l.started_at, l.status, j.queue_id FROM job_info AS j {hint} "
    "JOIN job_log AS l ON l.execution_id = j.execution_id {of}"
    f"WHERE j.status = {int(JobStatus.RUNNING)} AND j.kind = {int(JobKind.TASK)}"
)


async def read_running(
    connection: AsyncConnection, database: Database, *, of: Collection[int] | None = None
) -> list[RunningTask]:
    """Return all RUNNING tasks, or those of some partitions.

    There are never more than the fleet has slots.
    """
    hint = "" if database.is_sqlite else "FORCE INDEX (ix_job_info_claim)"
    own = ""
    if of is not None:
        own = (
            "JOIN queue AS q ON q.id = j.queue_id "
            f"AND q.partition_no IN ({', '.join(str(int(one)) for one in sorted(of))}) "
        )
    rows = await connection.execute(text(_RUNNING.format(hint=hint, of=own)))
    return [
        RunningTask(
            job_id=row.id,
            execution_id=row.execution_id,
            worker_id=row.owner_worker_id,
            trigger_ts=row.trigger_ts,
            attempt=row.attempt,
            timeout_ms=row.timeout_ms,
            claimed_at=row.claimed_at,
            started_at=row.started_at,
            accepted=row.status != ExecutionStatus.CLAIMED,
            queue_id=row.queue_id,
        )
        for row in rows
    ]


_FOR_SENDING: Final = text(
    f"SELECT {TASK_COLUMNS} FROM job_info WHERE id IN :ids AND status = {int(JobStatus.RUNNING)}"
).bindparams(bindparam("ids", expanding=True))


async def read_for_sending(
    connection: AsyncConnection, tasks: Sequence[RunningTask]
) -> list[Claimed]:
    """Return the runs to send again, as they are now; those that moved on are left out."""
    if not tasks:
        return []
    known = {task.job_id: task for task in tasks}
    rows = await connection.execute(_FOR_SENDING, {"ids": sorted(known)})
    current = [
        dict(row) for row in rows.mappings() if row["execution_id"] == known[row["id"]].execution_id
    ]
    long = await read_payloads(
        connection, [(row["id"], "params") for row in current if row["params_in_payload"]]
    )
    return [claimed_row(row, long, known[row["id"]].claimed_at) for row in current]


_WANTED: Final = text(
    f"SELECT id, execution_id FROM job_info WHERE id IN :ids AND status = {int(JobStatus.RUNNING)}"
).bindparams(bindparam("ids", expanding=True))


async def read_unwanted(connection: AsyncConnection, held: Sequence[tuple[int, str]]) -> list[str]:
    """Return those of the held (job id, execution id) that are not the job's current run."""
    if not held:
        return []
    rows = await connection.execute(_WANTED, {"ids": sorted({job_id for job_id, _ in held})})
    current = {tuple(row) for row in rows}
    return [execution_id for job_id, execution_id in held if (job_id, execution_id) not in current]
