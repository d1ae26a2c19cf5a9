"""A run is given up under its run key first: what comes late to a frozen worker finds it taken."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from app.dispatch.death import Estate
from app.lifecycle.moves.claim import Claimed
from app.lifecycle.moves.release import read_stopping
from app.lifecycle.nodes import read_nodes
from app.lifecycle.running import read_running
from app.lifecycle.states import ExecutionStatus, JobStatus
from app.plumbing.database import Database
from oncue.protocol import GIVEN_UP, WorkerState, run_key, run_mark, stopping_key
from tests.integration.app.rig import (
    WORKER,
    Door,
    claimed,
    door,
    insert,
    new_term,
    outcome_of,
    rows_of,
    running_job,
    value_of,
)
from tests.support.engines import Engine
from tests.support.wait import until_async

STATUS: Final = "SELECT status FROM job_log WHERE execution_id = :id"
STATE: Final = "SELECT state FROM worker_node"
STOPPING: Final = "SELECT stopping_execution_id FROM job_info WHERE id = :id"


async def test_a_lost_run_leaves_a_mark_that_no_late_worker_begins_on(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as here:
        run = await running_job(here.database)
        key = run_key(migrated_engine.redis_prefix, run.job_id, run.trigger_ts)
        await _take_back(here)
        assert await here.parts.ground.redis.get(key) == run_mark(GIVEN_UP, GIVEN_UP)
        assert await value_of(here.database, STATUS, id=run.execution_id) == ExecutionStatus.LOST


async def test_a_job_whose_worker_died_is_due_at_once_and_has_used_up_an_attempt(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as here:
        run = await running_job(here.database, retry_interval_ms=86_400_000, max_retry=1)
        await _take_back(here)
        due = f"SELECT next_trigger_time > {here.database.now_ms} FROM job_info WHERE status = 0"
        assert await value_of(here.database, due) == 0
        term = await new_term(here.database)
        (again,) = await claimed(here.database, [run.job_id], term=term)
        assert again.attempt == 2
        await _take_back(here)
        (job,) = await rows_of(here.database, "SELECT status, error_code FROM job_info")
        assert (job["status"], job["error_code"]) == (JobStatus.FAILED, "worker_lost")


async def test_an_outcome_that_is_found_under_the_key_says_so_in_the_history(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as here:
        run = await running_job(here.database)
        key = run_key(migrated_engine.redis_prefix, run.job_id, run.trigger_ts)
        outcome = json.dumps(outcome_of(run, {"n": 1}))
        await here.parts.ground.redis.set(key, run_mark("boot", run.execution_id) + outcome)
        await _take_back(here)
        (log,) = await rows_of(here.database, "SELECT status, reason FROM job_log")
        assert log["status"] == ExecutionStatus.SUCCEEDED
        assert log["reason"] == "worker dead; its outcome was found under the run key"


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
        await here.parts.recovery._deaths.watch_redis()
        # The flush comes after the look at Redis, and before the look at the lease.
        redis = here.parts.ground.redis
        await redis.delete(*(await redis.keys(f"{migrated_engine.redis_prefix}:canary*")))
        await _nothing_is_given_up(here, run)


async def test_a_lease_that_an_older_snapshot_lacks_is_not_gone(migrated_engine: Engine) -> None:
    """Redis comes back with all that it had a moment ago, the canary too, but no more."""
    async with door(migrated_engine) as here:
        run = await running_job(here.database)
        deaths, redis = here.parts.recovery._deaths, here.parts.ground.redis
        await deaths.watch_redis()
        names = sorted(await redis.keys(f"{migrated_engine.redis_prefix}:canary*"))
        snapshot = [(name, await redis.get(name)) for name in names]
        for _ in range(2):
            await deaths.watch_redis()
        trusted_since = deaths._redis_good_since
        for name, value in snapshot:
            await redis.set(name, value or "")
        await _nothing_is_given_up(here, run)
        # From here on its time counts anew.
        await deaths.watch_redis()
        assert trusted_since is not None
        assert (deaths._redis_good_since or 0) > trusted_since
        await deaths._take_back(WORKER, await _running(here), "worker dead")
        assert await value_of(here.database, STATUS, id=run.execution_id) == ExecutionStatus.LOST


async def test_looks_at_a_redis_that_keeps_all_do_not_begin_its_time_anew(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as here:
        deaths, redis = here.parts.recovery._deaths, here.parts.ground.redis
        await deaths.watch_redis()
        trusted_since = deaths._redis_good_since

        async def sent_twice(*call: Any) -> Any:
            """As the client does when the first answer is lost."""
            await redis.eval(*call)
            return await redis.eval(*call)

        class Lossy:
            eval = staticmethod(sent_twice)

        deaths._redis = cast(Any, Lossy)
        for _ in range(3):
            await deaths.watch_redis()
        assert trusted_since is not None
        assert deaths._redis_good_since == trusted_since


async def test_any_number_of_runs_of_a_dead_worker_is_given_up(migrated_engine: Engine) -> None:
    # More than there are connections to Redis.
    async with door(migrated_engine) as here:
        term = await new_term(here.database)
        runs = await claimed(here.database, await insert(here.database, 300), term=term)
        await here.beat()
        await _declare(here, await _running(here))
        assert await value_of(here.database, STATE) == WorkerState.DOWN
        lost = "SELECT COUNT(*) FROM job_log WHERE status = :lost"
        assert await value_of(here.database, lost, lost=ExecutionStatus.LOST) == len(runs)


async def test_a_cancelled_run_whose_worker_has_not_heard_of_it_keeps_its_worker_alive(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as here:
        run = await _cancelled(here)
        key = run_key(migrated_engine.redis_prefix, run.job_id, run.trigger_ts)
        await here.parts.ground.redis.set(key, run_mark("boot", run.execution_id))
        await _declare(here)
        assert await value_of(here.database, STATE) == WorkerState.UP
        assert await value_of(here.database, STOPPING, id=run.job_id) == run.execution_id
        # Declared dead before by another dispatcher, say: the run is still not over.
        await here.parts.recovery._deaths._take_back(WORKER, await _estate(here), "worker dead")
        assert await value_of(here.database, STOPPING, id=run.job_id) == run.execution_id


async def test_a_run_that_goes_on_after_its_end_is_held_by_the_lease_it_has_then(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as here:
        run = await _cancelled(here)
        key = run_key(migrated_engine.redis_prefix, run.job_id, run.trigger_ts)
        redis = here.parts.ground.redis
        mark = run_mark("boot", run.execution_id)
        await redis.set(key, mark + '{"what": "it came to"}')
        await redis.set(stopping_key(key), mark)
        await _declare(here)
        assert await value_of(here.database, STATE) == WorkerState.UP
        assert await value_of(here.database, STOPPING, id=run.job_id) == run.execution_id


async def test_a_cancelled_run_without_a_lease_is_over_with_its_worker_and_cannot_begin_late(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as here:
        run = await _cancelled(here)
        key = run_key(migrated_engine.redis_prefix, run.job_id, run.trigger_ts)
        await _declare(here)
        assert await value_of(here.database, STATE) == WorkerState.DOWN
        assert await value_of(here.database, STOPPING, id=run.job_id) is None
        assert await here.parts.ground.redis.get(key) == run_mark(GIVEN_UP, GIVEN_UP)


async def test_a_worker_that_comes_and_is_given_a_run_during_a_look_is_not_taken_for_dead(
    migrated_engine: Engine,
) -> None:
    """The look reads twice; what happens in between must not look like a run without a worker."""
    async with door(migrated_engine) as here:
        recovery, between = here.parts.recovery, Between(here.database)
        await _may_declare_at_once(here)
        runs: list[Claimed] = []

        async def come() -> None:
            await here.beat()
            runs.append(await running_job(here.database))

        between.act = come
        recovery._database = cast(Database, between)
        # Nobody holds the lock here: the term of the look is that of the lock, none.
        await recovery._look(cast(int, None))
        [run] = runs
        assert await value_of(here.database, STATUS, id=run.execution_id) == ExecutionStatus.CLAIMED


async def test_who_has_lost_the_lock_during_a_look_declares_nobody_dead(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as here:
        run = await running_job(here.database)
        await _may_declare_at_once(here)
        deaths = here.parts.recovery._deaths
        running = (await _running(here)).running
        await deaths.bury([], running, holds=lambda: False)
        assert await value_of(here.database, STATUS, id=run.execution_id) == ExecutionStatus.CLAIMED
        await deaths.bury([], running, holds=lambda: True)
        assert await value_of(here.database, STATUS, id=run.execution_id) == ExecutionStatus.LOST


class Between:
    """A database in which something happens after the first read."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.act: Callable[[], Awaitable[None]] | None = None

    async def read(self, work: Any) -> Any:
        found = await self._database.read(work)
        act, self.act = self.act, None
        if act is not None:
            await act()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)


async def _may_declare_at_once(here: Door) -> None:
    deaths = here.parts.recovery._deaths
    await deaths.watch_redis()
    deaths._quiet_since = float("-inf")
    deaths._redis_good_since = float("-inf")


async def _cancelled(here: Door) -> Claimed:
    await here.beat()
    run = await running_job(here.database)
    answer = await here.client.post(f"/openapi/jobs/{run.job_id}/cancel")
    assert answer.status_code == 200, answer.text
    assert await value_of(here.database, STOPPING, id=run.job_id) == run.execution_id
    return run


async def _estate(here: Door) -> Estate:
    return Estate(stopping=await here.database.read(read_stopping))


async def _running(here: Door) -> Estate:
    running = await here.database.read(lambda connection: read_running(connection, here.database))
    return Estate(running=list(running))


async def _declare(here: Door, estate: Estate | None = None) -> None:
    deaths = here.parts.recovery._deaths
    await deaths.watch_redis()
    node = (await here.database.read(read_nodes))[0]
    await deaths._declare(node, estate or await _estate(here), "worker dead")


async def _take_back(here: Door) -> None:
    deaths = here.parts.recovery._deaths
    await deaths.watch_redis()
    await deaths._take_back(WORKER, await _running(here), "worker dead")


async def test_what_is_on_the_way_is_counted_until_it_is_answered(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as here:
        run = await running_job(here.database)
        sender = here.parts.sender
        sender.send([run])
        assert sender.knows(run.execution_id)
        assert "oncue_runs_unanswered 1.0" in here.parts.ground.metrics.render().decode()
        # This dispatcher holds no lock: it sends nothing, and lets go of it.
        await until_async(lambda: not sender.knows(run.execution_id), what="the send to end")
        assert "oncue_runs_unanswered 0.0" in here.parts.ground.metrics.render().decode()


async def _nothing_is_given_up(here: Door, run: Claimed) -> None:
    await here.parts.recovery._deaths._take_back(WORKER, await _running(here), "worker dead")
    key = run_key(here.parts.ground.settings.redis_prefix, run.job_id, run.trigger_ts)
    assert await here.parts.ground.redis.get(key) is None
    assert await value_of(here.database, STATUS, id=run.execution_id) == ExecutionStatus.CLAIMED
