"""A breaker opens after failures in a row, pauses longer each time, and closes by an answer."""

from __future__ import annotations

from worker.breaker import Breaker


def test_it_opens_after_so_many_failures_in_a_row_and_not_before() -> None:
    breaker = Breaker(limit=3, first_pause_seconds=5)
    for answered in (False, False, True, False, False):
        breaker.note(answered=answered, now=0)
    assert breaker.wait_seconds(0) == 0
    breaker.note(answered=False, now=10)
    assert breaker.wait_seconds(10) == 5
    assert breaker.wait_seconds(16) == 0


def test_calls_that_were_under_way_when_it_opened_do_not_lengthen_the_pause() -> None:
    breaker = Breaker(limit=1, first_pause_seconds=5)
    for now in (0.0, 1.0, 4.0):
        breaker.note(answered=False, now=now)
    assert breaker.wait_seconds(4) == 1


def test_each_failed_trial_doubles_the_pause_up_to_twelve_times_the_first() -> None:
    breaker = Breaker(limit=1, first_pause_seconds=5)
    now, pauses = 0.0, []
    for _ in range(6):
        breaker.note(answered=False, now=now)
        pauses.append(breaker.wait_seconds(now))
        now += pauses[-1]
    assert pauses == [5, 10, 20, 40, 60, 60]
    breaker.note(answered=True, now=now)
    assert breaker.is_closed
    breaker.note(answered=False, now=now)
    assert breaker.wait_seconds(now) == 5
