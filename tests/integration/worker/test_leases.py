"""Leases live exactly as long as their runs."""

from __future__ import annotations

import asyncio
import threading

import pytest
from redis import Redis

from oncue.protocol import LEASE_SECONDS, OutcomeStatus, run_key, run_mark, stopping_key
from tests.integration.worker import handlers_under_test
from tests.integration.worker.conftest import OpenWorker
from tests.integration.worker.rig import FakeDispatcher
from tests.support.redis import PrivateValkey
from tests.support.wait import until, until_async
from tests.unit.worker.runs import make_request, make_run


@pytest.fixture(autouse=True)
def renew_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.renew.RENEW_SECONDS", 0.1)


async def test_a_lease_lost_in_a_flush_is_set_again_while_the_run_goes_on(
    open_worker: OpenWorker, valkey: PrivateValkey
) -> None:
    run = make_run("w_wait", {"seconds": 60})
    key = run_key("oncue", run.job_id, run.trigger_ts)
    async with open_worker() as parts:
        await parts.intake.take(make_request(run))
        valkey.flushall()
        with Redis.from_url(valkey.socket_url, decode_responses=True) as redis:
            mark = await until_async(lambda: redis.get(key))
            assert mark == run_mark(parts.identity.boot_id, run.execution_id)
            redis.pexpire(key, 5000)
            await until_async(lambda: redis.pttl(key) > 10_000)


async def test_a_redis_that_takes_no_writes_can_grant_no_lease(
    open_worker: OpenWorker, valkey: PrivateValkey
) -> None:
    """It answers, but it is full."""
    async with open_worker() as parts:
        assert await parts.leases.is_reachable()
        assert valkey.command("CONFIG SET maxmemory 1") == b"+OK"
        try:
            assert not await parts.leases.is_reachable()
        finally:
            valkey.command("CONFIG SET maxmemory 0")
        assert await parts.leases.is_reachable()


async def test_an_outcome_lost_in_a_flush_is_stored_again_while_no_dispatcher_has_it(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, valkey: PrivateValkey
) -> None:
    """Whoever looks under the key finds it, or a lease: never nothing for as long as a lease."""
    run = make_run("echo", {"text": "x" * 5000})
    key = run_key("oncue", run.job_id, run.trigger_ts)
    async with open_worker() as parts:
        dispatcher.silent = True
        await parts.intake.take(make_request(run))
        mark = run_mark(parts.identity.boot_id, run.execution_id)
        with Redis.from_url(valkey.socket_url, decode_responses=True) as redis:

            def outcome() -> str:
                return str(redis.get(key) or "").removeprefix(mark)

            first = await until_async(outcome)
            for _ in range(2):
                valkey.flushall()
                assert await until_async(outcome) == first
            assert redis.pttl(key) > 500_000
            # A bare lease in its place is none: the outcome may have been lost while it was stored.
            redis.set(key, mark, px=1000)
            assert await until_async(outcome) == first
            dispatcher.silent = False
            await until_async(lambda: dispatcher.outcome(run.execution_id))


async def test_renewing_shortens_no_tombstone(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, valkey: PrivateValkey
) -> None:
    run = make_run("echo", 1)
    key = run_key("oncue", run.job_id, run.trigger_ts)
    async with open_worker() as parts:
        dispatcher.silent = True
        await parts.intake.take(make_request(run))
        with Redis.from_url(valkey.socket_url) as redis:
            await until_async(lambda: b"succeeded" in (redis.get(key) or b""))
            redis.pexpire(key, 900_000)
            contact = parts.liveness._contact_at
            await until_async(lambda: parts.liveness._contact_at > contact + 0.5)
            assert redis.pttl(key) > 800_000
        dispatcher.silent = False


async def test_a_run_whose_attempt_another_took_is_stopped(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, valkey: PrivateValkey
) -> None:
    run = make_run("w_wait", {"seconds": 60})
    key = run_key("oncue", run.job_id, run.trigger_ts)
    async with open_worker() as parts:
        await parts.intake.take(make_request(run))
        with Redis.from_url(valkey.socket_url, decode_responses=True) as redis:
            redis.set(key, run_mark("another", "execution"))
            outcome = await until_async(lambda: dispatcher.outcome(run.execution_id))
            assert redis.get(key) == run_mark("another", "execution")
    assert outcome.status is OutcomeStatus.RETURNED
    assert outcome.error is not None
    assert outcome.error.code == "lease_lost"


async def test_leases_are_renewed_while_the_event_loop_is_stuck(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, valkey: PrivateValkey
) -> None:
    handlers_under_test.GATES["renewed"] = threading.Event()
    run = make_run("w_burn", {"seconds": 60, "gate": "renewed"})
    key = run_key("oncue", run.job_id, run.trigger_ts)
    redis = Redis.from_url(valkey.socket_url, decode_responses=True)

    def shorten_and_wait() -> None:
        """Run beside the loop, which burns."""
        try:
            redis.pexpire(key, 5000)
            until(lambda: int(redis.pttl(key)) > 10_000, what="the lease to be renewed")
        finally:
            handlers_under_test.GATES["renewed"].set()

    async with open_worker() as parts:
        await parts.intake.take(make_request(run))
        # The burn begins now.
        await asyncio.get_running_loop().run_in_executor(None, shorten_and_wait)
    redis.close()


async def test_a_thread_that_goes_on_after_its_end_keeps_a_lease_of_its_own(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, valkey: PrivateValkey
) -> None:
    handlers_under_test.GATES["lingers"] = threading.Event()
    run = make_run("w_thread", {"gate": "lingers"}, timeout_ms=1000)
    key = run_key("oncue", run.job_id, run.trigger_ts)
    async with open_worker() as parts:
        await parts.intake.take(make_request(run))
        outcome = await until_async(lambda: dispatcher.outcome(run.execution_id))
        assert outcome.stopping
        with Redis.from_url(valkey.socket_url, decode_responses=True) as redis:
            mark = run_mark(parts.identity.boot_id, run.execution_id)
            # The run key tells how it ended, the other that it is not over.
            assert await until_async(lambda: redis.get(stopping_key(key))) == mark
            assert str(redis.get(key)).removeprefix(mark)
        handlers_under_test.GATES["lingers"].set()
        await until_async(lambda: run.execution_id in dispatcher.stopped())


async def test_the_lease_of_what_goes_on_is_there_as_soon_as_its_end_takes_the_run_keys_place(
    open_worker: OpenWorker,
    dispatcher: FakeDispatcher,
    valkey: PrivateValkey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The next renewal is a long time off: only what stores the end can have set it.
    monkeypatch.setattr("worker.renew.RENEW_SECONDS", 600.0)
    handlers_under_test.GATES["at_once"] = threading.Event()
    run = make_run("w_thread", {"gate": "at_once"}, timeout_ms=1000)
    key = run_key("oncue", run.job_id, run.trigger_ts)
    async with open_worker() as parts:
        await parts.intake.take(make_request(run))
        await until_async(lambda: dispatcher.outcome(run.execution_id))
        with Redis.from_url(valkey.socket_url, decode_responses=True) as redis:
            mark = run_mark(parts.identity.boot_id, run.execution_id)
            assert await until_async(lambda: redis.get(stopping_key(key))) == mark
            assert 0 < redis.pttl(stopping_key(key)) <= LEASE_SECONDS * 1000
        handlers_under_test.GATES["at_once"].set()
        await until_async(lambda: run.execution_id in dispatcher.stopped())
