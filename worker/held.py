"""What this worker holds: live runs, ended ones not yet acknowledged, and those lately finished.

Only the event loop changes these tables. Other threads read snapshots: copying a dict's
values is one step under the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import structlog

from oncue.handlers import RegisteredHandler
from oncue.protocol import Load, RejectReason, Run
from worker.clock import boot_seconds
from worker.log_buffer import RunLog
from worker.outcome import EncodedOutcome
from worker.verdict import Verdict

REMEMBER_SECONDS = 600.0
REMEMBER_AT_MOST = 50_000

log = structlog.get_logger(__name__)


class Phase(Enum):
    """Where an execution stands on its worker."""

    RESERVED = auto()
    RUNNING = auto()
    STOPPING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Execution:
    """One run on this worker, from its reservation to the acknowledgement of its outcome."""

    run: Run
    handler: RegisteredHandler
    key: str
    mark: str
    accepted_at: int
    start_at: float | None = None
    """Not to be begun before, on the monotonic clock."""
    begins: int = 0
    """How often it was tried in vain to begin it."""
    phase: Phase = Phase.RESERVED
    started_at: int | None = None
    has_verdict: bool = False
    """The handler has ended, and how is known: nothing stops it any more. Any thread may set it."""
    stop_verdict: Verdict | None = None
    cancel_event: threading.Event = field(default_factory=threading.Event)
    task: asyncio.Future[Verdict] | None = None
    timer: asyncio.TimerHandle | None = None
    child_pid: int | None = None
    log: RunLog | None = None
    last_words: asyncio.Task[None] | None = None
    outcome: EncodedOutcome | None = None
    stored_at: float | None = None
    acknowledged: bool = False
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        """The execution's id."""
        return self.run.execution_id

    @property
    def attempt(self) -> tuple[int, int]:
        """The attempt's name: job and trigger time."""
        return self.run.job_id, self.run.trigger_ts


@dataclass(frozen=True, slots=True)
class Known:
    """An execution that this worker holds or lately finished, and its outcome once it ended."""

    execution_id: str
    outcome: EncodedOutcome | bytes | None

    @property
    def wire(self) -> bytes | None:
        """The outcome's JSON."""
        if isinstance(self.outcome, EncodedOutcome):
            return self.outcome.wire
        return self.outcome


class Held:
    """The tables of executions, the load they make, and the marks of refused ones."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.draining = False
        self.live: dict[str, Execution] = {}
        self.unacknowledged: dict[str, Execution] = {}
        self._finished: OrderedDict[str, tuple[float, tuple[int, int], bytes]] = OrderedDict()
        self._attempts: dict[tuple[int, int], str] = {}
        self._refused: OrderedDict[str, tuple[float, RejectReason]] = OrderedDict()
        self._sequence = 0
        self._sequence_lock = threading.Lock()
        self._idle = asyncio.Event()
        self._idle.set()

    def load(self) -> Load:
        """The load now, with the next sequence number: a higher one is never an older count."""
        with self._sequence_lock:
            self._sequence += 1
            return Load(seq=self._sequence, active=len(self.live), queued=self.queued)

    @property
    def queued(self) -> int:
        """Accepted runs whose handler has not begun."""
        return sum(1 for one in list(self.live.values()) if one.started_at is None)

    @property
    def full(self) -> bool:
        """True when no slot is free; stopping runs and reservations hold theirs."""
        return len(self.live) >= self.capacity

    def reserve(self, execution: Execution) -> None:
        """Give a slot to a run whose lease is not taken yet."""
        self.live[execution.id] = execution
        self._attempts[execution.attempt] = execution.id
        self._idle.clear()

    def roll_back(self, execution: Execution) -> None:
        """Take the slot back from a reservation that did not become a run."""
        self._leave(execution)
        if self._attempts.get(execution.attempt) == execution.id:
            del self._attempts[execution.attempt]
        execution.settled.set()

    def begin(self, execution: Execution) -> None:
        """Turn a reservation into a run."""
        execution.phase = Phase.RUNNING
        execution.settled.set()

    def end(self, execution: Execution, outcome: EncodedOutcome) -> None:
        """Note how a run ended; a stopping one keeps its slot until `release`."""
        execution.outcome = outcome
        self.unacknowledged[execution.id] = execution
        if outcome.stopping:
            execution.phase = Phase.STOPPING
        else:
            execution.phase = Phase.ENDED
            self._leave(execution)

    def release(self, execution: Execution) -> None:
        """Free the slot of a stopping run whose thread has ended."""
        execution.phase = Phase.ENDED
        self._leave(execution)

    def acknowledge(self, execution: Execution) -> None:
        """Forget a stored outcome, but for what a late repeat of the run must be told."""
        execution.acknowledged = True
        if self.unacknowledged.pop(execution.id, None) is None or execution.outcome is None:
            return
        now = boot_seconds()
        self._finished[execution.id] = now, execution.attempt, execution.outcome.small
        while self._finished:
            oldest = next(iter(self._finished))
            at, attempt, _ = self._finished[oldest]
            if now - at < REMEMBER_SECONDS and len(self._finished) <= REMEMBER_AT_MOST:
                break
            del self._finished[oldest]
            if self._attempts.get(attempt) == oldest:
                del self._attempts[attempt]

    def find(self, execution_id: str) -> Known | None:
        """Look for an execution among those begun here."""
        execution = self.live.get(execution_id) or self.unacknowledged.get(execution_id)
        if execution is not None:
            if execution.phase is Phase.RESERVED:
                return None
            return Known(execution_id, execution.outcome)
        finished = self._finished.get(execution_id)
        return None if finished is None else Known(execution_id, finished[2])

    def find_attempt(self, run: Run) -> Known | None:
        """Look for the run, or for another execution of the same attempt."""
        known = self.find(run.execution_id)
        if known is not None:
            return known
        other = self._attempts.get((run.job_id, run.trigger_ts))
        return None if other is None else self.find(other)

    def reservation_of(self, run: Run) -> Execution | None:
        """The reservation that another request is making for the same run or attempt."""
        other = self._attempts.get((run.job_id, run.trigger_ts), run.execution_id)
        for execution_id in (run.execution_id, other):
            execution = self.live.get(execution_id)
            if execution is not None and execution.phase is Phase.RESERVED:
                return execution
        return None

    def refuse(self, execution_id: str, reason: RejectReason) -> None:
        """Leave a mark that refuses a later `/run` of this execution."""
        now = boot_seconds()
        self._refused[execution_id] = now, reason
        self._refused.move_to_end(execution_id)
        while self._refused:
            oldest, (at, _) = next(iter(self._refused.items()))
            if now - at < REMEMBER_SECONDS and len(self._refused) <= REMEMBER_AT_MOST:
                break
            del self._refused[oldest]

    def refusal_of(self, execution_id: str) -> RejectReason | None:
        """Tell why an execution is refused: a cancel or a rejection came before this `/run`."""
        at, reason = self._refused.get(execution_id, (0.0, None))
        return reason if boot_seconds() - at < REMEMBER_SECONDS else None

    def running(self) -> list[Execution]:
        """A snapshot of what runs or is stopping; any thread may ask."""
        return [one for one in list(self.live.values()) if one.phase is not Phase.RESERVED]

    def snapshot(self) -> list[Execution]:
        """A snapshot of what is held: running, stopping, ended and not acknowledged."""
        # In this order: what ends in between is in one of the two.
        held = [*self.running(), *list(self.unacknowledged.values())]
        return list({one.id: one for one in held}.values())

    async def wait_idle(self) -> None:
        """Return when no slot is taken."""
        await self._idle.wait()

    def _leave(self, execution: Execution) -> None:
        self.live.pop(execution.id, None)
        if not self.live:
            self._idle.set()


class StaleTerm(Exception):
    """A dispatcher that lost its lock sent this."""


class Terms:
    """The highest term that this worker has seen of each partition's dispatch lock."""

    def __init__(self, refused: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.Lock()
        self._highest: dict[int, int] = {}
        self._refused = refused

    @property
    def highest(self) -> int:
        """The highest term seen of partition 0."""
        return self._highest.get(0, 0)

    def admit(self, term: int, partition: int = 0) -> None:
        """Remember a term.

        Raises:
            StaleTerm: a higher one has been seen.
        """
        with self._lock:
            highest = self._highest.get(partition, 0)
            if term < highest:
                log.warning(
                    "a lower term is refused", partition=partition, term=term, highest=highest
                )
                self._refused()
                raise StaleTerm(f"term {term} is older than {highest}")
            self._highest[partition] = term

    def learn(self, term: int) -> None:
        """Remember a term of partition 0 that is only information."""
        with self._lock:
            self._highest[0] = max(self._highest.get(0, 0), term)
