"""How many new jobs a tenant may submit now: by its rate, and by what it has waiting already.

The rate is counted in Redis for all dispatchers together; while Redis is away each counts by
itself, so that a Redis that is lost refuses nobody. Of a high rate a little is taken ahead, so that
not every submission waits for Redis. What waits is counted from the rows, up to the limit, at most
once a second, and less often where counting takes long; only those for whom what is known would
not do wait for a count. A tenant without these limits costs neither a statement nor a round trip.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple, TypeVar

import structlog
from redis.asyncio import Redis

from app.access.limits import LimitBook
from app.access.stored_quota import StoredQuota
from app.edge.problems import Problem
from app.lifecycle.limits import count_waiting
from app.plumbing.database import Database
from app.plumbing.group_commit import GroupCommit, Overloaded
from app.plumbing.redis import REDIS_ERRORS
from app.plumbing.single_flight import SingleFlight

log = structlog.get_logger(__name__)

REDIS_SECONDS: Final = 0.25
AWAY_SECONDS: Final = 1.0
"""So long Redis is not asked again after it did not answer."""
AHEAD_SECONDS: Final = 0.02
"""What a rate brings in so long may be taken ahead: nothing of less than 50 a second."""
AHEAD_KEPT_SECONDS: Final = 0.1
"""What was taken ahead and is not used by then is given up."""
COUNTED_SECONDS: Final = 1.0
COUNTING_SHARE: Final = 0.05
"""Of the time no more is spent on counting what one tenant has waiting."""
WAIT_SECONDS: Final = 1
MOST_KNOWN: Final = 10_000
MOST_TOGETHER: Final = 500

Value = TypeVar("Value")

# The generic cell rate algorithm: one number, the time at which the bucket is full again.
_TAKE: Final = """
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local each, burst, wanted = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local full = math.max(now, tonumber(redis.call('GET', KEYS[1]) or 0))
local room = math.floor((now + burst * each - full) / each + 0.000001)
local taken = math.max(0, math.min(wanted, room))
full = full + taken * each
if taken > 0 then
  redis.call('SET', KEYS[1], string.format('%.0f', full), 'PX', math.ceil((full - now) / 1000) + 1)
end
return {taken, math.max(0, room - taken), string.format('%.0f', full - now)}
"""


class Asked(NamedTuple):
    """So many new jobs of a tenant with this rate."""

    tenant_id: int
    rate: float
    wanted: int


@dataclass(frozen=True, slots=True)
class Taken:
    """How many of the wanted tokens there were, how many are left, and when it is full again."""

    taken: int
    left: int
    full_in_us: float


@dataclass(slots=True)
class LocalBucket:
    """The same bucket for this process alone; times are microseconds."""

    full: float = 0.0

    def take(self, wanted: int, *, each: float, burst: int, now: float) -> Taken:
        """Take up to so many tokens, of which one comes each `each` microseconds."""
        self.full = max(now, self.full)
        room = math.floor((now + burst * each - self.full) / each + 1e-6)
        taken = max(0, min(wanted, room))
        self.full += taken * each
        return Taken(taken, max(0, room - taken), self.full - now)


@dataclass(frozen=True, slots=True)
class Admitted:
    """Of the jobs that were asked for so many may be new; `refusal` is for the others.

    `headers` tell what is left, for the answer.
    """

    count: int
    refusal: Problem | None
    headers: dict[str, str]


@dataclass(slots=True)
class _Ahead:
    """Tokens of a rate that were taken ahead, and the bucket as it was then (monotonic seconds)."""

    rate: float
    bucket: Taken
    count: int
    until: float

    def spend(self, wanted: int, rate: float) -> Taken | None:
        """Take all that is wanted, or nothing."""
        if self.count < wanted or self.rate != rate or time.monotonic() >= self.until:
            return None
        self.count -= wanted
        return Taken(wanted, self.bucket.left + self.count, self.bucket.full_in_us)


@dataclass(slots=True)
class _Counted:
    """What a tenant had waiting at a time (monotonic seconds), and what it was let in since.

    It is counted anew after `until`; after `at_last` nobody is let in before that.
    """

    waiting: int = 0
    until: float = float("-inf")
    at_last: float = float("-inf")
    since: int = 0


class SubmissionQuota:
    """Says how many of some new jobs of a tenant are within its limits."""

    def __init__(
        self, database: Database, redis: Redis, prefix: str, limits: LimitBook, stored: StoredQuota
    ) -> None:
        self._database = database
        self._redis = redis
        self._prefix = prefix
        self._limits = limits
        self._stored = stored
        self._script = redis.register_script(_TAKE)
        self._away_until = float("-inf")
        self._buckets: dict[int, LocalBucket] = {}
        self._ahead: dict[int, _Ahead] = {}
        self._counted: dict[int, _Counted] = {}
        self._counts: SingleFlight[int, _Counted] = SingleFlight()
        # Those who ask while Redis is being asked share the next round trip.
        self._takes: GroupCommit[Asked, Taken] = GroupCommit(
            self._take_together, batch_limit=MOST_TOGETHER, backlog_limit=MOST_KNOWN
        )

    async def admit(self, tenant_id: int, params: Sequence[str | None]) -> Admitted | None:
        """Let in new jobs with these params, the first ones first; None is what has no limit.

        Raises:
            Problem: `overloaded`.
            DatabaseUnavailable: what waits cannot be counted.
        """
        limits = self._limits.of(tenant_id)
        rate, most = limits.submissions_per_second, limits.waiting_jobs
        wanted = len(params)
        if not wanted or (rate is None and most is None and limits.stored_bytes is None):
            return None
        count, refusal, headers = wanted, None, dict[str, str]()
        if most is not None:
            count = min(count, await self._room(tenant_id, most, wanted))
            if count < wanted:
                refusal = _too_many_waiting(most)
        fitting, too_much = self._stored.fitting(tenant_id, params)
        if fitting < count:
            count, refusal = fitting, too_much
        counted = self._counted.get(tenant_id, _Counted())
        # Before anything is waited for: others who ask meanwhile must not count on the same room.
        counted.since += (reserved := count)
        try:
            if rate is not None:
                taken = await self._take_of(tenant_id, rate, count)
                if taken.taken < count:
                    count, refusal = taken.taken, _too_fast(rate, taken)
                headers = _headers(rate, taken)
                if refusal is not None:
                    refusal.headers.update(headers)
        except BaseException:
            counted.since -= reserved
            raise
        counted.since -= reserved - count
        self._stored.note(tenant_id, params[:count])
        return Admitted(count, refusal, headers)

    async def _take_of(self, tenant_id: int, rate: float, wanted: int) -> Taken:
        ahead = self._ahead.get(tenant_id)
        taken = None if ahead is None else ahead.spend(wanted, rate)
        if taken is not None:
            return taken
        try:
            return await self._takes.add(Asked(tenant_id, rate, wanted))
        except Overloaded:
            raise Problem("overloaded", "Repeat the same request after Retry-After.") from None

    async def _take_together(self, asked: Sequence[Asked]) -> list[Taken]:
        """Take for each tenant what all ask for, and deal it out in the order of asking."""
        rates = {one.tenant_id: one.rate for one in asked}
        wanted: Counter[int] = Counter()
        for one in asked:
            wanted[one.tenant_id] += one.wanted
        taken_by = await asyncio.gather(
            *(
                self._take_ahead(tenant_id, rate, wanted[tenant_id])
                for tenant_id, rate in rates.items()
            )
        )
        found = dict(zip(rates, taken_by, strict=True))
        left = {tenant_id: taken.taken for tenant_id, taken in found.items()}
        dealt = []
        for one in asked:
            own = min(one.wanted, left[one.tenant_id])
            left[one.tenant_id] -= own
            dealt.append(replace(found[one.tenant_id], taken=own))
        return dealt

    async def _take_ahead(self, tenant_id: int, rate: float, wanted: int) -> Taken:
        """Take what is wanted, with what is left of what was taken ahead, and some ahead again."""
        before = self._ahead.pop(tenant_id, None)
        kept = 0
        if before is not None and before.rate == rate and time.monotonic() < before.until:
            kept = before.count
        taken = await self._take(
            tenant_id, rate, max(0, wanted - kept) + math.floor(rate * AHEAD_SECONDS)
        )
        over = kept + taken.taken - wanted
        if over <= 0:
            return replace(taken, taken=kept + taken.taken)
        until = time.monotonic() + AHEAD_KEPT_SECONDS
        _kept(self._ahead, tenant_id, lambda: _Ahead(rate, taken, over, until))
        return replace(taken, taken=wanted, left=taken.left + over)

    async def _take(self, tenant_id: int, rate: float, wanted: int) -> Taken:
        each, burst = 1_000_000 / rate, burst_of(rate)
        if time.monotonic() >= self._away_until:
            try:
                async with asyncio.timeout(REDIS_SECONDS):
                    taken, left, full_in = await self._script(
                        keys=[f"{self._prefix}:submissions:{tenant_id}"], args=[each, burst, wanted]
                    )
                # Where Redis is away next, this goes on from here: nobody gets a burst again.
                known = _kept(self._buckets, tenant_id, LocalBucket)
                known.full = time.monotonic() * 1_000_000 + float(full_in)
                return Taken(int(taken), int(left), float(full_in))
            except REDIS_ERRORS as error:
                self._away_until = time.monotonic() + AWAY_SECONDS
                log.info("submissions_counted_here", error=str(error) or type(error).__name__)
        bucket = _kept(self._buckets, tenant_id, LocalBucket)
        return bucket.take(wanted, each=each, burst=burst, now=time.monotonic() * 1_000_000)

    async def _room(self, tenant_id: int, most: int, wanted: int) -> int:
        counted = _kept(self._counted, tenant_id, _Counted)
        now = time.monotonic()
        if now >= counted.until:
            count = partial(self._count, tenant_id, counted, most)
            if now >= counted.at_last or counted.waiting + counted.since + wanted > most:
                counted = await self._counts.call(tenant_id, count)
            else:
                _ = self._counts.begin(tenant_id, count)
        return max(0, most - counted.waiting - counted.since)

    async def _count(self, tenant_id: int, counted: _Counted, most: int) -> _Counted:
        began, before = time.monotonic(), counted.since
        waiting = await self._database.read(
            lambda connection: count_waiting(connection, tenant_id, most=most)
        )
        now = time.monotonic()
        span = max(COUNTED_SECONDS, (now - began) / COUNTING_SHARE)
        counted.waiting = waiting
        # What was let in while it was counted may not be in the count.
        counted.since -= before
        counted.until, counted.at_last = now + span, now + 2 * span
        return counted


def burst_of(rate: float) -> int:
    """Return how many may come at once: what a second brings, and one at least."""
    return max(1, math.floor(rate))


def _kept(known: dict[int, Value], tenant_id: int, new: Callable[[], Value]) -> Value:
    if tenant_id not in known:
        if len(known) >= MOST_KNOWN:
            known.clear()
        known[tenant_id] = new()
    return known[tenant_id]


def _headers(rate: float, taken: Taken) -> dict[str, str]:
    """Write the fields of draft-ietf-httpapi-ratelimit-headers; whole seconds, rounded up."""
    burst = burst_of(rate)
    window = math.ceil(burst / rate)
    full_in = math.ceil(taken.full_in_us / 1_000_000)
    return {
        "RateLimit-Policy": f'"submissions";q={burst};w={window}',
        "RateLimit": f'"submissions";r={taken.left};t={full_in}',
    }


def _too_fast(rate: float, taken: Taken) -> Problem:
    # The bucket has room for one when it is full but for one.
    wait_us = taken.full_in_us - (burst_of(rate) - 1) * 1_000_000 / rate
    return Problem(
        "too_many_submissions",
        f"The tenant may submit {rate:g} new jobs a second: repeat this after Retry-After.",
        retry_after_seconds=max(1, math.ceil(wait_us / 1_000_000)),
    )


def _too_many_waiting(most: int) -> Problem:
    return Problem(
        "too_many_waiting",
        f"{most} jobs of the tenant wait already, which is its limit: repeat this when some "
        "have begun.",
        retry_after_seconds=WAIT_SECONDS,
    )
