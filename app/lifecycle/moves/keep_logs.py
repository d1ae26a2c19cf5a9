"""Keeping what runs say: lines in chunks, bounded for each execution, and the newest progress.

Nothing here changes how a job stands, so no lock of a job is taken; a part that is repeated
changes nothing. The first 512 KiB of an execution stay, then the last 512 KiB: older chunks of
this tail leave, and are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.bulk import ColumnType, insert_from_rows, rows_json, update_from_rows
from app.lifecycle.tables import BY_EXECUTION_ID
from app.plumbing.database import NOW_MS, Database, keep_first
from oncue.output import HEAD_BYTES, TAIL_BYTES

CHUNK_BYTES: Final = 32 * 1024
SLIDE_ROWS: Final = 200


@dataclass(frozen=True, slots=True)
class NewLine:
    """A line to keep: its JSON, and what it counts. A marker stands for lines that were dropped."""

    seq: int
    size: int
    body: bytes
    dropped_lines: int = 0
    dropped_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NewProgress:
    """How far a run had come at `at`."""

    value: float
    text: str
    at: int


@dataclass(frozen=True, slots=True)
class NewPart:
    """Lines that follow each other in one execution, and its newest progress."""

    execution_id: str
    lines: Sequence[NewLine]
    progress: NewProgress | None
    complete: bool


@dataclass(slots=True)
class Kept:
    """What one transaction kept: the executions concerned with their jobs, and counts."""

    refused: list[str] = field(default_factory=list)
    touched: list[tuple[str, int]] = field(default_factory=list)
    lines: int = 0
    size: int = 0
    dropped: int = 0


@dataclass(slots=True)
class _State:
    """A row of `execution_log`."""

    log_id: int
    next_seq: int
    head_bytes: int
    tail_bytes: int
    tail_first_seq: int | None
    dropped_lines: int
    dropped_bytes: int
    complete: bool


_EXECUTIONS: Final = {
    sqlite: text(
        f"SELECT {NOW_MS[sqlite]} AS now_ms, id, execution_id, job_id, worker_id, finished_at "
        f"FROM job_log {hint}WHERE execution_id IN :executions"
    ).bindparams(bindparam("executions", expanding=True))
    for sqlite, hint in BY_EXECUTION_ID.items()
}
_STATES: Final = {
    sqlite: text(
        "SELECT log_id, next_seq, head_bytes, tail_bytes, tail_first_seq, dropped_lines, "
        f"dropped_bytes, complete FROM execution_log WHERE log_id IN :ids ORDER BY log_id{lock}"
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite, lock in ((True, ""), (False, " FOR UPDATE"))
}
_OPEN_FIELDS: Final[dict[str, ColumnType]] = {"id": "BIGINT"}
_OPEN: Final = {
    sqlite: insert_from_rows(
        sqlite=sqlite,
        table="execution_log",
        columns=_OPEN_FIELDS,
        values={
            "log_id": "v.v_id",
            "next_seq": "1",
            "head_bytes": "0",
            "tail_bytes": "0",
            "dropped_lines": "0",
            "dropped_bytes": "0",
            "complete": "0",
        },
        keep_first=keep_first(sqlite, "log_id"),
    )
    for sqlite in (True, False)
}
_INSERT_CHUNK: Final = text(
    "INSERT INTO log_chunk (log_id, first_seq, line_count, byte_count, dropped_lines, "
    "dropped_bytes, body) VALUES (:log_id, :first_seq, :line_count, :byte_count, "
    ":dropped_lines, :dropped_bytes, :body)"
)
_STATE_FIELDS: Final[dict[str, ColumnType]] = {
    "log_id": "BIGINT",
    "next": "BIGINT",
    "head": "BIGINT",
    "tail": "BIGINT",
    "first": "BIGINT",
    "lines": "BIGINT",
    "bytes": "BIGINT",
    "over": "BIGINT",
}
_SAVE: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="execution_log",
        key="log_id",
        columns=_STATE_FIELDS,
        assignments=(
            "next_seq = v.v_next, head_bytes = v.v_head, tail_bytes = v.v_tail, "
            "tail_first_seq = v.v_first, dropped_lines = v.v_lines, dropped_bytes = v.v_bytes, "
            "complete = v.v_over"
        ),
        guard="j.next_seq <= v.v_next",
    )
    for sqlite in (True, False)
}
_PROGRESS_FIELDS: Final[dict[str, ColumnType]] = {
    "id": "BIGINT",
    "value": "TEXT",
    "words": "TEXT",
    "at": "BIGINT",
}
_PROGRESS: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="job_log",
        key="id",
        columns=_PROGRESS_FIELDS,
        assignments=("progress = v.v_value + 0.0, progress_text = v.v_words, progress_at = v.v_at"),
        guard="(j.progress_at IS NULL OR j.progress_at < v.v_at)",
    )
    for sqlite in (True, False)
}
_TAIL: Final = text(
    "SELECT first_seq, line_count, byte_count, dropped_lines, dropped_bytes FROM log_chunk "
    "WHERE log_id = :id AND first_seq >= :first ORDER BY first_seq LIMIT :limit"
)
_SLIDE: Final = text(
    "DELETE FROM log_chunk WHERE log_id = :id AND first_seq >= :first AND first_seq < :before"
)


async def keep_logs(
    connection: AsyncConnection,
    database: Database,
    worker_id: str,
    parts: Sequence[NewPart],
    *,
    too_old_ms: int,
) -> Kept:
    """Keep the parts of executions that are this worker's; safe to repeat.

    Refused are executions that are unknown, another worker's, or ended `too_old_ms` ago: what
    is about to be pruned gets nothing new.
    """
    sqlite = database.is_sqlite
    found = await connection.execute(
        _EXECUTIONS[sqlite], {"executions": sorted({part.execution_id for part in parts})}
    )
    ours = {
        row["execution_id"]: row
        for row in found.mappings()
        if row["worker_id"] == worker_id
        and (row["finished_at"] is None or row["finished_at"] > row["now_ms"] - too_old_ms)
    }
    kept = Kept(refused=sorted({one.execution_id for one in parts} - ours.keys()))
    wanted = [part for part in parts if part.execution_id in ours]
    kept.touched = sorted({(one.execution_id, ours[one.execution_id]["job_id"]) for one in wanted})
    with_lines = sorted(
        {ours[one.execution_id]["id"] for one in wanted if one.lines or one.complete}
    )
    if with_lines:
        states = await _lock_states(connection, sqlite, with_lines)
        chunks: list[dict[str, Any]] = []
        for part in wanted:
            state = states.get(ours[part.execution_id]["id"])
            if state is not None:
                chunks += _append(state, part)
        if chunks:
            await connection.execute(_INSERT_CHUNK, chunks)
        kept.lines = sum(chunk["line_count"] for chunk in chunks)
        kept.size = sum(chunk["byte_count"] for chunk in chunks)
        for state in states.values():
            kept.dropped += await _slide(connection, state)
        await connection.execute(
            _SAVE[sqlite], {"rows": rows_json(_STATE_FIELDS, [_row(s) for s in states.values()])}
        )
    # Last, because a run's report may be waiting for the same row.
    await _keep_progress(connection, sqlite, wanted, ours)
    return kept


async def _lock_states(
    connection: AsyncConnection, sqlite: bool, log_ids: Sequence[int]
) -> dict[int, _State]:
    """Lock the rows of these executions, and make those that are missing."""
    query = _STATES[sqlite]
    rows = (await connection.execute(query, {"ids": list(log_ids)})).all()
    if missing := sorted(set(log_ids) - {row.log_id for row in rows}):
        await connection.execute(
            _OPEN[sqlite], {"rows": rows_json(_OPEN_FIELDS, [{"id": one} for one in missing])}
        )
        rows = (await connection.execute(query, {"ids": list(log_ids)})).all()
    return {row.log_id: _State(*row) for row in rows}


def _append(state: _State, part: NewPart) -> list[dict[str, Any]]:
    """Put the lines that are new into chunks, and count them in the state."""
    chunks: list[list[NewLine]] = []
    size, in_tail = 0, False
    for line in part.lines:
        if line.seq < state.next_seq:
            continue
        if state.tail_first_seq is None and state.head_bytes + line.size > HEAD_BYTES:
            state.tail_first_seq = line.seq
        tail = state.tail_first_seq is not None
        if not chunks or tail != in_tail or size + line.size > CHUNK_BYTES:
            chunks.append([])
            size, in_tail = 0, tail
        chunks[-1].append(line)
        size += line.size
        if tail:
            state.tail_bytes += line.size
        else:
            state.head_bytes += line.size
        state.next_seq = line.seq + 1
    state.complete = state.complete or part.complete
    return [_chunk(state.log_id, lines) for lines in chunks]


def _chunk(log_id: int, lines: Sequence[NewLine]) -> dict[str, Any]:
    return {
        "log_id": log_id,
        "first_seq": lines[0].seq,
        "line_count": sum(1 for line in lines if not line.dropped_lines),
        "byte_count": sum(line.size for line in lines),
        "dropped_lines": sum(line.dropped_lines for line in lines),
        # A marker's own bytes are in byte_count, and were never a run's.
        "dropped_bytes": sum(
            line.dropped_bytes - line.size for line in lines if line.dropped_lines
        ),
        "body": (b"[" + b",".join(line.body for line in lines) + b"]").decode(),
    }


async def _slide(connection: AsyncConnection, state: _State) -> int:
    """Let the oldest chunks of the tail go until it is within its bound; count their lines."""
    gone = 0
    while state.tail_bytes > TAIL_BYTES and state.tail_first_seq is not None:
        rows = (
            await connection.execute(
                _TAIL, {"id": state.log_id, "first": state.tail_first_seq, "limit": SLIDE_ROWS}
            )
        ).all()
        first, left = state.tail_first_seq, state.tail_bytes
        for row, following in pairwise(rows):
            if state.tail_bytes <= TAIL_BYTES:
                break
            state.tail_bytes -= row.byte_count
            state.dropped_lines += row.line_count + row.dropped_lines
            state.dropped_bytes += row.byte_count + row.dropped_bytes
            state.tail_first_seq = following.first_seq
            gone += row.line_count
        if state.tail_bytes == left:
            break
        await connection.execute(
            _SLIDE, {"id": state.log_id, "first": first, "before": state.tail_first_seq}
        )
    return gone


def _row(state: _State) -> dict[str, Any]:
    return {
        "log_id": state.log_id,
        "next": state.next_seq,
        "head": state.head_bytes,
        "tail": state.tail_bytes,
        "first": state.tail_first_seq,
        "lines": state.dropped_lines,
        "bytes": state.dropped_bytes,
        "over": int(state.complete),
    }


async def _keep_progress(
    connection: AsyncConnection,
    sqlite: bool,
    parts: Sequence[NewPart],
    ours: Mapping[str, Any],
) -> None:
    newest = {
        ours[part.execution_id]["id"]: part.progress for part in parts if part.progress is not None
    }
    if newest:
        rows = [
            {"id": log_id, "value": repr(one.value), "words": one.text, "at": one.at}
            for log_id, one in sorted(newest.items())
        ]
        await connection.execute(_PROGRESS[sqlite], {"rows": rows_json(_PROGRESS_FIELDS, rows)})
