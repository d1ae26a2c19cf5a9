"""Group commit: shared batches without a timer, and an offender that fails alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.plumbing.group_commit import ENOUGH, GATHER_FROM, GroupCommit, Overloaded


class Away(Exception):
    """What a database that is away raises."""


class Commits:
    """A commit that can be held up, refuses poison, and remembers its batches."""

    def __init__(self, *, poison: frozenset[int] = frozenset()) -> None:
        self.batches: list[list[int]] = []
        self.stored: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.away = False
        self._poison = poison

    async def __call__(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        await self.gate.wait()
        if self.away:
            raise Away
        if self._poison & set(items):
            raise ValueError(str(sorted(self._poison & set(items))))
        self.stored += items
        return [item * 10 for item in items]


def group(
    commits: Commits,
    *,
    batch_limit: int = 100,
    backlog_limit: int = 1000,
    gather_seconds: float = 0.0,
) -> GroupCommit[int, int]:
    return GroupCommit(
        commits,
        batch_limit=batch_limit,
        backlog_limit=backlog_limit,
        shared_errors=(Away,),
        gather_seconds=gather_seconds,
    )


async def test_what_is_entered_together_is_one_commit_however_long_and_busy() -> None:
    commits = Commits()
    own = group(commits, batch_limit=3)
    first = asyncio.create_task(own.add(1))
    await asyncio.sleep(0)
    later = [asyncio.create_task(own.add(number)) for number in (2, 3)]
    await asyncio.sleep(0)
    together = own.enter([4, 5, 6, 7])
    assert own.backlog == 6
    assert await asyncio.gather(first, *later, *together) == [10, 20, 30, 40, 50, 60, 70]
    assert commits.batches[1:] == [[2, 3], [4, 5, 6, 7]]
    assert own.backlog == 0


async def test_an_idle_group_commits_a_single_item_at_once() -> None:
    commits = Commits()
    assert await group(commits).add(1) == 10
    assert commits.batches == [[1]]


async def test_items_that_arrive_while_a_commit_is_in_flight_share_the_next_one() -> None:
    commits = Commits()
    commits.gate.clear()
    one = group(commits)
    first = asyncio.create_task(one.add(0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert commits.batches == [[0]]
    later = [asyncio.create_task(one.add(number)) for number in range(1, 6)]
    await asyncio.sleep(0)
    assert one.backlog == 5
    commits.gate.set()
    assert await asyncio.gather(first, *later) == [0, 10, 20, 30, 40, 50]
    assert commits.batches == [[0], [1, 2, 3, 4, 5]]


async def test_no_batch_is_longer_than_its_limit() -> None:
    commits = Commits()
    one = group(commits, batch_limit=4)
    await asyncio.gather(*(one.add(number) for number in range(10)))
    assert [len(batch) for batch in commits.batches] == [4, 4, 2]


@given(st.integers(1, 70), st.data())
async def test_offenders_fail_alone_and_all_others_are_committed_once(
    count: int, data: st.DataObject
) -> None:
    poison = data.draw(st.frozensets(st.integers(0, count - 1), max_size=5))
    commits = Commits(poison=poison)
    one = group(commits)
    results = await asyncio.gather(
        *(one.add(number) for number in range(count)), return_exceptions=True
    )
    for number, result in enumerate(results):
        if number in poison:
            assert isinstance(result, ValueError)
            assert str(result) == f"[{number}]"
        else:
            assert result == number * 10
    assert sorted(commits.stored) == sorted(set(range(count)) - poison)


async def test_an_error_that_is_shared_goes_to_all_and_no_batch_is_split() -> None:
    commits = Commits()
    commits.away = True
    one = group(commits)
    results = await asyncio.gather(
        *(one.add(number) for number in range(8)), return_exceptions=True
    )
    assert all(isinstance(result, Away) for result in results)
    assert len(commits.batches) == 1
    commits.away = False
    assert await one.add(1) == 10


async def test_an_error_that_is_shared_goes_to_those_who_wait_for_the_next_commit_too() -> None:
    commits = Commits()
    commits.away = True
    commits.gate.clear()
    one = group(commits)
    first = asyncio.create_task(one.add(1))
    await asyncio.sleep(0)
    next_ones = [asyncio.create_task(one.add(number)) for number in (2, 3)]
    await asyncio.sleep(0)
    commits.gate.set()
    results = await asyncio.gather(first, *next_ones, return_exceptions=True)
    assert all(isinstance(result, Away) for result in results)
    assert (commits.batches, one.backlog) == ([[1]], 0)
    commits.away = False
    assert await one.add(4) == 40


async def test_what_is_above_the_backlog_limit_is_refused_at_once_and_not_taken() -> None:
    commits = Commits()
    commits.gate.clear()
    one = group(commits, backlog_limit=3)
    first = asyncio.create_task(one.add(0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    held = [asyncio.create_task(one.add(number)) for number in (1, 2, 3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await one.add(4)
    commits.gate.set()
    await asyncio.gather(first, *held)
    assert sorted(commits.stored) == [0, 1, 2, 3]
    assert await one.add(5) == 50


async def test_a_caller_that_leaves_takes_nothing_from_the_others() -> None:
    commits = Commits()
    commits.gate.clear()
    one = group(commits)
    tasks = [asyncio.create_task(one.add(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[2].cancel()
    await asyncio.sleep(0)
    commits.gate.set()
    assert list(await asyncio.gather(tasks[1], tasks[3])) == [10, 30]
    await one.drained()
    # Accepted is accepted: a client that hung up may have sent its request in earnest.
    assert sorted(commits.stored) == [0, 1, 2, 3]


async def test_drained_returns_when_nothing_waits() -> None:
    commits = Commits()
    commits.gate.clear()
    one = group(commits)
    task = asyncio.create_task(one.add(1))
    await asyncio.sleep(0)
    draining = asyncio.create_task(one.drained())
    await asyncio.sleep(0)
    assert not draining.done()
    commits.gate.set()
    await draining
    assert await task == 10
    await one.drained()


async def test_a_commit_that_answers_for_too_few_items_is_a_fault_of_each() -> None:
    async def forgetful(items: Sequence[int]) -> list[int]:
        return []

    one: GroupCommit[int, int] = GroupCommit(forgetful, batch_limit=10, backlog_limit=10)
    results = await asyncio.gather(one.add(1), one.add(2), return_exceptions=True)
    assert all(isinstance(result, RuntimeError) for result in results)


LONG = 3600.0
"""A gathering that would not end by its time."""


async def settled(tasks: Sequence[asyncio.Task[int]]) -> None:
    """Let what can go on go on, until these have their results."""
    await asyncio.wait_for(asyncio.gather(*tasks), 5)


def entered(one: GroupCommit[int, int], numbers: range) -> list[asyncio.Task[int]]:
    return [asyncio.create_task(one.add(number)) for number in numbers]


async def test_after_a_shared_commit_the_next_waits_for_as_many_again() -> None:
    commits = Commits()
    one = group(commits, gather_seconds=LONG)
    await settled(entered(one, range(GATHER_FROM)))
    again = entered(one, range(100, 100 + GATHER_FROM - 1))
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(commits.batches) == 1, "one is missing yet"
    await settled([*again, *entered(one, range(200, 201))])
    assert [len(batch) for batch in commits.batches] == [GATHER_FROM, GATHER_FROM]


async def test_whoever_is_alone_afterwards_waits_no_longer_than_is_said() -> None:
    commits = Commits()
    one = group(commits, gather_seconds=0.01)
    await settled(entered(one, range(GATHER_FROM)))
    assert await asyncio.wait_for(one.add(7), 5) == 70
    assert await asyncio.wait_for(one.add(8), 5) == 80
    await one.drained()
    assert [len(batch) for batch in commits.batches] == [GATHER_FROM, 1, 1]


@pytest.mark.parametrize(
    ("shared", "gather_seconds"), [(GATHER_FROM - 1, LONG), (GATHER_FROM, 0.0)]
)
async def test_few_who_share_a_commit_put_off_nobody(shared: int, gather_seconds: float) -> None:
    commits = Commits()
    one = group(commits, gather_seconds=gather_seconds)
    await settled(entered(one, range(shared)))
    assert await asyncio.wait_for(one.add(7), 5) == 70


async def test_a_full_batch_waits_for_no_more_than_fit() -> None:
    commits = Commits()
    limit = GATHER_FROM
    one = group(commits, batch_limit=limit, gather_seconds=LONG)
    numbers = range(5 * limit)
    await settled(entered(one, numbers))
    assert [len(batch) for batch in commits.batches] == [limit] * math.ceil(len(numbers) / limit)


async def test_one_caller_with_many_items_puts_off_nobody() -> None:
    commits = Commits()
    one = group(commits, gather_seconds=LONG)
    await asyncio.wait_for(asyncio.gather(*one.enter(range(4 * GATHER_FROM))), 5)
    assert await asyncio.wait_for(one.add(7), 5) == 70


async def test_a_backlog_that_can_hold_no_more_is_not_waited_for() -> None:
    commits = Commits()
    commits.gate.clear()
    small = group(commits, backlog_limit=GATHER_FROM, gather_seconds=LONG)
    first = entered(small, range(1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    again = entered(small, range(1, 1 + GATHER_FROM))
    await asyncio.sleep(0)
    commits.gate.set()
    await settled([*first, *again])
    # Two callers fill it: they are fewer than shared the last commit.
    together = [*small.enter(range(GATHER_FROM - 1)), *small.enter(range(1))]
    await asyncio.wait_for(asyncio.gather(*together), 5)
    assert [len(batch) for batch in commits.batches] == [1, GATHER_FROM, GATHER_FROM]


async def test_nobody_waits_where_enough_are_there() -> None:
    commits = Commits()
    one = group(commits, batch_limit=2 * ENOUGH, gather_seconds=LONG)
    first = entered(one, range(2 * ENOUGH + ENOUGH))
    await settled(first)
    assert [len(batch) for batch in commits.batches] == [2 * ENOUGH, ENOUGH]
