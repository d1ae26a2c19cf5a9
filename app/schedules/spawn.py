"""The loop of the lock holder that fires schedules when they are due."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import structlog
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from app.dispatch.lock import DispatchLock
from app.ground import Ground
from app.lifecycle.moves.backfill import MOST_OPEN, find_backfills
from app.lifecycle.moves.fire import (
    Fenced,
    Fire,
    Fired,
    Skip,
    Spawn,
    find_due,
    find_next,
    fire,
    lock_due,
    put_off,
    read_live,
)
from app.lifecycle.moves.follow import Claimable, Live
from app.lifecycle.moves.mend import mend_schedules
from app.lifecycle.states import JobStatus
from app.lifecycle.token import new_token
from app.plumbing.bus import CANCEL, ENDED, FIRE, OWED, WAKE, Bus, Signal
from app.plumbing.database import Database, DatabaseUnavailable
from app.plumbing.loops import Loop
from app.schedules.backfill import step_backfill
from app.schedules.decide import FIXED_DELAY, OVERLAP, Decision, Entry, decide

log = structlog.get_logger(__name__)

BATCH: Final = 500
"""Schedules fired in one transaction."""
MOST_CHILDREN: Final = 2000
"""Children spawned in one transaction, give or take those of one schedule."""
BROKEN_AGAIN_MS: Final = 60_000
"""When to look again at a schedule that cannot be planned; its cursor stays."""
LONGEST_SLEEP_SECONDS: Final = 1.0
SHORTEST_SLEEP_SECONDS: Final = 0.0005
WITHOUT_LOCK_SECONDS: Final = 0.25
MEND_SECONDS: Final = 5.0
AHEAD_MS: Final = 60
"""So long before its time a fire is decided, where its time would bring nothing new: the time of
a commit, before its child is claimed, itself a moment before that time (`dispatch.loop`)."""
NO_LIVE: Final = Live()


@dataclass(frozen=True, slots=True)
class Round:
    """What one transaction of fires has done, with what was decided for each schedule."""

    fired: Fired
    decisions: tuple[Decision, ...]
    now_ms: int
    broken: int = 0
    schedules: frozenset[int] = frozenset()
    """Those that went on."""


async def fire_locked(
    connection: AsyncConnection,
    database: Database,
    rows: Sequence[RowMapping],
    *,
    grace_ms: int,
    token: str,
    term: int | None,
    ahead_ms: int = 0,
    early: bool = False,
) -> Round:
    """Decide and carry out what is due for schedules that this transaction holds.

    With `ahead_ms` also what will be due so much later: its runs wait for their due times. If that
    is `early`, what might be decided otherwise at its time is left for then.

    Raises:
        Fenced: the term is over; nothing may be committed.
    """
    now = int(rows[0]["now_ms"])
    live = await read_live(connection, database, rows)
    fires: list[Fire] = []
    decisions: list[Decision] = []
    broken: list[RowMapping] = []
    children = 0
    for row in rows:
        if early and row["interval_mode"] == FIXED_DELAY:
            continue
        if children >= MOST_CHILDREN:
            break  # the others are due still, and have the next transaction
        own = live.get(row["id"], NO_LIVE)
        try:
            decision = decide(
                row,
                now_ms=now,
                grace_ms=grace_ms,
                going=len(own.going),
                waiting=len(own.waiting),
                ahead_ms=ahead_ms,
            )
        except Exception:
            # A zone that is gone, say: one such schedule must not stop all others.
            log.exception("schedule_cannot_be_planned", job_id=row["id"])
            broken.append(row)
            continue
        if early and not may_be_early(decision):
            continue
        # What is passed over one by one costs as much to decide as what runs.
        passed = sum(entry.count for entry in decision.ledger if entry.reason == OVERLAP)
        children += len(decision.runs) + passed
        decisions.append(decision)
        fires.append(_fire_of(row, decision, own))
    await put_off(connection, broken, until_ms=now + BROKEN_AGAIN_MS)
    fired = await fire(connection, database, fires, token=token, now_ms=now, term=term)
    ids = frozenset(int(one.schedule["id"]) for one in fires)
    return Round(fired, tuple(decisions), now, len(broken), ids)


def may_be_early(decision: Decision) -> bool:
    """Tell whether a decision made a moment before its time is nothing but runs of that time.

    What meets another run is decided when it is known whether that goes on still; no schedule
    ends before its last fire; and what goes on record as not run was due.
    """
    changes_more = decision.ended or decision.replaces or decision.ledger
    return not changes_more and not any(one.waits for one in decision.runs)


def _fire_of(row: RowMapping, decision: Decision, live: Live) -> Fire:
    # Those that wait go first, so that none of them begins in between.
    replaced = (*live.waiting, *live.going) if decision.replaces else ()
    return Fire(
        row,
        decision.cursor_ms,
        decision.next_ms,
        ended=decision.ended,
        spawns=tuple(Spawn(one.nominal_ms, one.due_ms, one.waits) for one in decision.runs),
        skips=tuple(skip_of(one) for one in decision.ledger),
        replaced=replaced,
        last_skip=None if decision.last is None else skip_of(decision.last),
    )


def skip_of(entry: Entry) -> Skip:
    """Return an entry of the ledger as the row that is written."""
    return Skip(entry.from_ms, entry.to_ms, entry.count, entry.reason)


def announce(bus: Bus, fired: Fired) -> None:
    """Tell everybody concerned what a committed round of fires has done."""
    wake(bus, fired.claimable)
    if fired.cancelled or fired.ended:
        ended = [[schedule_id, ""] for schedule_id in fired.ended]
        bus.publish(ENDED, [list(one) for one in fired.cancelled] + ended)
    for worker_id, execution_id in fired.stopped:
        bus.publish(CANCEL, [worker_id, execution_id])
    if fired.owed:
        bus.publish(OWED, [])


def wake(bus: Bus, tasks: Sequence[Claimable]) -> None:
    """Announce tasks that may be claimed: the earliest of each queue and priority."""
    earliest: dict[tuple[int, int], int] = {}
    for task in tasks:
        place = (task.queue_id, task.priority)
        earliest[place] = min(task.due_ms, earliest.get(place, task.due_ms))
    if earliest:
        bus.publish(WAKE, [[*place, due] for place, due in earliest.items()])


class Spawner:
    """Fires schedules at their times, never early; a new holder goes on from their cursors."""

    def __init__(self, ground: Ground, lock: DispatchLock) -> None:
        self._database = ground.database
        self._bus = ground.bus
        self._clock = ground.clock
        self._metrics = ground.metrics
        self._lock = lock
        self._grace_ms = round(ground.settings.misfire_grace_seconds * 1000)
        self._look = asyncio.Event()
        self._left: dict[int, int] = {}
        """Schedules that are due in a moment and were left for their time, by id: that time."""
        self._mend_at = float("-inf")
        self._mended = 0
        self._started_term: int | None = None
        self._loop = Loop("spawner", self._step, expected=(DatabaseUnavailable, Fenced))
        self._fill_look = asyncio.Event()
        # Apart: past fires must not hold up those that are due.
        self._fill_loop = Loop("backfills", self._fill_step, expected=(DatabaseUnavailable,))
        self._filled = 0
        self._broken_fills: dict[int, float] = {}
        ground.bus.subscribe(FIRE, self._on_signal)

    def start(self) -> None:
        """Start firing whenever the lock is held."""
        self._loop.start()
        self._fill_loop.start()

    async def stop(self) -> None:
        """Stop firing."""
        await self._loop.stop()
        await self._fill_loop.stop()

    async def fire_due(self, term: int, *, limit: int = BATCH, ahead_ms: int = 0) -> int:
        """Fire up to `limit` schedules that are due, and return how many were looked at.

        With `ahead_ms` also those that are due so much later, where their time would bring nothing
        new: their runs wait for it.

        Raises:
            Fenced: another dispatcher holds the lock.
        """
        found = await self._database.read(
            lambda connection: find_due(connection, self._database, limit=limit, ahead_ms=ahead_ms)
        )
        due = {one.id for one in found if one.due_ms <= one.now_ms}
        later = {one.id: one.due_ms for one in found if one.id not in due}
        early = {one for one, at in later.items() if self._left.get(one) != at}
        if due:
            await self._fire(due, term)
        fired = await self._fire(early, term, ahead_ms=ahead_ms) if early else frozenset()
        self._left = {one: at for one, at in later.items() if one not in fired}
        return len(due) + len(early)

    async def _fire(self, ids: Collection[int], term: int, *, ahead_ms: int = 0) -> frozenset[int]:
        """Fire schedules in one transaction; return those that went on."""
        token = new_token()

        async def write(connection: AsyncConnection) -> Round | None:
            rows = await lock_due(connection, self._database, ids, ahead_ms=ahead_ms)
            if not rows:
                return None
            return await fire_locked(
                connection,
                self._database,
                rows,
                grace_ms=self._grace_ms,
                token=token,
                term=term,
                ahead_ms=ahead_ms,
                early=ahead_ms > 0,
            )

        try:
            done = await self._database.write(write)
        except (DatabaseUnavailable, Fenced):
            raise
        except Exception:
            log.exception("fires_failed", schedules=len(ids))
            return await self._fire_apart(sorted(ids), term, ahead_ms=ahead_ms)
        if done is None:
            return frozenset()
        announce(self._bus, done.fired)
        self._count(done)
        return done.schedules

    async def _fire_apart(self, ids: Sequence[int], term: int, *, ahead_ms: int) -> frozenset[int]:
        """Halve until the one that cannot be fired stands alone: it must not stop all others."""
        if len(ids) > 1:
            middle = len(ids) // 2
            first = await self._fire(ids[:middle], term, ahead_ms=ahead_ms)
            return first | await self._fire(ids[middle:], term, ahead_ms=ahead_ms)

        async def write(connection: AsyncConnection) -> None:
            for row in await lock_due(connection, self._database, ids, ahead_ms=ahead_ms):
                await put_off(connection, [row], until_ms=row["now_ms"] + BROKEN_AGAIN_MS)

        await self._database.write(write)
        self._metrics.broken_schedules.inc()
        return frozenset()

    async def mend(self) -> None:
        """Free what waits for an end that was not followed up, by a crash or an old dispatcher."""
        mended = await mend_schedules(self._database, after=self._mended)
        self._mended = mended.onward
        wake(self._bus, mended.claimable)
        if mended.claimable:
            log.info("schedules_mended", freed=len(mended.claimable))

    async def fill(self) -> None:
        """Let a page of the open backfills go on as far as their concurrency allows."""
        after = self._filled
        found = await self._database.read(
            lambda connection: find_backfills(connection, after=after)
        )
        # Those that wait for their runs must not keep others from their turn.
        self._filled = found[-1].id if len(found) == MOST_OPEN else 0
        now = time.monotonic()
        self._broken_fills = {one: at for one, at in self._broken_fills.items() if at > now}
        for backfill_id, may_go_on in found:
            if not may_go_on or backfill_id in self._broken_fills:
                continue
            try:
                born = await step_backfill(self._database, backfill_id)
            except DatabaseUnavailable:
                raise
            except Exception:
                # A zone that is gone, as with schedules: it must not stop all others.
                log.exception("backfill_cannot_go_on", backfill_id=backfill_id)
                self._broken_fills[backfill_id] = now + BROKEN_AGAIN_MS / 1000
                continue
            wake(self._bus, born)

    async def _step(self) -> None:
        term = self._lock.term
        if term is None:
            self._started_term = None
            self._look.clear()
            await self._wait(self._look, WITHOUT_LOCK_SECONDS)
            return
        if term != self._started_term:
            self._started_term = term
            self._mend_at = float("-inf")
        self._look.clear()
        while await self.fire_due(term, ahead_ms=AHEAD_MS) >= BATCH:
            continue
        if time.monotonic() >= self._mend_at:
            self._mend_at = time.monotonic() + MEND_SECONDS
            await self.mend()
        first = await self._database.read(lambda connection: find_next(connection, self._database))
        seconds = LONGEST_SLEEP_SECONDS
        if first is not None:
            was_left = self._left.get(first.id) == first.due_ms
            look_at = first.due_ms - (0 if was_left else AHEAD_MS)
            seconds = min(seconds, (look_at - self._clock.now_ms()) / 1000)
        await self._wait(self._look, max(SHORTEST_SLEEP_SECONDS, seconds))

    async def _fill_step(self) -> None:
        self._fill_look.clear()
        if self._lock.term is not None:
            await self.fill()
        await self._wait(self._fill_look, LONGEST_SLEEP_SECONDS)

    @staticmethod
    async def _wait(event: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return

    def _count(self, done: Round) -> None:
        metrics = self._metrics
        metrics.fires.inc(len(done.fired.spawned))
        metrics.broken_schedules.inc(done.broken)
        for decision in done.decisions:
            for entry in decision.ledger:
                metrics.fires_skipped.labels(entry.reason).inc(entry.count)
            for run in decision.runs:
                metrics.fire_lateness.observe(max(0, done.now_ms - run.nominal_ms) / 1000)
        if done.fired.ended:
            metrics.finished.labels(JobStatus.SUCCEEDED.name).inc(len(done.fired.ended))
        if done.fired.cancelled:
            metrics.finished.labels(JobStatus.CANCELLED.name).inc(len(done.fired.cancelled))
        late = [one for one in done.decisions if len(one.runs) > 1 or one.ledger]
        for decision in late:
            log.debug("fires_decided", runs=len(decision.runs), passed=len(decision.ledger))

    def _on_signal(self, _signal: Signal) -> None:
        self._look.set()
        self._fill_look.set()
