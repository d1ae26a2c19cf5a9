"""Which workers may have the tasks of a queue now, and a slot of one of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

from app.dispatch.queues import QueueBook
from app.fleet.balance import Policy, Slots, choose
from app.fleet.roster import Roster
from app.lifecycle.term import FIRST


class Offers:
    """The slots of one deal: as they are taken they shrink, for all queues that share a worker.

    `turns` counts all choices of this process, which round robin goes by.
    """

    def __init__(
        self, queues: QueueBook, roster: Roster, policy: Policy, turns: Iterator[int]
    ) -> None:
        self._queues = queues
        self._roster = roster
        self._policy = policy
        self._turns = turns
        self._slots: dict[str, Slots] = {}
        self._by_queue: dict[int, list[Slots]] = {}

    def of(self, queue_id: int) -> list[Slots]:
        """Return the workers, full or not, for a known queue: one object each."""
        workers = self._by_queue.get(queue_id)
        if workers is None:
            row = self._queues.get(queue_id).row
            workers = self._by_queue[queue_id] = [
                self._slots.setdefault(worker.worker_id, worker)
                for worker in self._roster.slots_for(
                    row.job_handler, row.requirement, seated=row.partition != FIRST
                )
            ]
        return workers

    def take(self, queue_id: int, *, key: str = "") -> str | None:
        """Take a slot for a task of a known queue: return its worker, None if all are full.

        `key` names the task, for the policy that goes by it.
        """
        worker = choose(
            self.of(queue_id), self._policy, draw=random.random(), turn=next(self._turns), key=key
        )
        if worker is None:
            return None
        worker.active += 1
        return worker.worker_id
