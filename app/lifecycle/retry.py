"""Whether and when a failed attempt is followed by another. Pure: chance is an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

Backoff = Literal["fixed", "exponential"]

MAX_DELAY_MS: Final = 24 * 3600 * 1000
MAX_ASKED_MS: Final = 366 * 24 * 3600 * 1000
EXPONENTIAL_JITTER: Final = 0.2
SHORTEST: Final = 0.8
"""The least part of a callback's pause that is waited."""
SHORTEST_ASKED_MS: Final = 1000
MOST_TRIES_BY_REQUEST: Final = 100
"""So many failed tries of a callback a receiver may have sooner than the schedule has them."""
MAX_RETURNS: Final = 10
"""How often a task may be given back without the attempt being counted."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """A job's own policy: at most `max_retry` + 1 attempts."""

    max_retry: int
    interval_ms: int
    backoff: Backoff


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """Another attempt is due `delay_ms` from now."""

    delay_ms: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No attempt follows: the job has failed."""


def after_failure(
    policy: RetryPolicy,
    *,
    attempt: int,
    retryable: bool,
    retry_after_ms: int | None,
    jitter: float,
) -> RetryAfter | GiveUp:
    """Decide what follows attempt number `attempt` (from 1); `jitter` is a draw from [0, 1).

    A delay that the handler asked for is taken as asked, up to a year. Exponential means
    interval * 2^(n-1) after the n-th attempt, lengthened by up to a fifth, at most a day.
    """
    if not retryable or attempt > policy.max_retry:
        return GiveUp()
    if retry_after_ms is not None:
        return RetryAfter(min(retry_after_ms, MAX_ASKED_MS))
    if policy.backoff == "fixed":
        return RetryAfter(policy.interval_ms)
    doubled = policy.interval_ms * 2 ** min(attempt - 1, 40)
    return RetryAfter(min(int(doubled * (1 + EXPONENTIAL_JITTER * jitter)), MAX_DELAY_MS))


def next_try_pause_ms(
    schedule_seconds: tuple[float, ...],
    *,
    tries: int,
    owed_ms: int,
    retry_after_ms: int | None,
    jitter: float,
) -> int | None:
    """Return the pause before a callback's next try after `tries` failed ones, or None when spent.

    A pause is lengthened or shortened by up to a fifth (`jitter` from [0, 1)). A receiver's own
    Retry-After is taken as asked, from a second to a day; after `MOST_TRIES_BY_REQUEST` tries it
    can only lengthen the pause.

    The schedule is spent by time as well as by tries: those that came sooner than by it, since the
    receiver or an operator asked for them, use up nothing of what is still to come `owed_ms` after
    the callback was made.
    """
    place = min(tries, _begun(schedule_seconds, owed_ms))
    if place >= len(schedule_seconds):
        return None
    pause = math.ceil(schedule_seconds[place] * 1000 * (SHORTEST + 2 * (1 - SHORTEST) * jitter))
    if not retry_after_ms:
        return pause
    asked = min(max(retry_after_ms, SHORTEST_ASKED_MS), MAX_DELAY_MS)
    return asked if tries <= MOST_TRIES_BY_REQUEST else max(pause, asked)


def _begun(schedule_seconds: tuple[float, ...], owed_ms: int) -> int:
    """Return how many tries there can have been by the schedule alone, its pauses the shortest.

    The first is made at once, whatever the schedule begins with.
    """
    moments = accumulate((0.0, *schedule_seconds[1:]))
    return sum(int(moment * 1000 * SHORTEST) <= max(0, owed_ms) for moment in moments)


def longest_wait_ms(schedule_seconds: tuple[float, ...]) -> int:
    """Return how long a callback is owed at most while its host is not called: all pauses, a day.

    A breaker that is open takes no try from the schedule, and would else keep it for ever.
    """
    return int(sum(schedule_seconds) * 1000 * 1.2) + MAX_DELAY_MS
