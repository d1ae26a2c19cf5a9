"""Retention deletes what has ended, whole, and nothing that somebody may still need."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.moves.guard import Asked, Changed, Unknown
from app.lifecycle.moves.prune import drop_jobs, find_again
from app.lifecycle.moves.release import release_stopped
from app.lifecycle.moves.reopen import reopen_job
from app.lifecycle.states import DeliveryStatus, ExecutionStatus, JobStatus
from app.lifecycle.token import new_token
from app.plumbing.database import Database
from tests.integration.app.rig import (
    change,
    ending,
    insert,
    opened,
    prune_all,
    rows_of,
    running_job,
    settled,
    value_of,
)
from tests.support.engines import Engine

URL = "http://127.0.0.1:9/hook"
LONG = f'"{"x" * 5000}"'
TABLES = ("job_info", "job_log", "job_payload", "job_label", "callback_delivery")


async def pruned(database: Database, *, later_ms: int = 1000, limit: int = 500) -> int:
    """Walk all jobs as retention does, as if `later_ms` had passed."""
    now = await value_of(database, f"SELECT {database.now_ms}")
    return sum(await prune_all(database, before_ms=now + later_ms, limit=limit))


async def ended_job(database: Database, **fields: Any) -> int:
    """A job with long params, a label, a long result and, with a URL, a callback."""
    run = await running_job(database, params=LONG, labels={"a": "b"}, **fields)
    await settled(database, ending(run, ExecutionStatus.SUCCEEDED, result=LONG))
    return run.job_id


async def left(database: Database) -> list[int]:
    return [row["id"] for row in await rows_of(database, "SELECT id FROM job_info ORDER BY id")]


async def test_a_finished_job_leaves_with_all_that_belongs_to_it(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        await ended_job(database, callback_url=URL)
        await change(
            database, f"UPDATE callback_delivery SET status = {int(DeliveryStatus.DELIVERED)}"
        )
        assert await pruned(database) == 1
        counts = [await value_of(database, f"SELECT COUNT(*) FROM {table}") for table in TABLES]
        assert counts == [0] * len(TABLES)


async def test_jobs_that_have_not_ended_stay(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        waiting = (await insert(database, 1, labels={"a": "b"}))[0]
        running = (await running_job(database)).job_id
        assert await pruned(database) == 0
        assert await left(database) == [waiting, running]
        assert await value_of(database, "SELECT COUNT(*) FROM job_label") == 1


async def test_a_job_stays_until_its_callback_has_ended(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        job_id = await ended_job(database, callback_url=URL)
        assert await pruned(database) == 0
        for ended in (DeliveryStatus.EXHAUSTED, DeliveryStatus.GONE):
            await change(database, f"UPDATE callback_delivery SET status = {int(ended)}")
        assert await pruned(database) == 1
        assert job_id not in await left(database)


async def test_a_job_stays_until_its_thread_has_ended(migrated_engine: Engine) -> None:
    """It holds its concurrency key until then, and what stands behind it waits."""
    async with opened(migrated_engine) as database:
        run = await running_job(database, concurrency_key="k", concurrency_limit=1)
        await settled(
            database, ending(run, ExecutionStatus.TIMED_OUT, stopping=True, retryable=False)
        )
        assert await pruned(database) == 0
        await database.write(lambda connection: release_stopped(connection, [run.execution_id]))
        assert await pruned(database) == 1


async def test_a_child_stays_until_its_root_has_ended(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        root, child = await ended_job(database), await ended_job(database)
        await change(
            database,
            "UPDATE job_info SET root_id = :root, parent_id = :root WHERE id = :child",
            root=root,
            child=child,
        )
        alive = f"UPDATE job_info SET status = {int(JobStatus.RUNNING)} WHERE id = :root"
        await change(database, alive, root=root)
        assert await pruned(database) == 0
        done = f"UPDATE job_info SET status = {int(JobStatus.SUCCEEDED)} WHERE id = :root"
        await change(database, done, root=root)
        assert await pruned(database) == 2


async def test_a_job_that_ended_lately_stays(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        job_id = await ended_job(database)
        assert await pruned(database, later_ms=-60_000) == 0
        # Created long ago, ended just now.
        await change(database, "UPDATE job_info SET created_at = 1")
        assert await pruned(database, later_ms=-60_000) == 0
        assert await left(database) == [job_id]


@pytest.mark.parametrize("limit", [1, 3, 7])
async def test_small_batches_reach_every_job(migrated_engine: Engine, limit: int) -> None:
    async with opened(migrated_engine) as database:
        kept = await insert(database, 3)
        for _ in range(5):
            await ended_job(database)
        kept += await insert(database, 2)
        assert await pruned(database, limit=limit) == 5
        assert await left(database) == kept


@pytest.mark.parametrize("first", ["retry", "prune"])
async def test_a_job_that_is_retried_while_it_is_pruned_stays_whole_or_leaves_whole(
    migrated_engine: Engine, first: str
) -> None:
    async with opened(migrated_engine) as one, opened(migrated_engine) as other:
        run = await running_job(one, params=LONG, labels={"a": "b"}, max_retry=0)
        await settled(one, ending(run, ExecutionStatus.FAILED, error_code="e"))
        asked = Asked(run.job_id, 0, new_token())
        (found,) = await one.read(lambda connection: find_again(connection, one, [run.job_id]))
        holds, let_go = asyncio.Event(), asyncio.Event()

        async def retry(connection: AsyncConnection) -> object:
            answer = await reopen_job(connection, one, asked)
            if first == "retry":
                holds.set()
                await let_go.wait()
            return answer

        async def prune(connection: AsyncConnection) -> int:
            left = await drop_jobs(connection, other, [found])
            if first == "prune":
                holds.set()
                await let_go.wait()
            return len(left)

        tasks: dict[str, asyncio.Task[Any]] = {}
        for name in (first, "prune" if first == "retry" else "retry"):
            work = one.write(retry) if name == "retry" else other.write(prune)
            tasks[name] = asyncio.create_task(work)
            await holds.wait()
        await asyncio.sleep(0.2)
        let_go.set()
        answer, deleted = await tasks["retry"], await tasks["prune"]
        counts = [await value_of(one, f"SELECT COUNT(*) FROM {table}") for table in TABLES]
        if first == "retry":
            assert isinstance(answer, Changed)
            assert (deleted, counts) == (0, [1, 1, 1, 1, 0])
        else:
            assert isinstance(answer, Unknown)
            assert (deleted, counts) == (1, [0] * len(TABLES))
