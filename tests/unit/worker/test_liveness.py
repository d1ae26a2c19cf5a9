"""The rule of death, with a clock that the test turns."""

from __future__ import annotations

import threading

import pytest

from oncue.protocol import LEASE_SECONDS
from tests.unit.worker.test_held import make_execution
from worker import liveness as liveness_module
from worker.held import Execution, Held
from worker.liveness import EXIT_CODE, SILENCE_SECONDS, STOP_SECONDS, Liveness, Watchdog


class Turned:
    """A clock and a worker that may have runs."""

    def __init__(self) -> None:
        self.now = 100.0
        self.has_runs = True
        self.liveness = Liveness(lambda: self.has_runs, clock=lambda: self.now)


def test_the_rule_fires_before_a_dispatcher_may() -> None:
    assert SILENCE_SECONDS + STOP_SECONDS + 0.5 < LEASE_SECONDS


def test_one_channel_is_enough() -> None:
    turned = Turned()
    for _ in range(10):
        turned.now += 10
        turned.liveness.beat_acknowledged(turned.now)
        assert not turned.liveness.must_stop()
    for _ in range(10):
        turned.now += 10
        turned.liveness.renewed(turned.now)
        assert not turned.liveness.must_stop()


def test_silence_of_both_fires() -> None:
    turned = Turned()
    turned.now += SILENCE_SECONDS
    assert not turned.liveness.must_stop()
    turned.now += 0.1
    assert turned.liveness.must_stop()


def test_what_counts_is_when_it_was_sent() -> None:
    turned = Turned()
    turned.now += 11
    turned.liveness.beat_acknowledged(turned.now - 10)
    turned.now += 2.1
    assert turned.liveness.must_stop()


def test_a_process_that_was_paused_stops_its_runs_though_its_first_call_succeeds() -> None:
    turned = Turned()
    turned.now += 60
    turned.liveness.renewed(turned.now)
    assert turned.liveness.must_stop()
    assert not turned.liveness.must_stop()


def test_an_idle_worker_that_comes_back_has_nothing_to_stop() -> None:
    turned = Turned()
    turned.has_runs = False
    turned.now += 60
    turned.liveness.renewed(turned.now)
    assert not turned.liveness.must_stop()


async def test_the_process_exits_when_a_run_cannot_be_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness_module, "STOP_SECONDS", 0.05)
    monkeypatch.setattr(liveness_module, "TICK_SECONDS", 0.01)
    turned, held, execution = Turned(), Held(1), make_execution()
    held.reserve(execution)
    held.begin(execution)
    turned.now += 60
    exits: list[int] = []
    told: list[str] = []
    done = threading.Event()

    def leave(code: int) -> None:
        exits.append(code)
        done.set()

    watchdog = Watchdog(
        held,
        turned.liveness,
        stop_runs=lambda runs: told.extend(run.id for run in runs),
        kill_children=lambda: None,
        exit_process=leave,
    )
    watchdog.start()
    assert done.wait(30)
    watchdog.end()
    watchdog.join()
    assert exits[0] == EXIT_CODE
    assert execution.id in told
    assert execution.cancel_event.is_set()


async def test_the_watchdog_acts_although_no_thread_is_to_be_had_and_a_first_try_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness_module, "TICK_SECONDS", 0.01)
    turned, held, execution = Turned(), Held(1), make_execution()
    held.reserve(execution)
    held.begin(execution)
    # Seen once only: the channel works again by the time the watchdog looks a second time.
    turned.now += 60
    turned.liveness.renewed(turned.now)
    stopped = threading.Event()
    tries: list[int] = []

    def stop_runs(_: list[Execution]) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("something unforeseen")
        held.live.clear()
        stopped.set()

    watchdog = Watchdog(held, turned.liveness, stop_runs=stop_runs, kill_children=lambda: None)
    watchdog.start()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert stopped.wait(30)
    monkeypatch.undo()
    assert watchdog.is_alive()
    watchdog.end()
    watchdog.join()


def test_nothing_is_begun_when_the_last_acknowledged_beat_is_too_old() -> None:
    now = 100.0
    liveness = Liveness(has_runs=lambda: True, clock=lambda: now, silence_seconds=12.0)
    assert liveness.may_begin(), "its first beat is on its way"
    liveness.beat_acknowledged(100.0)
    now = 112.0
    assert liveness.may_begin()
    now = 112.1
    assert not liveness.may_begin()
    liveness.renewed(112.1)
    assert not liveness.may_begin(), "Redis does not know who was given up"
    liveness.beat_acknowledged(112.1)
    assert liveness.may_begin()
