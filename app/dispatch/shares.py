"""Whose turn it is among tenants, before priorities count: start-time fair queueing. Pure.

Each deal of a task costs its tenant one over its weight of virtual time, and the tenant whose
time is the least goes next; one that comes back after a rest stands level with the others, with
nothing saved up. So of tenants that all have due tasks each gets its weight's share of the slots,
however much the others have waiting and of whatever priority, and one that comes new has the very
next slot. Within a tenant the order is that of `turns`. A tenant that has no share left (`spare`)
is served only from what nobody else wants.

Tenants are measured against each other in a pool: the workers that may take the task. What a
tenant gets from workers that nobody else can use is not held against it elsewhere.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple

from app.dispatch.turns import Line, Task, Turns, Workers

MOST_POOLS: Final = 1000
MOST_TENANTS: Final = 20_000
"""More than this of either is not remembered: all begin anew, level with each other."""


@dataclass(slots=True)
class Pool:
    """The virtual time of some workers: of the last deal, and at which each tenant is next."""

    now: float = 0.0
    next_of: dict[int, float] = field(default_factory=dict)

    def start_of(self, tenant_id: int) -> float:
        """Return the virtual time at which a tenant is next: never before the last deal."""
        return max(self.now, self.next_of.get(tenant_id, 0.0))

    def charge(self, tenant_id: int, weight: float) -> None:
        """Note that a task of the tenant was dealt."""
        self.now = self.start_of(tenant_id)
        self.next_of[tenant_id] = self.now + 1 / weight


@dataclass(slots=True)
class Shares:
    """What is remembered from round to round; without it every round would begin anew."""

    turn: int = 0
    served_at: dict[int, int] = field(default_factory=dict)
    pools: dict[Hashable, Pool] = field(default_factory=dict)
    turns: dict[int, Turns] = field(default_factory=dict)

    def turns_of(self, tenant_id: int) -> Turns:
        """Return the turns of the lanes of one tenant."""
        if tenant_id not in self.turns and len(self.turns) >= MOST_TENANTS:
            self.turns.clear()
            self.served_at.clear()
        return self.turns.setdefault(tenant_id, Turns())

    def pool(self, key: Hashable) -> Pool:
        """Return the virtual time of a pool of workers."""
        pool = self.pools.get(key)
        if pool is None:
            if len(self.pools) >= MOST_POOLS:
                self.pools.clear()
            pool = self.pools[key] = Pool()
        elif len(pool.next_of) >= MOST_TENANTS:
            pool.next_of.clear()
        return pool


class Quota(NamedTuple):
    """How many more runs a tenant may have now, and whether it may borrow what others leave."""

    left: int
    may_borrow: bool


class Part(NamedTuple):
    """What one tenant has waiting for the workers of one pool."""

    tenant_id: int
    pool: Hashable


class Place(NamedTuple):
    """Where a part stands among those of its pool; the least is next."""

    start: float
    served_at: int
    rank: tuple[int, int, int]
    tenant_id: int


class SharedLine(Generic[Task]):
    """The due tasks of one round, handed out one by one: first whose tenant's turn it is.

    In each pool the tenant with the least virtual time is next; of pools, which may overlap, the
    one whose next tenant was served least recently, and of one tenant's tasks the highest.
    """

    def __init__(
        self,
        lines: Mapping[Part, Line[Task]],
        shares: Shares,
        *,
        weight_of: Callable[[int], float],
        quotas: Mapping[int, Quota],
    ) -> None:
        self._lines = lines
        self._shares = shares
        self._weight_of = weight_of
        self._quotas = dict(quotas)
        self._held: set[Part] = set()
        self._heaps: dict[tuple[bool, Hashable], list[Place]] = defaultdict(list)
        self._picked: tuple[bool, Part] | None = None
        for part in lines:
            self._place(part)

    def first(self) -> Task | None:
        """Return the task whose turn it is, None when no more are left."""
        while (picked := self._choose()) is not None:
            borrows, part = picked
            self._picked = picked
            if borrows == self._has_used_up(part.tenant_id):
                return self._lines[part].first()
            # It had a quota left when it was lined up.
            self._move()
        return None

    def deal(self) -> None:
        """Take away the task that `first` has returned: it was dealt."""
        part = self._part()
        tenant_id = part.tenant_id
        self._lines[part].deal()
        self._shares.pool(part.pool).charge(tenant_id, self._weight_of(tenant_id))
        self._shares.turn += 1
        self._shares.served_at[tenant_id] = self._shares.turn
        quota = self._quotas.get(tenant_id)
        if quota is not None:
            self._quotas[tenant_id] = quota._replace(left=quota.left - 1)
        self._move()

    def drop_queue(self) -> int:
        """Take away the whole queue of that task, which has no slot left, and return its id."""
        queue_id = self._lines[self._part()].drop_queue()
        self._move()
        return queue_id

    def queues(self) -> set[int]:
        """Return the queues that still have tasks in this line."""
        return {queue_id for line in self._lines.values() for queue_id in line.queues()}

    def held_queues(self) -> set[int]:
        """Return those of them whose tenants may have no more runs before one of theirs ends."""
        return {queue_id for part in self._held for queue_id in self._lines[part].queues()}

    def _part(self) -> Part:
        if self._picked is None:
            raise RuntimeError("nothing was taken from the line")
        return self._picked[1]

    def _choose(self) -> tuple[bool, Part] | None:
        found = min(
            (
                (borrows, self._shares.served_at.get(heap[0].tenant_id, 0), heap[0].rank, pool)
                for (borrows, pool), heap in self._heaps.items()
                if heap
            ),
            key=lambda one: one[:3],
            default=None,
        )
        if found is None:
            return None
        borrows, pool = found[0], found[3]
        return borrows, Part(self._heaps[(borrows, pool)][0].tenant_id, pool)

    def _has_used_up(self, tenant_id: int) -> bool:
        quota = self._quotas.get(tenant_id)
        return quota is not None and quota.left <= 0

    def _move(self) -> None:
        """Give the part that was picked the place of its next task."""
        part = self._part()
        heapq.heappop(self._heaps[(self._picked is not None and self._picked[0], part.pool)])
        self._picked = None
        self._place(part)

    def _place(self, part: Part) -> None:
        task = self._lines[part].first()
        if task is None:
            return
        used_up = self._has_used_up(part.tenant_id)
        if used_up and not self._quotas[part.tenant_id].may_borrow:
            self._held.add(part)
            return
        heapq.heappush(
            self._heaps[(used_up, part.pool)],
            Place(
                self._shares.pool(part.pool).start_of(part.tenant_id),
                self._shares.served_at.get(part.tenant_id, 0),
                (-task.priority, task.due_ms, task.job_id),
                part.tenant_id,
            ),
        )


class OneTenantsLine(Generic[Task]):
    """The due tasks of a tenant that nobody contends with, and that its quota lets all begin.

    Nothing is charged.
    """

    def __init__(self, line: Line[Task]) -> None:
        self.first = line.first
        self.deal = line.deal
        self.drop_queue = line.drop_queue
        self.queues = line.queues

    def held_queues(self) -> set[int]:
        """Return none: its quota has room for all of them."""
        return set()


def shared_line(
    waiting: Iterable[Task],
    shares: Shares,
    *,
    tenant_of: Callable[[int], int],
    weight_of: Callable[[int], float],
    pool_of: Callable[[int], Workers],
    now_ms: float,
    ageing_ms: float,
    quotas: Mapping[int, Quota] | None = None,
) -> SharedLine[Task] | OneTenantsLine[Task]:
    """Line up due tasks: each tenant's by priority and age, and the tenants by their shares.

    `pool_of` tells which workers may take a queue's tasks.
    """
    by_tenant: dict[int, list[Task]] = defaultdict(list)
    for task in waiting:
        by_tenant[tenant_of(task.queue_id)].append(task)

    def line(tenant_id: int, tasks: Iterable[Task]) -> Line[Task]:
        turns = shares.turns_of(tenant_id)
        return Line(tasks, turns, pool_of=pool_of, now_ms=now_ms, ageing_ms=ageing_ms)

    if len(by_tenant) == 1:
        ((tenant_id, tasks),) = by_tenant.items()
        quota = (quotas or {}).get(tenant_id)
        if quota is None or quota.left >= len(tasks):
            return OneTenantsLine(line(tenant_id, tasks))
    by_part: dict[Part, list[Task]] = defaultdict(list)
    for tenant_id, tasks in by_tenant.items():
        for task in tasks:
            by_part[Part(tenant_id, pool_of(task.queue_id))].append(task)
    return SharedLine(
        {part: line(part.tenant_id, tasks) for part, tasks in by_part.items()},
        shares,
        weight_of=weight_of,
        quotas=quotas or {},
    )
