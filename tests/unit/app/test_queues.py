"""What the dispatch loop keeps of a queue between two reads."""

from __future__ import annotations

import pytest

from app.dispatch.queues import KNOWN_AHEAD_MS, NEVER, READ_AHEAD_MS, QueueState
from app.lifecycle.moves.claim import Candidate, Found
from app.lifecycle.reads import QueueRow

NOW = 1_000_000
LIMIT = 4


def task(job_id: int, due_ms: int, *, priority: int = 5) -> Candidate:
    """Return a task as a read saw it."""
    return Candidate(job_id, 0, 1, priority, due_ms)


def state_of(*tasks: Candidate, limit: int = LIMIT) -> QueueState:
    """Return a queue that has been read at NOW."""
    state = QueueState(QueueRow(1, 0, "echo", ""))
    assert state.needs_read(NOW)
    state.probes(limit)
    due = [one for one in tasks if one.due_ms <= NOW]
    later = [one for one in tasks if one.due_ms > NOW]
    state.learn(Found(due, later, NOW), limit, was_rescan=True)
    return state


def test_what_is_due_soon_is_taken_at_its_time_without_a_read() -> None:
    state = state_of(task(1, NOW + 50), task(2, NOW + 20, priority=9))
    assert state.next_look_ms(2) == NOW + 18
    assert state.take_soon(NOW + 19) == []
    assert [one.job_id for one in state.take_soon(NOW + 20)] == [2]
    assert not state.needs_read(NOW + 50)
    assert [one.job_id for one in state.take_soon(NOW + 60)] == [1]
    assert state.next_look_ms(2) == NEVER


def test_an_announced_task_is_read_some_time_before_it_is_due() -> None:
    state = state_of(task(1, NOW + 900))
    state.announce(5, NOW + 800)
    assert not state.needs_read(NOW)
    assert state.next_look_ms(2) == NOW + 800 - READ_AHEAD_MS
    assert state.needs_read(NOW + 800 - READ_AHEAD_MS)
    state.announce(9, NOW)
    assert state.needs_read(NOW)


def test_what_is_announced_during_a_read_is_not_forgotten() -> None:
    state = state_of()
    state.probes(LIMIT)
    state.announce(3, NOW)
    state.learn(Found([], [], 0), LIMIT, was_rescan=False)
    assert state.needs_read(NOW)
    assert 3 in state.priorities


def test_a_range_that_was_cut_is_read_on_at_its_last_time_and_not_before() -> None:
    state = state_of(*(task(number, NOW + 10 * number) for number in range(1, LIMIT + 1)))
    assert not state.has_backlog
    assert not state.needs_read(NOW + 39)
    assert state.needs_read(NOW + 40)


def test_a_range_full_of_due_tasks_is_a_backlog() -> None:
    state = state_of(*(task(number, NOW - number) for number in range(LIMIT)))
    assert state.has_backlog
    assert state.next_look_ms(2) == 0
    assert state.needs_read(NOW)


@pytest.mark.parametrize("ahead_ms", [int(KNOWN_AHEAD_MS) + 1, 10 * int(KNOWN_AHEAD_MS)])
def test_what_is_far_off_is_read_again_before_its_time(ahead_ms: int) -> None:
    state = state_of(task(1, NOW + ahead_ms))
    assert state.take_soon(NOW + ahead_ms) == []
    assert not state.needs_read(NOW)
    assert state.needs_read(NOW + ahead_ms - READ_AHEAD_MS)
