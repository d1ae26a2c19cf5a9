"""Admission by expected waiting time: few are always let in, many only as fast as they leave."""

from __future__ import annotations

from app.edge.pressure import FIRST_RATE, FORGOTTEN_SECONDS, WINDOW_SECONDS, Limits, Pressure

LIMITS = Limits(
    wait_seconds=0.5, lag_seconds=0.1, few=20, some=100, free_units=1000, most_bytes=10_000
)
STEP = 0.01


def flooded(pressure: Pressure, *, rate: float, seconds: float, start: float = 0.0) -> int:
    """Offer as much as is let in, answer `rate` a second; return how many were let in."""
    let_in, done = 0, 0.0
    for step in range(1, round(seconds / STEP) + 1):
        now = start + step * STEP
        done += rate * STEP
        while done >= 1 and pressure.units:
            pressure.leave(now, 1)
            done -= 1
        done = min(done, 1)
        while let_in < 10**6 and pressure.why_not(now) is None:
            pressure.enter(now, 1)
            let_in += 1
    return let_in


def limits(**changes: float) -> Limits:
    given = {"wait_seconds": 0.5, "lag_seconds": 0.1, "few": 20, "some": 100}
    given |= {"free_units": 1000, "most_bytes": 10**9, **changes}
    return Limits(**given)  # type: ignore[arg-type]


def test_as_many_are_let_in_as_leave_and_none_waits_longer_than_the_limit() -> None:
    for rate in (500, 3000, 10_000):
        pressure = Pressure(limits())
        flooded(pressure, rate=rate, seconds=5)
        let_in = flooded(pressure, rate=rate, seconds=5, start=5)
        assert 0.95 * rate * 5 <= let_in <= 1.05 * rate * 5
        assert pressure.units <= max(0.55 * rate, 20)


def test_a_few_are_let_in_even_if_nothing_is_answered() -> None:
    pressure = Pressure(limits())
    flooded(pressure, rate=0, seconds=10)
    most = round(0.5 * FIRST_RATE)
    assert 20 <= pressure.units <= most + 1
    assert pressure.why_not(11.0) == "wait"
    slow = Pressure(limits())
    for number in range(19):
        slow.enter(number * WINDOW_SECONDS, 1)
    assert slow.why_not(100.0) is None


def test_a_database_that_comes_back_is_believed_again() -> None:
    pressure = Pressure(limits())
    flooded(pressure, rate=3000, seconds=2)
    flooded(pressure, rate=0, seconds=10, start=2)
    assert pressure.why_not(12.0) == "wait"
    flooded(pressure, rate=3000, seconds=3, start=12)
    assert flooded(pressure, rate=3000, seconds=1, start=15) >= 2800


def test_a_rate_of_long_ago_says_nothing() -> None:
    pressure = Pressure(limits())
    flooded(pressure, rate=10, seconds=5)
    assert pressure.wait_seconds() > 1
    now = 5.0
    while pressure.units:
        pressure.leave(now, 1)
    later = now + 2 * FORGOTTEN_SECONDS
    let_in = flooded(pressure, rate=FIRST_RATE, seconds=1, start=later)
    assert let_in >= FIRST_RATE


def test_a_late_event_loop_stops_all_but_some() -> None:
    pressure = Pressure(limits())
    pressure.note_lag(0.2)
    assert pressure.why_not(0.0) is None
    for _ in range(100):
        pressure.enter(0.0, 1)
    assert pressure.why_not(0.0) == "lag"
    for _ in range(10):
        pressure.note_lag(0.001)
    assert pressure.why_not(0.0) is None


def test_bytes_are_bounded_but_a_single_body_always_fits() -> None:
    pressure = Pressure(LIMITS)
    assert not pressure.lacks_room(50_000)
    pressure.hold(6000)
    assert not pressure.lacks_room(4000)
    assert pressure.lacks_room(4001)
    assert not pressure.lacks_room(50_000, own=6000)
    pressure.hold(-6000)
    assert not pressure.lacks_room(4001)


def test_one_batch_that_takes_long_keeps_no_single_submission_out() -> None:
    pressure = Pressure(limits())
    pressure.enter(0.0, 500)
    pressure.note_lag(0.2)
    for step in range(1, 200):
        now = step * STEP
        assert pressure.why_not(now) is None
        pressure.enter(now, 1)
        pressure.leave(now, 1)
    assert pressure.wait_seconds() > 0.5, "the law alone would refuse them"


def test_many_jobs_in_a_few_batches_are_as_many_as_single_ones() -> None:
    pressure = Pressure(limits())
    for _ in range(2):
        assert pressure.why_not(0.0) is None
        pressure.enter(0.0, 500)
    pressure.note_lag(0.2)
    assert pressure.why_not(0.0) == "lag"
    pressure.enter(0.0, -400, requests=0)
    assert pressure.why_not(0.0) is None, "one was smaller than it looked"


def test_what_is_expected_takes_places_but_is_no_measure_of_the_rate() -> None:
    """Heads whose bodies never come are not work that the database was too slow for."""
    pressure = Pressure(limits())
    for round_number in range(50):
        for _ in range(1000):
            pressure.expect(1)
        assert pressure.why_not(round_number * 0.25) is None
        for _ in range(500):
            pressure.expect(1)
        assert pressure.why_not(round_number * 0.25) == "wait"
        for _ in range(1500):
            pressure.expect_no_more(1)
    assert (pressure.expected_requests, pressure.expected_units) == (0, 0)
    pressure.enter(13.0, 500)
    assert pressure.wait_seconds() == 500 / FIRST_RATE
