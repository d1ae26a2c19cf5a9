"""The dispatch lock: one holder at a time by Redis, fenced by a term in the database."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Final

import structlog

from app.ground import Ground
from app.lifecycle.term import begin_term
from app.plumbing.bus import LOCK
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.loops import Loop
from app.plumbing.redis import REDIS_ERRORS

log = structlog.get_logger(__name__)

TRY_SECONDS: Final = 1.0

# A client whose first reply was lost finds its own token, not somebody else's lock.
_ACQUIRE: Final = """
local holder = redis.call('GET', KEYS[1])
if holder == false or holder == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return 1
end
return 0
"""
_EXTEND: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
"""
_RELEASE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
"""


class DispatchLock:
    """Acquires, extends at a third of its life, and releases the lock of partition 0.

    `held` is true only while the lock cannot have run out: its life is counted from before the
    last successful extension was sent.
    """

    def __init__(
        self,
        ground: Ground,
    ) -> None:
        self._redis = ground.lock_redis
        self._database = ground.database
        self._clock = ground.clock
        self._bus = ground.bus
        self._metrics = ground.metrics
        self._key = f"{ground.settings.redis_prefix}:dispatch:lock:0"
        self._life = ground.settings.lock_seconds
        self._token = uuid.uuid4().hex
        self._valid_until = float("-inf")
        self._term: int | None = None
        self._free = asyncio.Event()
        self._changed = asyncio.Event()
        self._loop = Loop(
            "dispatch-lock", self._step, expected=(*REDIS_ERRORS, DatabaseUnavailable)
        )
        ground.bus.subscribe(LOCK, lambda _signal: self._free.set())

    @property
    def holder(self) -> str:
        """The token that names this process in the lock and in the term's row."""
        return self._token

    @property
    def term(self) -> int | None:
        """The term while the lock is held, else None."""
        return self._term if self._term is not None and self.is_valid else None

    @property
    def is_valid(self) -> bool:
        """True while the lock cannot have run out."""
        return time.monotonic() < self._valid_until

    @property
    def changed(self) -> asyncio.Event:
        """Set whenever the lock was won or lost."""
        return self._changed

    def start(self) -> None:
        """Start competing for the lock."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop, and release the lock so that another takes over at once."""
        await self._loop.stop()
        held = self._term is not None
        self._forget()
        if held:
            try:
                await self._redis.eval(_RELEASE, 1, self._key, self._token)
            except REDIS_ERRORS as error:
                log.info("lock_not_released", error=str(error))
            self._bus.publish(LOCK, [])

    def give_up(self, reason: str) -> None:
        """Stop acting as the holder: a worker or the database knows a higher term."""
        log.warning("lock_given_up", reason=reason, term=self._term)
        self._forget()

    async def _step(self) -> None:
        if self._term is None:
            await self._compete()
        else:
            await self._extend()

    async def _compete(self) -> None:
        sent = time.monotonic()
        if self._clock.may_dispatch and await self._redis.eval(
            _ACQUIRE, 1, self._key, self._token, self._life_ms
        ):
            term = await self._database.write(
                lambda connection: begin_term(connection, self._database, self._token)
            )
            self._valid_until = sent + self._life
            if not self.is_valid:
                return
            self._term = term
            self._metrics.lock_held.set(1)
            self._metrics.term.set(term)
            log.info("lock_held", term=term)
            self._changed.set()
            return
        self._free.clear()
        try:
            async with asyncio.timeout(TRY_SECONDS):
                await self._free.wait()
        except TimeoutError:
            return

    async def _extend(self) -> None:
        await asyncio.sleep(self._life / 3)
        sent = time.monotonic()
        try:
            extended = await self._redis.eval(_EXTEND, 1, self._key, self._token, self._life_ms)
        except REDIS_ERRORS:
            if not self.is_valid:
                self._lose("it could not be extended in time")
            raise
        if not extended or sent >= self._valid_until:
            self._lose("it ran out")
            return
        if self._term is not None and not self._clock.may_dispatch:
            self._lose("this process's clock is more than 5 s off the database's")
            await self._redis.eval(_RELEASE, 1, self._key, self._token)
            return
        self._valid_until = sent + self._life

    def _lose(self, reason: str) -> None:
        log.warning("lock_lost", reason=reason, term=self._term)
        self._forget()

    def _forget(self) -> None:
        self._term = None
        self._valid_until = float("-inf")
        self._metrics.lock_held.set(0)
        self._changed.set()

    @property
    def _life_ms(self) -> int:
        return int(self._life * 1000)
