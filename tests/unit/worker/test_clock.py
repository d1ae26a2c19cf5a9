"""What a worker knows of the database's time."""

from __future__ import annotations

import math
import random

from worker.clock import WINDOW_SECONDS, LowerBound


def test_the_bound_is_as_late_as_what_came_quickest() -> None:
    bound = LowerBound()
    for sent_ms, way_ms in ((1_000, 5.0), (1_100, 2.0), (1_200, 90.0)):
        # The database is exactly a second ahead of the monotonic clock here.
        bound.hear(sent_ms, (sent_ms - 1_000 + way_ms) / 1000)
    assert math.isclose(bound.reached_at(2_000), 1.0 + 0.002)


def test_it_is_never_before_the_truth() -> None:
    dice = random.Random(7)
    bound, at = LowerBound(), 50.0
    for _ in range(2_000):
        at += dice.expovariate(2.0)
        bound.hear(math.floor(at * 1000), at + dice.random())
        assert bound.reached_at(math.floor(at * 1000) + 500) >= at + 0.499


def test_what_was_heard_long_ago_counts_no_more() -> None:
    bound = LowerBound()
    bound.hear(10_000, 0.0)
    at = 0.0
    for _ in range(3):
        # The database's clock was set back by five seconds.
        at += WINDOW_SECONDS
        bound.hear(int(at * 1000) + 5_000, at)
    assert bound.reached_at(50_000) == 45.0


def test_nothing_is_known_before_the_first_message() -> None:
    assert LowerBound().reached_at(1_000) == math.inf
