"""Outcomes reach a dispatcher whatever it answers, and nothing else waits for a bad one."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from redis import Redis

from oncue.protocol import Outcome, OutcomeStatus, ReportsRequest, run_key, run_mark
from tests.integration.worker.conftest import SECRET, OpenWorker
from tests.integration.worker.rig import FakeDispatcher
from tests.support.redis import PrivateValkey
from tests.support.wait import until_async
from tests.unit.worker.runs import make_request, make_run


async def test_an_outcome_is_repeated_until_acknowledged_by_any_dispatcher(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    gone = "http://127.0.0.1:9"
    run = make_run("echo", 1)
    async with open_worker(dispatcher_url=(gone, dispatcher.url)) as parts:
        dispatcher.silent = True
        await parts.intake.take(make_request(run))
        await until_async(lambda: parts.reporter._failures > 1)
        assert parts.held.unacknowledged
        dispatcher.silent = False
        outcome = await until_async(lambda: dispatcher.outcome(run.execution_id))
        await until_async(lambda: not parts.held.unacknowledged)
    assert outcome.result == 1


@pytest.mark.parametrize("status", [401, 404, 429])
async def test_a_refusal_that_is_not_about_the_content_changes_no_outcome(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, status: int
) -> None:
    dispatcher.status_of = lambda _: status
    run = make_run("echo", 1)
    async with open_worker() as parts:
        await parts.intake.take(make_request(run))
        await until_async(lambda: len(dispatcher.refused) > 1)
        dispatcher.status_of = lambda _: 200
        outcome = await until_async(lambda: dispatcher.outcome(run.execution_id))
    assert outcome.status is OutcomeStatus.SUCCEEDED


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_proxy_that_refuses_a_report_changes_no_outcome(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, status: int
) -> None:
    dispatcher.behind_a_proxy = True
    dispatcher.status_of = lambda _: status
    runs = [make_run("echo", number) for number in range(3)]
    async with open_worker() as parts:
        await parts.intake.take(make_request(*runs))
        await until_async(lambda: len(dispatcher.refused) > 3)
        dispatcher.status_of = lambda _: 200
        await until_async(lambda: len(dispatcher.outcomes()) == 3)
    assert [dispatcher.outcomes()[run.execution_id].result for run in runs] == [0, 1, 2]


async def test_what_is_too_large_for_a_proxy_comes_in_parts(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    dispatcher.behind_a_proxy = True
    runs = [make_run("echo", number) for number in range(8)]
    async with open_worker() as parts:
        dispatcher.silent = True
        await parts.intake.take(make_request(*runs))
        await until_async(lambda: len(parts.held.unacknowledged) == 8)
        dispatcher.status_of = lambda report: 413 if len(report.outcomes) > 2 else 200
        dispatcher.silent = False
        await until_async(lambda: len(dispatcher.outcomes()) == 8)
    assert {one.result for one in dispatcher.outcomes().values()} == set(range(8))


@pytest.mark.parametrize("status", [400, 422, 413])
async def test_the_offender_in_a_batch_is_found_and_told_as_unstorable(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, status: int
) -> None:
    poison = make_run("echo", "poison")
    good = [make_run("echo", number) for number in range(20)]

    def judge(report: ReportsRequest) -> int:
        return status if any(one.result == "poison" for one in report.outcomes) else 200

    async with open_worker() as parts:
        dispatcher.silent = True
        await parts.intake.take(make_request(*good[:10], poison, *good[10:]))
        await until_async(lambda: len(parts.held.unacknowledged) == 21)
        dispatcher.status_of = judge
        dispatcher.silent = False
        await until_async(lambda: len(dispatcher.outcomes()) == 21)
    found = dispatcher.outcomes()
    assert {found[run.execution_id].result for run in good} == set(range(20))
    bad = found[poison.execution_id]
    assert (bad.status, bad.retryable) == (OutcomeStatus.FAILED, False)
    assert bad.error is not None
    assert bad.error.code == "result_unstorable"


async def test_an_outcome_that_breaks_the_dispatcher_blocks_no_other(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    poison, good = make_run("echo", "poison"), make_run("echo", "good")
    dispatcher.status_of = lambda report: (
        500 if any(one.result == "poison" for one in report.outcomes) else 200
    )
    async with open_worker() as parts:
        await parts.intake.take(make_request(poison, good))
        await until_async(lambda: dispatcher.outcome(good.execution_id))
        dispatcher.status_of = lambda _: 200
        outcome = await until_async(lambda: dispatcher.outcome(poison.execution_id))
    assert outcome.result == "poison"


async def test_an_outcome_is_readable_in_redis_before_it_is_acknowledged_and_a_tombstone_after(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, valkey: PrivateValkey
) -> None:
    run = make_run("echo", {"text": "x" * 5000})
    key = run_key("oncue", run.job_id, run.trigger_ts)
    redis = Redis.from_url(valkey.socket_url, decode_responses=True)
    async with open_worker() as parts:
        dispatcher.silent = True
        await parts.intake.take(make_request(run))
        mark = run_mark(parts.identity.boot_id, run.execution_id)

        def value() -> str:
            return str(redis.get(key) or "").removeprefix(mark)

        await until_async(value)
        assert Outcome.model_validate_json(value()).result == run.params
        dispatcher.silent = False
        await until_async(lambda: len(value()) < 1000)
        small = json.loads(value())
        assert (small["status"], "result" in small) == ("succeeded", False)
        assert int(redis.ttl(key)) > 500
    redis.close()


async def test_outcomes_are_reported_while_redis_is_gone_and_stored_when_it_is_back(
    open_worker: OpenWorker,
    dispatcher: FakeDispatcher,
    valkey: PrivateValkey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.store.LOOK_SECONDS", 0.1)
    told, kept = make_run("w_wait", {"seconds": 0.2}), make_run("w_wait", {"seconds": 0.2})
    dispatcher.acknowledges = lambda execution_id: execution_id == told.execution_id
    async with open_worker() as parts:
        await parts.intake.take(make_request(told, kept))
        valkey.kill()
        await until_async(lambda: dispatcher.outcome(told.execution_id))
        valkey.start()
        key = run_key("oncue", kept.job_id, kept.trigger_ts)
        with Redis.from_url(valkey.socket_url) as redis:
            await until_async(lambda: b'"succeeded"' in (redis.get(key) or b""))


async def test_what_gathers_during_one_report_goes_into_the_next(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    dispatcher.gate = asyncio.Event()
    first = make_run("echo", -1)
    async with open_worker(worker_capacity=500) as parts:
        await parts.intake.take(make_request(first))
        await until_async(lambda: dispatcher.arrived == 1)
        await parts.intake.take(make_request(*(make_run("echo", number) for number in range(450))))
        await until_async(lambda: len(parts.held.unacknowledged) == 451)
        dispatcher.gate.set()
        await until_async(lambda: len(dispatcher.outcomes()) == 451)
    sizes = [len(report.outcomes) for report in dispatcher.reports]
    assert sizes == [1, 200, 200, 50]


async def test_a_slot_is_free_in_the_report_of_its_run(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    run = make_run("echo", 1)
    async with open_worker(worker_capacity=1) as parts:
        await parts.intake.take(make_request(run))
        await until_async(lambda: dispatcher.outcome(run.execution_id))
    [report] = [one for one in dispatcher.reports if one.outcomes]
    assert report.load.active == 0


@pytest.mark.parametrize("secret", [SECRET, None])
async def test_a_report_says_whether_its_worker_delivers_callbacks(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, secret: str | None
) -> None:
    run = make_run("echo")
    async with open_worker(webhook_secret=secret) as parts:
        await parts.intake.take(make_request(run))
        await until_async(lambda: dispatcher.outcome(run.execution_id))
    assert {report.delivers for report in dispatcher.reports} == {secret is not None}


async def test_an_unwanted_run_is_stopped_and_an_unwanted_outcome_dropped(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    dispatcher.acknowledges = lambda _: False
    running, ended = make_run("w_wait", {"seconds": 60}), make_run("echo")
    async with open_worker() as parts:
        await parts.intake.take(make_request(running, ended))
        await until_async(lambda: ended.execution_id in parts.held.unacknowledged)
        dispatcher.unwanted = [running.execution_id, ended.execution_id]
        parts.beats.beat_now()
        await until_async(lambda: not parts.held.live)
        parts.beats.beat_now()
        await until_async(lambda: not parts.held.snapshot())
        began = time.monotonic()
        await parts.reporter.wait_empty()
        assert time.monotonic() - began < 3
