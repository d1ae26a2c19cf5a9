"""Counts what tenants with a quota of bytes have stored, while the lock is held.

One tenant's jobs are walked after the other's, a slice at a time, and each whole sum is kept for
all dispatchers. No more than a share of the time is spent on it; without such a quota nothing is.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

import structlog

from app.access.limits import LimitBook
from app.dispatch.lock import DispatchLock
from app.ground import Ground
from app.lifecycle.limits import Stored
from app.lifecycle.stored import Place, sum_slice, tell_stored
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.loops import Loop

log = structlog.get_logger(__name__)

REST_SECONDS: Final = 5.0
"""Between two counts of the same tenant, however little it has."""
LOOK_SECONDS: Final = 0.5
SHARE: Final = 0.1
"""Of the time no more is spent on counting."""


@dataclass(slots=True)
class _Walk:
    """A count that goes on."""

    tenant_id: int
    counted_from: int
    place: Place
    bytes: int = 0


class StoredCounter:
    """Counts for one tenant after the other, the one whose last count is the oldest first."""

    def __init__(self, ground: Ground, lock: DispatchLock, limits: LimitBook) -> None:
        self._database = ground.database
        self._clock = ground.clock
        self._lock = lock
        self._limits = limits
        self._walk: _Walk | None = None
        self._counted_at: dict[int, float] = {}
        self._loop = Loop("stored-bytes", self._step, expected=(DatabaseUnavailable,))

    def start(self) -> None:
        """Start counting while the lock is held."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop counting."""
        await self._loop.stop()

    async def count_a_slice(self) -> bool:
        """Count on for a slice; tell whether there was anything to count."""
        walk = self._walk or self._next_walk()
        if walk is None:
            return False
        # Kept only if all of it is read: a count that fails goes on where it stood.
        self._walk = walk
        found = await self._database.read(
            lambda connection: sum_slice(connection, walk.tenant_id, walk.place)
        )
        walk.bytes += found.bytes
        if found.onward is not None:
            walk.place = found.onward
            return True
        stored = Stored(walk.bytes, walk.counted_from)
        await self._database.write(
            lambda connection: tell_stored(connection, walk.tenant_id, stored)
        )
        self._walk = None
        self._counted_at[walk.tenant_id] = time.monotonic()
        log.debug("stored_counted", tenant_id=walk.tenant_id, bytes=stored.bytes)
        return True

    def _next_walk(self) -> _Walk | None:
        tenants = self._limits.with_stored_bytes()
        self._counted_at = {one: at for one, at in self._counted_at.items() if one in tenants}
        first = min(tenants, key=lambda one: self._counted_at.get(one, 0.0), default=None)
        if first is None:
            return None
        if time.monotonic() - self._counted_at.get(first, float("-inf")) < REST_SECONDS:
            return None
        return _Walk(first, int(self._clock.now_ms()), Place())

    async def _step(self) -> None:
        if self._lock.term is None:
            self._walk = None
            await asyncio.sleep(LOOK_SECONDS)
            return
        began = time.monotonic()
        found = await self.count_a_slice()
        took = time.monotonic() - began
        await asyncio.sleep(took * (1 / SHARE - 1) if found else LOOK_SECONDS)
