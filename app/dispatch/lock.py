"""The lock of a partition: one holder at a time by Redis, fenced by a term in the database."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Final

import structlog

from app.ground import Ground
from app.lifecycle.term import FIRST, TermRowMissing, begin_term, read_term
from app.plumbing.bus import LOCK, WAKE
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.loops import Loop
from app.plumbing.redis import REDIS_ERRORS

log = structlog.get_logger(__name__)

TRY_SECONDS: Final = 1.0
EXTEND_AGAIN_SECONDS: Final = 0.2

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


def lock_key(prefix: str, partition: int = FIRST) -> str:
    """Name the Redis key of the lock of a partition."""
    return f"{prefix}:dispatch:lock:{partition}"


class DispatchLock:
    """Acquires while it is wanted, extends at a third of its life, and releases one lock.

    `term` is there only while the lock cannot have run out: its life is counted from before the
    last successful extension was sent. The database is asked as often as Redis: a holder that it
    does not answer, or that it knows a later term than, lets go.
    """

    def __init__(
        self,
        ground: Ground,
        partition: int = FIRST,
        *,
        token: str | None = None,
        changed: asyncio.Event | None = None,
        wanted: bool = True,
    ) -> None:
        self.partition = partition
        self._redis = ground.lock_redis
        self._database = ground.database
        self._clock = ground.clock
        self._bus = ground.bus
        self._metrics = ground.metrics
        self._key = lock_key(ground.settings.redis_prefix, partition)
        self._life = ground.settings.lock_seconds
        self._token = token or uuid.uuid4().hex
        self._wanted = wanted
        self._valid_until = float("-inf")
        self._confirmed_until = float("-inf")
        self._term: int | None = None
        self._may_own = False
        self._free = asyncio.Event()
        self._changed = changed or asyncio.Event()
        self._loop = Loop(
            f"dispatch-lock-{partition}", self._step, expected=(*REDIS_ERRORS, DatabaseUnavailable)
        )
        ground.bus.subscribe(LOCK, lambda _signal: self._free.set())

    @property
    def token(self) -> str:
        """What stands in the lock while this process holds it."""
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
        """Set whenever the lock was won or lost; all locks of a process may share it."""
        return self._changed

    def start(self) -> None:
        """Start competing for the lock."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop, and release the lock so that another takes over at once."""
        await self._loop.stop()
        self._forget()
        if self._may_own:
            await self._release()

    def want(self, wanted: bool) -> None:
        """Compete for the lock, or no longer; one that is held is kept."""
        if wanted and not self._wanted:
            self._free.set()
        self._wanted = wanted

    async def leave(self) -> None:
        """Let another process have the lock, and do not compete for it until it is wanted."""
        self._wanted = False
        self._forget()
        if self._may_own:
            await self._release()

    def give_up(self, reason: str) -> None:
        """Stop acting as the holder: a worker or the database knows a higher term."""
        log.warning("lock_given_up", reason=reason, partition=self.partition, term=self._term)
        self._metrics.lock_lost.inc()
        self._forget()

    async def _step(self) -> None:
        if self._term is None:
            await self._compete()
        else:
            await self._extend()

    async def _compete(self) -> None:
        # Before it is asked: it may be released, and that be heard, before its refusal arrives.
        self._free.clear()
        sent = time.monotonic()
        if self._wanted and self._clock.may_dispatch:
            # From here on the lock may be ours, whether or not the answer comes back.
            self._may_own = True
            if await self._redis.eval(_ACQUIRE, 1, self._key, self._token, self._life_ms):
                await self._begin(sent)
                return
            self._may_own = False
        try:
            async with asyncio.timeout(TRY_SECONDS):
                await self._free.wait()
        except TimeoutError:
            return

    async def _begin(self, sent: float) -> None:
        """Start a term; a process that cannot reach the database must not keep the others out."""
        try:
            term = await self._database.write(
                lambda connection: begin_term(
                    connection, self._database, self._token, self.partition
                )
            )
        except Exception:
            await self._release()
            await asyncio.sleep(2 * TRY_SECONDS)
            raise
        self._valid_until = self._confirmed_until = sent + self._life
        if not self._wanted:
            await self._release()
        if not self.is_valid or not self._wanted:
            return
        self._term = term
        self._show(term)
        log.info("lock_held", partition=self.partition, term=term)
        self._changed.set()
        # What dispatches for other partitions already sleeps until there is something to do.
        self._bus.publish(WAKE, [], here_only=True)

    async def _extend(self) -> None:
        await asyncio.sleep(self._life / 3)
        await self._extend_in_redis()
        if self._term is not None:
            await self._confirm_in_database()

    async def _extend_in_redis(self) -> None:
        while self._term is not None:
            sent = time.monotonic()
            try:
                extended = await self._redis.eval(_EXTEND, 1, self._key, self._token, self._life_ms)
            except REDIS_ERRORS as error:
                # One lost reply must not cost the lock: there is time to ask again.
                if not self.is_valid:
                    self._lose("it could not be extended in time")
                    raise
                log.info("lock_not_extended_yet", error=str(error))
                await asyncio.sleep(EXTEND_AGAIN_SECONDS)
                continue
            if not extended or sent >= self._valid_until:
                self._lose("it ran out")
            else:
                self._valid_until = sent + self._life
            return

    async def _confirm_in_database(self) -> None:
        """Give the lock up when the database knows a later term, or cannot be asked for long."""
        asked = time.monotonic()
        reason = None
        try:
            async with asyncio.timeout(self._life / 3):
                term = await self._database.read(
                    lambda connection: read_term(connection, self.partition)
                )
        except (DatabaseUnavailable, TermRowMissing, TimeoutError):
            if time.monotonic() >= self._confirmed_until:
                reason = "the database cannot be asked for its term"
        else:
            self._confirmed_until = asked + self._life
            if term != self._term:
                reason = "the database knows a later term"
        if not self._clock.may_dispatch:
            reason = "this process's clock is more than 5 s off the database's"
        if reason is not None and self._term is not None:
            self._lose(reason)
            await self._release()
            # Somebody else's turn.
            await asyncio.sleep(2 * TRY_SECONDS)

    async def _release(self) -> None:
        self._may_own = False
        try:
            await self._redis.eval(_RELEASE, 1, self._key, self._token)
        except REDIS_ERRORS as error:
            log.info("lock_not_released", error=str(error))
        self._bus.publish(LOCK, [])

    def _lose(self, reason: str) -> None:
        if self._term is None:  # it was left meanwhile
            return
        log.warning("lock_lost", reason=reason, partition=self.partition, term=self._term)
        self._metrics.lock_lost.inc()
        self._forget()

    def _forget(self) -> None:
        self._term = None
        self._valid_until = float("-inf")
        self._show(None)
        self._changed.set()

    def _show(self, term: int | None) -> None:
        if self.partition == FIRST:
            self._metrics.lock_held.set(term is not None)
            if term is not None:
                self._metrics.term.set(term)

    @property
    def _life_ms(self) -> int:
        return int(self._life * 1000)
