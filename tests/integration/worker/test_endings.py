"""How runs end: results, errors, timeouts and what cannot be stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from oncue.protocol import CancelRequest, Outcome, OutcomeStatus, Run
from tests.integration.worker import handlers_under_test
from tests.integration.worker.conftest import OpenWorker
from tests.integration.worker.rig import FakeDispatcher
from tests.support.child import is_running
from tests.support.wait import until_async
from tests.unit.worker.runs import make_request, make_run
from worker.held import Execution
from worker.parts import Parts


async def run_once(
    parts: Parts, dispatcher: FakeDispatcher, handler: str, params: Any = None, **changes: Any
) -> Outcome:
    run = make_run(handler, params, **changes)
    await parts.intake.take(make_request(run))
    return await until_async(lambda: dispatcher.outcome(run.execution_id))


@pytest.mark.parametrize("handler", ["w_nominal", "w_nominal_child"])
async def test_a_handler_is_told_the_time_that_its_run_stands_for(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, handler: str
) -> None:
    at = datetime(2026, 1, 31, 2, 0, 0, 125_000, tzinfo=UTC)
    async with open_worker() as parts:
        told = await run_once(parts, dispatcher, handler, nominal_time=1_769_824_800_125)
        # So it is for a job that no schedule made, and where an older dispatcher sends nothing.
        nothing = await run_once(parts, dispatcher, handler)
    assert (told.result, nothing.result) == (repr(at), "None")


async def ends_of(dispatcher: FakeDispatcher, runs: Sequence[Run]) -> list[Outcome]:
    await until_async(lambda: all(dispatcher.outcome(run.execution_id) for run in runs))
    return [dispatcher.outcomes()[run.execution_id] for run in runs]


@pytest.mark.parametrize(
    ("handler", "kind", "code", "retryable"),
    [
        ("w_return", "surrogate", "result_unstorable", False),
        ("w_return", "nan", "result_unstorable", False),
        ("w_return", "object", "result_unstorable", False),
        ("w_return", "big", "result_too_large", False),
        ("w_raise", "fail", "no_customer", False),
        ("w_raise", "retry", "retry_requested", True),
        ("w_raise", "value", "handler_error", True),
        ("w_raise", "exit", "handler_error", True),
        ("w_raise", "interrupt", "handler_error", True),
        ("w_raise", "surrogate", "handler_error", True),
        ("w_raise", "cancelled", "handler_error", True),
        ("w_thread_exit", "", "handler_error", True),
        ("w_child_raise", "", "not_today", False),
        ("w_child_die", "", "child_died", True),
    ],
)
async def test_a_failure_has_its_code_and_says_whether_to_retry(
    open_worker: OpenWorker,
    dispatcher: FakeDispatcher,
    handler: str,
    kind: str,
    code: str,
    retryable: bool,
) -> None:
    async with open_worker() as parts:
        outcome = await run_once(parts, dispatcher, handler, {"kind": kind})
    assert outcome.status is OutcomeStatus.FAILED
    assert outcome.error is not None
    assert (outcome.error.code, outcome.retryable) == (code, retryable)
    assert len(outcome.error.message) <= 2000
    if kind == "retry":
        assert outcome.retry_after_ms == 1500
    if kind == "value":
        assert outcome.error.message.startswith("ValueError: xxx")
        assert outcome.error.message.endswith("...")


@pytest.mark.parametrize(("kind", "size"), [("largest", 64 * 1024 - 2), ("huge_number", None)])
async def test_a_result_at_the_limit_arrives_whole(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, kind: str, size: int | None
) -> None:
    async with open_worker() as parts:
        outcome = await run_once(parts, dispatcher, "w_return", {"kind": kind})
    assert outcome.result == 2**200 if size is None else len(outcome.result) == size


async def test_a_task_that_a_handler_left_behind_cannot_end_the_worker(
    start_worker: Any, dispatcher: FakeDispatcher
) -> None:
    worker = await start_worker()
    run = make_run("w_rogue_task")
    await worker.post("/run", make_request(run).model_dump(by_alias=True))
    outcome = await until_async(lambda: dispatcher.outcome(run.execution_id))
    assert outcome.result == "still here"
    assert worker.child.running


async def test_a_coroutine_is_cancelled_at_its_timeout(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    async with open_worker() as parts:
        outcome = await run_once(parts, dispatcher, "w_wait", {"seconds": 30}, timeout_ms=50)
        assert not parts.held.live
    assert (outcome.status, outcome.stopping) == (OutcomeStatus.TIMED_OUT, False)
    assert outcome.error is not None
    assert outcome.error.code == "timeout"


async def test_a_coroutine_deaf_to_its_cancel_is_stopping_until_it_ends(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.execute.CLEANUP_SECONDS", 0.2)
    async with open_worker() as parts:
        outcome = await run_once(parts, dispatcher, "w_deaf", {"gate": "deaf"}, timeout_ms=50)
        assert outcome.stopping
        handlers_under_test.GATES["deaf"].set()
        await until_async(lambda: outcome.execution_id in dispatcher.stopped())


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no thread of runs be started until the event is set, as where `ulimit -u` is reached."""
    may_start, start = threading.Event(), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("oncue-run") and not may_start.is_set():
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr("worker.execute.BEGIN_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    return may_start


async def test_runs_that_get_no_thread_are_given_back_and_never_begin(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, no_threads: threading.Event
) -> None:
    runs = [make_run("w_count", {"counter": "no_thread"}) for _ in range(3)]
    async with open_worker() as parts:
        await parts.intake.take(make_request(*runs))
        assert set(parts.held.live) == {run.execution_id for run in runs}
        for outcome in await ends_of(dispatcher, runs):
            assert outcome.status is OutcomeStatus.RETURNED
            assert outcome.error is not None
            assert (outcome.error.code, outcome.started_at) == ("not_begun", None)
        assert not parts.held.live
        # What was queued in vain is not begun by the threads of later runs.
        no_threads.set()
        later = await run_once(parts, dispatcher, "w_count", {"counter": "later"})
        assert later.result == 1
    assert "no_thread" not in handlers_under_test.COUNTERS


async def test_runs_that_wait_for_a_thread_begin_when_there_is_one(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, no_threads: threading.Event
) -> None:
    runs = [make_run("w_count", {"counter": "waited"}) for _ in range(3)]
    async with open_worker() as parts:
        await parts.intake.take(make_request(*runs))
        assert len(parts.held.live) == 3
        no_threads.set()
        for outcome in await ends_of(dispatcher, runs):
            assert outcome.status is OutcomeStatus.SUCCEEDED
    assert handlers_under_test.COUNTERS["waited"] == 3


async def test_a_request_that_breaks_off_leaves_no_reservation(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that broke is begun or rolled back, and those after it are free to come again."""
    runs = [make_run("echo", number) for number in range(3)]
    async with open_worker() as parts:
        start = parts.executor.start

        def break_off(execution: Execution) -> None:
            if execution.id == runs[1].execution_id:
                raise OSError("something unforeseen")
            start(execution)

        monkeypatch.setattr(parts.executor, "start", break_off)
        with pytest.raises(OSError, match="unforeseen"):
            await parts.intake.take(make_request(*runs))
        monkeypatch.undo()
        await parts.intake.take(make_request(runs[2]))
        outcome = await until_async(lambda: dispatcher.outcome(runs[2].execution_id))
        assert outcome.result == 2


async def test_a_thread_past_its_timeout_keeps_its_slot_until_it_ends(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    handlers_under_test.GATES["slow"] = threading.Event()
    async with open_worker(worker_capacity=1) as parts:
        outcome = await run_once(parts, dispatcher, "w_thread", {"gate": "slow"}, timeout_ms=1000)
        assert (outcome.status, outcome.stopping) == (OutcomeStatus.TIMED_OUT, True)
        assert parts.held.full
        assert [one.id for one in parts.held.snapshot()] == [outcome.execution_id]
        assert outcome.execution_id not in dispatcher.stopped()
        handlers_under_test.GATES["slow"].set()
        await until_async(lambda: outcome.execution_id in dispatcher.stopped())
        assert not parts.held.live
        assert dispatcher.outcomes()[outcome.execution_id].status is OutcomeStatus.TIMED_OUT


async def test_stopped_is_told_only_after_the_outcome_is_acknowledged(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    dispatcher.acknowledges = lambda _: False
    run = make_run("w_polite", timeout_ms=50)
    async with open_worker() as parts:
        await parts.intake.take(make_request(run))
        await until_async(lambda: parts.held.unacknowledged and not parts.held.live)
        await until_async(lambda: len(dispatcher.reports) > 2)
        assert not dispatcher.stopped()
        dispatcher.acknowledges = lambda _: True
        await until_async(lambda: run.execution_id in dispatcher.stopped())
    first_with_stopped = next(i for i, one in enumerate(dispatcher.reports) if one.stopped)
    acknowledged = next(i for i, one in enumerate(dispatcher.reports) if one.outcomes)
    assert acknowledged < first_with_stopped


async def test_a_child_returns_its_result_whatever_it_prints(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    async with open_worker() as parts:
        outcome = await run_once(parts, dispatcher, "w_child", {"n": 2**80}, attempt=3)
        other = await run_once(parts, dispatcher, "w_child_async", ["ü", 1.5])
    assert outcome.result == {
        "params": {"n": 2**80},
        "attempt": 3,
        "key": str(outcome.job_id),
    }
    assert other.result == ["ü", 1.5]


async def test_a_child_that_has_told_its_end_is_not_stopped_any_more(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    async with open_worker() as parts:
        run = make_run("w_child_lingers", {"seconds": 30})
        await parts.intake.take(make_request(run))
        execution = await until_async(lambda: parts.held.live.get(run.execution_id))
        await until_async(lambda: execution.has_verdict, what="the child's verdict")
        parts.intake.cancel(CancelRequest(term=1, execution_ids=[run.execution_id]))
        outcome = await until_async(lambda: dispatcher.outcome(run.execution_id))
    assert (outcome.status, outcome.result) == (OutcomeStatus.SUCCEEDED, "charged")


async def test_a_child_and_what_it_started_are_killed_at_the_timeout(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, tmp_path: Path
) -> None:
    note = tmp_path / "pids"
    params = {"pid_file": str(note), "seconds": 60}
    async with open_worker() as parts:
        run = make_run("w_child", params)
        await parts.intake.take(make_request(run))
        pids = await until_async(lambda: read_pids(note))
        parts.intake.cancel(CancelRequest(term=1, execution_ids=[run.execution_id]))
        outcome = await until_async(lambda: dispatcher.outcome(run.execution_id))
    assert (outcome.status, outcome.stopping) == (OutcomeStatus.CANCELLED, False)
    await until_async(lambda: not any(is_running(pid) for pid in pids))


async def test_a_child_that_is_asked_to_end_with_its_worker_goes_on(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, tmp_path: Path
) -> None:
    """Who stops a service may ask all of its processes; the run has its worker's grace."""
    note = tmp_path / "pids"
    async with open_worker() as parts:
        gate = tmp_path / "gate"
        run = make_run("w_child_forks", {"pid_file": str(note), "gate": str(gate)})
        await parts.intake.take(make_request(run))
        child, forked = await until_async(lambda: read_pids(note))
        os.kill(child, signal.SIGTERM)
        # What the handler itself has forked may be ended so, as a pool ends its processes.
        os.kill(forked, signal.SIGTERM)
        await until_async(lambda: not is_running(forked))
        gate.touch()
        outcome = await until_async(lambda: dispatcher.outcome(run.execution_id))
    assert (outcome.status, outcome.result) == (OutcomeStatus.SUCCEEDED, -signal.SIGTERM)


async def test_children_die_with_a_killed_worker(start_worker: Any, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    worker = await start_worker()
    run = make_run("w_child", {"pid_file": str(note), "seconds": 60})
    await worker.post("/run", make_request(run).model_dump(by_alias=True))
    pids = await until_async(lambda: read_pids(note))
    assert all(is_running(pid) for pid in pids)
    killed_at = time.monotonic()
    worker.child.kill_alone()
    await until_async(lambda: not any(is_running(pid) for pid in pids))
    assert time.monotonic() - killed_at < 30


def read_pids(note: Path) -> list[int]:
    return [int(pid) for pid in note.read_text().split()] if note.exists() else []
