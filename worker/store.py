"""Keeps the outcomes of ended runs readable in Redis until dispatchers have them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from worker.clock import boot_seconds
from worker.held import Execution, Held
from worker.lease import KEYS_PER_CALL, Leases, LeaseUnavailable

LOOK_SECONDS: Final = 5.0
STORE_AGAIN_SECONDS: Final = 120.0
"""An outcome that nobody acknowledges is stored again long before its tombstone would expire; one
that Redis has lost, when the next renewal of leases sees it."""

log = structlog.get_logger(__name__)


class OutcomeStore:
    """Stores each outcome under its run key, then passes it on; again while unacknowledged.

    It has a loop of its own, so that a dispatcher that does not answer delays no copy. Without
    Redis outcomes are passed on all the same.
    """

    def __init__(self, leases: Leases, held: Held, *, stored: Callable[[Execution], None]) -> None:
        self._leases = leases
        self._held = held
        self._stored = stored
        self._fresh: deque[Execution] = deque()
        self._work = asyncio.Event()
        self._failing = False
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to store."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="oncue-store")
        self._look_later()

    async def close(self) -> None:
        """Stop storing."""
        if self._timer is not None:
            self._timer.cancel()
        # Again and again: `wait_for` of Python 3.11 may swallow a cancellation.
        while self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=0.1)

    def add(self, execution: Execution) -> None:
        """Store the outcome of a run that has just ended, and pass it on."""
        self._fresh.append(execution)
        self._work.set()

    def store_again(self, executions: Sequence[Execution]) -> None:
        """Store at once what Redis has lost; what a dispatcher has by now need not be there."""
        for execution in executions:
            if execution.id in self._held.unacknowledged:
                execution.stored_at = None
        self._work.set()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            await self._store_fresh()
            while (overdue := self._overdue()) and await self._store(overdue):
                await self._store_fresh()

    async def _store_fresh(self) -> None:
        while self._fresh:
            count = min(len(self._fresh), KEYS_PER_CALL)
            batch = [self._fresh.popleft() for _ in range(count)]
            await self._store(batch)
            for execution in batch:
                self._stored(execution)

    async def _store(self, executions: list[Execution]) -> bool:
        """Store outcomes, and tell whether that worked."""
        now = boot_seconds()
        try:
            await self._leases.store(executions)
        except LeaseUnavailable as error:
            if not self._failing:
                log.warning("outcomes go without a copy in Redis", reason=str(error))
            self._failing = True
        except Exception:
            # The loop must outlive any surprise: without it no outcome would be told.
            log.exception("outcomes could not be stored")
        else:
            self._failing = False
            for execution in executions:
                execution.stored_at = now
            return True
        return False

    def _overdue(self) -> list[Execution]:
        now = boot_seconds()
        found = [
            one
            for one in self._held.unacknowledged.values()
            if one.stored_at is None or now - one.stored_at > STORE_AGAIN_SECONDS
        ]
        return found[:KEYS_PER_CALL]

    def _look_later(self) -> None:
        """Look again in a while: Redis may be back, or a copy may be about to expire."""
        self._work.set()
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look_later)
