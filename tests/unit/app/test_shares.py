"""Whose turn it is among tenants: by weight, whatever each of them has waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.dispatch.shares import (
    MOST_POOLS,
    OneTenantsLine,
    Quota,
    SharedLine,
    Shares,
    shared_line,
)

NOW = 1_000_000
AGEING = 60_000
QUEUES_EACH = 10


class Task(NamedTuple):
    """A due task; its queue tells its tenant."""

    job_id: int
    queue_id: int
    priority: int
    due_ms: int


def tenant_of(queue_id: int) -> int:
    """Ten queues are one tenant's."""
    return queue_id // QUEUES_EACH


def lined_up(
    tasks: Iterable[Task],
    shares: Shares,
    *,
    weights: Mapping[int, float] | None = None,
    pools: Mapping[int, str] | None = None,
    quotas: Mapping[int, Quota] | None = None,
) -> SharedLine[Task] | OneTenantsLine[Task]:
    """Line up the tasks of one round."""
    return shared_line(
        tasks,
        shares,
        tenant_of=tenant_of,
        weight_of=lambda tenant_id: (weights or {}).get(tenant_id, 1.0),
        pool_of=lambda queue_id: frozenset([(pools or {}).get(queue_id, "all")]),
        now_ms=NOW,
        ageing_ms=AGEING,
        quotas=quotas,
    )


def dealt(line: SharedLine[Task] | OneTenantsLine[Task], slots: int) -> list[Task]:
    """Deal up to so many tasks."""
    order: list[Task] = []
    while len(order) < slots and (first := line.first()) is not None:
        order.append(first)
        line.deal()
    return order


def flood(tenant_id: int, count: int, *, priority: int = 5, waited_ms: int = 0) -> list[Task]:
    """Return many tasks of one tenant."""
    first = tenant_id * 1_000_000
    queue_id = tenant_id * QUEUES_EACH
    return [Task(first + n, queue_id, priority, NOW - waited_ms + n) for n in range(count)]


def served(order: Iterable[Task]) -> Counter[int]:
    """Count what each tenant got."""
    return Counter(tenant_of(one.queue_id) for one in order)


WAITING = st.lists(
    st.builds(
        Task,
        st.just(0),
        st.integers(0, 4 * QUEUES_EACH - 1),
        st.integers(0, 9),
        st.integers(NOW - 2 * AGEING, NOW),
    ),
    max_size=60,
).map(lambda tasks: [one._replace(job_id=number) for number, one in enumerate(tasks)])


@given(WAITING, st.integers(0, 100))
def test_every_task_is_dealt_once(tasks: list[Task], slots: int) -> None:
    line = lined_up(tasks, Shares())
    order = dealt(line, slots)
    assert len(order) == min(slots, len(tasks)) == len(set(order))
    assert line.queues() == {one.queue_id for one in set(tasks) - set(order)}


@given(WAITING)
def test_within_a_tenant_the_order_is_that_of_priorities(tasks: list[Task]) -> None:
    young = [one for one in tasks if one.due_ms > NOW - AGEING]
    order = dealt(lined_up(young, Shares()), 100)
    for tenant_id in served(order):
        mine = [one for one in order if tenant_of(one.queue_id) == tenant_id]
        assert mine == sorted(mine, key=lambda one: (-one.priority, one.due_ms, one.job_id))


@given(
    st.dictionaries(st.integers(0, 5), st.integers(1, 8), min_size=2, max_size=6),
    st.lists(st.integers(1, 7), min_size=30, max_size=60),
    st.data(),
)
def test_while_all_have_tasks_each_gets_its_weights_share(
    weights: dict[int, int], rounds: list[int], data: st.DataObject
) -> None:
    shares = Shares()
    left = {
        tenant_id: flood(tenant_id, 500, priority=data.draw(st.integers(0, 9)), waited_ms=tenant_id)
        for tenant_id in weights
    }
    got: Counter[int] = Counter()
    for slots in rounds:
        due = [one for mine in left.values() for one in mine[:8]]
        line = lined_up(due, shares, weights=weights)
        for one in dealt(line, slots):
            left[tenant_of(one.queue_id)].remove(one)
            got[tenant_of(one.queue_id)] += 1
        normal = [got[tenant_id] / weight for tenant_id, weight in weights.items()]
        # The bound of start-time fair queueing: one task of each of two tenants.
        assert max(normal) - min(normal) <= 2 / min(weights.values())


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_a_newcomer_has_the_next_slot_however_long_another_had_them_all(slots: int) -> None:
    shares = Shares()
    for _ in range(1000):
        dealt(lined_up(flood(1, 20, priority=9, waited_ms=AGEING), shares), slots)
    new = flood(2, 1, priority=0)
    crowd = flood(1, 20, priority=9, waited_ms=AGEING)
    assert new[0] in dealt(lined_up(crowd + new, shares), 2)
    # It comes again and again: level with the other, never behind it.
    for _ in range(5):
        order = dealt(lined_up(crowd + new, shares), 2)
        assert served(order) == {1: 1, 2: 1}


def test_what_a_rest_leaves_is_not_saved_up() -> None:
    shares = Shares()
    dealt(lined_up(flood(1, 5) + flood(2, 5), shares), 4)
    for _ in range(200):
        dealt(lined_up(flood(2, 5) + flood(3, 5), shares), 4)
    order = dealt(lined_up(flood(1, 50) + flood(2, 50), shares), 20)
    assert abs(served(order)[1] - 10) <= 1


def test_what_a_tenant_gets_of_workers_of_its_own_is_not_held_against_it() -> None:
    shares = Shares()
    own, shared_1, shared_2 = 10, 11, 20
    pools = {own: "own", shared_1: "shared", shared_2: "shared"}
    got: Counter[int] = Counter()
    for _ in range(100):
        tasks = [Task(n, own, 9, NOW) for n in range(5)]
        tasks += [Task(10 + n, shared_1, 0, NOW) for n in range(5)]
        tasks += [Task(20 + n, shared_2, 9, NOW) for n in range(5)]
        line = lined_up(tasks, shares, pools=pools)
        free = {"own": 5, "shared": 1}
        while (first := line.first()) is not None:
            if free[pools[first.queue_id]] == 0:
                line.drop_queue()
                continue
            free[pools[first.queue_id]] -= 1
            got[first.queue_id] += 1
            line.deal()
    assert got[own] == 500
    assert abs(got[shared_1] - 50) <= 1
    assert abs(got[shared_2] - 50) <= 1


@pytest.mark.parametrize(("left", "alone"), [(10, True), (9, False), (0, False)])
def test_a_lone_tenant_with_room_for_all_is_lined_up_as_one_without_a_quota(
    left: int, alone: bool
) -> None:
    line = lined_up(flood(1, 10), Shares(), quotas={1: Quota(left, may_borrow=False)})
    assert isinstance(line, OneTenantsLine) is alone
    assert len(dealt(line, 12)) == left


def test_without_a_quota_left_a_tenant_gets_what_nobody_else_wants() -> None:
    quotas = {1: Quota(left=2, may_borrow=True)}
    order = dealt(lined_up(flood(1, 10, priority=9) + flood(2, 4), Shares(), quotas=quotas), 12)
    assert served(order[:6]) == {1: 2, 2: 4}
    assert served(order[6:]) == {1: 6}


@given(WAITING, st.integers(0, 5), st.integers(0, 70))
def test_a_tenant_that_may_not_borrow_gets_its_quota_and_the_others_the_rest(
    tasks: list[Task], left: int, slots: int
) -> None:
    line = lined_up(tasks, Shares(), quotas={1: Quota(left, may_borrow=False)})
    order = dealt(line, slots)
    mine = sum(tenant_of(one.queue_id) == 1 for one in tasks)
    assert served(order)[1] <= min(left, mine)
    assert len(order) == min(slots, len(tasks) - mine + min(left, mine))
    if line.first() is None:
        assert line.queues() == line.held_queues()
        assert bool(line.held_queues()) == (mine > left)


def test_a_queue_without_a_slot_leaves_the_line_as_a_whole() -> None:
    tasks = [Task(1, 10, 9, NOW), Task(2, 10, 0, NOW), Task(3, 11, 5, NOW), Task(4, 20, 5, NOW)]
    line = lined_up(tasks, Shares())
    dropped = set()
    while (first := line.first()) is not None:
        assert first.queue_id not in dropped
        dropped.add(line.drop_queue())
    assert dropped == {10, 11, 20}
    assert line.queues() == set()


def test_what_is_remembered_is_bounded() -> None:
    shares = Shares()
    for number in range(2 * MOST_POOLS):
        tasks = [Task(1, 10, 5, NOW), Task(2, 20, 5, NOW)]
        dealt(lined_up(tasks, shares, pools={10: f"w{number}", 20: f"w{number}"}), 2)
    assert len(shares.pools) <= MOST_POOLS
