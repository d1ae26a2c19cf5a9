"""The orderly end of a worker, within the time it is given."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

from worker.execute import SHUT_DOWN
from worker.parts import Parts

REST_SECONDS: Final = 5.0
"""Of the time given, what is kept for stopping runs, telling of it, and closing."""
CLOSING_SECONDS: Final = 1.5
LAST_RESORT_SECONDS: Final = 0.3

log = structlog.get_logger(__name__)


class Shutdown:
    """Drain, wait, stop what is left, tell of it, leave. A second request skips the waiting."""

    def __init__(
        self,
        grace_seconds: float,
        parts: Callable[[], Parts | None],
        leave: Callable[[], object],
    ) -> None:
        self._grace_seconds = grace_seconds
        self._parts = parts
        self._leave = leave
        self._began: float | None = None
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def ask(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ask for the end; safe in a signal handler, where the loop may be busy or stuck."""
        if self._began is not None:
            loop.call_soon_threadsafe(self._hurry.set)
            return
        self._began = time.monotonic()
        loop.call_soon_threadsafe(self._start, loop)
        # Where no thread is to be had the loop must do.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._end_at_last, name="oncue-grace", daemon=True).start()

    def finish(self) -> None:
        """Leave the process even when a handler's thread cannot be stopped."""
        parts = self._parts()
        if parts is not None and parts.held.running():
            log.warning("runs that cannot be stopped are left behind", runs=len(parts.held.live))
            parts.kill_children()
            _leave_at_once()

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            parts = self._parts()
            if parts is not None:
                await self._empty(parts)
        except Exception:
            log.exception("the orderly end failed")
        finally:
            self._leave()

    async def _empty(self, parts: Parts) -> None:
        parts.drain()
        await self._wait(parts.held.wait_idle(), self._left() - self._rest_seconds())
        for execution in parts.held.running():
            parts.executor.stop(execution, SHUT_DOWN)
        closing = min(CLOSING_SECONDS, self._grace_seconds / 4)
        # Coroutines and children first: what they leave behind must be reported too.
        await self._wait(parts.held.wait_idle(), self._left() - closing - 0.5)
        await self._wait(
            asyncio.gather(parts.deliverer.wait_idle(), parts.reporter.wait_empty()),
            self._left() - closing,
        )
        # The tries that ended last have their reports too.
        await self._wait(parts.reporter.wait_empty(), self._left() - closing)
        await self._wait(self._flush_logs(parts), self._left() - closing)
        log.info("drained", unreported=parts.reporter.backlog, deliveries=parts.deliverer.backlog)

    async def _flush_logs(self, parts: Parts) -> None:
        await parts.executor.wait_last_words()
        await parts.shipper.wait_empty()

    async def _wait(self, work: object, seconds: float) -> None:
        """Wait for `work`, but no longer than `seconds` or than the patience of who asked."""
        waiting = asyncio.ensure_future(work)  # type: ignore[call-overload]
        hurry = asyncio.ensure_future(self._hurry.wait())
        pending = {waiting} if self._hurry.is_set() else {waiting, hurry}
        limit = 1.0 if self._hurry.is_set() else seconds
        await asyncio.wait(
            pending, timeout=max(0.0, min(limit, seconds)), return_when=asyncio.FIRST_COMPLETED
        )
        for future in (waiting, hurry):
            future.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(waiting, hurry, return_exceptions=True)

    def _left(self) -> float:
        return self._grace_seconds - (time.monotonic() - (self._began or 0.0))

    def _rest_seconds(self) -> float:
        return min(REST_SECONDS, self._grace_seconds / 2)

    def _end_at_last(self) -> None:
        """End the process in time even if the event loop is stuck."""
        time.sleep(max(0.0, self._left() - LAST_RESORT_SECONDS))
        log.error("the time to end is over, the process exits as it is")
        parts = self._parts()
        if parts is not None:
            parts.kill_children()
        _leave_at_once()


def _leave_at_once() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)
