"""P3: each trigger of each job is claimed by exactly one dispatcher."""

from __future__ import annotations

import asyncio
import random

from app.lifecycle.moves.claim import Assignment, Claimed, claim
from app.lifecycle.states import ExecutionStatus
from app.lifecycle.token import new_token
from app.plumbing.database import Database
from tests.integration.app.rig import (
    assignments_for,
    change,
    claimed,
    ending,
    insert,
    new_term,
    opened,
    rows_of,
    running_job,
    settled,
    value_of,
)
from tests.support.engines import Engine

JOBS = 400


async def _claim_in_batches(
    database: Database, assignments: list[Assignment], term: int
) -> list[Claimed]:
    won: list[Claimed] = []
    for start in range(0, len(assignments), 40):
        batch, token = assignments[start : start + 40], new_token()
        won += await database.write(
            lambda connection, batch=batch, token=token: claim(  # type: ignore[misc]
                connection, database, batch, token=token, term=term
            )
        )
    return won


async def test_dispatchers_that_claim_the_same_jobs_at_once_win_each_job_once(
    migrated_engine: Engine,
) -> None:
    async with opened(migrated_engine) as one, opened(migrated_engine) as other:
        job_ids = await insert(one, JOBS)
        term = await new_term(one)
        claims = []
        for number, database in enumerate((one, other, one, other)):
            assignments = await assignments_for(database, job_ids, f"w{number}#boot")
            random.Random(number).shuffle(assignments)
            claims.append(_claim_in_batches(database, assignments, term))
        won = [run for runs in await asyncio.gather(*claims) for run in runs]

        assert sorted(run.job_id for run in won) == job_ids
        logged = await rows_of(one, "SELECT job_id, execution_id, worker_id FROM job_log")
        assert {(row["job_id"], row["execution_id"], row["worker_id"]) for row in logged} == {
            (run.job_id, run.execution_id, run.worker_id) for run in won
        }
        assert len(logged) == JOBS


async def test_a_holder_of_an_old_term_claims_nothing(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        job_ids = await insert(database, 5)
        old = await new_term(database)
        await new_term(database)
        assert await claimed(database, job_ids, term=old) == []
        assert await value_of(database, "SELECT COUNT(*) FROM job_log") == 0
        assert await value_of(database, "SELECT COUNT(*) FROM job_info WHERE status = 0") == 5


async def test_nothing_is_claimed_while_the_row_that_fences_dispatch_is_missing(
    migrated_engine: Engine,
) -> None:
    async with opened(migrated_engine) as database:
        job_ids = await insert(database, 1)
        term = await new_term(database)
        await change(database, "DELETE FROM dispatch_term")
        assert await claimed(database, job_ids, term=term) == []


async def test_a_claim_repeated_after_an_unknown_commit_returns_the_same_runs_and_logs_once(
    migrated_engine: Engine,
) -> None:
    async with opened(migrated_engine) as database:
        job_ids = await insert(database, 10)
        term = await new_term(database)
        assignments, token = await assignments_for(database, job_ids), new_token()

        async def again() -> list[Claimed]:
            return await database.write(
                lambda connection: claim(connection, database, assignments, token=token, term=term)
            )

        first, second = await again(), await again()
        assert [run.execution_id for run in first] == [run.execution_id for run in second]
        assert [run.trigger_ts for run in first] == [run.trigger_ts for run in second]
        assert await value_of(database, "SELECT COUNT(*) FROM job_log") == 10
        assert await value_of(database, "SELECT MAX(attempt) FROM job_info") == 1


async def test_a_repeated_claim_does_not_return_what_has_moved_on(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        job_ids = await insert(database, 2)
        term = await new_term(database)
        assignments, token = await assignments_for(database, job_ids), new_token()

        async def again() -> list[Claimed]:
            return await database.write(
                lambda connection: claim(connection, database, assignments, token=token, term=term)
            )

        first = await again()
        await settled(database, ending(first[0], ExecutionStatus.SUCCEEDED, result="1"))
        assert [run.job_id for run in await again()] == [first[1].job_id]


async def test_a_job_that_is_not_due_is_not_claimed(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        job_ids = await insert(database, 1, delay_ms=60_000)
        assert await claimed(database, job_ids, term=await new_term(database)) == []


async def test_each_attempt_has_a_later_trigger_time_than_the_one_before(
    migrated_engine: Engine,
) -> None:
    async with opened(migrated_engine) as database:
        run = await running_job(database, retry_interval_ms=0, max_retry=5)
        seen = [run]
        for _ in range(3):
            await settled(database, ending(run, ExecutionStatus.FAILED, retry_after_ms=0))
            (run,) = await claimed(database, [run.job_id], term=await new_term(database))
            seen.append(run)
        await settled(database, ending(run, ExecutionStatus.RETURNED))
        (run,) = await claimed(database, [run.job_id], term=await new_term(database))
        seen.append(run)
        triggers = [one.trigger_ts for one in seen]
        assert triggers == sorted(set(triggers))
        # What was given back does not count as an attempt.
        assert [one.attempt for one in seen] == [1, 2, 3, 4, 4]
