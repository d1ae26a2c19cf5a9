"""What the dispatch loop keeps of a queue between two reads."""

from __future__ import annotations

import pytest

from app.dispatch.queues import (
    KNOWN_AHEAD_MS,
    KNOWN_AT_MOST,
    NEVER,
    READ_AHEAD_MS,
    QueueBook,
    QueueState,
)
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


def book_of(*tasks: Candidate) -> tuple[QueueBook, QueueState]:
    """Return a book with one queue that has been read at NOW."""
    book = QueueBook()
    book.load([QueueRow(1, 0, "echo", "")])
    state = book.get(1)
    state.probes(LIMIT)
    state.learn(Found(list(tasks), [], NOW), LIMIT, was_rescan=True)
    state.dealt(tasks)
    return book, state


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


def test_what_lies_behind_a_range_that_was_cut_is_read_before_it_can_be_due() -> None:
    state = state_of(*(task(number, NOW + 300 * number) for number in range(1, LIMIT + 1)))
    last = NOW + 300 * LIMIT
    assert not state.has_backlog
    assert not state.needs_read(last - READ_AHEAD_MS - 1)
    assert state.needs_read(last - READ_AHEAD_MS)


def test_a_range_that_was_cut_is_not_read_again_at_once() -> None:
    state = state_of(*(task(number, NOW + 10 * number) for number in range(1, LIMIT + 1)))
    assert not state.needs_read(NOW + 5 * LIMIT - 1)
    assert state.needs_read(NOW + 5 * LIMIT)


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


def test_a_task_that_was_just_stored_needs_no_read() -> None:
    state = state_of(task(1, NOW + 50))
    state.store(task(3, NOW, priority=2), NOW)
    state.store(task(2, NOW), NOW)
    assert not state.needs_read(NOW)
    assert state.next_look_ms(2) <= NOW
    assert [one.job_id for one in state.take_soon(NOW)] == [2, 3]
    assert {2, 5} <= state.priorities
    assert [one.job_id for one in state.take_soon(NOW + 50)] == [1]


def test_a_task_that_is_stored_during_a_read_is_read_once_more() -> None:
    state = state_of()
    state.probes(LIMIT)
    state.store(task(1, NOW), NOW)
    state.learn(Found([], [], NOW), LIMIT, was_rescan=False)
    assert state.needs_read(NOW)


def test_a_task_that_a_read_has_seen_is_not_known_twice() -> None:
    state = state_of(task(1, NOW))
    state.store(task(1, NOW), NOW)
    assert state.take_soon(NOW) == []


def test_what_is_stored_beside_a_backlog_waits_for_the_read_of_it() -> None:
    state = state_of(*(task(number, NOW - number) for number in range(1, LIMIT + 1)))
    state.store(task(9, NOW), NOW)
    assert state.take_soon(NOW) == []
    assert state.needs_read(NOW)


def test_what_is_stored_beyond_a_limit_is_read_whatever_its_priority() -> None:
    state = state_of()
    for number in range(KNOWN_AT_MOST):
        state.store(task(number, NOW), NOW)
    state.store(task(KNOWN_AT_MOST, NOW, priority=9), NOW)
    assert len(state.take_soon(NOW)) == KNOWN_AT_MOST
    assert state.needs_read(NOW)
    assert 9 in state.priorities


def test_a_task_of_a_tenant_that_has_its_all_does_not_pass_those_held_before_it() -> None:
    book, state = book_of(task(1, NOW))
    book.left_over([1], {1}, ends=book.ends)
    assert not state.needs_read(NOW)
    state.store(task(2, NOW), NOW)
    assert state.take_soon(NOW) == []
    assert state.needs_read(NOW)


def test_a_task_that_was_stored_while_runs_were_counted_passes_none_of_those_held() -> None:
    book, state = book_of(task(1, NOW))
    state.store(task(2, NOW + 30), NOW)
    book.left_over([1], {1}, ends=book.ends)
    assert not state.needs_read(NOW + 29)
    assert state.next_look_ms(20) == NOW + 30
    assert state.needs_read(NOW + 30)
    state.probes(LIMIT)
    state.learn(Found([task(1, NOW), task(2, NOW + 30)], [], NOW + 30), LIMIT, was_rescan=False)
    assert not state.needs_read(NOW + 30)
    assert state.take_soon(NOW + 30) == []


def test_an_end_that_comes_while_runs_are_counted_is_not_forgotten() -> None:
    book, state = book_of(task(1, NOW))
    counted_at = book.ends
    assert not book.look_at_held()
    seen = []
    for ends in (counted_at, book.ends):
        book.left_over([1], {1}, ends=ends)
        seen.append(state.needs_read(NOW))
    assert seen == [True, False]
    assert book.look_at_held()
    assert state.needs_read(NOW)


def test_a_task_that_a_read_saw_before_its_time_is_not_known_twice() -> None:
    state = state_of(task(1, NOW + 20))
    state.store(task(1, NOW + 20), NOW)
    assert [one.job_id for one in state.take_soon(NOW + 20)] == [1]


def test_a_read_goes_on_before_what_is_known_and_not_dealt_yet() -> None:
    state = state_of()
    state.store(task(1, NOW - 5), NOW)
    state.dealt([task(2, NOW)])
    assert state.probes(LIMIT)[0][2:4] == (0, 0)
    state.learn(Found([task(1, NOW - 5)], [], NOW), LIMIT, was_rescan=False)
    state.dealt([task(1, NOW - 5), task(2, NOW)])
    state.store(task(3, NOW), NOW)
    assert state.probes(LIMIT)[0][2:4] == (0, 0)


def test_what_is_far_off_is_announced_when_it_is_stored() -> None:
    state = state_of()
    state.store(task(1, NOW + 60_000), NOW)
    assert state.take_soon(NOW + 60_000) == []
    assert not state.needs_read(NOW)
    assert state.needs_read(NOW + 60_000 - READ_AHEAD_MS)
