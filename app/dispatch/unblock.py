"""The safety net of concurrency keys: what waits for a key that has room again may run.

Every end of a run lets the next go in its own transaction. This finds what that cannot know: a
task that was let go and then did not begin, because it was put off, or no worker takes it.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from app.dispatch.lock import DispatchLock
from app.ground import Ground
from app.lifecycle.moves.free_keys import free_keys
from app.lifecycle.moves.limit_keys import forget_rates, look_through_keys
from app.plumbing.bus import WAKE
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.loops import Loop

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 2.0
KEYS_A_LOOK: Final = 500
KEYS_A_TRANSACTION: Final = 20
"""Whoever ends a run of one of these keys waits for the transaction."""
RATES_KEPT_SECONDS: Final = 60.0
FIRST: Final = (-1, 0, "")


class Unblocker:
    """Looks through the keys in use while the lock is held, some hundred every two seconds."""

    def __init__(self, ground: Ground, lock: DispatchLock) -> None:
        self._database = ground.database
        self._clock = ground.clock
        self._bus = ground.bus
        self._lock = lock
        self._after = FIRST
        self._loop = Loop("unblock", self._step, expected=(DatabaseUnavailable,))

    def start(self) -> None:
        """Start looking while the lock is held."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop looking."""
        await self._loop.stop()

    async def look(self) -> int:
        """Let go what some keys have room for, and return how many tasks that were."""
        idle_before = self._clock.now_ms() - RATES_KEPT_SECONDS * 1000
        found = await self._database.read(
            lambda connection: look_through_keys(
                connection, self._after, idle_before_ms=idle_before, limit=KEYS_A_LOOK
            )
        )
        self._after = found.last or FIRST
        freed = 0
        for start in range(0, len(found.waited_for), KEYS_A_TRANSACTION):
            keys = found.waited_for[start : start + KEYS_A_TRANSACTION]
            tasks = await self._database.write(
                lambda connection, keys=keys: free_keys(connection, keys)  # type: ignore[misc]
            )
            if tasks:
                self._bus.publish(WAKE, [list(task) for task in tasks])
                freed += len(tasks)
        if freed:
            log.info("keys_had_room", freed=freed)
        if found.idle_rates:
            await self._database.write(
                lambda connection: forget_rates(
                    connection, found.idle_rates, idle_before_ms=idle_before
                )
            )
        return freed

    async def _step(self) -> None:
        await asyncio.sleep(LOOK_SECONDS)
        if self._lock.term is not None:
            await self.look()
