"""P5: a late report of a superseded attempt changes nothing; a terminal state is final."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.lifecycle.moves.assign import Reassignment, reassign
from app.lifecycle.moves.ending import Settled
from app.lifecycle.states import ExecutionStatus, JobStatus
from app.lifecycle.token import new_token
from app.plumbing.database import Database
from tests.integration.app.rig import (
    WORKER,
    claimed,
    ending,
    new_term,
    opened,
    rows_of,
    running_job,
    settled,
    value_of,
)
from tests.support.engines import Engine

URL = "http://127.0.0.1:9/hook"
REPORTED = [
    ExecutionStatus.SUCCEEDED,
    ExecutionStatus.FAILED,
    ExecutionStatus.TIMED_OUT,
    ExecutionStatus.CANCELLED,
    ExecutionStatus.RETURNED,
    ExecutionStatus.LOST,
]


async def _job(database: Database, job_id: int) -> dict[str, Any]:
    (row,) = await rows_of(database, "SELECT * FROM job_info WHERE id = :id", id=job_id)
    return row


async def _log(database: Database, execution_id: str) -> dict[str, Any]:
    (row,) = await rows_of(
        database, "SELECT * FROM job_log WHERE execution_id = :id", id=execution_id
    )
    return row


@pytest.mark.parametrize("late", [ExecutionStatus.SUCCEEDED, ExecutionStatus.FAILED])
async def test_a_late_report_of_a_lost_run_changes_nothing_and_is_recorded_as_stale(
    migrated_engine: Engine, late: ExecutionStatus
) -> None:
    async with opened(migrated_engine) as database:
        first = await running_job(database, retry_interval_ms=0, callback_url=URL)
        await settled(database, ending(first, ExecutionStatus.LOST, deliver_by=None))
        (second,) = await claimed(database, [first.job_id], term=await new_term(database))
        before = await _job(database, first.job_id)

        (one,) = await settled(database, ending(first, late, result='"late"'))
        assert one.kind is Settled.STALE
        assert await _job(database, first.job_id) == before
        log = await _log(database, first.execution_id)
        assert (log["status"], log["stale_status"]) == (ExecutionStatus.LOST, late.name)
        assert log["stale_at"] is not None
        assert log["result"] is None

        (own,) = await settled(database, ending(second, ExecutionStatus.SUCCEEDED, result='"own"'))
        assert (own.kind, own.job_status) == (Settled.ENDED, JobStatus.SUCCEEDED)
        assert (await _log(database, second.execution_id))["result"] == '"own"'
        assert await value_of(database, "SELECT COUNT(*) FROM callback_delivery") == 1


async def test_a_late_report_in_the_same_batch_as_the_true_one_changes_nothing(
    migrated_engine: Engine,
) -> None:
    async with opened(migrated_engine) as database:
        first = await running_job(database, retry_interval_ms=0)
        await settled(database, ending(first, ExecutionStatus.LOST))
        (second,) = await claimed(database, [first.job_id], term=await new_term(database))
        kinds = [
            one.kind
            for one in await settled(
                database,
                ending(first, ExecutionStatus.FAILED, error_code="late", error_message=""),
                ending(second, ExecutionStatus.SUCCEEDED, result="2"),
                ending(first, ExecutionStatus.SUCCEEDED, result="1"),
                ending(second, ExecutionStatus.SUCCEEDED, result="2"),
            )
        ]
        assert kinds == [Settled.STALE, Settled.ENDED, Settled.STALE, Settled.REPEATED]
        job = await _job(database, first.job_id)
        assert (job["status"], job["error_code"]) == (JobStatus.SUCCEEDED, None)


async def test_a_report_of_a_run_that_was_given_to_another_worker_is_stale(
    migrated_engine: Engine,
) -> None:
    async with opened(migrated_engine) as database:
        run = await running_job(database)
        move = Reassignment(run.job_id, run.execution_id, "other#boot", "other-execution", "full")
        (moved,) = await database.write(
            lambda connection: reassign(connection, database, [move], token=new_token(), term=1)
        )
        assert (moved.attempt, moved.trigger_ts) == (run.attempt, run.trigger_ts)
        (one,) = await settled(database, ending(run, ExecutionStatus.SUCCEEDED, result="1"))
        assert one.kind is Settled.STALE
        job = await _job(database, run.job_id)
        assert (job["status"], job["execution_id"]) == (JobStatus.RUNNING, "other-execution")


@pytest.mark.parametrize(
    "end", [ExecutionStatus.SUCCEEDED, ExecutionStatus.FAILED, ExecutionStatus.CANCELLED]
)
async def test_a_terminal_job_never_changes_whatever_is_reported(
    migrated_engine: Engine, end: ExecutionStatus
) -> None:
    async with opened(migrated_engine) as database:
        run = await running_job(database, max_retry=0, callback_url=URL)
        await settled(
            database, ending(run, end, result='"first"', error_code="first", error_message="")
        )
        job, log = await _job(database, run.job_id), await _log(database, run.execution_id)
        for status in REPORTED:
            report = ending(run, status, result='"again"', error_code="again", error_message="x")
            (one,) = await settled(database, report)
            assert one.kind is (Settled.REPEATED if status is end else Settled.STALE)
        assert await _job(database, run.job_id) == job
        after = await _log(database, run.execution_id)
        stale = ("stale_at", "stale_status")
        assert {k: v for k, v in after.items() if k not in stale} == {
            k: v for k, v in log.items() if k not in stale
        }
        assert await value_of(database, "SELECT COUNT(*) FROM callback_delivery") == 1


async def test_a_repeated_report_gets_the_same_callback_again(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        run = await running_job(database, callback_url=URL)
        end = ending(run, ExecutionStatus.SUCCEEDED, result="1")
        (first,) = await settled(database, end)
        (again,) = await settled(database, end)
        assert (first.kind, again.kind) == (Settled.ENDED, Settled.REPEATED)
        assert first.delivery is not None
        assert again.delivery == first.delivery


async def test_a_repeated_report_of_another_worker_gets_no_callback(
    migrated_engine: Engine,
) -> None:
    async with opened(migrated_engine) as database:
        run = await running_job(database, callback_url=URL)
        await settled(database, ending(run, ExecutionStatus.SUCCEEDED, result="1"))
        (again,) = await settled(
            database, ending(run, ExecutionStatus.SUCCEEDED, deliver_by="other#boot")
        )
        assert (again.kind, again.delivery) == (Settled.REPEATED, None)


async def test_reports_that_conflict_at_once_end_a_job_once(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as one, opened(migrated_engine) as other:
        runs = [await running_job(one, callback_url=URL, max_retry=0) for _ in range(10)]
        statuses = (ExecutionStatus.SUCCEEDED, ExecutionStatus.FAILED, ExecutionStatus.CANCELLED)
        batches = await asyncio.gather(
            *(
                settled(
                    (one, other)[number % 2], *(ending(run, status, result="1") for run in runs)
                )
                for number, status in enumerate(statuses * 2)
            )
        )
        kinds = [one.kind for batch in batches for one in batch]
        assert kinds.count(Settled.ENDED) == len(runs)
        assert await value_of(one, "SELECT COUNT(*) FROM callback_delivery") == len(runs)
        ended = await rows_of(
            one,
            "SELECT j.status AS job, l.status AS run FROM job_info j "
            "JOIN job_log l ON l.execution_id = j.execution_id",
        )
        assert all(JobStatus(row["job"]).name == ExecutionStatus(row["run"]).name for row in ended)


async def test_a_report_of_an_execution_that_nobody_claimed_changes_nothing(
    migrated_engine: Engine,
) -> None:
    async with opened(migrated_engine) as database:
        run, other = await running_job(database), await running_job(database)
        before = await _job(database, run.job_id)
        stranger = ending(run, ExecutionStatus.SUCCEEDED, execution_id="unknown")
        crossed = ending(run, ExecutionStatus.SUCCEEDED, execution_id=other.execution_id)
        kinds = [one.kind for one in await settled(database, stranger, crossed)]
        assert kinds == [Settled.UNKNOWN, Settled.UNKNOWN]
        assert await _job(database, run.job_id) == before
        assert run.worker_id == WORKER
