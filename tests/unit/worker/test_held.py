"""The tables of executions, terms and cost."""

from __future__ import annotations

import threading

import pytest

from oncue.handlers import RegisteredHandler
from oncue.protocol import RejectReason
from tests.unit.worker.runs import make_run
from worker import held as held_module
from worker.cost import RecentCost
from worker.held import Execution, Held, StaleTerm, Terms
from worker.outcome import RunTimes, encode_outcome
from worker.verdict import Verdict


def make_execution() -> Execution:
    handler = RegisteredHandler("h", print, "none", "", False, False)
    return Execution(run=make_run("h"), handler=handler, key="k", mark="m", accepted_at=1)


def finish(held: Held, execution: Execution) -> None:
    held.reserve(execution)
    held.begin(execution)
    held.end(execution, encode_outcome(execution.run, Verdict("failed"), RunTimes(1, 2, 3)))
    held.acknowledge(execution)


async def test_lately_finished_runs_are_remembered_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_module, "REMEMBER_AT_MOST", 3)
    held = Held(10)
    executions = [make_execution() for _ in range(5)]
    for execution in executions:
        finish(held, execution)
    known = [held.find_attempt(one.run) is not None for one in executions]
    assert known == [False, False, True, True, True]
    assert len(held._attempts) == 3


def test_refusals_are_remembered_within_bounds_the_latest_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_module, "REMEMBER_AT_MOST", 3)
    held = Held(10)
    for name in ("a", "b", "c", "a", "d"):
        held.refuse(name, RejectReason.FULL)
    known = [name for name in "abcd" if held.refusal_of(name) is RejectReason.FULL]
    assert known == ["a", "c", "d"]
    assert len(held._refused) == 3


async def test_finished_runs_and_refusals_are_forgotten_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(held_module, "boot_seconds", lambda: now)
    held = Held(10)
    old = make_execution()
    finish(held, old)
    held.refuse("x", RejectReason.CANCELLED)
    now = 601.0
    finish(held, make_execution())
    assert held.find(old.id) is None
    assert held.refusal_of("x") is None


async def test_a_rolled_back_reservation_leaves_nothing() -> None:
    held, execution = Held(1), make_execution()
    held.reserve(execution)
    assert held.full
    held.roll_back(execution)
    assert not held.live
    assert held.reservation_of(execution.run) is None
    await held.wait_idle()


async def test_loads_of_many_threads_have_numbers_of_their_own() -> None:
    held = Held(1)
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda: seen.extend(held.load().seq for _ in range(500)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == 2000


def test_a_term_never_goes_back() -> None:
    terms = Terms()
    terms.admit(3)
    terms.learn(2)
    terms.admit(3)
    with pytest.raises(StaleTerm):
        terms.admit(2)
    terms.learn(9)
    assert terms.highest == 9


def test_the_mean_cost_is_that_of_the_last_five_minutes() -> None:
    cost = RecentCost()
    assert cost.mean_ms(0) == 0
    cost.add(100, now=10)
    cost.add(300, now=100)
    assert cost.mean_ms(200) == 200
    assert cost.mean_ms(320) == 300
    assert cost.mean_ms(10_000) == 0
