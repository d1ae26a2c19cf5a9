"""Reads of what runs say: their lines from a position on, and stamps that tell of news."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.plumbing.database import NOW_MS, Database
from oncue.output import dropped_message

CHUNKS_AT_ONCE: Final = 20


class KeptLine(NamedTuple):
    """A line as it is kept; `time` is epoch ms."""

    seq: int
    time: int
    level: str
    source: str
    message: str
    fields: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class RunLog:
    """Whose lines they are and how the execution stands; `complete`: no more lines will come."""

    log_id: int
    execution_id: str
    job_id: int
    status: int
    finished_at: int | None
    now_ms: int
    has_lines: bool
    complete: bool
    dropped_lines: int
    dropped_bytes: int


_LOG: Final = {
    sqlite: text(
        f"SELECT l.id, l.execution_id, l.job_id, l.status, l.finished_at, {now} AS now_ms, "
        "e.next_seq, e.complete, e.dropped_lines, e.dropped_bytes FROM job_log AS l "
        "JOIN job_info AS j ON j.id = l.job_id AND j.tenant_id = :tenant "
        "LEFT JOIN execution_log AS e ON e.log_id = l.id WHERE l.execution_id = :execution"
    )
    for sqlite, now in NOW_MS.items()
}
_CHUNKS: Final = text(
    "SELECT first_seq, body FROM log_chunk WHERE log_id = :id AND first_seq >= :first "
    "ORDER BY first_seq LIMIT :limit"
)
_CHUNK_OF: Final = text(
    "SELECT MAX(first_seq) FROM log_chunk WHERE log_id = :id AND first_seq <= :seq"
)


async def read_run_log(
    connection: AsyncConnection, database: Database, execution_id: str, *, tenant_id: int
) -> RunLog | None:
    """Return how the log of the tenant's execution stands."""
    row = (
        await connection.execute(
            _LOG[database.is_sqlite], {"execution": execution_id, "tenant": tenant_id}
        )
    ).one_or_none()
    if row is None:
        return None
    return RunLog(
        log_id=row.id,
        execution_id=row.execution_id,
        job_id=row.job_id,
        status=row.status,
        finished_at=row.finished_at,
        now_ms=row.now_ms,
        has_lines=row.next_seq is not None,
        complete=bool(row.complete),
        dropped_lines=row.dropped_lines or 0,
        dropped_bytes=row.dropped_bytes or 0,
    )


async def read_lines(
    connection: AsyncConnection, log: RunLog, *, after: int, limit: int
) -> list[KeptLine]:
    """Return up to `limit` lines behind the one with the number `after`, oldest first.

    Numbers that are missing were dropped: a line in their place says how many.
    """
    if not log.has_lines:
        return []
    values = {"id": log.log_id, "seq": after + 1}
    first = (await connection.execute(_CHUNK_OF, values)).scalar_one() or 0
    lines: list[KeptLine] = []
    expected = after + 1
    while True:
        rows = (
            await connection.execute(
                _CHUNKS, {"id": log.log_id, "first": first, "limit": CHUNKS_AT_ONCE}
            )
        ).all()
        for row in rows:
            for line in (KeptLine(*one) for one in json.loads(row.body)):
                if line.seq < expected:
                    continue
                lines += with_marker(line, expected, log)
                expected = line.seq + 1
        if len(rows) < CHUNKS_AT_ONCE or len(lines) >= limit:
            return lines[:limit]
        first = rows[-1].first_seq + 1


def with_marker(line: KeptLine, expected: int, log: RunLog) -> Iterable[KeptLine]:
    """Put a line that tells of missing ones before `line`, or into it if it tells of others."""
    told = (line.fields or {}).get("droppedLines", 0) if line.source == "oncue" else 0
    missing = line.seq - expected + (1 if told else 0) - told
    if missing <= 0:
        return (line,)
    size = log.dropped_bytes if missing == log.dropped_lines else None
    if told and size is not None:
        size += (line.fields or {}).get("droppedBytes", 0)
    marker = _marker(line.seq if told else line.seq - 1, line.time, missing + told, size)
    return (marker,) if told else (marker, line)


def _marker(seq: int, time: int, lines: int, size: int | None) -> KeptLine:
    if size is None:
        # Some of them were read before they were dropped: their size is not known apart.
        fields = {"droppedLines": lines}
        return KeptLine(seq, time, "warning", "oncue", f"{lines} lines were dropped here", fields)
    fields = {"droppedLines": lines, "droppedBytes": size}
    return KeptLine(seq, time, "warning", "oncue", dropped_message(lines, size), fields)


_LOG_STAMPS: Final = text(
    "SELECT l.execution_id, l.status, e.next_seq, e.complete FROM job_log AS l "
    "LEFT JOIN execution_log AS e ON e.log_id = l.id WHERE l.execution_id IN :keys"
).bindparams(bindparam("keys", expanding=True))
_JOB_STAMPS: Final = text(
    "SELECT j.id, j.version, l.status, l.progress_at FROM job_info AS j "
    "LEFT JOIN job_log AS l ON l.execution_id = j.execution_id WHERE j.id IN :keys"
).bindparams(bindparam("keys", expanding=True))


async def read_log_stamps(
    connection: AsyncConnection, executions: Sequence[str]
) -> dict[str, tuple[Any, ...]]:
    """Return for each execution values that change when its log has news."""
    rows = await connection.execute(_LOG_STAMPS, {"keys": list(executions)})
    return {row[0]: tuple(row[1:]) for row in rows}


async def read_job_stamps(
    connection: AsyncConnection, job_ids: Sequence[int]
) -> dict[int, tuple[Any, ...]]:
    """Return for each job values that change when it moves or its run makes progress."""
    rows = await connection.execute(_JOB_STAMPS, {"keys": list(job_ids)})
    return {row[0]: tuple(row[1:]) for row in rows}
