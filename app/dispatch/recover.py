"""Recovery: a loop of the lock holder that finds what was left behind, and proves deaths first.

A worker is dead only when its last committed beat is old, the probe fails, and its run leases
are gone; before anything runs again, the outcome under the run key is looked for.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from enum import Enum
from typing import Final

import structlog
from pydantic import ValidationError

from app.dispatch.lock import DispatchLock
from app.dispatch.send import Sender
from app.fleet.reports import ending_of
from app.fleet.roster import Roster
from app.fleet.settler import Settler
from app.ground import Ground
from app.lifecycle.moves.settle import Ending
from app.lifecycle.nodes import Node, forget_nodes, mark_down, read_nodes
from app.lifecycle.running import RunningTask, read_for_sending, read_running
from app.lifecycle.states import ExecutionStatus
from app.plumbing.bus import BEAT
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.http import NoAnswer
from app.plumbing.json_text import Unencodable
from app.plumbing.loops import Loop
from app.plumbing.redis import REDIS_ERRORS
from oncue.protocol import (
    CANCEL_PATH,
    LEASE_SECONDS,
    CancelRequest,
    Outcome,
    OutcomeStatus,
    WorkerState,
    run_key,
)

log = structlog.get_logger(__name__)

TICK_SECONDS: Final = 1.0
PROBE_SECONDS: Final = 3.0
CANCEL_AGAIN_SECONDS: Final = 30.0
FORGET_DOWN_MS: Final = 24 * 3600 * 1000
CANARY_LIFE_SECONDS: Final = 24 * 3600


class Probe(Enum):
    """What a worker's `/healthz` said."""

    ALIVE = "alive"
    FAILED = "failed"
    STALLED = "stalled"


class Lease(Enum):
    """What is under a run key."""

    HELD = "held"
    GONE = "gone"
    UNREADABLE = "unreadable"


class Recovery:
    """Repeats unanswered sends, buries dead workers, and asks overdue runs to stop."""

    def __init__(
        self,
        ground: Ground,
        lock: DispatchLock,
        roster: Roster,
        sender: Sender,
        settler: Settler,
    ) -> None:
        settings = ground.settings
        self._database = ground.database
        self._clock = ground.clock
        self._lock = lock
        self._roster = roster
        self._sender = sender
        self._settler = settler
        self._redis = ground.redis
        self._client = ground.client
        self._bus = ground.bus
        self._metrics = ground.metrics
        self._prefix = settings.redis_prefix
        self._default_timeout_ms = settings.default_timeout_seconds * 1000
        self._overdue_grace_ms = settings.overdue_grace_seconds * 1000
        self._stall_ms = settings.stall_seconds * 1000
        self._canary: str | None = None
        self._redis_good_since: float | None = None
        self._quiet_since = float("inf")
        self._missing: dict[str, int] = {}
        self._asked_to_stop: dict[str, float] = {}
        self._loop = Loop("recovery", self._step, expected=(DatabaseUnavailable, *REDIS_ERRORS))
        self._term: int | None = None

    def start(self) -> None:
        """Start looking once a second while the lock is held."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop looking."""
        await self._loop.stop()

    async def _step(self) -> None:
        await asyncio.sleep(TICK_SECONDS)
        term = self._lock.term
        if term is None:
            self._term = None
            return
        if term != self._term:
            self._term = term
            self._start_quiet_time()
            self._missing.clear()
            self._asked_to_stop.clear()
        try:
            await self._watch_redis()
            nodes = await self._database.read(
                lambda connection: read_nodes(connection, include_down=True)
            )
            running = await self._database.read(
                lambda connection: read_running(connection, self._database)
            )
        except DatabaseUnavailable:
            # Beats could not be committed either: nobody is dead because of that.
            self._start_quiet_time()
            raise
        by_worker: dict[str, list[RunningTask]] = {}
        for task in running:
            by_worker.setdefault(task.worker_id, []).append(task)
        known = {node.worker_id: node for node in nodes}
        await self._bury_the_dead(known, by_worker)
        await self._send_again(known, running)
        await self._stop_overdue(known, running)
        await self._forget_old(nodes)
        self._count(nodes)

    def _start_quiet_time(self) -> None:
        self._quiet_since = time.monotonic()

    @property
    def _may_bury(self) -> bool:
        return time.monotonic() - self._quiet_since >= LEASE_SECONDS

    @property
    def _absence_counts(self) -> bool:
        """An absent lease proves something only if Redis was up and unflushed for a whole lease."""
        return (
            self._redis_good_since is not None
            and time.monotonic() - self._redis_good_since >= LEASE_SECONDS
        )

    async def _watch_redis(self) -> None:
        """Follow the canary: a flushed or replaced Redis has lost it."""
        key = f"{self._prefix}:canary"
        try:
            found = await self._redis.get(key)
            if found is None:
                found = uuid.uuid4().hex
                await self._redis.set(key, found, ex=CANARY_LIFE_SECONDS)
            else:
                await self._redis.expire(key, CANARY_LIFE_SECONDS)
            found = str(found)
        except REDIS_ERRORS as error:
            if self._redis_good_since is not None:
                log.warning("redis_away", error=str(error))
            self._redis_good_since = None
            return
        if self._redis_good_since is None or found != self._canary:
            self._redis_good_since = time.monotonic()
        self._canary = found

    async def _bury_the_dead(
        self, nodes: dict[str, Node], by_worker: dict[str, list[RunningTask]]
    ) -> None:
        now = await self._database.now()
        silent = [
            node
            for node in nodes.values()
            if node.state is not WorkerState.DOWN
            and now - node.last_heartbeat > LEASE_SECONDS * 1000
        ]
        probes = await asyncio.gather(*(self._probe(node) for node in silent))
        for node, probe in zip(silent, probes, strict=True):
            quiet_ms = now - node.last_heartbeat
            if probe is Probe.ALIVE or (probe is Probe.STALLED and quiet_ms < self._stall_ms):
                continue
            if self._may_bury:
                reason = f"worker dead: no beat for {quiet_ms / 1000:.0f} s, probe {probe.value}"
                await self._bury(node, by_worker.get(node.worker_id, []), reason)
        for worker_id, tasks in by_worker.items():
            node_or_none = nodes.get(worker_id)
            if self._may_bury and (node_or_none is None or node_or_none.state is WorkerState.DOWN):
                await self._recover_tasks(tasks, "worker dead: declared before")

    async def _probe(self, node: Node) -> Probe:
        """Ask the worker who it is; only its own boot id proves that it lives."""
        try:
            reply = await self._client.get(f"{node.url}/healthz", seconds=PROBE_SECONDS)
        except NoAnswer as error:
            return Probe.STALLED if error.connected else Probe.FAILED
        if isinstance(reply.body, dict) and reply.body.get("bootId") == node.boot_id:
            return Probe.ALIVE
        return Probe.FAILED

    async def _bury(self, node: Node, tasks: Sequence[RunningTask], reason: str) -> None:
        leases = await asyncio.gather(*(self._lease(task) for task in tasks))
        if not self._absence_counts or any(
            isinstance(lease, Lease) and lease is not Lease.GONE for lease in leases
        ):
            log.info("worker_doubted", worker_id=node.worker_id, reason=reason)
            return
        if not await self._database.write(
            lambda connection: mark_down(
                connection, node.worker_id, last_heartbeat=node.last_heartbeat
            )
        ):
            return
        log.warning("worker_down", worker_id=node.worker_id, reason=reason, runs=len(tasks))
        self._metrics.recovered.labels("worker_down").inc()
        self._bus.publish(BEAT, [node.worker_id])
        await self._settle_lost(tasks, leases, f"{reason}, leases gone")

    async def _recover_tasks(self, tasks: Sequence[RunningTask], reason: str) -> None:
        """Recover runs of a worker that was declared dead by somebody who then died."""
        leases = await asyncio.gather(*(self._lease(task) for task in tasks))
        if self._absence_counts:
            free = [
                (task, lease)
                for task, lease in zip(tasks, leases, strict=True)
                if not isinstance(lease, Lease) or lease is Lease.GONE
            ]
            await self._settle_lost(
                [task for task, _ in free], [lease for _, lease in free], reason
            )

    async def _lease(self, task: RunningTask) -> Lease | Ending:
        """Read a run key: the lease of this execution, its outcome, or nothing of it."""
        key = run_key(self._prefix, task.job_id, task.trigger_ts)
        try:
            value = await self._redis.get(key)
        except REDIS_ERRORS:
            return Lease.UNREADABLE
        if value is None:
            return Lease.GONE
        _boot_id, _, rest = str(value).partition(" ")
        execution_id, _, outcome = rest.partition(" ")
        if not outcome:
            return Lease.HELD
        if execution_id != task.execution_id:
            return Lease.GONE
        try:
            ending = ending_of(Outcome.model_validate_json(outcome), None)
        except (ValidationError, Unencodable):
            log.warning("unreadable_outcome", job_id=task.job_id, execution_id=execution_id)
            return Lease.GONE
        return ending

    async def _settle_lost(
        self,
        tasks: Sequence[RunningTask],
        leases: Sequence[Lease | Ending],
        reason: str,
    ) -> None:
        endings = []
        for task, lease in zip(tasks, leases, strict=True):
            if isinstance(lease, Ending):
                endings.append(lease)
                self._metrics.recovered.labels("outcome_found").inc()
            else:
                endings.append(
                    Ending(
                        execution_id=task.execution_id,
                        job_id=task.job_id,
                        status=ExecutionStatus.LOST,
                        error_code="worker_lost",
                        error_message="The worker died while it ran this.",
                        reason=reason[:255],
                    )
                )
                self._metrics.recovered.labels("lost").inc()
        await asyncio.gather(*(self._settler.settle(ending) for ending in endings))

    async def _send_again(self, nodes: dict[str, Node], running: Sequence[RunningTask]) -> None:
        """Send again what no worker answered, and what two beats of its worker did not list."""
        again = []
        present = set()
        for task in running:
            node = nodes.get(task.worker_id)
            if (
                node is None
                or node.state is WorkerState.DOWN
                or self._sender.knows(task.execution_id)
            ):
                continue
            if task.execution_id in node.held:
                continue
            present.add(task.execution_id)
            if not task.accepted or self._missed_two_beats(task, node):
                again.append(task)
        self._missing = {one: beat for one, beat in self._missing.items() if one in present}
        if again:
            runs = await self._database.read(lambda connection: read_for_sending(connection, again))
            # Between the two reads a send may have begun.
            runs = [run for run in runs if not self._sender.knows(run.execution_id)]
            for run in runs:
                self._missing.pop(run.execution_id, None)
            if runs:
                self._metrics.recovered.labels("sent_again").inc(len(runs))
                log.info("sent_again", runs=len(runs))
                self._sender.send(runs)

    def _missed_two_beats(self, task: RunningTask, node: Node) -> bool:
        if task.claimed_at >= node.last_heartbeat:
            return False
        first = self._missing.setdefault(task.execution_id, node.beats)
        return node.beats > first

    async def _stop_overdue(self, nodes: dict[str, Node], running: Sequence[RunningTask]) -> None:
        """Ask workers to stop runs that are long past their timeout and were not reported."""
        now = self._clock.now_ms()
        overdue: dict[str, list[str]] = {}
        for task in running:
            timeout = task.timeout_ms or self._default_timeout_ms
            late = now - (task.started_at or task.claimed_at) - timeout
            asked = self._asked_to_stop.get(task.execution_id, float("-inf"))
            if (
                task.accepted
                and late > self._overdue_grace_ms
                and time.monotonic() - asked > CANCEL_AGAIN_SECONDS
            ):
                overdue.setdefault(task.worker_id, []).append(task.execution_id)
                self._asked_to_stop[task.execution_id] = time.monotonic()
        for worker_id, execution_ids in overdue.items():
            node = nodes.get(worker_id)
            if node is not None and node.state is not WorkerState.DOWN:
                await self._ask_to_stop(node, execution_ids)

    async def _ask_to_stop(self, node: Node, execution_ids: list[str]) -> None:
        request = CancelRequest(
            term=self._term or 0, execution_ids=execution_ids, reason=OutcomeStatus.TIMED_OUT
        )
        try:
            await self._client.post(
                node.url + CANCEL_PATH, request.model_dump_json(by_alias=True).encode()
            )
        except NoAnswer as error:
            log.info("overdue_not_stopped", worker_id=node.worker_id, error=str(error))
            return
        log.warning("overdue", worker_id=node.worker_id, executions=execution_ids)
        self._metrics.recovered.labels("overdue").inc(len(execution_ids))

    async def _forget_old(self, nodes: Sequence[Node]) -> None:
        oldest = self._clock.now_ms() - FORGET_DOWN_MS
        old = [
            node.worker_id
            for node in nodes
            if node.state is WorkerState.DOWN and node.last_heartbeat < oldest
        ]
        if old:
            await self._database.write(lambda connection: forget_nodes(connection, old))

    def _count(self, nodes: Sequence[Node]) -> None:
        for state in WorkerState:
            self._metrics.workers.labels(str(state)).set(sum(node.state is state for node in nodes))
