"""The judge of histories: each promise broken on its own, and the excuses that count."""

from __future__ import annotations

import pytest

from tests.support.checker import (
    Accepted,
    Began,
    CancelAsked,
    Died,
    Ended,
    Event,
    ExecutionRow,
    Frozen,
    Healed,
    JobRow,
    RedisTrouble,
    Report,
    RetryAsked,
    Seen,
    Webhook,
    add_up,
    judge,
)

ACCEPTED = Accepted(1.0, "r1", 7, 3, webhook=True)
BEGAN = Began(2.0, "w1#a", 7, "e1", 2000)
RETURNED = Ended(3.0, "w1#a", "e1", "returned")
TOLD = Webhook(4.0, "hook-1", 7, "SUCCEEDED", "e1", 200)
JOB = JobRow(9.0, 7, "r1", "SUCCEEDED", "e1", 3.1)


def row(
    execution_id: str = "e1",
    status: str = "SUCCEEDED",
    *,
    told_by: str | None = None,
    worker: str = "w1#a",
    trigger: int = 2000,
) -> ExecutionRow:
    told = (execution_id if status == "SUCCEEDED" else "") if told_by is None else told_by
    return ExecutionRow(9.0, execution_id, 7, trigger, worker, status, told, False, 5.0)


def found(*events: Event) -> list[str]:
    return sorted({violation.partition(":")[0] for violation in judge(events).violations})


def test_an_uneventful_history_is_clean() -> None:
    report = judge([ACCEPTED, BEGAN, RETURNED, TOLD, Healed(5.0), JOB, row()])

    assert report.violations == []
    assert (report.jobs, report.runs, report.run_again, report.webhooks_repeated) == (1, 1, 0, 0)
    assert "violations                          0" in report.table({"kill": 2})


def test_a_job_that_is_gone_or_never_ends_is_lost() -> None:
    assert found(ACCEPTED) == ["P1"]
    assert found(ACCEPTED, BEGAN, JobRow(9.0, 7, "r1", "RUNNING", "e1", None)) == ["P1"]
    assert found(ACCEPTED, JobRow(9.0, 7, "another", "FAILED", "", 1.0), TOLD)[0] == "P1"


def test_one_request_is_one_job() -> None:
    other = Accepted(1.5, "r1", 8, 3, webhook=False)

    assert "P2" in found(ACCEPTED, other, BEGAN, RETURNED, TOLD, JOB, row())
    assert "P2" in found(
        ACCEPTED, BEGAN, RETURNED, TOLD, JOB, row(), JobRow(9.0, 8, "r1", "SUCCEEDED", "e1", 3.0)
    )


def test_two_runs_at_once_are_found_unless_the_first_died_before() -> None:
    second = Began(2.5, "w2#b", 7, "e2", 2001)
    ends = (
        Ended(6.0, "w2#b", "e2", "returned"),
        TOLD,
        JobRow(9.0, 7, "r1", "SUCCEEDED", "e2", 6.0),
        row("e1", "LOST"),
        row("e2", worker="w2#b", trigger=2001),
    )

    assert found(ACCEPTED, BEGAN, second, Ended(5.0, "w1#a", "e1", "stopped"), *ends) == ["P4"]
    assert found(ACCEPTED, BEGAN, Died(2.4, "w1#a"), second, *ends) == []
    report = judge([ACCEPTED, BEGAN, Died(2.4, "w1#a"), second, *ends])
    assert (report.run_again, report.run_again_after_death) == (1, 1)


def test_a_run_that_is_given_up_is_over_by_then_unless_it_slept() -> None:
    given_up = [
        ACCEPTED,
        BEGAN,
        Ended(6.0, "w1#a", "e1", "stopped"),
        JobRow(9.0, 7, "r1", "FAILED", "e1", 5.0),
        Webhook(6.0, "hook-1", 7, "FAILED", "e1", 200),
        row("e1", "LOST"),
    ]

    assert found(*given_up) == ["P4"]
    assert found(*given_up, Frozen(5.5, 2.5, "w1#a")) == []
    assert found(*given_up, Frozen(5.5, 5.2, "w1#a")) == ["P4"]
    assert found(*given_up, Frozen(3.0, 2.5, "w1#a")) == ["P4"]
    assert found(*given_up, Frozen(5.5, 2.5, "w2#b")) == ["P4"]


def test_one_attempt_begins_once_and_none_begins_after_success() -> None:
    again = (Began(3.5, "w2#b", 7, "e2", 2000), Ended(3.6, "w2#b", "e2", "returned"))

    assert found(ACCEPTED, BEGAN, RETURNED, *again, TOLD, JOB, row(), row("e2", worker="w2#b")) == [
        "P3",
        "P4",
    ]


@pytest.mark.parametrize(
    ("events", "promises"),
    [
        ([row(told_by="e0"), JOB], ["P5"]),
        ([row(), JobRow(9.0, 7, "r1", "CANCELLED", "e1", 3.1)], ["P5", "P7"]),
        ([row("e1", "FAILED"), JOB], ["P5"]),
        ([Seen(3.5, 7, "FAILED"), row(), JOB], ["P5"]),
        ([Seen(3.5, 7, "SUCCEEDED"), Seen(3.6, 7, "RUNNING"), row(), JOB], ["P5"]),
    ],
)
def test_an_end_that_was_not_earned_or_did_not_stay(
    events: list[Event], promises: list[str]
) -> None:
    assert found(ACCEPTED, BEGAN, RETURNED, TOLD, *events) == promises


def test_a_cancel_explains_a_cancelled_job() -> None:
    told = Webhook(4.0, "hook-1", 7, "CANCELLED", "e1", 200)
    events = [ACCEPTED, CancelAsked(2.5, 7), BEGAN, Ended(3.0, "w1#a", "e1", "stopped"), told]

    ended = JobRow(9.0, 7, "r1", "CANCELLED", "e1", 3.1)
    assert found(*events, ended, row("e1", "CANCELLED")) == []


def test_a_finished_run_is_not_lost_unless_redis_failed_it_too() -> None:
    history: list[Event] = [
        ACCEPTED,
        BEGAN,
        RETURNED,
        JobRow(9.0, 7, "r1", "FAILED", "e1", 5.0),
        Webhook(6.0, "hook-1", 7, "FAILED", "e1", 200),
        row("e1", "LOST"),
    ]

    assert found(*history) == ["P6"]
    assert found(*history, Died(8.0, "w1#a")) == ["P6"]
    assert found(*history, Died(3.5, "w1#a")) == []
    assert found(*history, RedisTrouble(4.0, 3.5)) == []
    assert found(*history, RedisTrouble(4.0, 3.5, "w1")) == []
    assert found(*history, RedisTrouble(4.0, 3.5, "w2")) == ["P6"]
    assert found(*history, RedisTrouble(8.0, 6.0)) == ["P6"]


def test_a_living_worker_mends_what_redis_lost_of_a_finished_run() -> None:
    lost = ExecutionRow(99.0, "e1", 7, 2000, "w1#a", "LOST", "", False, 30.0)
    history = (ACCEPTED, BEGAN, RETURNED, JobRow(99.0, 7, "r1", "FAILED", "e1", 30.0), lost)
    flushed = RedisTrouble(6.0, 6.0)

    assert "P6" in found(*history, flushed)
    assert "P6" not in found(*history, flushed, Died(17.0, "w1#a"))
    assert "P6" in found(*history, flushed, Died(19.0, "w1#a"))
    assert "P6" not in found(*history, flushed, RedisTrouble(31.0, 10.0, "w1"))
    assert "P6" in found(*history, flushed, RedisTrouble(31.0, 10.0, "w2"))
    assert "P6" not in found(*history, flushed, Frozen(40.0, 8.0, "w1#a"))
    assert "P6" in found(*history, flushed, RedisTrouble(17.0, 7.0))


def test_a_job_that_began_has_not_expired() -> None:
    job = JobRow(9.0, 7, "r1", "FAILED", "e1", 4.0, "expired")
    accepted = Accepted(1.0, "r1", 7, 3, webhook=False)

    assert found(accepted, job) == []
    stopped = Ended(3.0, "w1#a", "e1", "stopped")
    assert found(accepted, BEGAN, stopped, row("e1", "RETURNED"), job) == ["expired"]


def test_webhooks_are_told_once_at_least_under_one_id_and_as_it_is() -> None:
    ends = (JOB, row())
    base = (ACCEPTED, BEGAN, RETURNED)

    assert found(*base, *ends) == ["P7"]
    assert found(*base, Webhook(4.0, "hook-1", 7, "SUCCEEDED", "e1", 500), *ends) == ["P7"]
    assert found(*base, Webhook(4.0, "hook-1", 7, "FAILED", "e1", 200), *ends) == ["P7"]
    assert found(*base, TOLD, Webhook(5.0, "hook-2", 7, "SUCCEEDED", "e1", 200), *ends) == ["P7"]
    report = judge([*base, TOLD, TOLD, *ends])
    assert (report.violations, report.webhooks_repeated) == ([], 1)


def test_a_job_makes_no_more_attempts_than_it_may() -> None:
    accepted = Accepted(1.0, "r1", 7, 0, webhook=False)
    rows = (row("e0", "RETURNED"), row("e1"), row("e2", "FAILED"))

    assert found(accepted, BEGAN, RETURNED, JOB, row("e0", "RETURNED"), row("e1")) == []
    assert found(accepted, BEGAN, RETURNED, JOB, *rows) == ["budget"]


def test_figures_add_up() -> None:
    total = add_up(
        [Report(jobs=2, slowest_recovery_seconds=5.0), Report(jobs=3, slowest_recovery_seconds=4.0)]
    )

    assert (total.jobs, total.slowest_recovery_seconds) == (5, 5.0)


def test_a_retry_of_the_caller_is_another_life_with_an_end_of_its_own() -> None:
    again = (Began(3.5, "w2#b", 7, "e2", 3000), Ended(3.6, "w2#b", "e2", "returned"))
    events = [
        ACCEPTED,
        CancelAsked(2.2, 7),
        BEGAN,
        Ended(2.5, "w1#a", "e1", "stopped"),
        Seen(2.6, 7, "CANCELLED"),
        Webhook(2.7, "hook-1", 7, "CANCELLED", "e1", 200),
        *again,
        Webhook(4.0, "hook-2", 7, "SUCCEEDED", "e2", 200),
        JobRow(9.0, 7, "r1", "SUCCEEDED", "e2", 3.6),
        row("e1", "CANCELLED"),
        row("e2", worker="w2#b", trigger=3000),
    ]

    assert found(*events) == ["P4", "P5", "P7"]
    assert found(*events, RetryAsked(2.8, 7)) == []
    untold = [one for one in events if not (isinstance(one, Webhook) and one.at == 4.0)]
    assert found(*untold, RetryAsked(2.8, 7)) == ["P7"]


def test_a_child_that_outlives_its_worker_runs_until_its_own_end() -> None:
    second = (Began(2.6, "w2#b", 7, "e2", 2001), Ended(3.0, "w2#b", "e2", "returned"))
    rest = (
        TOLD,
        JobRow(9.0, 7, "r1", "SUCCEEDED", "e2", 3.0),
        row("e1", "LOST"),
        row("e2", worker="w2#b", trigger=2001),
    )
    child = (Died(2.4, "w1#a"), *second[:1], Ended(2.8, "w1#a", "e1", "died"), *second[1:])

    assert found(ACCEPTED, BEGAN, Died(2.4, "w1#a"), *second, *rest) == []
    assert found(ACCEPTED, BEGAN, *child, *rest) == ["P4"]
