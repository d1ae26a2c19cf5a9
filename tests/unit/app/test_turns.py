"""Whose turn it is: the order by priority, and what ageing adds to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.dispatch.turns import SHARE, Lane, Line, Turns, Workers

NOW = 1_000_000
AGEING = 60_000


class Task(NamedTuple):
    """A due task."""

    job_id: int
    queue_id: int
    priority: int
    due_ms: int


def task(
    number: int, *, priority: int, waited_ms: int = 0, queue_id: int = 1, now: int = NOW
) -> Task:
    """Return a task that has waited for so long."""
    return Task(number, queue_id, priority, now - waited_ms)


def one_pool(_queue_id: int) -> Workers:
    """Let the same workers serve all queues."""
    return frozenset(["w"])


def dealt(
    tasks: Iterable[Task],
    slots: int,
    *,
    turns: Turns | None = None,
    ageing_ms: float = AGEING,
    now: int = NOW,
    pool_of: Callable[[int], Workers] = one_pool,
) -> list[Task]:
    """Deal up to so many tasks."""
    line = Line(tasks, turns or Turns(), pool_of=pool_of, now_ms=now, ageing_ms=ageing_ms)
    order: list[Task] = []
    while len(order) < slots and (first := line.first()) is not None:
        order.append(first)
        line.deal()
    return order


def by_priority(one: Task) -> tuple[int, int, int]:
    """Sort by the strict order."""
    return -one.priority, one.due_ms, one.job_id


WAITING = st.lists(
    st.builds(
        task,
        st.just(0),
        priority=st.integers(0, 9),
        waited_ms=st.integers(0, 3 * AGEING),
        queue_id=st.integers(1, 3),
    ),
    max_size=60,
).map(lambda tasks: [one._replace(job_id=number) for number, one in enumerate(tasks)])


@given(WAITING)
def test_without_ageing_the_order_is_strict(tasks: list[Task]) -> None:
    assert dealt(tasks, 100, ageing_ms=0) == sorted(tasks, key=by_priority)


@given(WAITING)
def test_what_is_young_is_in_strict_order(tasks: list[Task]) -> None:
    young = [one for one in tasks if one.due_ms > NOW - AGEING]
    assert dealt(young, 100) == sorted(young, key=by_priority)


@given(WAITING, st.integers(0, 100))
def test_every_task_is_dealt_once_and_a_lane_in_its_own_order(
    tasks: list[Task], slots: int
) -> None:
    order = dealt(tasks, slots)
    assert len(order) == min(slots, len(tasks)) == len(set(order))
    lanes: dict[Lane, list[Task]] = {}
    for one in order:
        lanes.setdefault(Lane(one.queue_id, one.priority), []).append(one)
    for lane, mine in lanes.items():
        whole = [one for one in tasks if (one.queue_id, one.priority) == lane]
        assert mine == sorted(whole, key=by_priority)[: len(mine)]


@given(WAITING)
def test_what_overtakes_a_higher_one_has_aged_and_takes_no_more_than_its_share(
    tasks: list[Task],
) -> None:
    order = dealt(tasks, 100)
    overtaking = []
    for place, one in enumerate(order):
        if any(later.priority > one.priority for later in order[place + 1 :]):
            assert one.due_ms <= NOW - AGEING
            overtaking.append(one)
    queues = len({one.queue_id for one in order})
    assert len(overtaking) <= (len(order) // SHARE) * (1 + min(queues, 1)) + queues


@given(st.lists(st.integers(0, 8), min_size=1, max_size=9, unique=True), st.integers(0, SHARE))
def test_a_flood_delays_the_first_of_an_aged_lane_by_nine_turns_for_each_aged_lane(
    priorities: list[int], before: int
) -> None:
    turns = Turns()
    flood = [task(number, priority=9, waited_ms=9 * AGEING) for number in range(500)]
    dealt(flood, before, turns=turns)
    aged = [
        task(1000 + number, priority=priority, waited_ms=AGEING + number)
        for number, priority in enumerate(priorities)
    ]
    order = dealt(flood + aged, SHARE * len(priorities), turns=turns)
    assert set(aged) <= set(order)


def test_the_first_aged_one_after_a_flood_has_the_very_next_turn() -> None:
    turns = Turns()
    flood = [task(number, priority=9) for number in range(40)]
    dealt(flood, 20, turns=turns)
    old = task(1000, priority=0, waited_ms=AGEING)
    assert dealt([*flood, old], 1, turns=turns) == [old]
    young = old._replace(due_ms=old.due_ms + 1)
    assert dealt([*flood, young], 40, turns=turns)[-1] == flood[-1]


def test_an_old_backlog_of_low_ones_costs_the_high_ones_a_tenth() -> None:
    backlog = [task(number, priority=0, waited_ms=60 * AGEING) for number in range(1000)]
    flood = [task(2000 + number, priority=9) for number in range(1000)]
    order = dealt(backlog + flood, 200)
    assert Counter(one.priority for one in order) == {9: 180, 0: 20}


def simulated(
    arrivals: Callable[[int], Sequence[Task]], *, seconds: int, slots_a_second: int
) -> dict[Task, int]:
    """Serve what arrives, round by round, and return when each task began (ms)."""
    turns, waiting = Turns(), set[Task]()
    began: dict[Task, int] = {}
    for second in range(seconds):
        now = second * 1000
        waiting |= set(arrivals(now))
        for one in dealt(waiting, slots_a_second, turns=turns, now=now):
            waiting.discard(one)
            began[one] = now
    return began


@pytest.mark.parametrize("slots_a_second", [1, 4, 20])
def test_a_flood_that_never_ends_starves_nobody(slots_a_second: int) -> None:
    low = task(0, priority=0, waited_ms=0, now=0)

    def arrivals(now: int) -> list[Task]:
        flood = [
            task(now + number + 1, priority=9, now=now) for number in range(2 * slots_a_second)
        ]
        return [*flood, low] if now == 0 else flood

    began = simulated(arrivals, seconds=90, slots_a_second=slots_a_second)
    assert began[low] == AGEING


def test_queues_that_are_busy_do_not_take_the_aged_turns_of_a_quiet_one() -> None:
    turns = Turns()
    busy = [task(number, priority=9, queue_id=1) for number in range(3000)]
    busy += [
        task(5000 + number, priority=0, waited_ms=2 * AGEING, queue_id=1) for number in range(300)
    ]
    quiet = [task(9000 + number, priority=9, queue_id=2) for number in range(40)]
    old = task(9999, priority=0, waited_ms=AGEING, queue_id=2)
    line = Line([*busy, *quiet, old], turns, pool_of=one_pool, now_ms=NOW, ageing_ms=AGEING)
    seen = 0
    while (first := line.first()) is not None and first != old:
        seen += first.queue_id == 2
        line.deal()
    assert first == old
    assert seen <= SHARE


@pytest.mark.parametrize("before", range(5))
def test_pools_whose_slots_come_free_in_turns_each_have_their_aged_turns(before: int) -> None:
    """Five slots of one pool and five of the other are no ten of one."""
    pools = {1: frozenset(["a"]), 2: frozenset(["a"]), 3: frozenset(["b"]), 4: frozenset(["b"])}
    waiting = {
        (high, low): [task(high * 100 + number, priority=9, queue_id=high) for number in range(5)]
        + [
            task(low * 100 + number, priority=0, waited_ms=AGEING, queue_id=low)
            for number in range(5)
        ]
        for high, low in ((1, 2), (3, 4))
    }
    turns, got = Turns(), Counter[int]()
    dealt(waiting[1, 2][:5], before, turns=turns, pool_of=pools.__getitem__)
    for _ in range(2 * SHARE):
        for mine in waiting.values():
            order = dealt(mine, 5, turns=turns, pool_of=pools.__getitem__)
            got.update(one.queue_id for one in order)
    rounds = 2 * SHARE * 5
    assert got[2] == got[4] == rounds // SHARE
    assert got[1] == got[3] == rounds - rounds // SHARE


@pytest.mark.parametrize("turns_a_pool", [1, 5, 9])
def test_workers_that_come_and_go_do_not_take_the_aged_turns_away(turns_a_pool: int) -> None:
    """Each change of the fleet makes a pool that was not there before."""
    turns, got = Turns(), Counter[int]()
    for fleet in range(100 // turns_a_pool):
        workers = frozenset([f"w{fleet}", "old"])
        waiting = [
            *(task(1000 + number, priority=9) for number in range(turns_a_pool)),
            task(1, priority=0, waited_ms=AGEING, queue_id=2),
        ]
        pool_of = dict.fromkeys((1, 2), workers).__getitem__
        order = dealt(waiting, turns_a_pool, turns=turns, pool_of=pool_of)
        got.update(one.queue_id for one in order)
    assert got[2] == sum(got.values()) // SHARE


def test_what_only_some_workers_of_a_pool_may_take_has_aged_turns_of_it() -> None:
    pools = {1: frozenset(["a", "b"]), 2: frozenset(["b"]), 3: frozenset(["c"])}
    flood = [task(number, priority=9) for number in range(40)]
    old = task(1000, priority=0, waited_ms=AGEING, queue_id=2)
    foreign = task(2000, priority=0, waited_ms=2 * AGEING, queue_id=3)
    order = dealt([*flood, old, foreign], 40, pool_of=pools.__getitem__)
    assert order.index(old) == SHARE - 1
    assert foreign not in order


def test_a_queue_without_a_slot_leaves_the_line_as_a_whole() -> None:
    tasks = [task(1, priority=9), task(2, priority=0), task(3, priority=5, queue_id=2)]
    line = Line(tasks, Turns(), pool_of=one_pool, now_ms=NOW, ageing_ms=AGEING)
    assert line.first() == tasks[0]
    assert line.drop_queue() == 1
    assert line.first() == tasks[2]
    assert line.queues() == {2}
    line.deal()
    assert line.first() is None
