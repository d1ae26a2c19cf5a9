"""The dispatch loop of a holder of locks: sleep until something is due, choose, claim, send."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import structlog
import uuid_utils
from sqlalchemy.ext.asyncio import AsyncConnection

from app.access.limits import LimitBook
from app.dispatch.offers import Offers
from app.dispatch.probe import Prober
from app.dispatch.queues import QueueBook, QueueState
from app.dispatch.quotas import Quotas
from app.dispatch.seats import Seats
from app.dispatch.send import Sender
from app.dispatch.shares import Quota, Shares, shared_line
from app.dispatch.turns import Workers
from app.fleet.portions import TURN_MS
from app.fleet.roster import Roster
from app.ground import Ground
from app.lifecycle.moves.claim import Assignment, Candidate, Claimed, Found, Probe, claim, find_due
from app.lifecycle.moves.follow import Claimable
from app.lifecycle.moves.submit import NEW_VERSION
from app.lifecycle.moves.within_quotas import keep_within_quotas
from app.lifecycle.nodes import read_nodes
from app.lifecycle.reads import read_queues
from app.lifecycle.running import read_for_sending, read_running
from app.lifecycle.term import FIRST
from app.lifecycle.token import new_token
from app.plumbing.bus import BEAT, ENDED, LOAD, WAKE, Signal
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.loops import Loop
from app.plumbing.tempo import Tempo
from oncue.protocol import Load

log = structlog.get_logger(__name__)

RESCAN_SECONDS: Final = 1.0
PROBES_PER_READ: Final = 60
SHORTEST_SLEEP_SECONDS: Final = 0.0005
AHEAD_MS: Final = 40
"""So long before its time a task is claimed and sent, to be begun at its time: the time of a
commit and two round trips, and far less than what a worker may have in hand."""
SLOW_CLAIM_SECONDS: Final = 0.02
"""A quicker claim is never called slow."""


class Dealt(NamedTuple):
    """What waits, what of it was known without a read, and who gets what."""

    waiting: list[Candidate]
    known: list[Candidate]
    assignments: list[Assignment]
    ahead_ms: int
    """So long before their time they may be claimed."""


class DispatchLoop:
    """Claims due tasks for workers with free slots, never more than there are slots.

    The backlog stays in the database, where priority means something. Signals only make the
    loop look sooner; without any it looks at everything once a second.
    """

    def __init__(
        self,
        ground: Ground,
        seats: Seats,
        roster: Roster,
        queues: QueueBook,
        prober: Prober,
        sender: Sender,
        limits: LimitBook,
    ) -> None:
        self._database = ground.database
        self._clock = ground.clock
        self._seats = seats
        self._roster = roster
        self._queues = queues
        self._prober = prober
        self._sender = sender
        self._metrics = ground.metrics
        self._policy = ground.settings.balance
        self._claim_batch = ground.settings.claim_batch
        self._look = asyncio.Event()
        self._fleet_changed = False
        self._reload_queues = True
        self._rescan_at = float("-inf")
        self._begun: dict[int, int] = {}
        self._has_dealt = False
        self.tempo = Tempo(floor_seconds=SLOW_CLAIM_SECONDS)
        self.turns = itertools.count()
        """One for each choice of a worker, wherever it is made."""
        self._shares = Shares()
        self._limits = limits
        self._quotas = Quotas(ground.database, queues, limits)
        self._ageing_ms = ground.settings.priority_ageing_seconds * 1000
        self._loop = Loop("dispatch", self._step, expected=(DatabaseUnavailable,))
        ground.bus.subscribe(WAKE, self._on_wake)
        ground.bus.subscribe(LOAD, self._on_load)
        ground.bus.subscribe(BEAT, self._on_beat)
        ground.bus.subscribe(ENDED, self._on_ended)

    def start(self) -> None:
        """Start dispatching whenever a lock is held."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop claiming."""
        await self._loop.stop()
        await self._prober.stop()

    def has_dealt_all(self, term: int) -> bool:
        """Tell whether this loop, in this term of partition 0 alone, has dealt what it has read."""
        return self._begun == {FIRST: term} and self._has_dealt

    def look_again(self) -> None:
        """Look at once: slots have come free that were counted as taken."""
        self._look.set()

    async def _step(self) -> None:
        async with self._seats.rounds:
            terms = self._seats.terms
            if terms:
                await self._turn_of(terms)
        if terms:
            await self._sleep()
            return
        self._seats.changed.clear()
        if not self._seats.terms:
            await self._wait(self._seats.changed, 1.0)

    async def _turn_of(self, terms: dict[int, int]) -> None:
        if terms != self._begun:
            await self._begin(terms)
            self._begun = terms
        self._roster.portion = self._seats.portion
        if time.monotonic() >= self._rescan_at:
            self._rescan_at = time.monotonic() + RESCAN_SECONDS
            self._queues.forget_positions()
            # A signal may have been lost: new queues and workers are found here at the latest.
            self._fleet_changed = self._reload_queues = True
        if self._fleet_changed or not self._queues.complete:
            await self._refresh()
        self._look.clear()
        await self._round(terms)

    async def _begin(self, terms: dict[int, int]) -> None:
        """Start terms from the rows: what runs where, and which sends were never answered."""
        new = {one for one, term in terms.items() if self._begun.get(one) != term}
        self._queues.serve(terms)
        if not new:
            return
        if not terms.keys() & self._begun.keys() - new:
            self._sender.reset()
        self._quotas.forget()
        # What is sent again may be of a queue that came while another held the lock.
        self._reload_queues = True
        await self._refresh()
        self._queues.forget_positions()
        running = await self._database.read(
            lambda connection: read_running(connection, self._database)
        )
        self._roster.seed(Counter(task.worker_id for task in running if task.accepted))
        unanswered = [
            task
            for task in running
            if not task.accepted and self._queues.partition_of(task.queue_id) in new
        ]
        runs = await self._database.read(
            lambda connection: read_for_sending(connection, unanswered)
        )
        self._sender.send(runs, again=True)
        log.info(
            "term_begins",
            terms={one: terms[one] for one in sorted(new)},
            running=len(running),
            sent_again=len(runs),
        )

    async def _refresh(self) -> None:
        self._fleet_changed = False
        if self._reload_queues or not self._queues.complete:
            self._reload_queues = False
            after_id = self._queues.read_after(time.monotonic())
            self._queues.load(
                await self._database.read(
                    lambda connection: read_queues(connection, after_id=after_id)
                )
            )
            self._seats.notice(self._queues.partitions)
        self._roster.refresh(await self._database.read(read_nodes))
        if terms := self._seats.terms:
            self._prober.clear_suspects(*min(terms.items()))

    async def _round(self, terms: Mapping[int, int]) -> None:
        # What a round that fails has read or dealt is known to nobody until all is read again.
        self._has_dealt = False
        rescan_at, self._rescan_at = self._rescan_at, float("-inf")
        dealt = await self._deal_due()
        self._has_dealt = True
        won: set[str] = set()
        try:
            for fence, own in self._by_partition(dealt.waiting, dealt.assignments, terms):
                won |= await self._take(
                    own, fence, dealt.waiting, dealt.known, ahead_ms=dealt.ahead_ms
                )
        except BaseException:
            self._has_dealt = False
            raise
        finally:
            self._let_go(one for one in dealt.assignments if one.execution_id not in won)
        self._rescan_at = rescan_at

    def _let_go(self, lost: Iterable[Assignment]) -> None:
        """Count no longer what was dealt and not won."""
        for one in lost:
            self._roster.answered(one.worker_id, one.execution_id)
            self._roster.over(one.execution_id)

    async def _deal_due(self) -> Dealt:
        """Read what has to be read, and deal what is due, or will be in a moment."""
        now = self._clock.now_ms()
        served = self._queues.served(self._roster)
        unread = [(state, free) for state, free in served if state.needs_read(now)]
        candidates = await self._find(unread) if unread else []
        # What is held was due before: a read, with all in their order, is the way out of that.
        states = [state for state, _free in served if not state.held]
        known = _take_soon(states, self._clock.now_ms())
        # A moment before its time a task is claimed and sent: its worker begins it in time.
        ahead = [] if candidates or known else _take_soon(states, self._clock.now_ms() + AHEAD_MS)
        waiting = [*candidates, *known, *ahead]
        if not waiting:
            return Dealt([], [], [], 0)
        ends = self._queues.ends
        quotas = await self._quotas.of(waiting)
        assignments = self._deal(waiting, now, quotas, ends=ends)
        return Dealt(waiting, [*known, *ahead], assignments, AHEAD_MS if ahead else 0)

    def _by_partition(
        self,
        waiting: Sequence[Candidate],
        assignments: Sequence[Assignment],
        terms: Mapping[int, int],
    ) -> list[tuple[tuple[int, int], Sequence[Assignment]]]:
        """Part what was dealt by partition, each with the partition and its term."""
        if not assignments:
            return []
        if len(terms) == 1:
            return [(next(iter(terms.items())), assignments)]
        lies_in = {task.job_id: self._queues.get(task.queue_id).row.partition for task in waiting}
        parted: dict[int, list[Assignment]] = defaultdict(list)
        for one in assignments:
            parted[lies_in[one.job_id]].append(one)
        return [((partition, terms[partition]), own) for partition, own in parted.items()]

    async def _take(
        self,
        assignments: Sequence[Assignment],
        fence: tuple[int, int],
        waiting: Sequence[Candidate],
        known: Sequence[Candidate],
        *,
        ahead_ms: int,
    ) -> set[str]:
        """Claim what was dealt of one partition, and send what was won: return its executions."""
        claimed, too_many = await self._claim(assignments, fence, ahead_ms=ahead_ms)
        self._read_again(known, assignments, claimed)
        if too_many:
            self._count_again(waiting, too_many)
        self._metrics.claimed.inc(len(claimed))
        for run in claimed:
            self._metrics.lateness.observe(max(0, run.claimed_at - run.due_ms) / 1000)
            log.debug(
                "claimed",
                job_id=run.job_id,
                execution_id=run.execution_id,
                worker_id=run.worker_id,
                attempt=run.attempt,
            )
        self._sender.send(claimed)
        return {run.execution_id for run in claimed}

    async def _find(self, due: Sequence[tuple[QueueState, int]]) -> list[Candidate]:
        """Read every due queue, a few dozen ranges a statement."""
        candidates: list[Candidate] = []
        chunk: list[tuple[QueueState, int, bool]] = []
        probes: list[Probe] = []
        for number, (state, free) in enumerate(due, start=1):
            limit = min(free, self._claim_batch) + 1
            chunk.append((state, limit, state.rescan))
            probes += state.probes(limit)
            if len(probes) < PROBES_PER_READ and number < len(due):
                continue
            if probes:
                found = await self._read(probes)
                for one, one_limit, was_rescan in chunk:
                    one.learn(found, one_limit, was_rescan=was_rescan)
                candidates += found.due
            chunk, probes = [], []
        return candidates

    async def _read(self, probes: Sequence[Probe]) -> Found:
        return await self._database.read(
            lambda connection: find_due(connection, self._database, probes)
        )

    def _deal(
        self,
        candidates: Sequence[Candidate],
        now_ms: float,
        quotas: Mapping[int, Quota],
        *,
        ends: int,
    ) -> list[Assignment]:
        """Deal tasks to workers in their turns until the slots or the batch run out."""
        offers = Offers(self._queues, self._roster, self._policy, self.turns)
        pools: dict[tuple[str, str], Workers] = {}

        def pool_of(queue_id: int) -> Workers:
            row = self._queues.get(queue_id).row
            key = (row.job_handler, row.requirement)
            if key not in pools:
                pools[key] = frozenset(one.worker_id for one in offers.of(queue_id))
            return pools[key]

        line = shared_line(
            candidates,
            self._shares,
            tenant_of=self._queues.tenant_of,
            weight_of=self._limits.weight_of,
            pool_of=pool_of,
            now_ms=now_ms,
            ageing_ms=self._ageing_ms,
            quotas=quotas,
        )
        assignments: list[Assignment] = []
        dealt: dict[int, list[Candidate]] = defaultdict(list)
        while len(assignments) < self._claim_batch and (task := line.first()) is not None:
            worker_id = offers.take(task.queue_id, key=str(task.job_id))
            if worker_id is None:
                self._queues.get(line.drop_queue()).has_backlog = True
                continue
            line.deal()
            dealt[task.queue_id].append(task)
            one = Assignment(task.job_id, task.version, worker_id, str(uuid_utils.uuid7()))
            # From now on: while these are claimed, new tasks are dealt slots too.
            self._roster.sent(one.worker_id, one.execution_id)
            assignments.append(one)
        self._queues.left_over(line.queues(), line.held_queues(), ends=ends)
        for queue_id, tasks in dealt.items():
            self._queues.get(queue_id).dealt(tasks)
            self._quotas.note([queue_id] * len(tasks))
        return assignments

    def _read_again(
        self,
        known: Sequence[Candidate],
        assignments: Sequence[Assignment],
        claimed: Sequence[Claimed],
    ) -> None:
        """Look anew at queues whose known tasks were not won: they are not as they were read."""
        lost = {one.job_id for one in assignments} - {run.job_id for run in claimed}
        for task in known:
            if task.job_id in lost:
                self._queues.get(task.queue_id).rescan = True

    def _count_again(self, waiting: Sequence[Candidate], too_many: Container[int]) -> None:
        """Look once more at tasks that were too many for their tenants, by a count of its own.

        Another dispatcher has claimed for the same tenant: what was known of it is out of date.
        """
        self._quotas.forget()
        for task in waiting:
            if task.job_id in too_many:
                self._queues.get(task.queue_id).rescan = True
        self._look.set()

    async def _claim(
        self, assignments: Sequence[Assignment], fence: tuple[int, int], *, ahead_ms: int
    ) -> tuple[list[Claimed], set[int]]:
        """Return what was won, and the jobs that were too many for their tenants."""
        partition, term = fence
        token = new_token()
        later: list[Claimable] = []
        dealt = assignments

        async def write(connection: AsyncConnection) -> list[Claimed]:
            nonlocal dealt
            later.clear()
            dealt = assignments
            if self._seats.are_many and self._limits.any_running:
                dealt = await keep_within_quotas(connection, self._database, assignments)
            return await claim(
                connection,
                self._database,
                dealt,
                token=token,
                term=term,
                partition=partition,
                ahead_ms=ahead_ms,
                later=later,
            )

        began = time.monotonic()
        claimed = await self._database.write(write)
        self.tempo.note(time.monotonic() - began)
        for task in later:
            self._queues.announce(*task)
        if len(claimed) < len(dealt):
            log.info("claims_lost", wanted=len(dealt), won=len(claimed), term=term)
        return claimed, {one.job_id for one in assignments} - {one.job_id for one in dealt}

    async def _sleep(self) -> None:
        """Sleep until the next due time of a queue with free slots, a signal, or the rescan."""
        now = self._clock.now_ms()
        next_look = min(
            (state.next_look_ms(AHEAD_MS) for state, _free in self._queues.served(self._roster)),
            default=float("inf"),
        )
        until_look = (next_look - now) / 1000
        until_rescan = self._rescan_at - time.monotonic()
        if self._roster.portion is not None:
            # What is another's now may be this one's in the next turn.
            until_look = min(until_look, (TURN_MS - now % TURN_MS) / 1000)
        await self._wait(self._look, max(SHORTEST_SLEEP_SECONDS, min(until_look, until_rescan)))

    @staticmethod
    async def _wait(event: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return

    def _on_wake(self, signal: Signal) -> None:
        for queue_id, priority, due_ms, *new in signal:
            if new and self._seats.terms:
                task = Candidate(new[0], NEW_VERSION, queue_id, priority, due_ms)
                self._queues.store(task, self._clock.now_ms())
            else:
                self._queues.announce(queue_id, priority, due_ms)
        self._look.set()

    def _on_load(self, signal: Signal) -> None:
        worker_id, seq, active = signal
        self._roster.observe(worker_id, Load(seq=seq, active=active))
        self._look.set()

    def _on_ended(self, signal: Signal) -> None:
        if self._roster.portion is not None:
            for _job_id, execution_id in signal:
                self._roster.over(execution_id)
        # Only now is it in the rows, from which quotas are counted.
        if self._queues.look_at_held():
            self._look.set()

    def _on_beat(self, _signal: Signal) -> None:
        self._fleet_changed = True
        self._look.set()


def _take_soon(states: Sequence[QueueState], by_ms: float) -> list[Candidate]:
    return [task for state in states for task in state.take_soon(by_ms)]
