"""Intervals are arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.schedules.interval import IntervalTimes, spread_of

DAY_MS = 86_400_000


@given(
    every=st.integers(1, 500),
    start=st.integers(-1000, 1000),
    instant=st.integers(-3000, 3000),
    later=st.integers(0, 3000),
)
def test_an_interval_fires_at_its_start_and_then_evenly(
    every: int, start: int, instant: int, later: int
) -> None:
    times = IntervalTimes(every, start)
    fires = [start + number * every for number in range(8000 // every + 8000)]
    assert times.next_after(instant) == next(fire for fire in fires if fire > instant)
    before = [fire for fire in fires if fire < instant]
    assert times.previous_before(instant) == (before[-1] if before else None)
    until = instant + later
    assert times.count(instant, until) == sum(instant < fire <= until for fire in fires)


def test_a_year_of_tenths_of_a_second_is_counted_at_once() -> None:
    assert IntervalTimes(100, 0).count(0, 365 * DAY_MS) == 365 * 864_000


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="1 ms"):
        IntervalTimes(0, 0)


def test_the_spread_is_the_same_for_ever() -> None:
    assert [spread_of(name, 60_000) for name in ("1", "2", "nightly")] == [10_629, 12_533, 10_785]
    assert spread_of("1", 0) == 0


def test_a_thousand_nightly_schedules_are_spread_evenly() -> None:
    spreads = [spread_of(str(number), 59_999) for number in range(1000)]
    assert all(0 <= spread <= 59_999 for spread in spreads)
    in_each_second = [
        sum(second * 1000 <= spread < (second + 1) * 1000 for spread in spreads)
        for second in range(60)
    ]
    assert max(in_each_second) < 40  # 16.7 on average
