"""The queues that can be served now, and from where each is read on."""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Final

from app.fleet.roster import Roster
from app.lifecycle.moves.claim import Candidate, Found, Probe
from app.lifecycle.reads import QueueRow
from app.lifecycle.term import FIRST

PRIORITIES: Final = range(9, -1, -1)
WHOLE_SECONDS: Final = 60.0
OUT_OF_ORDER_IDS: Final = 200
KNOWN_AHEAD_MS: Final = 2000.0
"""What a read sees is kept if it is due so soon; each second there is a read of everything."""
READ_AHEAD_MS: Final = 250.0
"""What was announced, or may lie behind what was read, is read so long before it is due."""
KNOWN_AT_MOST: Final = 1000
"""So many tasks of a queue are kept without a read; what is more waits in the database."""
NEVER: Final = float("inf")


@dataclass(slots=True)
class QueueState:
    """What is known of one queue: a hint that saves reads, while the database decides.

    `cursors` hold the last claimed (due, id) of each priority, so that the index entries of
    tasks that have left are not walked again and again. `soon` are tasks that were not due when
    they were read, the first due first: at their time they are claimed without another read.
    """

    row: QueueRow
    priorities: set[int] = field(default_factory=set)
    cursors: dict[int, tuple[int, int]] = field(default_factory=dict)
    announced: dict[int, int] = field(default_factory=dict)
    soon: deque[Candidate] = field(default_factory=deque)
    read_at_ms: float = NEVER
    """When a read may find what `soon` lacks."""
    seen: frozenset[int] | None = frozenset()
    """The tasks that the last read found; None while one is on its way."""
    has_backlog: bool = False
    held: bool = False
    """Its tenant may have no more runs: what waits is looked at when one of them has ended."""
    rescan: bool = True

    def announce(self, priority: int, due_ms: int) -> None:
        """Note that a task with this due time is there; read it even if the cursor is past it."""
        self.priorities.add(priority)
        self.announced[priority] = min(due_ms, self.announced.get(priority, due_ms))
        cursor = self.cursors.get(priority)
        if cursor is not None and due_ms <= cursor[0]:
            del self.cursors[priority]
        self.read_at_ms = min(self.read_at_ms, due_ms - READ_AHEAD_MS)

    def store(self, task: Candidate, now_ms: float) -> None:
        """Note a task that was just stored: where all else is known, it needs no read.

        A read that has begun may have seen it, or not; one that is still to come will. So will that
        of a tenant that has its all: what was held before it is known to the database alone.
        """
        if (
            self.held
            or self.seen is None
            or self.needs_read(now_ms)
            or task.due_ms > now_ms + KNOWN_AHEAD_MS
            or len(self.soon) >= KNOWN_AT_MOST
        ):
            self.announce(task.priority, task.due_ms)
        elif task.job_id not in self.seen:
            self.priorities.add(task.priority)
            cursor = self.cursors.get(task.priority)
            if cursor is not None and task.due_ms <= cursor[0]:
                del self.cursors[task.priority]
            insort(self.soon, task, key=_due)

    def needs_read(self, now_ms: float) -> bool:
        """Tell whether a read may find a task that is not known yet.

        Or what must come first: a known one that is due may not pass what is held.
        """
        if self.rescan or self.has_backlog or self.read_at_ms <= now_ms:
            return True
        return self.held and bool(self.soon) and self.soon[0].due_ms <= now_ms

    def count_due(self, now_ms: float, *, most: int) -> int:
        """Count the known tasks that are due, not beyond `most`."""
        due = takewhile(lambda task: task.due_ms <= now_ms, self.soon)
        return sum(1 for _ in islice(due, most))

    @property
    def is_at_rest(self) -> bool:
        """Tell whether there is nothing to read and nothing to claim, now or at any known time."""
        return not (self.soon or self.rescan or self.has_backlog or self.read_at_ms < NEVER)

    def next_look_ms(self, ahead_ms: float) -> float:
        """Return when there is something to read, or so long before to claim."""
        if self.has_backlog:
            return 0.0
        if self.held:
            ahead_ms = 0.0
        return min(self.read_at_ms, self.soon[0].due_ms - ahead_ms if self.soon else NEVER)

    def take_soon(self, by_ms: float) -> list[Candidate]:
        """Take out the known tasks that are due by then."""
        taken = []
        while self.soon and self.soon[0].due_ms <= by_ms:
            taken.append(self.soon.popleft())
        return taken

    def probes(self, limit: int) -> list[Probe]:
        """Return the ranges to read: every priority from the start on a rescan, else those in use.

        What is announced from here on may be missing in what the read finds, and is kept.
        """
        self.announced.clear()
        self.read_at_ms = NEVER
        self.held = False
        self.seen = None
        if self.rescan:
            self.cursors.clear()
        wanted = PRIORITIES if self.rescan else sorted(self.priorities, reverse=True)
        return [
            Probe(self.row.queue_id, priority, *self.cursors.get(priority, (0, 0)), limit)
            for priority in wanted
        ]

    def learn(self, found: Found, limit: int, *, was_rescan: bool) -> None:
        """Take over what a read of this queue saw."""
        queue_id = self.row.queue_id
        own = [task for task in found.due if task.queue_id == queue_id]
        due = Counter(task.priority for task in own)
        later = [task for task in found.later if task.queue_id == queue_id]
        self.seen = frozenset(task.job_id for task in (*own, *later))
        if was_rescan:
            seen = due.keys() | {task.priority for task in later}
            self.priorities = seen | self.announced.keys()
        self.rescan = False
        # A full range may hide more behind it.
        self.has_backlog = any(count >= limit for count in due.values())
        self.soon = deque(sorted(later, key=_due))
        while self.soon and self.soon[-1].due_ms > found.now_ms + KNOWN_AHEAD_MS:
            self.read_at_ms = min(self.read_at_ms, self.soon.pop().due_ms - READ_AHEAD_MS)
        for priority, count in Counter(task.priority for task in later).items():
            if count + due[priority] >= limit:
                # What lies behind the last one is due with it at the earliest, and has to be known
                # before that. Half of the way at least is waited, so that no read follows at once.
                last = max(task.due_ms for task in later if task.priority == priority)
                soonest = (found.now_ms + last) / 2
                self.read_at_ms = min(self.read_at_ms, max(last - READ_AHEAD_MS, soonest))

    def dealt(self, tasks: Iterable[Candidate]) -> None:
        """Go on behind the tasks that were dealt, unless an earlier one came up meanwhile."""
        earliest = dict(self.announced)
        for task in self.soon:
            earliest[task.priority] = min(task.due_ms, earliest.get(task.priority, task.due_ms))
        for task in tasks:
            place = (task.due_ms, task.job_id)
            if earliest.get(task.priority, place[0] + 1) <= place[0]:
                continue
            self.cursors[task.priority] = max(place, self.cursors.get(task.priority, place))


def _due(task: Candidate) -> tuple[int, int]:
    return task.due_ms, task.job_id


class QueueBook:
    """All queues by id, and of those the ones whose handler live workers offer."""

    def __init__(self) -> None:
        self._states: dict[int, QueueState] = {}
        self._by_handler: dict[str, list[QueueState]] = {}
        self._by_tenant: dict[int, list[int]] = {}
        self._held: dict[int, QueueState] = {}
        self._partitions: Container[int] = (FIRST,)
        self.partitions: set[int] = set()
        """Those that have a queue, whoever serves them."""
        self._newest_id = 0
        self._whole_until = float("-inf")
        self.complete = False
        """False when a queue was named that is not known: the rows must be read again."""
        self.ends = 0
        """How often it was told that runs have ended."""

    def read_after(self, now_seconds: float) -> int:
        """Return the id after which rows are to be read: mostly just the newest.

        Ids may become visible out of order, so the last few are read again, and all of them once
        a minute.
        """
        if now_seconds >= self._whole_until:
            self._whole_until = now_seconds + WHOLE_SECONDS
            return 0
        return self._newest_id - OUT_OF_ORDER_IDS

    def load(self, rows: Sequence[QueueRow]) -> None:
        """Take over rows of queues."""
        for row in rows:
            self._newest_id = max(self._newest_id, row.queue_id)
            if row.queue_id not in self._states:
                state = self._states[row.queue_id] = QueueState(row)
                self._by_handler.setdefault(row.job_handler, []).append(state)
                self._by_tenant.setdefault(row.tenant_id, []).append(row.queue_id)
                self.partitions.add(row.partition)
        self.complete = True

    def forget_positions(self) -> None:
        """Read every queue from its start: a second has passed, or the lock changed hands."""
        for state in self._states.values():
            state.rescan = True

    def announce(self, queue_id: int, priority: int, due_ms: int) -> None:
        """Note a wake-up."""
        state = self._states.get(queue_id)
        if state is None:
            self.complete = False
        else:
            state.announce(priority, due_ms)

    def store(self, task: Candidate, now_ms: float) -> None:
        """Note a task that was just stored."""
        state = self._states.get(task.queue_id)
        if state is None:
            self.complete = False
        else:
            state.store(task, now_ms)

    def requirement(self, queue_id: int) -> str:
        """Return what the tasks of a queue ask of a worker's labels."""
        state = self._states.get(queue_id)
        return "" if state is None else state.row.requirement

    def serve(self, partitions: Container[int]) -> None:
        """Serve the queues of these partitions from now on."""
        self._partitions = partitions

    def partition_of(self, queue_id: int) -> int | None:
        """Return the partition of a queue, None of one that is not known."""
        state = self._states.get(queue_id)
        return None if state is None else state.row.partition

    def get(self, queue_id: int) -> QueueState:
        """Return the state of a known queue."""
        return self._states[queue_id]

    def find(self, queue_id: int) -> QueueState | None:
        """Return the state of a queue, None of one that is not known."""
        return self._states.get(queue_id)

    def known_due(self, roster: Roster, by_ms: float) -> dict[int, int] | None:
        """Count the known tasks due by then that a worker with a free slot could have, by queue.

        None: there may be some that are not known before a read.
        """
        found = {}
        for state, free in self.served(roster):
            if state.needs_read(by_ms):
                return None
            if count := state.count_due(by_ms, most=free):
                found[state.row.queue_id] = count
        return found if self.complete else None

    def tenant_of(self, queue_id: int) -> int:
        """Return the tenant whose tasks wait in a known queue."""
        return self._states[queue_id].row.tenant_id

    def queues_of(self, tenant_id: int) -> list[int]:
        """Return the queues of a tenant."""
        return self._by_tenant.get(tenant_id, [])

    def look_at_held(self) -> bool:
        """Read the queues that were held once more, if any were: a run has ended."""
        self.ends += 1
        any_held = bool(self._held)
        for state in self._held.values():
            state.held = False
            state.has_backlog = True
        self._held.clear()
        return any_held

    def left_over(self, queue_ids: Iterable[int], held: Container[int], *, ends: int) -> None:
        """Note that tasks of these queues were due and not dealt, and which tenants may not.

        `ends` is what it was when their runs were counted: where one has ended since, there may be
        room again.
        """
        for queue_id in queue_ids:
            state = self._states[queue_id]
            is_held = queue_id in held and ends == self.ends
            state.has_backlog = not is_held
            if is_held:
                state.held = True
                self._held[queue_id] = state

    def served(self, roster: Roster) -> list[tuple[QueueState, int]]:
        """Return the queues in hand that live workers have slots for, with the number of slots.

        Those that have nothing to read or to claim are left out.
        """
        served = []
        free = roster.free()
        for handler in roster.handlers:
            slots: dict[tuple[str, bool], int] = {}
            for state in self._by_handler.get(handler, ()):
                if state.is_at_rest or state.row.partition not in self._partitions:
                    continue
                of = state.row.requirement, state.row.partition != FIRST
                if of not in slots:
                    slots[of] = roster.free_for(handler, of[0], free, seated=of[1])
                if slots[of] > 0:
                    served.append((state, slots[of]))
        return served
