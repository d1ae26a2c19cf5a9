"""A run is given up under its run key first: what comes late to a frozen worker finds it taken."""

from __future__ import annotations

from typing import Final

from app.dispatch.death import Estate
from app.lifecycle.running import read_running
from app.lifecycle.states import ExecutionStatus
from oncue.protocol import GIVEN_UP, run_key, run_mark
from tests.integration.app.rig import WORKER, Door, door, running_job, value_of
from tests.support.engines import Engine

STATUS: Final = "SELECT status FROM job_log WHERE execution_id = :id"


async def test_a_lost_run_leaves_a_mark_that_no_late_worker_begins_on(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as here:
        run = await running_job(here.database)
        key = run_key(migrated_engine.redis_prefix, run.job_id, run.trigger_ts)
        await _take_back(here)
        assert await here.parts.ground.redis.get(key) == run_mark(GIVEN_UP, GIVEN_UP)
        assert await value_of(here.database, STATUS, id=run.execution_id) == ExecutionStatus.LOST


async def test_a_mark_whose_run_could_not_be_settled_hinders_no_later_look(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as here:
        run = await running_job(here.database)
        key = run_key(migrated_engine.redis_prefix, run.job_id, run.trigger_ts)
        await here.parts.ground.redis.set(key, run_mark(GIVEN_UP, GIVEN_UP))
        await _take_back(here)
        assert await value_of(here.database, STATUS, id=run.execution_id) == ExecutionStatus.LOST


async def test_a_lease_that_was_taken_in_the_last_moment_keeps_the_run(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as here:
        run = await running_job(here.database)
        key = run_key(migrated_engine.redis_prefix, run.job_id, run.trigger_ts)
        lease = run_mark("boot", run.execution_id)
        await here.parts.ground.redis.set(key, lease)
        await _take_back(here)
        assert await here.parts.ground.redis.get(key) == lease
        assert await value_of(here.database, STATUS, id=run.execution_id) == ExecutionStatus.CLAIMED


async def test_a_lease_that_is_absent_since_a_flush_is_not_gone(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as here:
        run = await running_job(here.database)
        key = run_key(migrated_engine.redis_prefix, run.job_id, run.trigger_ts)
        deaths = here.parts.recovery._deaths
        await deaths.watch_redis()
        # The flush comes after the look at the canary, and before the look at the lease.
        await here.parts.ground.redis.delete(f"{migrated_engine.redis_prefix}:canary")
        running = await here.database.read(lambda one: read_running(one, here.database))
        await deaths._take_back(WORKER, Estate(running=list(running)), "worker dead")
        assert await here.parts.ground.redis.get(key) is None
        assert await value_of(here.database, STATUS, id=run.execution_id) == ExecutionStatus.CLAIMED


async def _take_back(here: Door) -> None:
    running = await here.database.read(lambda connection: read_running(connection, here.database))
    deaths = here.parts.recovery._deaths
    await deaths.watch_redis()
    await deaths._take_back(WORKER, Estate(running=list(running)), "worker dead")
