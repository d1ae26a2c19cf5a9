"""Claims at submission: a new task that has a free worker is stored as claimed already.

That spares it a transaction of its own. Nobody is overtaken: it is done only while the loop has
left nothing behind, and there are slots for all that is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import structlog
import uuid_utils

from app.access.limits import LimitBook
from app.dispatch.loop import AHEAD_MS, DispatchLoop
from app.dispatch.offers import Offers
from app.dispatch.queues import QueueBook
from app.dispatch.seats import Seats
from app.dispatch.send import Sender
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

    def deal(self, jobs: Sequence[NewJob]) -> Starts:
        """Return which of these tasks may begin now and where; `begin` must follow.

        Either there are slots for all that is due, of what is known and of these, or nothing is
        dealt: who goes first is for the loop to say, which knows priorities, shares and keys.
        """
        term = self._seats.term_of(FIRST)
        if term is None or not self._may_deal(term):
            return NO_STARTS
        # What the loop will claim in a moment, a little ahead of its time, keeps its slots.
        due = self._queues.known_due(self._roster, self._clock.now_ms() + AHEAD_MS)
        if due is None:
            return NO_STARTS
        offers = Offers(self._queues, self._roster, self._policy, self._loop.turns)
        for queue_id, count in due.items():
            if any(offers.take(queue_id) is None for _ in range(count)):
                return NO_STARTS
        dealt: dict[str, Start] = {}
        for job in filter(_is_due, jobs):
            state = self._queues.find(job.queue_id)
            if state is None or state.row.partition != FIRST:
                return NO_STARTS
            if not offers.of(job.queue_id):
                # Wherever it waits, it waits for nobody's slot.
                continue
            worker_id = offers.take(job.queue_id)
            if worker_id is None or len(dealt) >= self._most:
                return NO_STARTS
            if _needs_no_more(job):
                dealt[job.submit_token] = Start(worker_id, str(uuid_utils.uuid7()))
        for start in dealt.values():
            self._roster.sent(start.worker_id, start.execution_id)
        return Starts(term, dealt)

    def begin(self, starts: Starts, runs: Sequence[Claimed], *, seconds: float) -> None:
        """Send the runs that were stored as claimed, and let go of what was dealt besides.

        `seconds` is what the commit took: others have to know how long claims take.
        """
        if not starts.of:
            return
        self._loop.tempo.note(seconds)
        if self._seats.term_of(FIRST) != starts.term:
            # A later term of this process sends again by itself what it finds unanswered.
            runs = []
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


def _is_due(job: NewJob) -> bool:
    """Tell whether a job will be due when it is stored, as far as that is known."""
    return job.schedule is None and job.due_ms is None and not job.delay_ms


def _needs_no_more(job: NewJob) -> bool:
    """Tell whether a task that is due needs nothing but a free worker to begin."""
    return job.expires_at is None and job.concurrency_key is None and job.rate_key is None
