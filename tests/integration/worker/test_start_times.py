"""A run that is sent a moment before its time begins then, and never if it is stopped."""

from __future__ import annotations

import time

import pytest

from oncue.protocol import CancelRequest, OutcomeStatus, RunResponse
from tests.integration.worker.conftest import OpenWorker
from tests.integration.worker.rig import FakeDispatcher
from tests.support.wait import until_async
from tests.unit.worker.runs import make_request, make_run
from worker.clock import LowerBound
from worker.execute import CUT_OFF
from worker.parts import Parts


async def sent(parts: Parts, start_in_ms: float, handler: str = "echo") -> str:
    run = make_run(handler, {"kind": "none"}).model_copy(update={"start_in_ms": start_in_ms})
    answer = RunResponse.model_validate_json(await parts.intake.take(make_request(run)))
    assert answer.waits, "dispatchers keep a run for a worker that does not say so"
    assert [one.answer for one in answer.answers] == ["accepted"]
    return run.execution_id


@pytest.mark.parametrize("wait_ms", [0.0, 0.4, 3.7, 150.0])
async def test_it_begins_at_its_time(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, wait_ms: float
) -> None:
    async with open_worker() as parts:
        asked = time.time() * 1000
        execution_id = await sent(parts, wait_ms)
        outcome = await until_async(lambda: dispatcher.outcome(execution_id))
        assert outcome.status is OutcomeStatus.SUCCEEDED
        assert outcome.started_at is not None
        # The clock of the records has whole milliseconds, and is a guess to a few.
        assert outcome.started_at >= asked + wait_ms - 1 + min(0.0, parts.clock.offset_ms)


async def test_the_way_of_a_request_does_not_make_a_run_late(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    """Its pause ends a minute later than the time at which it is due."""
    async with open_worker() as parts:
        due_at = 1_000_000 + 400
        parts.clock.lower_bound = LowerBound()
        parts.clock.lower_bound.hear(1_000_000, time.monotonic())
        run = make_run("w_monotonic", {"kind": "none"}).model_copy(
            update={"start_in_ms": 60_000.0, "due_at": due_at}
        )
        arrived, due = time.monotonic(), parts.clock.lower_bound.reached_at(due_at)
        RunResponse.model_validate_json(await parts.intake.take(make_request(run)))
        outcome = await until_async(lambda: dispatcher.outcome(run.execution_id))
        began = outcome.result
        assert isinstance(began, float)
        assert due <= began < arrived + 60


async def test_no_start_is_recorded_before_it_was_due(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    """The clock of the records is a guess: here it is ten minutes behind."""
    async with open_worker() as parts:
        due_at = parts.clock.now_ms() + 600_000
        parts.clock.lower_bound.hear(due_at, time.monotonic())
        run = make_run("echo", {"kind": "none"}).model_copy(
            update={"start_in_ms": 30.0, "due_at": due_at}
        )
        await parts.intake.take(make_request(run))
        outcome = await until_async(lambda: dispatcher.outcome(run.execution_id))
        assert outcome.started_at == due_at


async def test_one_that_is_cancelled_before_its_time_never_begins(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    async with open_worker() as parts:
        execution_id = await sent(parts, 60_000)
        assert parts.held.load().queued == 1
        answer = parts.intake.cancel(CancelRequest(term=1, execution_ids=[execution_id]))
        assert answer.stopped == [execution_id]
        outcome = await until_async(lambda: dispatcher.outcome(execution_id))
        assert (outcome.status, outcome.started_at) == (OutcomeStatus.CANCELLED, None)
        assert parts.held.load().active == 0


async def test_a_worker_that_may_have_been_given_up_does_not_begin_it(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_worker() as parts:
        monkeypatch.setattr(parts.executor, "_may_begin", lambda: False)
        execution_id = await sent(parts, 200)
        outcome = await until_async(lambda: dispatcher.outcome(execution_id))
        assert (outcome.status, outcome.started_at) == (OutcomeStatus.RETURNED, None)
        assert outcome.error is not None
        assert outcome.error.code == CUT_OFF.code
