"""Ships log lines and progress to a dispatcher, in batches, until each part is acknowledged.

Reports never wait for it. While no dispatcher takes lines they stay in their bounded buffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
import structlog
from pydantic import ValidationError

from oncue.protocol import (
    LOGS_PATH,
    MAX_LINES_PER_LOG_PART,
    MAX_LOG_PARTS_PER_REQUEST,
    PROTOCOL_VERSION,
    LogsResponse,
)
from worker.dispatchers import Dispatchers, NoDispatcher
from worker.log_buffer import Line, LogBuffers, RunLog, Taken

SHIP_SECONDS: Final = 0.5
"""From the first line of a batch to its sending; the end of a run sends at once."""
LEAST_SECONDS: Final = 0.1
"""Between two batches, also when runs end one after the other."""
PART_BYTES: Final = 64 * 1024
"""Of a run that goes on, in one batch: one that prints in a tight loop sends some 128 KB/s."""
BATCH_BYTES: Final = 1024 * 1024
LONGEST_BACKOFF_SECONDS: Final = 5.0
NOT_OFFERED_SECONDS: Final = 60.0
"""How long to wait before a dispatcher without this address is asked again."""
NOT_OFFERED: Final = frozenset({404, 405})
ABOUT_THE_CONTENT: Final = frozenset({400, 413, 422})

log = structlog.get_logger(__name__)


class NotOffered(Exception):
    """No dispatcher has the address that takes logs: all are of an older release."""


@dataclass(frozen=True, slots=True)
class Part:
    """What is sent of one run, unchanged until it is acknowledged."""

    log: RunLog
    wire: bytes
    lines: int


class Shipper:
    """The loop that takes from the buffers and tells dispatchers."""

    def __init__(
        self,
        worker_id: str,
        dispatchers: Dispatchers,
        now_ms: Callable[[], int],
        *,
        shipped: Callable[[int, int], None],
        dropped: Callable[[int], None],
    ) -> None:
        self._worker_id = worker_id
        self._dispatchers = dispatchers
        self._shipped = shipped
        self._dropped = dropped
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._hurry = asyncio.Event()
        self._again = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight: list[Part] = []
        self._failures = 0
        self._offered = True
        self._flushing = False
        self._task: asyncio.Task[None] | None = None
        self.buffers = LogBuffers(now_ms, changed=self._changed, dropped=dropped)

    def start(self) -> None:
        """Begin to ship."""
        self._task = self._loop.create_task(self._run(), name="oncue-logs")

    async def close(self) -> None:
        """Stop shipping, whatever is left."""
        while self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=0.1)

    async def wait_empty(self) -> None:
        """Return when every line is acknowledged, or nobody takes any; from now on none waits."""
        self._flushing = True
        self._hurry.set()
        while self._offered and self.backlog:
            self._idle.clear()
            await self._idle.wait()

    def dispatcher_is_back(self) -> None:
        """Try at once again: beats are acknowledged after a silence. Any thread may say so."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._again.set)

    @property
    def backlog(self) -> int:
        """How many runs have lines that are not acknowledged."""
        return self.buffers.waiting + len({part.log for part in self._in_flight})

    def _changed(self, urgent: bool) -> None:
        # A closed loop has nothing left to ship with.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._note, urgent)

    def _note(self, urgent: bool) -> None:
        self._news.set()
        if urgent:
            self._hurry.set()

    async def _run(self) -> None:
        while True:
            try:
                await self._step()
            except NoDispatcher as error:
                await self._back_off(str(error))
            except NotOffered as error:
                await self._wait_for_an_upgrade(str(error))
            except Exception as error:
                # The loop must outlive any surprise: without it no line would arrive.
                log.exception("logs could not be shipped")
                await self._back_off(type(error).__name__)

    async def _step(self) -> None:
        if not self._in_flight:
            await self._news.wait()
            if not self._flushing:
                await _wait(self._hurry, SHIP_SECONDS)
            self._news.clear()
            self._hurry.clear()
            self._in_flight = self._take()
        if self._in_flight:
            await self._send(self._in_flight)
            self._in_flight = []
        if self.buffers.waiting:
            self._news.set()
        else:
            self._idle.set()
        if not self._flushing:
            await asyncio.sleep(LEAST_SECONDS)

    def _take(self) -> list[Part]:
        """Take a batch: every waiting run has its turn before one has a second."""
        parts: list[Part] = []
        back: list[RunLog] = []
        size = 0
        while (
            size < BATCH_BYTES
            and len(parts) < MAX_LOG_PARTS_PER_REQUEST
            and (one := self.buffers.next()) is not None
        ):
            taken = one.take(
                min(BATCH_BYTES - size, BATCH_BYTES if one.closed else PART_BYTES),
                MAX_LINES_PER_LOG_PART,
            )
            wire = encode_part(one.execution_id, taken)
            parts.append(Part(one, wire, len(taken.lines)))
            size += len(wire)
            back.append(one)
        for one in back:
            self.buffers.put_back(one)
        return parts

    async def _send(self, parts: Sequence[Part]) -> None:
        reply = await self._dispatchers.post(LOGS_PATH, self._encode(parts))
        if reply.status == 200:
            try:
                response = LogsResponse.model_validate_json(reply.body)
            except ValidationError:
                raise NoDispatcher("the answer is not one of a dispatcher") from None
            self._acknowledge(parts, frozenset(response.refused))
        elif reply.status in NOT_OFFERED:
            raise NotOffered(f"status {reply.status}")
        elif reply.status in ABOUT_THE_CONTENT:
            await self._find_offender(parts, reply.status)
        else:
            raise NoDispatcher(f"status {reply.status}")

    def _acknowledge(self, parts: Sequence[Part], refused: frozenset[str]) -> None:
        if self._failures or not self._offered:
            log.info("logs are taken again")
        self._failures, self._offered = 0, True
        for part in parts:
            if part.log.execution_id in refused:
                part.log.refuse()
                self._dropped(part.lines)
            else:
                self._shipped(part.lines, len(part.wire))

    async def _find_offender(self, parts: Sequence[Part], status: int) -> None:
        """Send each part of a refused batch alone, and drop the one that is refused alone."""
        if len(parts) > 1:
            for part in parts:
                await self._send([part])
            return
        log.error(
            "lines of a run are refused", execution_id=parts[0].log.execution_id, status=status
        )
        self._dropped(parts[0].lines)

    async def _wait_for_an_upgrade(self, reason: str) -> None:
        if self._offered:
            log.warning("dispatchers take no logs: lines stay here, bounded", reason=reason)
        self._offered = False
        self._idle.set()
        self._again.clear()
        await _wait(self._again, NOT_OFFERED_SECONDS)

    async def _back_off(self, reason: str) -> None:
        if self._failures == 0:
            log.warning("logs are not acknowledged", reason=reason)
        self._failures += 1
        longest = min(LONGEST_BACKOFF_SECONDS, SHIP_SECONDS * 2.0 ** min(self._failures - 1, 8))
        self._again.clear()
        await _wait(self._again, longest * random.uniform(0.5, 1))

    def _encode(self, parts: Sequence[Part]) -> bytes:
        return orjson.dumps(
            {
                "protocol": PROTOCOL_VERSION,
                "workerId": self._worker_id,
                "parts": [orjson.Fragment(part.wire) for part in parts],
            }
        )


def encode_part(execution_id: str, taken: Taken) -> bytes:
    """Encode one `LogPart`; fields are spliced in, so that big integers stay exact."""
    part: dict[str, Any] = {"executionId": execution_id}
    if taken.lines:
        part["lines"] = [_encode_line(line) for line in taken.lines]
    if taken.progress is not None:
        one = taken.progress
        part["progress"] = {"value": one.value, "text": one.text, "at": one.at}
    if taken.complete:
        part["complete"] = True
    return orjson.dumps(part)


def _encode_line(line: Line) -> dict[str, Any]:
    found: dict[str, Any] = {
        "seq": line.seq,
        "time": line.time,
        "level": line.level,
        "source": line.source,
        "message": line.message,
    }
    if line.fields is not None:
        found["fields"] = orjson.Fragment(line.fields)
    return found


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, but no longer than so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
