"""The moves between claim and end: `reassign` after a refusal, and the note that a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.bulk import ColumnType, rows_json, update_from_rows
from app.lifecycle.moves.claim import TASK_COLUMNS, Claimed, claimed_row, insert_executions
from app.lifecycle.reads import read_now, read_payloads
from app.lifecycle.retry import MAX_RETURNS
from app.lifecycle.states import OPEN_EXECUTIONS, ExecutionStatus, JobKind, in_list, sources
from app.plumbing.database import Database


class Reassignment(NamedTuple):
    """A refused execution and the worker and execution id that replace it."""

    job_id: int
    refused_execution_id: str
    worker_id: str
    execution_id: str
    reason: str
    counts: bool = True
    """Whether it counts as given back: a job may be that only so often."""


_RUNNING: Final = in_list(sources("reassign", JobKind.TASK))
_MOVED: Final[dict[str, ColumnType]] = {
    "id": "BIGINT",
    "refused": "TEXT",
    "worker": "TEXT",
    "execution": "TEXT",
    "counts": "BIGINT",
}
_REASSIGN: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="job_info",
        key="id",
        columns=_MOVED,
        assignments=(
            "owner_worker_id = v.v_worker, execution_id = v.v_execution, "
            "returned = j.returned + v.v_counts, version = j.version + 1, claim_token = :token, "
            "updated_at = :now"
        ),
        guard=(
            f"j.status IN ({_RUNNING}) AND j.execution_id = v.v_refused "
            f"AND j.returned + v.v_counts <= {MAX_RETURNS} "
            "AND EXISTS (SELECT 1 FROM dispatch_term "
            "WHERE partition_no = :partition AND term = :term)"
        ),
    )
    for sqlite in (True, False)
}
_REFUSED: Final[dict[str, ColumnType]] = {"execution_id": "TEXT", "reason": "TEXT"}
_END_REFUSED: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="job_log",
        key="execution_id",
        columns=_REFUSED,
        assignments=(
            f"status = {int(ExecutionStatus.RETURNED)}, finished_at = :now, reason = v.v_reason"
        ),
        guard=f"j.status IN ({in_list(OPEN_EXECUTIONS)})",
    )
    for sqlite in (True, False)
}
_READ: Final = text(
    f"SELECT {TASK_COLUMNS} FROM job_info WHERE id IN :ids AND claim_token = :token "
    f"AND status IN ({_RUNNING}) ORDER BY id"
).bindparams(bindparam("ids", expanding=True))


async def reassign(
    connection: AsyncConnection,
    database: Database,
    moves: Sequence[Reassignment],
    *,
    token: str,
    term: int,
    partition: int = 0,
) -> list[Claimed]:
    """Give refused runs to other workers: same attempt, same triggerTs, a new execution.

    Returns what may be sent; a job that moved on, or was refused too often, is not in it.
    Safe to repeat with the same token.
    """
    if not moves:
        return []
    now = await read_now(connection, database)
    by_job = {move.job_id: move for move in sorted(moves)}
    rows = [
        {
            "id": move.job_id,
            "refused": move.refused_execution_id,
            "worker": move.worker_id,
            "execution": move.execution_id,
            "counts": int(move.counts),
        }
        for move in by_job.values()
    ]
    await connection.execute(
        _REASSIGN[database.is_sqlite],
        {
            "rows": rows_json(_MOVED, rows),
            "token": token,
            "now": now,
            "term": term,
            "partition": partition,
        },
    )
    back = await connection.execute(_READ, {"ids": list(by_job), "token": token})
    own = [dict(row) for row in back.mappings()]
    if not own:
        return []
    ended = [
        {
            "execution_id": by_job[row["id"]].refused_execution_id,
            "reason": by_job[row["id"]].reason,
        }
        for row in own
    ]
    await connection.execute(
        _END_REFUSED[database.is_sqlite], {"rows": rows_json(_REFUSED, ended), "now": now}
    )
    await insert_executions(connection, database, own, term=term)
    long = await read_payloads(
        connection, [(row["id"], "params") for row in own if row["params_in_payload"]]
    )
    return [claimed_row(row, long, now) for row in own]


_ACCEPTED: Final[dict[str, ColumnType]] = {"execution_id": "TEXT", "accepted": "BIGINT"}
_ACCEPT: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="job_log",
        key="execution_id",
        columns=_ACCEPTED,
        assignments=(
            f"status = {int(ExecutionStatus.RUNNING)}, accepted_at = v.v_accepted, "
            "started_at = v.v_accepted"
        ),
        guard=f"j.status = {int(ExecutionStatus.CLAIMED)}",
    )
    for sqlite in (True, False)
}


async def note_running(
    connection: AsyncConnection, database: Database, accepted: Sequence[tuple[str, int]]
) -> None:
    """Note that workers took these executions (execution id, epoch ms) and they still run."""
    if accepted:
        rows = [
            {"execution_id": execution_id, "accepted": accepted_at}
            for execution_id, accepted_at in sorted(accepted)
        ]
        await connection.execute(_ACCEPT[database.is_sqlite], {"rows": rows_json(_ACCEPTED, rows)})
