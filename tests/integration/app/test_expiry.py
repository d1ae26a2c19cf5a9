"""A job that has not begun by its `expiresAt` fails, and never begins; others are left alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.dispatch.expire import Expiry
from app.dispatch.lock import DispatchLock
from app.lifecycle.moves.assign import note_running
from app.lifecycle.moves.claim import Probe, find_due
from app.lifecycle.moves.expire import expire_jobs
from app.lifecycle.states import ExecutionStatus
from app.plumbing.database import Database
from tests.integration.app.rig import (
    Door,
    change,
    claimed,
    door,
    ending,
    insert,
    new_term,
    opened,
    prune_all,
    rows_of,
    settled,
    value_of,
)
from tests.support.engines import Engine

PAST = 1_700_000_000_000
HOUR_MS = 3_600_000


def moment(**ago: float) -> str:
    return (datetime.now(UTC) - timedelta(**ago)).isoformat()


async def now_of(database: Database) -> int:
    return await database.now()


async def expire(database: Database, limit: int = 100) -> Any:
    return await database.write(lambda connection: expire_jobs(connection, database, limit=limit))


async def status_of(database: Database, job_id: int) -> tuple[int, str | None]:
    (row,) = await rows_of(
        database, "SELECT status, error_code FROM job_info WHERE id = :id", id=job_id
    )
    return row["status"], row["error_code"]


async def look(at: Door) -> list[int]:
    ground = at.parts.ground
    return await Expiry(ground, DispatchLock(ground)).look()


async def test_a_job_not_begun_by_then_fails_with_its_callback(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as at:
        job_id = await at.submitted(
            expiresAt=moment(hours=1), callbackUrl="http://203.0.113.9/hook", maxRetry=5
        )
        assert await look(at) == [job_id]
        job = (await at.client.get(f"/openapi/jobs/{job_id}")).json()
        assert job["status"] == "FAILED"
        assert job["error"]["code"] == "expired"
        assert job["attempt"] == 0
        assert job["executions"] == []
        assert job["finishedAt"] is not None
        callbacks = (await at.client.get(f"/openapi/jobs/{job_id}/callbacks")).json()["items"]
        assert [callback["event"] for callback in callbacks] == ["job.failed"]
        assert await look(at) == []
        assert await value_of(at.database, "SELECT count(*) FROM job_expiry") == 0


async def test_an_expired_job_waits_for_nobody_to_be_told(migrated_engine: Engine) -> None:
    """A caller that waits for the job hears of it at once."""
    async with door(migrated_engine) as at:
        job_id = await at.submitted(jobHandler="absent", expiresAt=moment(seconds=1))
        await look(at)
        answer = await at.client.get(f"/openapi/jobs/{job_id}", params={"wait": 10})
        assert answer.json()["status"] == "FAILED"


async def test_an_expired_job_is_neither_found_nor_claimed(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        (job_id,) = await insert(database, expires_at=PAST)
        queue_id = await value_of(
            database, "SELECT queue_id FROM job_info WHERE id = :id", id=job_id
        )
        found = await database.read(
            lambda connection: find_due(connection, database, [Probe(queue_id, 5, 0, 0, 10)])
        )
        assert found.due == []
        assert await claimed(database, [job_id], term=await new_term(database)) == []
        assert await value_of(database, "SELECT count(*) FROM job_log") == 0


@pytest.mark.parametrize("status", [4, 6], ids=["PAUSED", "BLOCKED"])
async def test_a_job_that_is_kept_from_running_expires_too(
    migrated_engine: Engine, status: int
) -> None:
    async with opened(migrated_engine) as database:
        (job_id,) = await insert(database, expires_at=PAST)
        await change(
            database,
            "UPDATE job_info SET status = :status WHERE id = :id",
            status=status,
            id=job_id,
        )
        assert (await expire(database)).job_ids == [job_id]
        assert await status_of(database, job_id) == (3, "expired")


async def test_a_job_that_has_begun_is_not_expired(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        job_ids = await insert(database, 3, expires_at=await now_of(database) + HOUR_MS)
        running, retried, done = await claimed(database, job_ids, term=await new_term(database))
        await settled(
            database,
            ending(retried, ExecutionStatus.FAILED, error_code="x"),
            ending(done, ExecutionStatus.SUCCEEDED),
        )
        await change(database, "UPDATE job_info SET expires_at = :past", past=PAST)
        await change(database, "UPDATE job_expiry SET look_at = :past", past=PAST)
        assert (await expire(database)).job_ids == []
        assert [await status_of(database, run.job_id) for run in (running, done)] == [
            (1, None),
            (2, None),
        ]
        assert (await status_of(database, retried.job_id))[0] == 0
        # Only the run that is under way may still be given back, and is looked at again.
        assert await rows_of(database, "SELECT job_id FROM job_expiry") == [
            {"job_id": running.job_id}
        ]
        # The retry is claimed although its time has passed: its first attempt began in time.
        await change(database, "UPDATE job_info SET next_trigger_time = 1 WHERE status = 0")
        assert len(await claimed(database, [retried.job_id], term=await new_term(database))) == 1


async def test_a_run_that_had_begun_and_is_given_back_has_met_its_deadline(
    migrated_engine: Engine,
) -> None:
    """A deploy that cuts a run short does not make it one that had never begun."""
    async with opened(migrated_engine) as database:
        job_ids = await insert(database, 2, expires_at=await now_of(database) + HOUR_MS)
        told, noted = await claimed(database, job_ids, term=await new_term(database))
        began = await now_of(database)
        await database.write(
            lambda connection: note_running(connection, database, [(noted.execution_id, began)])
        )
        # Only the look at the first deadline goes: what is looked at again finds nothing to end.
        await change(
            database,
            "INSERT INTO job_expiry (look_at, job_id) VALUES (:past, :id)",
            past=PAST,
            id=told.job_id,
        )
        await settled(
            database,
            ending(told, ExecutionStatus.RETURNED, started_at=began),
            ending(noted, ExecutionStatus.RETURNED),
        )
        assert (
            await rows_of(database, "SELECT status, attempt, expires_at FROM job_info ORDER BY id")
            == [{"status": 0, "attempt": 0, "expires_at": None}] * 2
        )
        assert await value_of(database, "SELECT count(*) FROM job_expiry") == 1
        assert (await expire(database)).job_ids == []
        assert await value_of(database, "SELECT count(*) FROM job_expiry") == 0
        await change(database, "UPDATE job_info SET next_trigger_time = 1")
        assert len(await claimed(database, job_ids, term=await new_term(database))) == 2


@pytest.mark.parametrize("waited", [False, True])
async def test_a_run_that_is_given_back_before_it_began_expires_after_all(
    migrated_engine: Engine, waited: bool
) -> None:
    async with opened(migrated_engine) as database:
        job_ids = await insert(database, 1, expires_at=await now_of(database) + HOUR_MS)
        (run,) = await claimed(database, job_ids, term=await new_term(database))
        await change(database, "UPDATE job_info SET expires_at = :past", past=PAST)
        await change(database, "UPDATE job_expiry SET look_at = :past", past=PAST)
        assert (await expire(database)).job_ids == []
        accepted = await now_of(database) if waited else None
        if accepted is not None:
            # Accepted, it waited for a thread: meanwhile it was taken for one that goes on.
            noted = [(run.execution_id, accepted)]
            await database.write(lambda connection: note_running(connection, database, noted))
        await settled(database, ending(run, ExecutionStatus.RETURNED, accepted_at=accepted))
        await change(database, "UPDATE job_expiry SET look_at = :past", past=PAST)
        assert (await expire(database)).job_ids == [run.job_id]
        assert await status_of(database, run.job_id) == (3, "expired")


async def test_the_claim_decides_between_two_that_want_the_same_job(
    migrated_engine: Engine,
) -> None:
    """What is claimed in time is not expired, even by a look that comes after the moment."""
    async with opened(migrated_engine) as database:
        job_ids = await insert(database, 50, expires_at=await now_of(database) + HOUR_MS)
        term = await new_term(database)
        await change(database, "UPDATE job_expiry SET look_at = :past", past=PAST)
        runs = await claimed(database, job_ids[:25], term=term)
        await change(database, "UPDATE job_info SET expires_at = :past", past=PAST)
        expired = (await expire(database)).job_ids
        assert sorted(expired) == job_ids[25:]
        assert [run.job_id for run in runs] == job_ids[:25]


async def test_many_are_looked_at_in_batches(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        job_ids = await insert(database, 25, expires_at=PAST)
        ended: list[int] = []
        for _ in range(3):
            ended += (await expire(database, limit=10)).job_ids
        assert sorted(ended) == job_ids
        assert not (await expire(database, limit=10)).more


async def test_a_changed_deadline_counts(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as at:
        later = await at.submitted(jobHandler="absent", expiresAt=moment(hours=-1))
        never = await at.submitted(jobHandler="absent", expiresAt=moment(hours=-1))
        for job_id, value in ((later, moment(minutes=1)), (never, None)):
            answer = await at.client.patch(
                f"/openapi/jobs/{job_id}", json={"expiresAt": value}, headers={"If-Match": '"0"'}
            )
            assert answer.status_code == 200, answer.text
        await change(
            at.database, "UPDATE job_expiry SET look_at = look_at - :hours", hours=2 * HOUR_MS
        )
        assert await look(at) == [later]
        assert (await status_of(at.database, never))[0] == 0


async def test_a_job_that_is_retried_by_its_caller_expires_no_more(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as at:
        job_id = await at.submitted(expiresAt=moment(hours=1))
        await look(at)
        answer = await at.client.post(f"/openapi/jobs/{job_id}/retry")
        assert answer.status_code == 200, answer.text
        assert answer.json()["expiresAt"] is None
        assert await look(at) == []
        assert len(await claimed(at.database, [job_id], term=await new_term(at.database))) == 1


async def test_a_repeat_of_an_expired_request_is_answered_with_its_job(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as at:
        body = {"expiresAt": moment(hours=1)}
        job_id = await at.submitted(request_id="once", **body)
        await look(at)
        answer = await at.submit("once", **body)
        assert answer.status_code == 200
        assert (answer.json()["jobId"], answer.json()["status"]) == (job_id, "FAILED")


async def test_a_deadline_before_the_due_time_is_refused(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as at:
        answer = await at.submit(runAt="2031-01-01T00:00:00Z", expiresAt="2030-01-01T00:00:00Z")
        assert answer.status_code == 422
        assert "expiresAt must be later than runAt" in answer.text
        job_id = await at.submitted(jobHandler="absent", delayMs=60_000)
        answer = await at.client.patch(
            f"/openapi/jobs/{job_id}",
            json={"runAt": "2031-01-01T00:00:00Z", "expiresAt": "2030-01-01T00:00:00Z"},
            headers={"If-Match": "*"},
        )
        assert answer.status_code == 422
        assert "expiresAt must be later than runAt" in answer.text


async def test_no_look_stays_behind_for_a_deadline_that_is_gone(migrated_engine: Engine) -> None:
    """A far deadline is not looked at for years: what it is good for no more goes at once."""
    async with door(migrated_engine) as at:
        changed, retried, pruned = [
            await at.submitted(jobHandler="absent", expiresAt="2090-01-01T00:00:00Z")
            for _ in range(3)
        ]
        for value, looks in (("2091-01-01T00:00:00Z", 3), (None, 2), ("2092-01-01T00:00:00Z", 3)):
            answer = await at.client.patch(
                f"/openapi/jobs/{changed}", json={"expiresAt": value}, headers={"If-Match": "*"}
            )
            assert answer.status_code == 200, answer.text
            assert await value_of(at.database, "SELECT count(*) FROM job_expiry") == looks
        for verb in ("cancel", "retry"):
            answer = await at.client.post(f"/openapi/jobs/{retried}/{verb}")
            assert answer.status_code == 200, answer.text
        assert await value_of(at.database, "SELECT count(*) FROM job_expiry") == 2
        assert (await at.client.post(f"/openapi/jobs/{pruned}/cancel")).status_code == 200
        assert await prune_all(at.database, before_ms=2**53) == [1]
        left = await rows_of(at.database, "SELECT job_id FROM job_expiry")
        assert [row["job_id"] for row in left] == [changed]


async def test_jobs_without_a_deadline_leave_no_trace(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as at:
        await at.submitted()
        assert await value_of(at.database, "SELECT count(*) FROM job_expiry") == 0
