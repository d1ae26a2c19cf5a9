"""The lock holder's live view of the workers: what each holds now, between its beats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from zlib import crc32

from app.fleet.balance import Slots
from app.fleet.portions import Portion, Use
from app.lifecycle.nodes import Node
from app.lifecycle.requirement import meets
from oncue.protocol import LEASE_SECONDS, Load, WorkerState

SILENT_MS: Final = LEASE_SECONDS * 1000
LISTED_MS: Final = 2000
"""What was sent so long before a beat, and is not listed in it, is over."""


class OwnRun(NamedTuple):
    """A run that this dispatcher sent, counted in the use of its worker since then (epoch ms)."""

    worker_id: str
    use: Use
    since_ms: float


@dataclass(slots=True)
class LiveWorker:
    """A worker: its last row, its newest own count, and the runs sent to it but not answered.

    A worker is suspect until it has answered a call to its address: one that beats but cannot
    be reached must be dealt nothing.
    """

    node: Node
    load_seq: int
    active: int
    unanswered: set[str] = field(default_factory=set)
    suspect: bool = True
    draining: bool = False
    waits: bool = False
    """It holds a run that is sent before its time until that has come."""
    seats: bool = False
    """It tells the partitions' terms apart; any other is sent runs of partition 0 alone."""
    use: Use | None = None
    """How it is used by this dispatcher, where it is one of several that send."""

    @property
    def live_active(self) -> int:
        """Slots in use: its own newest count and what is on the way to it."""
        return self.active + len(self.unanswered)


class Roster:
    """Counts free slots from every answer, report and beat; the newest sequence number wins."""

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._workers: dict[str, LiveWorker] = {}
        self._by_handler: dict[str, list[LiveWorker]] = {}
        self._own: dict[str, OwnRun] = {}
        self.portion: Portion | None = None
        """Which part of each worker's slots may be counted; None: all of them."""

    def refresh(self, nodes: Iterable[Node]) -> None:
        """Take over the rows of all workers that are not DOWN; forget the others."""
        seen = set()
        for node in nodes:
            seen.add(node.worker_id)
            known = self._workers.get(node.worker_id)
            if known is None:
                self._workers[node.worker_id] = LiveWorker(node, node.load_seq, node.active)
                continue
            known.node = node
            self.observe(node.worker_id, Load(seq=node.load_seq, active=node.active))
        for worker_id in self._workers.keys() - seen:
            del self._workers[worker_id]
        self._by_handler = {}
        for worker in self._workers.values():
            for name in worker.node.handler_names:
                self._by_handler.setdefault(name, []).append(worker)
        self._forget_over()

    def seed(self, running: Mapping[str, int]) -> None:
        """Start a term from the RUNNING rows by owner: a beat may be older than they are."""
        for worker_id, count in running.items():
            worker = self._workers.get(worker_id)
            if worker is not None:
                worker.active = max(worker.active, count)

    def suspects(self) -> list[Node]:
        """Return the beating workers that have not answered a call lately."""
        oldest = self._oldest_beat()
        return [
            worker.node
            for worker in self._workers.values()
            if worker.suspect and worker.node.last_heartbeat >= oldest
        ]

    def workers(self) -> list[LiveWorker]:
        """Return every worker that is not DOWN."""
        return list(self._workers.values())

    @property
    def handlers(self) -> Iterable[str]:
        """The handlers that known workers offer."""
        return self._by_handler.keys()

    def observe(self, worker_id: str, load: Load) -> None:
        """Take a worker's own count if it is newer."""
        worker = self._workers.get(worker_id)
        if worker is not None and load.seq > worker.load_seq:
            worker.load_seq, worker.active = load.seq, load.active

    def get(self, worker_id: str) -> LiveWorker | None:
        """Return a worker that is known and not DOWN."""
        return self._workers.get(worker_id)

    def sent(self, worker_id: str, execution_id: str) -> None:
        """Count a run as on the way from now on."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.unanswered.add(execution_id)
            if self.portion is not None:
                self._use(worker, execution_id)

    def answered(self, worker_id: str, execution_id: str) -> None:
        """Stop counting a run as on the way: the worker's own count has it, or refused it."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.unanswered.discard(execution_id)

    def forget_sent(self) -> None:
        """Count nothing as on the way: what still is will be sent again, and counted then."""
        for worker in self._workers.values():
            worker.unanswered.clear()

    def over(self, execution_id: str) -> None:
        """Count a run of this dispatcher no longer: it has ended, or was refused."""
        run = self._own.pop(execution_id, None)
        if run is not None:
            run.use.own -= 1

    def doubt(self, worker_id: str) -> None:
        """Deal nothing to a worker that did not answer, until it does."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.suspect = True

    def trust(self, worker_id: str) -> None:
        """Deal to a worker again: it answered."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.suspect = False

    def note_waits(self, worker_id: str, waits: bool) -> None:
        """Note whether a worker said that it begins runs at their time, not before."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.waits = waits

    def note_seats(self, worker_id: str, seats: bool) -> None:
        """Note whether a worker said that it tells the partitions' terms apart."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.seats = seats

    def mark_draining(self, worker_id: str) -> None:
        """Deal nothing to a worker that said it is draining."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.draining = True

    def slots_for(self, handler: str, requirement: str, *, seated: bool = False) -> list[Slots]:
        """Return the workers that may take the handler's tasks now, with what they hold.

        `seated` are tasks of other partitions than 0.
        """
        return [
            Slots(
                worker_id=worker.node.worker_id,
                active=worker.live_active,
                capacity=worker.live_active + self._free(worker),
                avg_cost_ms=worker.node.avg_cost_ms,
                cpu_idle_percent=worker.node.cpu_idle_percent,
                weight=worker.node.weight,
            )
            for worker in self._ready(handler, requirement, seated)
        ]

    def free(self) -> dict[str, int]:
        """Return how many tasks may be dealt to each worker now, if it is ready for them."""
        return {worker_id: self._free(worker) for worker_id, worker in self._workers.items()}

    def free_for(
        self, handler: str, requirement: str, free: Mapping[str, int], *, seated: bool = False
    ) -> int:
        """Return how many of the handler's tasks may be dealt now, of what is `free`."""
        ready = self._ready(handler, requirement, seated)
        return sum(free[worker.node.worker_id] for worker in ready)

    def delivering(self) -> list[Node]:
        """Return the live workers that deliver callbacks."""
        oldest = self._oldest_beat()
        return [
            worker.node
            for worker in self._workers.values()
            if worker.node.delivers
            and not worker.suspect
            and worker.node.last_heartbeat >= oldest
            and worker.node.state is not WorkerState.DOWN
        ]

    def _free(self, worker: LiveWorker) -> int:
        capacity = worker.node.capacity
        free = max(0, capacity - worker.live_active)
        if self.portion is None:
            return free
        use = worker.use = worker.use or Use(crc32(worker.node.worker_id.encode()))
        return use.allowed(self.portion, capacity=capacity, free=free, now_ms=self._now_ms())

    def _use(self, worker: LiveWorker, execution_id: str) -> None:
        if execution_id not in self._own:
            use = worker.use = worker.use or Use(crc32(worker.node.worker_id.encode()))
            use.own += 1
            self._own[execution_id] = OwnRun(worker.node.worker_id, use, self._now_ms())

    def _forget_over(self) -> None:
        """Count no longer what the workers do not have: the word of its end may have been lost."""
        for execution_id, run in list(self._own.items()):
            worker = self._workers.get(run.worker_id)
            if worker is None or (
                run.since_ms < worker.node.last_heartbeat - LISTED_MS
                and execution_id not in worker.node.held
            ):
                self.over(execution_id)

    def _ready(self, handler: str, requirement: str, seated: bool) -> list[LiveWorker]:
        oldest = self._oldest_beat()
        return [
            worker
            for worker in self._by_handler.get(handler, ())
            if worker.node.state is WorkerState.UP
            and not worker.suspect
            and not worker.draining
            and (worker.seats or not seated)
            and worker.node.last_heartbeat >= oldest
            and meets(requirement, worker.node.labels)
        ]

    def _oldest_beat(self) -> float:
        return self._now_ms() - SILENT_MS
