"""Which worker a task is dealt to. Pure: chance and turns are arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, assert_never

Policy = Literal["least_load", "round_robin", "random", "rendezvous"]

NEAR_EQUAL: Final = 5.0
"""Loads that differ by less than half a run are drawn from at random: what the CPU part of the
formula says is old and coarse, and must not send a whole burst to one worker."""


@dataclass(slots=True)
class Slots:
    """A worker that may take a task: its free slots shrink as tasks are dealt to it."""

    worker_id: str
    active: int
    capacity: int
    avg_cost_ms: float
    cpu_idle_percent: float
    weight: float

    @property
    def free(self) -> int:
        """How many more tasks it can take."""
        return max(0, self.capacity - self.active)


def load_of(worker: Slots) -> float:
    """`(active*10 + avgCostMs/1000 + (100-cpuIdle)/10) / weight`: lower is freer."""
    return (
        worker.active * 10 + worker.avg_cost_ms / 1000 + (100 - worker.cpu_idle_percent) / 10
    ) / worker.weight


def choose(
    workers: Sequence[Slots], policy: Policy, *, draw: float, turn: int, key: str
) -> Slots | None:
    """Return the worker for one task, or None when all are full.

    `draw` is from [0, 1), `turn` counts choices (round robin), `key` names the task
    (rendezvous hashing: the same worker for the same key while it has slots).
    """
    free = [worker for worker in workers if worker.free > 0]
    if not free:
        return None
    match policy:
        case "least_load":
            loads = [load_of(worker) for worker in free]
            limit = min(loads) + NEAR_EQUAL
            near = [worker for worker, load in zip(free, loads, strict=True) if load < limit]
            return near[int(draw * len(near))]
        case "round_robin":
            return sorted(free, key=lambda worker: worker.worker_id)[turn % len(free)]
        case "random":
            return free[int(draw * len(free))]
        case "rendezvous":
            return max(free, key=lambda worker: _rendezvous_score(worker.worker_id, key))
        case _:
            assert_never(policy)


def _rendezvous_score(worker_id: str, key: str) -> bytes:
    # Thaler and Ravishankar, "A name-based mapping scheme for rendezvous" (1996).
    return hashlib.blake2b(f"{worker_id}\0{key}".encode(), digest_size=8).digest()
