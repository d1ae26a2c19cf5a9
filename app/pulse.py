"""Whether this process reaches what it stands on, how soon that answers, and whether it was paused.

Nothing is decided by it: it is for the metrics and the log, which tells of every change once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, Final

import structlog

from app.dispatch.death import canary_key
from app.ground import Ground
from app.metrics import Metrics
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.loops import Loop
from app.plumbing.redis import REDIS_ERRORS, ensure_writable

log = structlog.get_logger(__name__)

PULSE_SECONDS: Final = 1.0
PATIENCE_SECONDS: Final = 2.0
"""What has not answered by then is away."""
SLOW_SECONDS: Final = 0.5
QUICK_SECONDS: Final = 0.25
"""What was slow is quick again only below this: the log must not flutter."""
PAUSE_SECONDS: Final = 3.0
"""A second that took so much longer than a second was a pause of the process or the machine."""


class State(Enum):
    """How a part was found."""

    BACK = "back"
    SLOW = "slow"
    AWAY = "away"


class Part:
    """A server that this process needs, and how it was found last."""

    def __init__(
        self,
        name: str,
        ask: Callable[[], Awaitable[object]],
        errors: tuple[type[Exception], ...],
        metrics: Metrics,
    ) -> None:
        self._name = name
        self._ask = ask
        self._errors: tuple[type[Exception], ...] = (*errors, TimeoutError)
        self._up = metrics.part_up.labels(name)
        self._seconds = metrics.part_seconds.labels(name)
        self._state = State.BACK

    async def feel(self) -> None:
        """Ask it once, and say so if it was found otherwise than the last time."""
        began = time.monotonic()
        reason = None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._ask()
        except self._errors as error:
            reason = str(error) or type(error).__name__
        seconds = time.monotonic() - began
        self._up.set(reason is None)
        self._seconds.set(seconds)
        self._become(self._found(seconds, reason), seconds, reason)

    def _found(self, seconds: float, reason: str | None) -> State:
        if reason is not None:
            return State.AWAY
        limit = QUICK_SECONDS if self._state is State.SLOW else SLOW_SECONDS
        return State.SLOW if seconds > limit else State.BACK

    def _become(self, state: State, seconds: float, reason: str | None) -> None:
        before, self._state = self._state, state
        if state is before:
            return
        fields: dict[str, Any] = {"seconds": round(seconds, 3)}
        if reason is not None:
            fields["reason"] = reason
        say = log.info if state is State.BACK else log.warning
        say(f"{self._name}_{state.value}", **fields)


class Pulse:
    """Asks the database and Redis once a second: one small statement, one GET and one SET."""

    def __init__(self, ground: Ground) -> None:
        self._parts = (
            Part("database", ground.database.now, (DatabaseUnavailable,), ground.metrics),
            Part("redis", self._look_at_the_canary, REDIS_ERRORS, ground.metrics),
        )
        self._redis = ground.redis
        self._prefix = ground.settings.redis_prefix
        self._canary_key = canary_key(self._prefix)
        self._canary: str | bytes | None = None
        self._flushes = ground.metrics.redis_flushes
        self._paused = ground.metrics.paused
        self._loop = Loop("pulse", self._step)

    def start(self) -> None:
        """Start asking."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop asking."""
        await self._loop.stop()

    async def _look_at_the_canary(self) -> None:
        """Ask Redis for the key that only a flush takes away, and whether it takes writes."""
        found = await self._redis.get(self._canary_key)
        if self._canary is not None and found != self._canary:
            self._flushes.inc()
            log.warning("redis_flushed")
        self._canary = found
        await ensure_writable(self._redis, self._prefix)

    async def _step(self) -> None:
        slept_at = time.monotonic()
        await asyncio.sleep(PULSE_SECONDS)
        over = time.monotonic() - slept_at - PULSE_SECONDS
        if over > PAUSE_SECONDS:
            self._paused.inc(over)
            log.warning("process_was_paused", seconds=round(over, 1))
        await asyncio.gather(*(part.feel() for part in self._parts))
