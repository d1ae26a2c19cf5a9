"""Beats tell who a worker is and what it holds, whatever its handlers do."""

from __future__ import annotations

import time
from itertools import takewhile
from typing import Any

from oncue.protocol import Heartbeat, ReportsRequest, WorkerState
from tests.integration.worker.conftest import SECRET, OpenWorker
from tests.integration.worker.rig import HANDLERS, FakeDispatcher
from tests.support.wait import until_async
from tests.unit.worker.runs import make_request, make_run


async def test_a_beat_describes_the_worker(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    run = make_run("w_wait", {"seconds": 60})
    async with open_worker(
        worker_capacity=7, worker_weight=2.5, worker_labels="zone=a,gpu=yes"
    ) as parts:
        await parts.intake.take(make_request(run))
        parts.beats.beat_now()
        await until_async(lambda: dispatcher.beats[-1].held)
        beat = dispatcher.beats[-1]
    assert beat.worker_id == f"tested#{beat.boot_id}"
    assert (beat.capacity, beat.weight, beat.delivers) == (7, 2.5, True)
    assert beat.labels == {"zone": "a", "gpu": "yes"}
    assert {"echo", "sleep", "fail", "http"} <= {one.name for one in beat.handlers}
    isolation = {one.name: one.isolation for one in beat.handlers}
    assert (isolation["w_child"], isolation["w_wait"]) == ("process", "none")
    assert [(one.job_id, one.execution_id) for one in beat.held] == [(run.job_id, run.execution_id)]
    assert beat.load.active == 1


async def test_a_drain_is_told_at_once_and_the_last_beat_offers_nothing(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    async with open_worker() as parts:
        began = time.monotonic()
        parts.drain()
        await until_async(lambda: dispatcher.beats[-1].state is WorkerState.DRAINING)
        assert time.monotonic() - began < 4
        assert dispatcher.beats[-1].capacity > 0
    assert (dispatcher.beats[-1].state, dispatcher.beats[-1].capacity) == (WorkerState.DRAINING, 0)


async def test_beats_go_to_the_next_dispatcher_when_one_fails(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    async with open_worker(dispatcher_url=("http://127.0.0.1:9", dispatcher.url)):
        assert dispatcher.beats


async def test_the_database_clock_is_learned_from_the_answers(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    async with open_worker() as parts:
        assert abs(parts.clock.offset_ms) < 5000


async def test_beats_go_on_while_a_handler_burns_the_processor(
    start_worker: Any, dispatcher: FakeDispatcher
) -> None:
    worker = await start_worker(ONCUE_WEBHOOK_SECRET=SECRET, ONCUE_HANDLERS=HANDLERS)
    run = make_run("w_burn", {"seconds": 9})
    await worker.post("/run", make_request(run).model_dump(by_alias=True))
    accepted = len(dispatcher.told)
    outcome = await until_async(lambda: dispatcher.outcome(run.execution_id))
    assert outcome.result > 0
    before = takewhile(lambda one: not ends(one, run.execution_id), dispatcher.told[accepted:])
    assert any(
        held.execution_id == run.execution_id
        for beat in before
        if isinstance(beat, Heartbeat)
        for held in beat.held
    )


def ends(told: Heartbeat | ReportsRequest, execution_id: str) -> bool:
    return isinstance(told, ReportsRequest) and any(
        one.execution_id == execution_id for one in told.outcomes
    )
