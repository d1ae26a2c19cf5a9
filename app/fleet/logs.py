"""What runs say, as their workers ship it: kept for callers, and told to streams that follow."""

from __future__ import annotations

import orjson
import structlog
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.edge.problems import Problem, validation_problem
from app.fleet.groups import require_group
from app.ground import Ground
from app.lifecycle.keep import DAY_MS, shortest_keep_days
from app.lifecycle.moves.keep_logs import Kept, NewLine, NewPart, NewProgress, keep_logs
from app.lifecycle.nodes import GroupKey, groups_of
from app.plumbing.bus import LOGGED
from app.plumbing.json_text import Unencodable, plain_json
from oncue.output import LINE_OVERHEAD_BYTES, MAX_FIELDS_BYTES, MAX_MESSAGE_BYTES
from oncue.protocol import LogLine, LogPart, LogSource, LogsRequest, LogsResponse

log = structlog.get_logger(__name__)


class RunLogs:
    """Takes the lines and the progress of runs; an answer means that they are committed."""

    def __init__(self, ground: Ground) -> None:
        self._database = ground.database
        self._bus = ground.bus
        self._metrics = ground.metrics
        # Far from the moment at which retention takes the job away.
        shortest = shortest_keep_days(ground.settings.retention_days, ground.settings.retention)
        self._too_old_ms = int(shortest * DAY_MS / 2)

    async def take(self, body: bytes, by_key: GroupKey | None = None) -> LogsResponse:
        """Keep what a worker ships of its own executions.

        Raises:
            Problem: the request cannot be read, a line is too long, or `not_your_run`.
            DatabaseUnavailable: the worker must ship it again.
        """
        try:
            request = LogsRequest.model_validate_json(body)
        except ValidationError as error:
            raise validation_problem(list(error.errors(include_url=False))) from None
        parts = [_new_part(part) for part in request.parts]
        if not parts:
            return LogsResponse(refused=[])

        async def write(connection: AsyncConnection) -> Kept:
            if by_key is not None:
                groups = await groups_of(connection, [request.worker_id])
                require_group(by_key, request.worker_id, groups.get(request.worker_id))
            return await keep_logs(
                connection,
                self._database,
                request.worker_id,
                parts,
                too_old_ms=self._too_old_ms,
            )

        kept = await self._database.write(write)
        if kept.refused:
            log.info("logs_refused", worker_id=request.worker_id, executions=len(kept.refused))
        self._metrics.log_lines.inc(kept.lines)
        self._metrics.log_bytes.inc(kept.size)
        self._metrics.log_lines_dropped.inc(kept.dropped)
        if kept.touched:
            self._bus.publish(LOGGED, [list(one) for one in kept.touched])
        return LogsResponse(refused=kept.refused)


def _new_part(part: LogPart) -> NewPart:
    if not part.execution_id.isascii():
        raise Problem("validation_failed", "executionId: it is not one of ours")
    progress = part.progress
    return NewPart(
        execution_id=part.execution_id,
        lines=sorted((_new_line(line) for line in part.lines), key=lambda line: line.seq),
        progress=None
        if progress is None
        else NewProgress(progress.value, progress.text.replace("\0", "\ufffd"), progress.at),
        complete=part.complete,
    )


def _new_line(line: LogLine) -> NewLine:
    message = len(line.message.encode())
    if message > MAX_MESSAGE_BYTES:
        raise Problem(
            "validation_failed",
            f"message: a line has at most {MAX_MESSAGE_BYTES} bytes, not {message}; split it",
        )
    fields, size = None, 0
    if line.fields:
        try:
            text = plain_json(line.fields)
        except Unencodable as error:
            raise Problem("validation_failed", f"fields: not JSON: {error}") from None
        fields, size = orjson.Fragment(text), len(text.encode())
        if size > MAX_FIELDS_BYTES:
            raise Problem(
                "validation_failed", f"fields: at most {MAX_FIELDS_BYTES} bytes, not {size}"
            )
    marked = line.fields if line.source is LogSource.ONCUE and line.fields else {}
    return NewLine(
        seq=line.seq,
        size=LINE_OVERHEAD_BYTES + message + size,
        body=orjson.dumps(
            [line.seq, line.time, line.level.value, line.source.value, line.message, fields]
        ),
        dropped_lines=_count(marked.get("droppedLines")),
        dropped_bytes=_count(marked.get("droppedBytes")),
    )


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value < 2**53 else 0
