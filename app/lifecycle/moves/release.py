"""The move that lets a job be claimed again once a run that could not be stopped is really over.

A thread cannot be stopped: after its timeout the job has its new status, but no next attempt is
claimable until the thread has ended, or its worker is proven dead. `stopping_execution` has a
row for each such run; there are never more than the fleet has slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.moves.follow import follow_ends
from app.lifecycle.moves.free_keys import free_keys
from app.lifecycle.moves.limit_keys import Key
from app.plumbing.database import Database


@dataclass(frozen=True, slots=True)
class StoppingRun:
    """A run whose end is stored while its thread goes on."""

    execution_id: str
    job_id: int
    trigger_ts: int
    worker_id: str


@dataclass(frozen=True, slots=True)
class Released:
    """A job that may be claimed again; `due_ms` is None when it does not wait for that.

    One that `stood_behind` was not stopping itself: it waited for the end of another's run.
    """

    queue_id: int
    priority: int
    due_ms: int | None
    stood_behind: bool = False


async def note_stopping(
    connection: AsyncConnection, database: Database, runs: Sequence[dict[str, Any]]
) -> None:
    """Insert a row for each run that goes on after its end."""
    if runs:
        await connection.execute(
            text(
                "INSERT INTO stopping_execution (execution_id, job_id, trigger_ts, worker_id) "
                "VALUES (:execution_id, :job_id, :trigger_ts, :worker_id) "
                + database.keep_first("execution_id")
            ),
            list(runs),
        )


async def read_stopping(connection: AsyncConnection) -> list[StoppingRun]:
    """Return every run that goes on after its end."""
    rows = await connection.execute(
        text("SELECT execution_id, job_id, trigger_ts, worker_id FROM stopping_execution")
    )
    return [StoppingRun(*row) for row in rows]


_STOPPED: Final = text(
    "SELECT execution_id, job_id FROM stopping_execution WHERE execution_id IN :executions"
).bindparams(bindparam("executions", expanding=True))
_RELEASE: Final = text(
    "UPDATE job_info SET stopping_execution_id = NULL, version = version + 1 "
    "WHERE id = :job AND stopping_execution_id = :execution"
)


async def release_stopped(connection: AsyncConnection, executions: Sequence[str]) -> list[Released]:
    """Let the jobs of runs that are really over be claimed again."""
    rows = await connection.execute(_STOPPED, {"executions": list(executions)})
    released = []
    for execution_id, job_id in sorted(rows, key=lambda row: int(row.job_id)):
        done = await connection.execute(_RELEASE, {"job": job_id, "execution": execution_id})
        await connection.execute(
            text("DELETE FROM stopping_execution WHERE execution_id = :execution"),
            {"execution": execution_id},
        )
        if done.rowcount:
            row = (
                await connection.execute(
                    text(
                        "SELECT queue_id, priority, next_trigger_time, parent_id, tenant_id, "
                        "concurrency_key FROM job_info WHERE id = :id"
                    ),
                    {"id": job_id},
                )
            ).one()
            released.append(Released(row.queue_id, row.priority, row.next_trigger_time))
            if row.parent_id is not None:
                # A child that was replaced by a later fire: that one was waiting for this.
                followed = await follow_ends(connection, [job_id])
                released += [Released(*one, stood_behind=True) for one in followed.claimable]
            if row.concurrency_key is not None:
                freed = await free_keys(connection, [Key(row.tenant_id, row.concurrency_key)])
                released += [Released(*one, stood_behind=True) for one in freed]
    return released
