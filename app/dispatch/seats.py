"""Which partitions this dispatcher works for: a lock for each, shared evenly with the others.

With one partition there is one lock, and whoever is first has it. With more, each dispatcher that
can dispatch announces itself in Redis; all of them see the same list, from which each knows how
many partitions are its own. It takes so many of those that are free, and lets go of what is over.
Nothing rests on the list but evenness: that a partition has one holder is what its lock and its
term are for.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from app.dispatch.lock import TRY_SECONDS, DispatchLock, lock_key
from app.fleet.portions import Portion, seats_of
from app.ground import Ground
from app.lifecycle.term import FIRST, open_partitions, read_partitions
from app.plumbing.bus import LOCK
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.loops import Loop
from app.plumbing.redis import REDIS_ERRORS

log = structlog.get_logger(__name__)

ALONE_SECONDS: Final = 60.0
"""So often one whose one partition is all there is looks whether another has opened more."""

# The list is by Redis's own clock: of the members' clocks nothing is asked.
_ANNOUNCE: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local holders = {}
for number = 2, #KEYS do holders[number - 1] = redis.call('GET', KEYS[number]) or '' end
return {redis.call('ZRANGE', KEYS[1], 0, -1), holders}
"""
_WITHDRAW: Final = "return redis.call('ZREM', KEYS[1], ARGV[1])"


def members_key(prefix: str) -> str:
    """Name the Redis key of the dispatchers among whom the partitions are shared."""
    return f"{prefix}:dispatch:members"


@dataclass(frozen=True, slots=True)
class _Seen:
    """The members in the order of their places, and what stands in each partition's lock."""

    members: Sequence[str]
    holders: Mapping[int, str]


class Seats:
    """The partitions that this process holds, each with the term of its lock."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._database = ground.database
        self._redis = ground.lock_redis
        self._prefix = ground.settings.redis_prefix
        self._life_ms = int(ground.settings.lock_seconds * 1000)
        self._wanted = ground.settings.dispatch_partitions
        self._token = uuid.uuid4().hex
        self._seen: frozenset[int] = frozenset(range(self._wanted))
        self._is_open = self._wanted == 1
        self._announced = False
        self._leaving: set[int] = set()
        self._look = asyncio.Event()
        self.first = DispatchLock(ground, token=self._token, wanted=self._wanted == 1)
        """The lock of partition 0: its holder does what is not per partition."""
        self.changed = self.first.changed
        self._locks = {FIRST: self.first}
        self.rounds = asyncio.Lock()
        """Held by whoever is claiming: no partition is let go of in between."""
        self.portion: Portion | None = None
        """Which part of the workers is this process's; None when it alone dispatches."""
        self._loop = Loop("seats", self._step, expected=(DatabaseUnavailable, *REDIS_ERRORS))
        ground.bus.subscribe(LOCK, lambda _signal: self._look.set())

    @property
    def terms(self) -> dict[int, int]:
        """The partitions that this process works for now, with their terms."""
        return {
            partition: term
            for partition, lock in self._locks.items()
            if (term := lock.term) is not None and partition not in self._leaving
        }

    @property
    def are_many(self) -> bool:
        """Whether others may claim for the same tenants and workers."""
        return len(self._seen) > 1

    def notice(self, partitions: Set[int]) -> None:
        """Look at once if one of these is not known: a process that wants more has opened it."""
        if not partitions <= self._seen:
            self._look.set()

    def term_of(self, partition: int) -> int | None:
        """Return the term of a partition while its lock is held, else None."""
        lock = self._locks.get(partition)
        return None if lock is None else lock.term

    def give_up(self, partition: int, term: int, reason: str) -> None:
        """Stop acting as the holder of a partition in this term: somebody knows a higher one."""
        lock = self._locks.get(partition)
        if lock is not None and lock.term == term:
            lock.give_up(reason)

    def start(self) -> None:
        """Start competing for locks."""
        self.first.start()
        self._loop.start()

    async def stop(self) -> None:
        """Stop, and release every lock so that others take over at once."""
        await self._loop.stop()
        # First, so that those who take the locks do not leave us our share.
        await self._withdraw()
        await asyncio.gather(*(lock.stop() for lock in self._locks.values()))

    async def _step(self) -> None:
        self._look.clear()
        try:
            partitions = await self._partitions()
            if len(partitions) == 1:
                await self._be_alone()
                return
            if not self._ground.clock.may_dispatch:
                await self._withdraw()
            else:
                await self._share(sorted(partitions))
        except (DatabaseUnavailable, *REDIS_ERRORS):
            if self.are_many:
                # One that cannot dispatch must not be counted on.
                self._want(())
                await self._withdraw()
            raise
        await self._wait(TRY_SECONDS)

    async def _be_alone(self) -> None:
        self.portion = None
        self._want((FIRST,))
        await self._wait(ALONE_SECONDS)

    async def _partitions(self) -> frozenset[int]:
        """Return the partitions that are wanted or in use, whoever wanted them."""
        if not self._is_open:

            async def open_them(connection: AsyncConnection) -> None:
                await open_partitions(connection, self._database, range(self._wanted))

            await self._database.write(open_them)
            self._is_open = True
        self._seen |= frozenset(await self._database.read(read_partitions))
        return self._seen

    async def _share(self, partitions: Sequence[int]) -> None:
        seen = await self._announce(partitions)
        place, of = seen.members.index(self._token), len(seen.members)
        fair = seats_of(place, of=of, partitions=len(partitions))
        senders = min(of, len(partitions))
        self.portion = Portion(place, senders) if senders > 1 and place < senders else None
        held = [one for one in partitions if self.term_of(one) is not None]
        for partition in held[fair:]:
            await self._leave(partition)
        free = [
            one
            for one, holder in seen.holders.items()
            if holder in ("", self._token) and one not in held
        ]
        # Each begins at another one, so that they seldom ask for the same.
        begin = place * len(free) // of
        self._want((*held[:fair], *[*free[begin:], *free[:begin]][: max(0, fair - len(held))]))

    async def _announce(self, partitions: Sequence[int]) -> _Seen:
        self._announced = True
        keys = [lock_key(self._prefix, one) for one in partitions]
        members, holders = await self._redis.eval(
            _ANNOUNCE,
            1 + len(keys),
            members_key(self._prefix),
            *keys,
            self._token,
            self._life_ms,
        )
        return _Seen(sorted(members), dict(zip(partitions, holders, strict=True)))

    def _want(self, partitions: Sequence[int]) -> None:
        """Compete for these and no others; what is held meanwhile is kept."""
        for partition in partitions:
            if partition not in self._locks:
                lock = self._locks[partition] = DispatchLock(
                    self._ground, partition, token=self._token, changed=self.changed, wanted=False
                )
                lock.start()
        for partition, lock in self._locks.items():
            lock.want(partition in partitions)

    async def _leave(self, partition: int) -> None:
        """Let another have a partition, once the claim that is under way is over."""
        log.info("partition_left", partition=partition)
        self._leaving.add(partition)
        try:
            async with self.rounds:
                await self._locks[partition].leave()
        finally:
            self._leaving.discard(partition)

    async def _withdraw(self) -> None:
        """Be counted no longer, as far as Redis can be told."""
        if not self._announced:
            return
        self._announced = False
        try:
            await self._redis.eval(_WITHDRAW, 1, members_key(self._prefix), self._token)
        except REDIS_ERRORS as error:
            log.info("not_withdrawn", error=str(error))

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._look.wait()
        except TimeoutError:
            return
