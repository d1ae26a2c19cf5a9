"""Retries: how many, how far apart, and who decides."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.lifecycle.retry import (
    EXPONENTIAL_JITTER,
    MAX_DELAY_MS,
    MOST_TRIES_BY_REQUEST,
    Backoff,
    GiveUp,
    RetryAfter,
    RetryPolicy,
    after_failure,
    next_try_pause_ms,
)

backoffs: st.SearchStrategy[Backoff] = st.sampled_from(["fixed", "exponential"])
policies = st.builds(
    RetryPolicy,
    max_retry=st.integers(0, 1000),
    interval_ms=st.integers(0, 86_400_000),
    backoff=backoffs,
)
jitters = st.floats(0, 1, exclude_max=True)
SCHEDULE = (0.0, 5.0, 15.0, 60.0, 300.0)


def after(
    policy: RetryPolicy,
    attempt: int,
    *,
    jitter: float = 0,
    retryable: bool = True,
    retry_after_ms: int | None = None,
) -> RetryAfter | GiveUp:
    return after_failure(
        policy,
        attempt=attempt,
        retryable=retryable,
        retry_after_ms=retry_after_ms,
        jitter=jitter,
    )


@given(policies, jitters)
def test_there_are_at_most_max_retry_plus_one_attempts(policy: RetryPolicy, jitter: float) -> None:
    attempts = 1
    while isinstance(after(policy, attempts, jitter=jitter), RetryAfter):
        attempts += 1
    assert attempts == policy.max_retry + 1


@given(policies, st.integers(1, 2000), jitters)
def test_a_delay_is_never_negative_nor_longer_than_a_day(
    policy: RetryPolicy, attempt: int, jitter: float
) -> None:
    decision = after(policy, attempt, jitter=jitter)
    if isinstance(decision, RetryAfter):
        assert 0 <= decision.delay_ms <= MAX_DELAY_MS


@given(policies, st.integers(1, 2000), jitters)
def test_what_may_not_be_retried_is_given_up(
    policy: RetryPolicy, attempt: int, jitter: float
) -> None:
    assert after(policy, attempt, jitter=jitter, retryable=False) == GiveUp()


@given(policies, st.integers(1, 1000), st.integers(0, 31_536_000_000))
def test_a_delay_that_the_handler_asked_for_is_taken_as_asked_within_the_budget(
    policy: RetryPolicy, attempt: int, asked: int
) -> None:
    decision = after(policy, attempt, retry_after_ms=asked)
    assert decision == (RetryAfter(asked) if attempt <= policy.max_retry else GiveUp())


def test_a_fixed_backoff_waits_the_same_each_time() -> None:
    policy = RetryPolicy(5, 1500, "fixed")
    assert [after(policy, n, jitter=0.9) for n in range(1, 6)] == [RetryAfter(1500)] * 5


def test_an_exponential_backoff_doubles() -> None:
    policy = RetryPolicy(5, 1000, "exponential")
    delays = [after(policy, n) for n in range(1, 6)]
    assert delays == [RetryAfter(1000 * 2**n) for n in range(5)]


@given(st.integers(1, 100_000), st.integers(1, 12), jitters)
def test_jitter_lengthens_an_exponential_delay_by_at_most_a_fifth(
    interval_ms: int, attempt: int, jitter: float
) -> None:
    decision = after(RetryPolicy(50, interval_ms, "exponential"), attempt, jitter=jitter)
    assert isinstance(decision, RetryAfter)
    plain = min(interval_ms * 2 ** (attempt - 1), MAX_DELAY_MS)
    longest = min(math.ceil(plain * (1 + EXPONENTIAL_JITTER)), MAX_DELAY_MS)
    assert plain <= decision.delay_ms <= longest


def pauses_of(schedule: tuple[float, ...], jitter: float, asked: int | None = None) -> list[int]:
    """The pauses of a callback that fails at once until it is given up, ms."""
    pauses: list[int] = []
    while (
        pause := next_try_pause_ms(
            schedule,
            tries=len(pauses) + 1,
            owed_ms=sum(pauses),
            retry_after_ms=asked,
            jitter=jitter,
        )
    ) is not None:
        pauses.append(pause)
    return pauses


@given(jitters, st.sampled_from([0.0, 5.0]))
def test_a_callbacks_pauses_follow_the_schedule_within_a_fifth(jitter: float, first: float) -> None:
    pauses = pauses_of((first, *SCHEDULE[1:]), jitter)
    assert len(pauses) == len(SCHEDULE) - 1, "as many tries as the schedule has"
    for pause, seconds in zip(pauses, SCHEDULE[1:], strict=True):
        assert seconds * 800 <= pause <= seconds * 1200 + 1


@pytest.mark.parametrize("tries", [5, 6, 100])
def test_a_callback_is_given_up_when_its_schedule_is_spent(tries: int) -> None:
    owed = sum(SCHEDULE) * 1000
    assert (
        next_try_pause_ms(SCHEDULE, tries=tries, owed_ms=int(owed), retry_after_ms=1, jitter=0.5)
        is None
    )


@given(st.integers(1, 4), st.integers(0, 2**40), jitters)
def test_a_receivers_retry_after_is_obeyed_from_a_second_to_a_day(
    tries: int, asked: int, jitter: float
) -> None:
    told = next_try_pause_ms(
        SCHEDULE, tries=tries, owed_ms=10**7, retry_after_ms=asked or None, jitter=jitter
    )
    if asked:
        assert told == min(max(asked, 1000), 86_400_000)
    else:
        assert told is not None
        assert SCHEDULE[tries] * 800 <= told


@given(st.integers(1, 100_000), jitters)
def test_a_retry_after_makes_no_callback_be_given_up_sooner(asked: int, jitter: float) -> None:
    pauses = pauses_of(SCHEDULE, jitter, asked)
    assert len(pauses) >= len(SCHEDULE) - 1
    assert sum(pauses) >= 0.8 * 1000 * sum(SCHEDULE)


def test_a_receiver_that_asks_for_a_second_for_ever_is_called_a_bounded_number_of_times() -> None:
    week = (*SCHEDULE, 7 * 86_400.0)
    pauses = pauses_of(week, 0.5, 1000)
    assert set(pauses[:MOST_TRIES_BY_REQUEST]) == {1000}
    assert len(pauses) < MOST_TRIES_BY_REQUEST + len(week)


def test_tries_that_came_sooner_than_by_the_schedule_use_up_nothing_of_it() -> None:
    """As those that an operator asked for during an outage."""
    after = [
        next_try_pause_ms(SCHEDULE, tries=20, owed_ms=owed, retry_after_ms=None, jitter=0.5)
        for owed in (-9_000, 0, 5_000, 20_000, 80_000, 380_000)
    ]
    # The first: the database's clock was set back.
    assert after == [5_000, 5_000, 15_000, 60_000, 300_000, None]
