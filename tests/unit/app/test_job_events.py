"""The stamps of a job's states, by which readers of its events go on."""

from __future__ import annotations

from typing import Any, cast

from sqlalchemy import RowMapping

from app.jobs.events import stamp_of
from app.lifecycle.reads import JobRecord
from app.lifecycle.states import ExecutionStatus


def record(job: dict[str, Any], *executions: dict[str, Any]) -> JobRecord:
    rows = tuple(cast(RowMapping, one) for one in executions)
    return JobRecord(cast(RowMapping, job), rows, None, {})


def test_an_attempt_that_began_between_two_reads_is_not_of_the_state_before() -> None:
    job = {"version": 4, "execution_id": "first"}
    failed = {"execution_id": "first", "status": ExecutionStatus.FAILED, "progress_at": 7}
    claimed = {"execution_id": "second", "status": ExecutionStatus.CLAIMED, "progress_at": None}
    assert stamp_of(record(job, failed)) == stamp_of(record(job, claimed, failed)) == (4, 1, 7)


def test_a_job_that_never_ran_has_a_stamp() -> None:
    assert stamp_of(record({"version": 0, "execution_id": None})) == (0, 0, 0)
