"""Partitions in the rows: where a job lies, and which term fences what is done with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import uuid_utils
from sqlalchemy.ext.asyncio import AsyncConnection

from app.jobs.check import partition_of
from app.lifecycle.limits import TenantLimits, count_running_of, count_waiting, write_limits
from app.lifecycle.moves.assign import Reassignment, reassign
from app.lifecycle.moves.claim import Claimed, claim
from app.lifecycle.moves.ending import Settled
from app.lifecycle.moves.within_quotas import keep_within_quotas
from app.lifecycle.reads import ensure_queue
from app.lifecycle.retry import MAX_RETURNS
from app.lifecycle.states import ExecutionStatus
from app.lifecycle.term import begin_term, open_partitions
from app.lifecycle.token import new_token
from app.plumbing.database import Database
from tests.integration.app.rig import (
    assignments_for,
    change,
    door,
    ending,
    insert,
    opened,
    rows_of,
    settled,
    value_of,
)
from tests.support.engines import Engine

PARTITION = 3


async def term_of(database: Database, partition: int) -> int:
    """Begin a term of a partition, which is opened if it is new."""

    async def write(connection: AsyncConnection) -> int:
        await open_partitions(connection, database, [partition])
        return await begin_term(connection, database, "test", partition)

    return await database.write(write)


async def queue_of(database: Database, partition: int) -> int:
    return await database.write(
        lambda connection: ensure_queue(
            connection,
            database,
            tenant_id=0,
            job_handler="echo",
            requirement="",
            partition=partition,
        )
    )


async def claimed_in(
    database: Database, job_ids: Sequence[int], *, partition: int, term: int
) -> list[Claimed]:
    assignments = await assignments_for(database, job_ids)
    return await database.write(
        lambda connection: claim(
            connection, database, assignments, token=new_token(), term=term, partition=partition
        )
    )


async def test_jobs_are_spread_by_their_request_and_a_repeat_finds_its_own(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine, dispatch_partitions=8) as api:
        ids = [await api.submitted(request_id=f"r{number}") for number in range(64)]
        rows = await rows_of(
            api.database,
            "SELECT j.id, j.client_request_id, q.partition_no FROM job_info AS j "
            "JOIN queue AS q ON q.id = j.queue_id ORDER BY j.id",
        )
        assert [row["id"] for row in rows] == ids
        for row in rows:
            assert row["partition_no"] == partition_of(0, row["client_request_id"], 8)
        assert len({row["partition_no"] for row in rows}) == 8
        in_use = await rows_of(
            api.database, "SELECT partition_no FROM dispatch_term ORDER BY partition_no"
        )
        assert [row["partition_no"] for row in in_use] == list(range(8))
        counts = (await api.client.get("/openapi/counts")).json()
        of_status = {one["status"]: one["count"] for one in counts["items"]}
        assert of_status["WAITING"] == 64
        assert await api.database.read(lambda c: count_waiting(c, 0, most=1000)) == 64
        listed = await api.client.get("/openapi/jobs?handler=echo&limit=200")
        assert len(listed.json()["items"]) == 64
    # With another number too: what is there stays where it is.
    async with door(migrated_engine, dispatch_partitions=2) as api:
        again = await api.submit(request_id="r5")
        assert (again.status_code, again.json()["jobId"]) == (200, ids[5])


async def test_children_of_a_schedule_lie_in_its_partition(migrated_engine: Engine) -> None:
    async with door(migrated_engine, dispatch_partitions=8) as api:
        for number in range(8):
            request = f"s{number}"
            schedule = await api.submitted(request_id=request, intervalMs=3_600_000)
            answer = await api.client.post(f"/openapi/jobs/{schedule}/trigger", json={})
            assert answer.is_success, answer.text
            partition = await value_of(
                api.database,
                "SELECT q.partition_no FROM job_info AS j JOIN queue AS q ON q.id = j.queue_id "
                "WHERE j.parent_id = :id",
                id=schedule,
            )
            assert partition == partition_of(0, request, 8)


async def test_with_one_partition_no_other_is_opened(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as api:
        await api.submitted()
        assert await value_of(api.database, "SELECT COUNT(*) FROM dispatch_term") == 1
        assert await value_of(api.database, "SELECT MAX(partition_no) FROM queue") == 0


async def test_only_the_current_term_of_its_own_partition_claims(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        job_ids = await insert(database, 4, queue_id=await queue_of(database, PARTITION))
        of_first = await term_of(database, 0)
        old = await term_of(database, PARTITION)
        await term_of(database, PARTITION)
        current = await term_of(database, PARTITION)
        assert current not in (old, of_first)
        for partition, term in ((PARTITION, old), (PARTITION, of_first), (0, current)):
            assert await claimed_in(database, job_ids, partition=partition, term=term) == []
        won = await claimed_in(database, job_ids, partition=PARTITION, term=current)
        assert [run.job_id for run in won] == job_ids


async def test_what_is_given_back_or_passed_on_in_an_old_term_of_its_partition_stays(
    migrated_engine: Engine,
) -> None:
    async with opened(migrated_engine) as database:
        (job_id,) = await insert(database, 1, queue_id=await queue_of(database, PARTITION))
        old = await term_of(database, PARTITION)
        (run,) = await claimed_in(database, [job_id], partition=PARTITION, term=old)
        current = await term_of(database, PARTITION)

        async def passed_on(term: int, partition: int) -> list[Claimed]:
            move = Reassignment(
                job_id, run.execution_id, "other#boot", str(uuid_utils.uuid7()), "full"
            )
            return await database.write(
                lambda connection: reassign(
                    connection, database, [move], token=new_token(), term=term, partition=partition
                )
            )

        async def given_back(term: int, partition: int) -> Settled:
            (answer,) = await settled(
                database,
                ending(run, ExecutionStatus.RETURNED, in_term=term, in_partition=partition),
            )
            return answer.kind

        assert await passed_on(old, PARTITION) == []
        assert await passed_on(current, 0) == []
        assert await given_back(old, PARTITION) is Settled.STALE
        assert await given_back(current, 0) is Settled.STALE
        assert await given_back(current, PARTITION) is Settled.RETRIED
        assert await value_of(database, "SELECT attempt FROM job_info") == 0


async def test_a_run_that_others_left_no_slot_for_may_be_given_back_any_number_of_times(
    migrated_engine: Engine,
) -> None:
    async with opened(migrated_engine) as database:
        (job_id,) = await insert(database, 1, max_retry=0)
        term = await term_of(database, 0)
        for _ in range(MAX_RETURNS + 3):
            (run,) = await claimed_in(database, [job_id], partition=0, term=term)
            back = ending(run, ExecutionStatus.RETURNED, in_term=term, counts=False)
            (answer,) = await settled(database, back)
            assert answer.kind is Settled.RETRIED
        (row,) = await rows_of(database, "SELECT status, attempt, returned FROM job_info")
        assert row == {"status": 0, "attempt": 0, "returned": 0}


async def test_several_holders_never_claim_more_than_a_tenants_quota(
    migrated_engine: Engine,
) -> None:
    most = 7
    async with opened(migrated_engine) as one, opened(migrated_engine) as other:
        await one.write(
            lambda connection: write_limits(
                connection, 0, TenantLimits(running_jobs=most, may_borrow=False)
            )
        )

        async def claim_all(database: Database, partition: int) -> int:
            job_ids = await insert(database, 12, queue_id=await queue_of(database, partition))
            term = await term_of(database, partition)
            won = 0
            for start in range(0, 12, 3):
                assignments = await assignments_for(database, job_ids[start : start + 3])

                async def write(connection: AsyncConnection) -> list[Claimed]:
                    dealt = await keep_within_quotas(connection, database, assignments)  # noqa: B023
                    return await claim(
                        connection,
                        database,
                        dealt,
                        token=new_token(),
                        term=term,
                        partition=partition,
                    )

                won += len(await database.write(write))
            return won

        won = await asyncio.gather(*(claim_all(db, p) for p, db in ((1, one), (2, other))))
        assert sum(won) == most
        assert await one.read(lambda connection: count_running_of(connection, 0)) == most


async def test_explain_names_the_partition_that_nobody_holds(migrated_engine: Engine) -> None:
    async with door(migrated_engine, dispatch_partitions=8) as api:
        request = next(f"e{n}" for n in range(100) if partition_of(0, f"e{n}", 8) == PARTITION)
        job_id = await api.submitted(request_id=request)
        await api.parts.ground.redis.set(f"{migrated_engine.redis_prefix}:dispatch:lock:0", "held")
        told = (await api.client.get(f"/openapi/jobs/{job_id}/explain")).json()
        (found,) = [one for one in told["reasons"] if one["code"] == "dispatcher_without_lock"]
        assert found["message"].startswith("No dispatcher holds the dispatch lock of partition 3: ")
        assert found["details"]["partition"] == PARTITION
        await change(api.database, "UPDATE queue SET partition_no = 0")
        told = (await api.client.get(f"/openapi/jobs/{job_id}/explain")).json()
        assert "dispatcher_without_lock" not in {one["code"] for one in told["reasons"]}
