"""What a worker knows of the database's time."""

from __future__ import annotations

import math
import random
import time

import pytest

from worker.clock import DRIFT_MS_A_SECOND, LowerBound

NOW = 1_000_000


@pytest.fixture(autouse=True)
def moment(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, which the test moves; the database is `NOW` ms ahead of it."""
    at = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: at[0])
    return at


def told(bound: LowerBound, moment: list[float], way_ms: float) -> None:
    """Hear a time that was read so long ago."""
    bound.hear(math.floor(NOW + moment[0] * 1000 - way_ms), moment[0])


def test_what_came_quickest_says_most(moment: list[float]) -> None:
    bound = LowerBound()
    for way_ms in (5.0, 2.0, 90.0):
        told(bound, moment, way_ms)
    assert bound.reached_at(NOW + 60_000) == pytest.approx(60.0 + 0.002)


def test_it_says_less_with_every_second(moment: list[float]) -> None:
    bound = LowerBound()
    told(bound, moment, 0.0)
    moment[0] += 8
    assert bound.reached_at(NOW + 60_000) == pytest.approx(60.0 + 0.008 * DRIFT_MS_A_SECOND)
    told(bound, moment, 1.0)
    assert bound.reached_at(NOW + 60_000) == pytest.approx(60.0 + 0.001)


@pytest.mark.parametrize("rate", [1.0, 1.0005, 0.9995, 1.00002])
def test_it_is_never_before_the_truth(moment: list[float], rate: float) -> None:
    """Whichever of the two clocks runs faster, by as much as one is slewed."""
    dice, bound = random.Random(7), LowerBound()
    for _ in range(2_000):
        moment[0] += dice.expovariate(2.0)
        database_ms = moment[0] * 1000 * rate
        bound.hear(math.floor(database_ms - 20 * dice.random()), moment[0])
        assert bound.reached_at(round(database_ms) + 40) >= moment[0] + 0.0394 / rate


def test_an_answer_tells_that_the_clock_was_set_back(moment: list[float]) -> None:
    bound = LowerBound()
    told(bound, moment, 0.0)
    asked_at = moment[0] + 1
    moment[0] += 1.004
    bound.hear(NOW + 51_002 - 5_000, moment[0], asked_at=asked_at)
    assert bound.reached_at(NOW + 60_000) == pytest.approx(65.0 + 0.002)


def test_an_answer_that_was_slow_does_not(moment: list[float]) -> None:
    bound = LowerBound()
    told(bound, moment, 0.0)
    asked_at = moment[0]
    moment[0] += 0.9
    bound.hear(NOW + 50_100, moment[0], asked_at=asked_at)
    assert bound.reached_at(NOW + 60_000) == pytest.approx(60.0, abs=0.001)


def test_nothing_is_known_before_the_first_message() -> None:
    assert LowerBound().reached_at(1_000) == math.inf
