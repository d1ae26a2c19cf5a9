"""Claims at submission: a new task that has a free worker is stored as claimed already.

That spares it a transaction of its own. Nobody's slot is taken: it is done only while the loop has
left nothing behind, and for what it is about to deal as many slots stay free.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import structlog
import uuid_utils

from app.access.limits import LimitBook
from app.dispatch.loop import DispatchLoop
from app.dispatch.queues import QueueBook
from app.dispatch.seats import Seats
from app.dispatch.send import Sender
from app.fleet.balance import Slots, choose
from app.fleet.roster import Roster
from app.ground import Ground
from app.lifecycle.moves.claim import Claimed
from app.lifecycle.moves.submit import NO_STARTS, NewJob, Start, Starts
from app.lifecycle.term import FIRST

log = structlog.get_logger(__name__)

KEYED_BY_ID: Final = "rendezvous"
"""The policy that chooses by the id of a job, which one that is not stored yet does not have."""


class AtOnce:
    """Deals new tasks to free workers, and sends what was stored as claimed.

    What is dealt counts as sent from then on: the loop deals no slot twice.
    """

    def __init__(
        self,
        ground: Ground,
        seats: Seats,
        roster: Roster,
        queues: QueueBook,
        sender: Sender,
        limits: LimitBook,
        loop: DispatchLoop,
    ) -> None:
        self._clock = ground.clock
        self._metrics = ground.metrics
        self._policy = ground.settings.balance
        self._most = ground.settings.claim_batch
        self._seats = seats
        self._roster = roster
        self._queues = queues
        self._sender = sender
        self._limits = limits
        self._loop = loop
        self._turn = 0

    def deal(self, jobs: Sequence[NewJob]) -> Starts:
        """Return which of these tasks may begin now and where; `begin` must follow."""
        term = self._seats.term_of(FIRST)
        if term is None or not self._may_deal(term):
            return NO_STARTS
        kept = self._queues.known_due(self._roster, self._clock.now_ms())
        if kept is None:
            return NO_STARTS
        offers: dict[int, list[Slots]] = {}
        slots: dict[str, Slots] = {}
        starts = Starts(term, {})
        for job in sorted(filter(_is_due, jobs), key=_by_priority):
            if len(starts.of) >= self._most:
                break
            if job.queue_id not in offers:
                offers[job.queue_id] = self._offer(job.queue_id, slots)
            workers = offers[job.queue_id]
            if sum(worker.free for worker in workers) <= kept:
                continue
            self._turn += 1
            worker = choose(workers, self._policy, draw=random.random(), turn=self._turn, key="")
            assert worker is not None, "there is a free slot"
            worker.active += 1
            start = Start(worker.worker_id, str(uuid_utils.uuid7()))
            self._roster.sent(start.worker_id, start.execution_id)
            starts.of[job.submit_token] = start
        return starts

    def begin(self, starts: Starts, runs: Sequence[Claimed], *, seconds: float) -> None:
        """Send the runs that were stored as claimed, and let go of what was dealt besides.

        `seconds` is what the commit took: others have to know how long claims take.
        """
        if not starts.of:
            return
        self._loop.tempo.note(seconds)
        begun = {run.execution_id for run in runs}
        for start in starts.of.values():
            if start.execution_id not in begun:
                self._roster.answered(start.worker_id, start.execution_id)
                self._roster.over(start.execution_id)
        if len(begun) < len(starts.of):
            # What came meanwhile may have found these slots taken.
            self._loop.look_again()
        self._metrics.claimed.inc(len(runs))
        for run in runs:
            self._metrics.lateness.observe(0)
            log.debug(
                "claimed",
                job_id=run.job_id,
                execution_id=run.execution_id,
                worker_id=run.worker_id,
                attempt=run.attempt,
            )
        self._sender.send(runs)

    def _may_deal(self, term: int) -> bool:
        """Tell whether the loop has dealt all that it read, and needs no count of what runs."""
        return (
            self._policy != KEYED_BY_ID
            and not self._seats.are_many
            and not self._limits.any_running
            and self._loop.has_dealt_all(term)
        )

    def _offer(self, queue_id: int, slots: dict[str, Slots]) -> list[Slots]:
        """Return the workers for a queue, one object each, so that a slot is dealt once."""
        state = self._queues.find(queue_id)
        if state is None or state.row.partition != FIRST:
            return []
        return [
            slots.setdefault(worker.worker_id, worker)
            for worker in self._roster.slots_for(state.row.job_handler, state.row.requirement)
        ]


def _is_due(job: NewJob) -> bool:
    """Tell whether a task may begin when it is stored, by nothing but a free worker."""
    return (
        job.schedule is None
        and job.due_ms is None
        and not job.delay_ms
        and job.expires_at is None
        and job.concurrency_key is None
        and job.rate_key is None
    )


def _by_priority(job: NewJob) -> int:
    return -job.priority
