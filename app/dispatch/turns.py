"""Whose turn it is among due tasks: priority first, and a share for what has waited long. Pure.

A lane is what waits in one queue with one priority, in order of due time. The highest priority
goes first, of equal ones the task that is due the longest. A lane is aged when its first task has
been due for the ageing time; every tenth turn of the same workers goes to an aged lane of a lower
priority that some of them may take, the one that was served least recently. So a flood of higher
ones delays an aged task by nine of them for each lane that is aged, and the aged ones, however
many, cost the others a tenth of the slots.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

SHARE: Final = 10
"""Of so many turns one is for what has aged, if anything has."""
MOST_POOLS: Final = 1000
"""More than this are not remembered: all begin anew."""

Workers = frozenset[str]
"""The ids of the workers that may take a queue's tasks: a pool."""


class Waiting(Protocol):
    """A due task; times are epoch ms."""

    @property
    def job_id(self) -> int:
        """Its id, which orders what is due at the same time."""

    @property
    def queue_id(self) -> int:
        """The queue that it waits in."""

    @property
    def priority(self) -> int:
        """From 0 to 9, 9 first."""

    @property
    def due_ms(self) -> int:
        """Since when it is due."""


Task = TypeVar("Task", bound=Waiting)


class Lane(NamedTuple):
    """What waits in one queue with one priority."""

    queue_id: int
    priority: int


@dataclass(slots=True)
class Turns:
    """What is remembered from round to round: who was served when, and how long ago an aged one.

    Turns are counted in each pool of workers and in each queue: what has slots that nobody else
    wants must not lose its aged turns to what uses many. Pools are known by their hashes. One that
    is new goes on from the count over all: where workers come and go, each change makes a new pool.
    """

    turn: int = 0
    since_aged: int = 0
    since_aged_at: dict[int, int] = field(default_factory=dict)
    since_aged_in: dict[int, int] = field(default_factory=dict)
    served_at: dict[Lane, int] = field(default_factory=dict)

    def count(self, lane: Lane, pool: int, *, aged: bool, aged_in_queue: bool) -> None:
        """Note that a task of the lane had a turn of the pool, and whether as an aged one."""
        self.turn += 1
        self.served_at[lane] = self.turn
        if pool not in self.since_aged_at and len(self.since_aged_at) >= MOST_POOLS:
            self.since_aged_at.clear()
        self.since_aged_at[pool] = 0 if aged else self.since_aged_of(pool) + 1
        self.since_aged = 0 if aged else self.since_aged + 1
        queue_id = lane.queue_id
        again = aged or aged_in_queue
        self.since_aged_in[queue_id] = 0 if again else self.since_aged_in.get(queue_id, 0) + 1

    def since_aged_of(self, pool: int) -> int:
        """Return how many turns of a pool there were since one for an aged lane."""
        return self.since_aged_at.get(pool, self.since_aged)

    def last_served(self, lane: Lane) -> int:
        """Return the turn in which the lane was served last, 0 for never."""
        return self.served_at.get(lane, 0)


@dataclass(frozen=True, slots=True)
class _Pick:
    lane: Lane
    pool: int
    aged: bool = False
    aged_in_queue: bool = False


class Line(Generic[Task]):
    """The due tasks of one round, handed out one by one in the order of their turns."""

    def __init__(
        self,
        waiting: Iterable[Task],
        turns: Turns,
        *,
        pool_of: Callable[[int], Workers],
        now_ms: float,
        ageing_ms: float,
    ) -> None:
        self._turns = turns
        self._pool_of = pool_of
        self._aged_by_ms = now_ms - ageing_ms if ageing_ms > 0 else float("-inf")
        self._lanes: dict[Lane, deque[Task]] = defaultdict(deque)
        for task in sorted(waiting, key=lambda one: (one.due_ms, one.job_id)):
            self._lanes[Lane(task.queue_id, task.priority)].append(task)
        self._heads = [self._head(lane) for lane in self._lanes]
        heapq.heapify(self._heads)
        self._pick: _Pick | None = None

    def first(self) -> Task | None:
        """Return the task whose turn it is, None when no more are left."""
        self._pick = self._choose()
        return None if self._pick is None else self._lanes[self._pick.lane][0]

    def deal(self) -> None:
        """Take away the task that `first` has returned: it was dealt."""
        pick = self._picked()
        lane = self._lanes[pick.lane]
        lane.popleft()
        if lane:
            heapq.heappush(self._heads, self._head(pick.lane))
        else:
            del self._lanes[pick.lane]
        self._turns.count(pick.lane, pick.pool, aged=pick.aged, aged_in_queue=pick.aged_in_queue)

    def drop_queue(self) -> int:
        """Take away the whole queue of that task, which has no slot left, and return its id.

        A later task of a queue never overtakes one whose turn it is.
        """
        queue_id = self._picked().lane.queue_id
        for lane in [lane for lane in self._lanes if lane.queue_id == queue_id]:
            del self._lanes[lane]
        return queue_id

    def queues(self) -> set[int]:
        """Return the queues that still have tasks in this line."""
        return {lane.queue_id for lane in self._lanes}

    def _picked(self) -> _Pick:
        if self._pick is None:
            raise RuntimeError("nothing was taken from the line")
        return self._pick

    def _head(self, lane: Lane) -> tuple[int, int, int, Lane]:
        first = self._lanes[lane][0]
        return (-lane.priority, first.due_ms, first.job_id, lane)

    def _choose(self) -> _Pick | None:
        while self._heads:
            *_, job_id, lane = self._heads[0]
            # An aged turn, or the end of its queue, has left an entry that is over.
            if lane in self._lanes and self._lanes[lane][0].job_id == job_id:
                return self._pick_of(lane)
            heapq.heappop(self._heads)
        return None

    def _pick_of(self, best: Lane) -> _Pick:
        """Return the best lane, or the aged one that has this turn in place of it."""
        turns, workers = self._turns, self._pool_of(best.queue_id)
        pool = hash(workers)
        if turns.since_aged_of(pool) >= SHARE - 1:
            aged = self._longest_unserved(best, self._lanes, workers)
            if aged is not None:
                return _Pick(aged, pool, aged=True)
        elif turns.since_aged_in.get(best.queue_id, 0) >= SHARE - 1:
            own = (lane for lane in self._lanes if lane.queue_id == best.queue_id)
            aged = self._longest_unserved(best, own, workers)
            if aged is not None:
                return _Pick(aged, pool, aged_in_queue=True)
        return _Pick(best, pool)

    def _longest_unserved(self, best: Lane, lanes: Iterable[Lane], workers: Workers) -> Lane | None:
        return min(
            (
                lane
                for lane in lanes
                if lane.priority < best.priority
                and self._lanes[lane][0].due_ms <= self._aged_by_ms
                and not workers.isdisjoint(self._pool_of(lane.queue_id))
            ),
            key=lambda lane: (self._turns.last_served(lane), self._lanes[lane][0].due_ms, lane),
            default=None,
        )
