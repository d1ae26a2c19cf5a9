"""What runs after an outage, and what is on record."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.schedules.interval import IntervalTimes
from app.schedules.misfire import (
    MOST_AHEAD,
    PUNCTUAL_MS,
    Between,
    MisfireRule,
    Passed,
    Plan,
    Policy,
    Run,
    Times,
    pass_over,
    plan,
)
from tests.unit.schedules.looking import epoch_ms, times_of

MINUTE = 60_000
HOUR = 60 * MINUTE
YEAR = 365 * 24 * HOUR


def nominal(decided: Plan) -> list[int]:
    return [run.nominal_ms for run in decided.runs]


def hourly() -> Times:
    return times_of("0 * * * *")


# Away from 09:10 to 12:00:20; the fires of 10:00 and 11:00 are missed, that of 12:00 is not.
CURSOR = epoch_ms("2026-06-01T09:00:00+00:00")
NOW = epoch_ms("2026-06-01T12:00:20+00:00")
TEN, ELEVEN, NOON = (CURSOR + hours * HOUR for hours in (1, 2, 3))


@pytest.mark.parametrize(
    ("rule", "runs", "passed"),
    [
        (MisfireRule("skip"), [Run(NOON, NOON)], [Passed(TEN, ELEVEN, 2, "misfire_skip")]),
        (
            MisfireRule("once"),
            [Run(NOON, NOW, missed=True)],
            [Passed(TEN, ELEVEN, 2, "misfire_once")],
        ),
        (
            MisfireRule("all", spacing_ms=1000),
            [Run(TEN, NOW, missed=True), Run(ELEVEN, NOW + 1000, missed=True), Run(NOON, NOON)],
            [],
        ),
        (
            MisfireRule("all", cap=1),
            [Run(ELEVEN, NOW, missed=True), Run(NOON, NOON)],
            [Passed(TEN, TEN, 1, "over_cap")],
        ),
        (
            MisfireRule("all", cap=0),
            [Run(NOON, NOON)],
            [Passed(TEN, ELEVEN, 2, "over_cap")],
        ),
        (
            MisfireRule("all", window_ms=90 * MINUTE),
            [Run(ELEVEN, NOW, missed=True), Run(NOON, NOON)],
            [Passed(TEN, TEN, 1, "outside_window")],
        ),
        (
            MisfireRule("once", window_ms=90 * MINUTE),
            [Run(NOON, NOW, missed=True)],
            [Passed(TEN, TEN, 1, "outside_window"), Passed(ELEVEN, ELEVEN, 1, "misfire_once")],
        ),
        (
            MisfireRule("once", window_ms=5 * MINUTE),
            [Run(NOON, NOON)],
            [Passed(TEN, ELEVEN, 2, "outside_window")],
        ),
        (
            MisfireRule("skip", grace_ms=10_000),
            [],
            [Passed(TEN, NOON, 3, "misfire_skip")],
        ),
        (
            MisfireRule("once", grace_ms=4 * HOUR),
            [Run(TEN, TEN), Run(ELEVEN, ELEVEN), Run(NOON, NOON)],
            [],
        ),
    ],
)
def test_after_an_outage_the_policy_decides(
    rule: MisfireRule, runs: list[Run], passed: list[Passed]
) -> None:
    decided = plan(hourly(), rule, cursor_ms=CURSOR, now_ms=NOW)
    assert decided == Plan(NOON, NOON + HOUR, tuple(runs), tuple(passed))


# Each second, away from 0:00 to 1:00.3, where 10 s are the grace.
AWAY = 60_300
LAST = Run(60_000, 60_000)


@pytest.mark.parametrize(
    ("rule", "runs", "passed"),
    [
        (MisfireRule("skip"), [LAST], [Passed(1000, 59_000, 59, "misfire_skip")]),
        (
            MisfireRule("once"),
            [Run(60_000, AWAY, missed=True)],
            [Passed(1000, 59_000, 59, "misfire_once")],
        ),
        (
            MisfireRule("once", window_ms=2000),
            [Run(60_000, AWAY, missed=True)],
            [
                Passed(1000, 58_000, 58, "outside_window"),
                Passed(59_000, 59_000, 1, "misfire_once"),
            ],
        ),
        (
            MisfireRule("all", cap=3, spacing_ms=500),
            [
                Run(57_000, AWAY, missed=True),
                Run(58_000, AWAY + 500, missed=True),
                Run(59_000, AWAY + 1000, missed=True),
                LAST,
            ],
            [Passed(1000, 56_000, 56, "over_cap")],
        ),
        (
            MisfireRule("all", cap=2, window_ms=4000),
            [Run(58_000, AWAY, missed=True), Run(59_000, AWAY, missed=True), LAST],
            [Passed(1000, 56_000, 56, "outside_window"), Passed(57_000, 57_000, 1, "over_cap")],
        ),
    ],
)
def test_an_outage_of_a_fast_schedule_leaves_one_fire_that_is_due_now(
    rule: MisfireRule, runs: list[Run], passed: list[Passed]
) -> None:
    rule = replace(rule, grace_ms=10_000)
    decided = plan(IntervalTimes(1000, 0), rule, cursor_ms=0, now_ms=AWAY)
    assert decided == Plan(60_000, 61_000, tuple(runs), tuple(passed))


@pytest.mark.parametrize("policy", ["skip", "once", "all"])
def test_what_is_late_while_the_dispatcher_changes_is_not_lost(policy: Policy) -> None:
    rule = MisfireRule(policy, grace_ms=10_000, cap=1)
    decided = plan(IntervalTimes(1000, 0), rule, cursor_ms=0, now_ms=3300)
    runs = tuple(Run(fire, fire) for fire in (1000, 2000, 3000))
    assert decided == Plan(3000, 4000, runs)
    # Even then the window holds.
    rule = replace(rule, window_ms=1500)
    decided = plan(IntervalTimes(1000, 0), rule, cursor_ms=0, now_ms=3300)
    assert decided == Plan(3000, 4000, runs[1:], (Passed(1000, 1000, 1, "outside_window"),))


@pytest.mark.parametrize("policy", ["skip", "once", "all"])
def test_a_daily_fire_that_is_a_little_late_runs(policy: Policy) -> None:
    day = 24 * HOUR
    late = plan(IntervalTimes(day, 0), MisfireRule(policy), cursor_ms=0, now_ms=day + 5000)
    assert late == Plan(day, 2 * day, (Run(day, day),))


def test_the_shortest_window_passes_over_nothing_that_is_on_time() -> None:
    rule = MisfireRule("once", window_ms=1)
    for late, runs in ((PUNCTUAL_MS, [NOON]), (PUNCTUAL_MS + 1, [])):
        assert nominal(plan(hourly(), rule, cursor_ms=ELEVEN, now_ms=NOON + late)) == runs


def test_what_is_on_time_runs_whatever_the_policy() -> None:
    policies: tuple[Policy, ...] = ("skip", "once", "all")
    for policy in policies:
        decided = plan(hourly(), MisfireRule(policy), cursor_ms=ELEVEN, now_ms=NOON + 3)
        assert decided == Plan(NOON, NOON + HOUR, (Run(NOON, NOON),))


def test_nothing_is_due_before_its_time_or_when_the_clock_went_back() -> None:
    for now in (TEN - 1, CURSOR - HOUR):
        assert plan(hourly(), MisfireRule(), cursor_ms=CURSOR, now_ms=now) == Plan(CURSOR, TEN)


def test_a_spread_puts_every_fire_off_and_makes_none_late() -> None:
    rule = MisfireRule("once", grace_ms=1000)
    early = plan(hourly(), rule, cursor_ms=ELEVEN, now_ms=NOON + 29_999, spread_ms=30_000)
    assert early == Plan(ELEVEN, NOON)
    due = plan(hourly(), rule, cursor_ms=ELEVEN, now_ms=NOON + 30_001, spread_ms=30_000)
    assert due.runs == (Run(NOON, NOON + 30_000),)


def test_the_last_fire_that_is_left_ends_the_schedule() -> None:
    rule = MisfireRule("all")
    decided = plan(hourly(), rule, cursor_ms=CURSOR, now_ms=NOW, fires_left=2)
    assert nominal(decided) == [TEN, ELEVEN]
    assert (decided.cursor_ms, decided.next_ms) == (ELEVEN, None)
    assert plan(hourly(), rule, cursor_ms=CURSOR, now_ms=NOW, fires_left=4).next_ms is not None


def test_a_schedule_ends_with_its_end_date() -> None:
    times = Between(hourly(), start_ms=TEN, end_ms=ELEVEN)
    assert times.next_after(CURSOR - HOUR) == TEN
    assert times.previous_before(NOON) == ELEVEN
    assert times.previous_before(TEN) is None
    assert times.next_after(ELEVEN) is None
    assert times.count(CURSOR - YEAR, NOON) == 2
    decided = plan(times, MisfireRule("once"), cursor_ms=CURSOR, now_ms=NOW)
    assert (nominal(decided), decided.cursor_ms, decided.next_ms) == ([ELEVEN], ELEVEN, None)


def test_a_pause_is_passed_over_as_one_row() -> None:
    decided = pass_over(hourly(), cursor_ms=CURSOR, now_ms=NOW, reason="paused")
    assert decided == Plan(NOON, NOON + HOUR, (), (Passed(TEN, NOON, 3, "paused"),))
    nothing = pass_over(hourly(), cursor_ms=CURSOR, now_ms=CURSOR + 1, reason="paused")
    assert nothing == Plan(CURSOR, TEN)


class Counted:
    """The fires of another schedule; counts how often it was asked."""

    def __init__(self, times: Times) -> None:
        self.times, self.asked = times, 0

    def next_after(self, instant_ms: int) -> int | None:
        self.asked += 1
        return self.times.next_after(instant_ms)

    def previous_before(self, instant_ms: int) -> int | None:
        self.asked += 1
        return self.times.previous_before(instant_ms)

    def count(self, after_ms: int, until_ms: int) -> int:
        self.asked += 1
        return self.times.count(after_ms, until_ms)


@pytest.mark.parametrize("times", [IntervalTimes(100, 0), times_of("* * * * * *")])
@pytest.mark.parametrize("policy", ["skip", "once", "all"])
def test_a_year_away_costs_no_more_than_the_runs(times: Times, policy: Policy) -> None:
    counted = Counted(times)
    start = epoch_ms("2026-01-01T00:00:00+00:00")
    rule = MisfireRule(policy, cap=50, grace_ms=1000)
    decided = plan(counted, rule, cursor_ms=start, now_ms=start + YEAR)
    assert counted.asked < 100
    total = len(decided.runs) + sum(one.count for one in decided.passed)
    assert total == times.count(start, start + YEAR) > 30_000_000


@settings(max_examples=300, deadline=None)
@given(
    every=st.integers(1, 40),
    away=st.integers(0, 3000),
    policy=st.sampled_from(("skip", "once", "all")),
    grace=st.integers(0, 100) | st.integers(1000, 3000),
    window=st.none() | st.integers(0, 3000),
    cap=st.integers(0, 10),
    spread=st.integers(0, 50),
    ahead=st.just(0) | st.integers(0, 50),
)
def test_every_fire_is_decided_once_and_those_that_run_are_the_promised_ones(
    every: int,
    away: int,
    policy: Policy,
    grace: int,
    window: int | None,
    cap: int,
    spread: int,
    ahead: int,
) -> None:
    times = IntervalTimes(every, 0)
    cursor, now = 1000 // every * every, 1000 + away
    rule = MisfireRule(policy, grace_ms=grace, window_ms=window, cap=cap, spacing_ms=7)
    decided = plan(times, rule, cursor_ms=cursor, now_ms=now, spread_ms=spread, ahead_ms=ahead)
    due = list(range(cursor + every, now - spread + 1, every))
    lateness = {fire: now - (fire + spread) for fire in due}
    least = None if window is None else max(window, PUNCTUAL_MS)
    missed = due if any(late > grace for late in lateness.values()) else []
    if missed and lateness[missed[-1]] <= grace:
        missed = missed[:-1]
    wanted = [fire for fire in due[len(missed) :] if least is None or lateness[fire] <= least]
    missed = [fire for fire in missed if least is None or lateness[fire] <= least]
    if missed and policy == "once":
        wanted = due[-1:]
    elif missed and policy == "all":
        wanted = [*missed[max(0, len(missed) - cap) :], *wanted]
    # Those that are not due yet run at their times, whatever the rule for the missed.
    first = max(cursor, (now - spread) // every * every) + every
    not_due = range(first, now - spread + ahead + 1, every)
    wanted += not_due
    due += not_due
    assert nominal(decided) == wanted
    passed = [
        fire for one in decided.passed for fire in range(one.first_ms, one.last_ms + 1, every)
    ]
    assert sorted([*nominal(decided), *passed]) == due
    assert sum(one.count for one in decided.passed) == len(passed)
    assert decided.cursor_ms == (due[-1] if due else cursor)
    assert decided.next_ms == decided.cursor_ms + every
    again = [run.due_ms for run in decided.runs if run.missed]
    assert all(later - earlier == 7 for earlier, later in pairwise(again))
    assert all(run.due_ms <= now + ahead for run in decided.runs if not run.missed)
    assert all(run.due_ms == run.nominal_ms + spread for run in decided.runs if not run.missed)


def test_of_very_many_that_are_not_due_yet_the_newest_run() -> None:
    times = IntervalTimes(1, 0)
    decided = plan(times, MisfireRule(), cursor_ms=50, now_ms=100, spread_ms=50, ahead_ms=5000)
    assert nominal(decided) == list(range(5050 - MOST_AHEAD + 1, 5051))
    assert [(one.count, one.reason) for one in decided.passed] == [(5000 - MOST_AHEAD, "over_cap")]
