"""One step of a bulk operation: a few jobs are moved, and the row says so, in one transaction.

The row of the operation is locked first and holds how far it is. A step that finds it elsewhere
(another dispatcher has taken over, or an own commit whose answer was lost) changes nothing, so
no job has two turns. Each job is moved by the same guarded move as by its single verb.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Mapping
from dataclasses import dataclass
from typing import Final, assert_never

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.lists import Matching
from app.lifecycle.moves.cancel import CloseSchedule, cancel_job
from app.lifecycle.moves.guard import Asked, Changed, NotPossible, Unknown, WrongKind
from app.lifecycle.moves.hold import hold_job
from app.lifecycle.moves.redeliver import redeliver_failed
from app.lifecycle.moves.reopen import reopen_job
from app.lifecycle.operations import OPEN_OPERATIONS, Operation, OperationStatus
from app.lifecycle.states import TERMINAL_JOBS
from app.lifecycle.term import read_term
from app.plumbing.database import NOW_MS, Database

CATCH_UP_MS: Final = 250
"""How far a step that came late may draw the next one nearer, to keep the rate on average."""


@dataclass(frozen=True, slots=True)
class Calendar:
    """What is done to a schedule whose row is locked; only what knows its calendar can."""

    resume: Callable[[AsyncConnection, RowMapping, Asked], Awaitable[Changed]]
    close: CloseSchedule


_Answer = Changed | NotPossible | Unknown | WrongKind
_Move = Callable[[AsyncConnection, Database, Asked, Calendar], Awaitable[_Answer]]


async def _resume(
    connection: AsyncConnection, database: Database, asked: Asked, calendar: Calendar
) -> _Answer:
    async def resume(connection: AsyncConnection, job: RowMapping) -> Changed:
        return await calendar.resume(connection, job, asked)

    return await hold_job(connection, database, asked, "resume", resume_schedule=resume)


async def _redeliver(
    connection: AsyncConnection, database: Database, asked: Asked, _: Calendar
) -> _Answer:
    answer, _count = await redeliver_failed(connection, database, asked)
    return answer


_MOVES: Final[Mapping[str, _Move]] = {
    "cancel": lambda connection, database, asked, calendar: cancel_job(
        connection, database, asked, close_schedule=calendar.close
    ),
    "retry": lambda connection, database, asked, _: reopen_job(connection, database, asked),
    "pause": lambda connection, database, asked, _: hold_job(connection, database, asked, "pause"),
    "resume": _resume,
    "redeliver": _redeliver,
}
ACTIONS: Final = tuple(_MOVES)

_LOCK: Final = {
    sqlite: text(
        "SELECT status, after_finished, after_id, resume_at, changed, refused, started_at, "
        f"{NOW_MS[sqlite]} AS now_ms FROM bulk_operation WHERE id = :id{lock}"
    )
    for sqlite, lock in ((True, ""), (False, " FOR UPDATE"))
}
_STATUS: Final = {
    sqlite: text(f"SELECT status FROM job_info WHERE id = :id{lock}")
    for sqlite, lock in ((True, ""), (False, " FOR UPDATE"))
}
_STORE: Final = text(
    "UPDATE bulk_operation SET status = :status, after_finished = :finished, after_id = :after, "
    "resume_at = :resume, changed = :changed, refused = :refused, started_at = :started, "
    "updated_at = :now, finished_at = :ended WHERE id = :id"
)


@dataclass(frozen=True, slots=True)
class Swept:
    """What one step changed: the jobs, and how many were refused, by code."""

    changed: list[tuple[int, Changed]]
    refused: Counter[str]
    ended: bool


async def sweep(
    connection: AsyncConnection,
    database: Database,
    operation: Operation,
    found: Matching,
    *,
    term: int,
    token: str,
    calendar: Calendar,
    statuses: Container[int],
    broken: str | None = None,
) -> Swept | None:
    """Give the jobs that were found their turn; None if it is not this dispatcher's to give.

    A cancel ends only what is still in one of the `statuses` that were asked for: the verb itself
    would also end what has begun since it was found.

    With `broken` they are counted as refused with this code, and not touched: their move raises.
    """
    row = (
        (await connection.execute(_LOCK[database.is_sqlite], {"id": operation.key}))
        .mappings()
        .one_or_none()
    )
    if (
        row is None
        or row["status"] not in OPEN_OPERATIONS
        or (row["after_finished"], row["after_id"]) != operation.after
        or await read_term(connection) != term
    ):
        return None
    swept = Swept([], Counter(), ended=found.onward is None)
    for job_id in sorted(job_id for _, job_id in found.turns):
        if broken is not None:
            swept.refused[broken] += 1
        elif operation.action == "cancel" and await _has_gone_on(
            connection, database, job_id, statuses
        ):
            swept.refused["verb_not_possible"] += 1
        else:
            asked = Asked(job_id, operation.tenant_id, token)
            move = _MOVES[operation.action]
            _count(swept, job_id, await move(connection, database, asked, calendar))
    now = row["now_ms"]
    finished, after = found.onward or max(found.turns, default=operation.after)
    earliest = max(row["resume_at"], now - CATCH_UP_MS)
    ended = OperationStatus.SUCCEEDED if swept.ended else OperationStatus.RUNNING
    await connection.execute(
        _STORE,
        {
            "id": operation.key,
            "status": int(ended),
            "finished": finished,
            "after": after,
            "resume": earliest + round(len(found.turns) * 1000 / operation.rate),
            "changed": row["changed"] + len(swept.changed),
            "refused": json.dumps(Counter(json.loads(row["refused"])) + swept.refused),
            "started": now if row["started_at"] is None else row["started_at"],
            "now": now,
            "ended": now if swept.ended else None,
        },
    )
    return swept


async def _has_gone_on(
    connection: AsyncConnection, database: Database, job_id: int, statuses: Container[int]
) -> bool:
    """Lock a job, and tell whether it is in another state by now, and has not ended."""
    found = await connection.execute(_STATUS[database.is_sqlite], {"id": job_id})
    status = found.scalar_one_or_none()
    return status is not None and status not in statuses and status not in TERMINAL_JOBS


def _count(swept: Swept, job_id: int, answer: _Answer) -> None:
    match answer:
        case Changed(repeated=True):
            swept.refused["already_done"] += 1
        case Changed():
            swept.changed.append((job_id, answer))
        case NotPossible():
            swept.refused["verb_not_possible"] += 1
        case Unknown():
            swept.refused["job_not_found"] += 1
        case WrongKind():
            swept.refused["validation_failed"] += 1
        case _:
            assert_never(answer)
