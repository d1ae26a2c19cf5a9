"""The judge of schedules finds what it is there to find, and nothing in what is right."""

from __future__ import annotations

import pytest

from tests.support.checker import Accepted, Began, CancelAsked, Ended, Event, JobRow, RetryAsked
from tests.support.fires import (
    BulkAsked,
    FireRow,
    ScheduleEnds,
    ScheduleMade,
    ScheduleRow,
    SkipRow,
    implied,
    judge_fires,
)

STEP = 10_000
MADE = ScheduleMade(1.0, 5, STEP, "skip", 2, webhook=True)
ENDS = ScheduleEnds(95.0, 5, late=True, children=False)
ROW = ScheduleRow(99.0, 5, "CANCELLED", 1_000, 90_000)


def fire(nominal_ms: int, job_id: int = 0, *, own: bool = True) -> FireRow:
    return FireRow(99.0, 5, job_id or 100 + nominal_ms // STEP, nominal_ms, own)


def skipped(first: int, last: int, *, count: int | None = None, reason: str = "overlap") -> SkipRow:
    return SkipRow(99.0, 5, first, last, count or (last - first) // STEP + 1, reason)


CHILDREN = [fire(10_000), fire(20_000), fire(30_000), fire(70_000), fire(80_000), fire(90_000)]
RIGHT: list[Event] = [MADE, ENDS, ROW, *CHILDREN, skipped(40_000, 60_000)]


def test_each_time_once_is_right() -> None:
    assert judge_fires(RIGHT) == []
    assert judge_fires([*RIGHT, fire(55_555, own=False)]) == []


def test_a_schedule_that_was_long_in_being_stored_counts_from_its_request() -> None:
    late = ScheduleRow(99.0, 5, "CANCELLED", 12_000, 90_000)

    assert "first fire 10000" in judge_fires([MADE, ENDS, late, *RIGHT[3:]])[0]
    waited = ScheduleMade(12.0, 5, STEP, "skip", 2, webhook=True, waited=5.0)
    assert judge_fires([waited, ENDS, late, *RIGHT[3:]]) == []


@pytest.mark.parametrize(
    ("events", "what"),
    [
        ([one for one in RIGHT if one != CHILDREN[1]], "nothing is on record between"),
        ([*RIGHT, fire(20_000, 300)], "20000 is on record 2 times"),
        ([*RIGHT, skipped(20_000, 20_000)], "20000 is on record 2 times"),
        ([*RIGHT[:-1], skipped(40_000, 60_000, count=2)], "counts 2 fires"),
        ([MADE, ENDS, ROW, *CHILDREN[3:]], "first fire 70000"),
        ([*RIGHT[:8], skipped(40_000, 60_000)], "decided until 90000, last fire 80000"),
        ([MADE, ENDS, ScheduleRow(99.0, 5, "CANCELLED", 1_000, 1_000)], "still fires"),
        ([MADE, ENDS], "P1: schedule 5 is gone"),
        ([MADE, ENDS, ScheduleRow(99.0, 5, "PAUSED", 1_000, 90_000), *RIGHT[3:]], "never ended"),
        (
            [ScheduleMade(1.0, 5, STEP, "allow", 2, webhook=True), *RIGHT[1:]],
            "was an overlap, with overlapPolicy allow",
        ),
    ],
)
def test_what_is_wrong_is_found(events: list[Event], what: str) -> None:
    assert [what in one for one in judge_fires(events)] == [True]


def test_runs_of_one_schedule_may_overlap_only_where_it_allows_it() -> None:
    runs: list[Event] = [
        Began(10.5, "w1#a", 101, "e1", 10_000),
        Began(20.5, "w2#b", 102, "e2", 20_000),
        Ended(21.0, "w1#a", "e1", "returned"),
        Ended(22.0, "w2#b", "e2", "returned"),
    ]

    assert ["job 102 began" in one for one in judge_fires([*runs, *RIGHT])] == [True]
    allowed = ScheduleMade(1.0, 5, STEP, "allow", 2, webhook=True)
    children = [fire(10_000 * number) for number in range(1, 10)]
    assert judge_fires([*runs, allowed, ENDS, ROW, *children]) == []


def test_children_are_owed_what_their_schedule_promises() -> None:
    child = JobRow(99.0, 101, "fire 5 10000", "SUCCEEDED", "e1", 12.0)

    assert implied([MADE, ROW, fire(10_000), child]) == [
        Accepted(99.0, "fire 5 10000", 101, 2, webhook=True)
    ]
    replaced = ScheduleMade(1.0, 5, STEP, "replace", 2, webhook=True)
    assert CancelAsked(99.0, 101) in implied([replaced, ROW, fire(10_000), child])
    together = ScheduleEnds(95.0, 5, late=True, children=True)
    assert CancelAsked(99.0, 101) in implied([MADE, together, ROW, fire(10_000), child])


def test_a_bulk_operation_asks_for_each_job_that_it_names() -> None:
    jobs = [
        JobRow(9.0, 7, "request-12", "CANCELLED", "", 3.0),
        JobRow(9.0, 8, "request-2", "FAILED", "e", 3.0),
    ]

    assert implied([*jobs, BulkAsked(2.0, "cancel", "request-1")]) == [CancelAsked(2.0, 7)]
    assert implied([*jobs, BulkAsked(2.0, "retry", "request-2")]) == [RetryAsked(2.0, 8)]
