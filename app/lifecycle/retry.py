"""Whether and when a failed attempt is followed by another. Pure: chance is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Backoff = Literal["fixed", "exponential"]

MAX_DELAY_MS: Final = 24 * 3600 * 1000
MAX_ASKED_MS: Final = 366 * 24 * 3600 * 1000
EXPONENTIAL_JITTER: Final = 0.2
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
    schedule_seconds: tuple[float, ...], *, tries: int, retry_after_ms: int | None, jitter: float
) -> int | None:
    """Return the pause before a callback's next try after `tries` failed ones, or None when spent.

    A pause is lengthened or shortened by up to a fifth (`jitter` from [0, 1)); a receiver's own
    Retry-After can only lengthen it.
    """
    if tries >= len(schedule_seconds):
        return None
    pause = schedule_seconds[tries] * 1000 * (0.8 + 0.4 * jitter)
    return int(max(pause, min(retry_after_ms or 0, MAX_DELAY_MS)))


def longest_wait_ms(schedule_seconds: tuple[float, ...]) -> int:
    """Return how long a callback is owed at most while its host is not called: all pauses, a day.

    A breaker that is open takes no try from the schedule, and would else keep it for ever.
    """
    return int(sum(schedule_seconds) * 1000 * 1.2) + MAX_DELAY_MS
