"""The lines of an execution: a page of them, or all as they come."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from app.access.caller import Caller
from app.edge.paging import decode_cursor, encode_cursor
from app.edge.problems import Problem, invalid
from app.edge.sse import KEEP_ALIVE, KEEP_ALIVE_SECONDS, finished, news_or_silence, sse_event
from app.jobs.views import line_view
from app.jobs.watch import LetsOn, Streams
from app.lifecycle.run_logs import KeptLine, RunLog, read_lines, read_run_log
from app.lifecycle.states import OPEN_EXECUTIONS, ExecutionStatus
from app.plumbing.database import Database, DatabaseUnavailable

LINES_AT_ONCE: Final = 200
LAST_LINES_MS: Final = 10_000
"""After a run's end a stream waits so long for last lines, if there were any before."""
FIRST_LINES_MS: Final = 2_000
"""After the end of a run that has said nothing: its first lines may be on their way."""
LOOK_SECONDS: Final = 1.0


async def list_lines(
    database: Database, caller: Caller, execution_id: str, *, limit: int, cursor: str | None
) -> dict[str, Any]:
    """Return a page of an execution's lines, oldest first.

    Raises:
        Problem: `execution_not_found`, or `validation_failed` for a foreign cursor.
    """
    after = decode_cursor(cursor) or 0
    log, lines = await _read(database, caller, execution_id, after=after, limit=limit + 1)
    page = lines[:limit]
    more = len(lines) > limit
    return {
        "items": [line_view(line) for line in page],
        "nextCursor": encode_cursor(page[-1].seq) if more else None,
        "complete": not more and _is_over(log),
    }


async def follow_lines(
    database: Database,
    streams: Streams,
    caller: Caller,
    execution_id: str,
    *,
    after: int,
    lets_on: LetsOn,
) -> AsyncGenerator[bytes, None]:
    """Yield each line behind `after` once as an event with its number as id, then `end`.

    The stream ends without `end` when this process is about to, or the reader may read no more;
    one that comes back with the last id misses nothing and gets nothing twice. Make sure that the
    execution is there.
    """
    with streams.logs.waiting(execution_id) as news:
        silent_since = time.monotonic()
        while not streams.closed and await lets_on():
            news.clear()
            try:
                log, lines = await finished(
                    _read(database, caller, execution_id, after=after, limit=LINES_AT_ONCE)
                )
            except DatabaseUnavailable:
                log, lines = None, []
            except Problem:
                return  # retention has taken the job meanwhile
            for line in lines:
                after = line.seq
                silent_since = time.monotonic()
                yield sse_event("line", line_view(line), event_id=str(line.seq))
            if len(lines) == LINES_AT_ONCE:
                continue
            over = log is not None and not _is_open(log)
            if log is not None and over and _is_over(log):
                end = {
                    "executionId": execution_id,
                    "status": ExecutionStatus(log.status).name,
                    "complete": log.complete or not log.has_lines,
                }
                yield sse_event("end", end, event_id=str(after))
                return
            pause = LOOK_SECONDS if over or log is None else KEEP_ALIVE_SECONDS
            left = silent_since + KEEP_ALIVE_SECONDS - time.monotonic()
            if not await news_or_silence(news, min(pause, left)) and left <= pause:
                silent_since = time.monotonic()
                yield KEEP_ALIVE


async def require_execution(database: Database, caller: Caller, execution_id: str) -> None:
    """Return if the caller has this execution.

    Raises:
        Problem: `execution_not_found`.
    """
    await _read(database, caller, execution_id, after=0, limit=0)


def last_seq(last_event_id: str | None) -> int:
    """Read the id of the last event that a reader got.

    Raises:
        Problem: `validation_failed`, it is none of ours.
    """
    if not last_event_id:
        return 0
    if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) <= 16):
        raise invalid("send the id of an event of this stream, unchanged", "/Last-Event-ID")
    return int(last_event_id)


def _is_open(log: RunLog) -> bool:
    return log.status in OPEN_EXECUTIONS


def _is_over(log: RunLog) -> bool:
    """Whether no more lines are to be waited for."""
    if log.complete:
        return True
    if _is_open(log):
        return False
    patience = LAST_LINES_MS if log.has_lines else FIRST_LINES_MS
    return log.finished_at is None or log.finished_at + patience < log.now_ms


async def _read(
    database: Database, caller: Caller, execution_id: str, *, after: int, limit: int
) -> tuple[RunLog, list[KeptLine]]:
    async def read(connection: AsyncConnection) -> tuple[RunLog, list[KeptLine]] | None:
        log = await read_run_log(connection, database, execution_id, tenant_id=caller.tenant_id)
        if log is None:
            return None
        if not limit:
            return log, []
        return log, await read_lines(connection, log, after=after, limit=limit)

    found = await database.read(read)
    if found is None:
        raise Problem(
            "execution_not_found",
            "No execution has this id, or its job is past its retention.",
        )
    return found
