"""P7: a callback is written in the transaction that ends the job, and arrives at least once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event

from app.lifecycle.states import ExecutionStatus, JobStatus
from app.plumbing.database import Database
from tests.integration.app.rig import (
    door,
    ending,
    opened,
    outcome_of,
    rows_of,
    running_job,
    settled,
    value_of,
)
from tests.support.engines import Engine
from tests.support.processes import NewPlatform
from tests.support.receiver import Answer, Receiver
from tests.support.wait import until_async

URL = "http://127.0.0.1:9/hook"
QUICK = {"ONCUE_CALLBACK_SCHEDULE_SECONDS": ",".join(["0"] + ["2"] * 20 + ["10"] * 20)}


class Broken(Exception):
    """What a statement that a test broke raises."""


@contextmanager
def broken(database: Database, start: str) -> Iterator[list[str]]:
    """Let the next statement that begins so fail; yields the statements that failed."""
    failed: list[str] = []

    def fail_once(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if statement.startswith(start) and not failed:
            failed.append(statement)
            raise Broken(start)

    engine = database._writers.sync_engine
    event.listen(engine, "before_cursor_execute", fail_once)
    try:
        yield failed
    finally:
        event.remove(engine, "before_cursor_execute", fail_once)


async def _counts(database: Database) -> tuple[int, int]:
    terminal = await value_of(database, "SELECT COUNT(*) FROM job_info WHERE status IN (2, 3, 5)")
    return terminal, await value_of(database, "SELECT COUNT(*) FROM callback_delivery")


@pytest.mark.parametrize("table", ["callback_delivery", "job_payload"])
async def test_a_job_is_not_ended_when_its_callback_or_its_result_cannot_be_written(
    migrated_engine: Engine, table: str
) -> None:
    async with opened(migrated_engine) as database:
        run = await running_job(database, callback_url=URL)
        end = ending(run, ExecutionStatus.SUCCEEDED, result=f'"{"x" * 5000}"')
        with broken(database, f"INSERT INTO {table}") as failed:
            with pytest.raises(Broken):
                await settled(database, end)
            assert failed
        assert await _counts(database) == (0, 0)
        assert await value_of(database, "SELECT status FROM job_log") == ExecutionStatus.CLAIMED
        (one,) = await settled(database, end)
        assert one.job_status is JobStatus.SUCCEEDED
        assert await _counts(database) == (1, 1)


async def test_a_job_that_cannot_be_ended_owes_no_callback(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        run = await running_job(database, callback_url=URL)
        # The second of two: the job was moved before, and the callback would follow.
        ends = "UPDATE job_log" if database.is_sqlite else "INSERT INTO job_log (id,"
        with broken(database, ends), pytest.raises(Broken):
            await settled(database, ending(run, ExecutionStatus.SUCCEEDED, result="1"))
        assert await _counts(database) == (0, 0)


async def test_a_report_is_not_acknowledged_before_its_callback_is_stored(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as api:
        run = await running_job(api.database, callback_url=URL)
        with broken(api.database, "INSERT INTO callback_delivery"):
            answer = await api.report(outcome_of(run, {"n": 1}))
        terminal, owed = await _counts(api.database)
        assert terminal == owed
        assert len(answer["acknowledged"]) == owed
        again = await api.report(outcome_of(run, {"n": 1}))
        assert again["acknowledged"] == [run.execution_id]
        assert await _counts(api.database) == (1, 1)


@pytest.mark.parametrize(
    ("status", "retries", "owed"),
    [
        (ExecutionStatus.SUCCEEDED, 3, 1),
        (ExecutionStatus.FAILED, 0, 1),
        (ExecutionStatus.TIMED_OUT, 0, 1),
        (ExecutionStatus.LOST, 0, 1),
        (ExecutionStatus.CANCELLED, 3, 1),
        (ExecutionStatus.FAILED, 3, 0),
        (ExecutionStatus.LOST, 3, 0),
        (ExecutionStatus.RETURNED, 0, 0),
    ],
)
async def test_a_callback_is_owed_exactly_when_the_job_is_terminal(
    migrated_engine: Engine, status: ExecutionStatus, retries: int, owed: int
) -> None:
    async with opened(migrated_engine) as database:
        run = await running_job(database, callback_url=URL, max_retry=retries)
        await settled(database, ending(run, status))
        assert await _counts(database) == (owed, owed)


async def test_a_webhook_arrives_though_its_receiver_was_down_for_10_seconds(
    engine: Engine, new_platform: NewPlatform, receiver: Receiver
) -> None:
    platform = new_platform(engine, environment=QUICK).start()
    receiver.kill()
    job_id = platform.submit("echo", {"n": 1}, callbackUrl=receiver.url())
    ended = platform.ended(job_id)
    async with opened(engine) as database:

        async def tried_long_enough() -> bool:
            seen = f"SELECT tries, {database.now_ms} - created_at AS age FROM callback_delivery"
            (row,) = await rows_of(database, seen)
            return int(row["age"]) > 10_000 and int(row["tries"]) >= 4

        await until_async(tried_long_enough, 60, what="10 s of tries in vain, four or more")
    receiver.start()
    (received,) = receiver.wait_for(1)
    told = received.verified(platform.webhook_secret)["data"]
    assert {name: told[name] for name in ("jobId", "status", "result", "finishedAt")} == {
        name: ended[name] for name in ("jobId", "status", "result", "finishedAt")
    }


def test_a_webhook_arrives_under_its_id_though_the_worker_was_killed_while_it_delivered(
    mariadb_engine: Engine, new_platform: NewPlatform, receiver: Receiver
) -> None:
    platform = new_platform(mariadb_engine).start(workers=2)
    receiver.answer("/hook", Answer(delay_ms=600_000), Answer())
    job_id = platform.submit("record", {"ms": 1}, callbackUrl=receiver.url())
    (first,) = receiver.wait_for(1)
    job = platform.ended(job_id)
    platform.services[job["executions"][0]["workerId"].split("#")[0]].kill()
    second = receiver.wait_for(2, timeout=90)[1]
    assert second.webhook_id == first.webhook_id
    assert second.verified(platform.webhook_secret) == first.verified(platform.webhook_secret)
    assert platform.job(job_id) == job
