"""Proving that a worker is dead, and taking back what it had.

Three signs are needed: its last committed beat is old, the probe of its address fails, and its
run leases are gone. Before anything runs again the outcome under the run key is looked for.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

import structlog
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.dispatch.probe import Probe, Prober
from app.fleet.reports import ending_of
from app.fleet.settler import Settler
from app.ground import Ground
from app.lifecycle.moves.deliver import find_deliveries_of, release_deliveries
from app.lifecycle.moves.ending import MAX_REASON_LENGTH, Ending
from app.lifecycle.moves.release import Released, StoppingRun, read_stopping, release_stopped
from app.lifecycle.nodes import Node, mark_down
from app.lifecycle.running import RunningTask
from app.lifecycle.states import ExecutionStatus
from app.plumbing.bus import BEAT, OWED, WAKE
from app.plumbing.json_text import Unencodable
from app.plumbing.redis import REDIS_ERRORS
from app.plumbing.sealed import CannotOpen
from oncue.protocol import (
    GIVEN_UP,
    LEASE_SECONDS,
    TOMBSTONE_SECONDS,
    Outcome,
    WorkerState,
    run_key,
    run_mark,
    stopping_key,
)

log = structlog.get_logger(__name__)

CANARY_LIFE_MS: Final = 24 * 3600 * 1000
TOMBSTONE_MS: Final = int(TOMBSTONE_SECONDS * 1000)
DELIVERIES_RELEASED: Final = 10_000
LEASES_AT_ONCE: Final = 32
"""Fewer than the connections that a process may have to Redis: one more would be an error."""


# The canary is seen by all dispatchers, and lost in a flush. The tide is a new word at each look: a
# Redis that does not have the last one has lost what was written since, as one that comes back from
# an older snapshot, canary and all. The word before stays beside it, for a look that is repeated.
_WATCH: Final = """
local canary = redis.call('GET', KEYS[1]) or ARGV[1]
local last, before = string.match(redis.call('GET', KEYS[2]) or '', '^(%S*) ?(%S*)$')
if last == ARGV[2] then last = before end
redis.call('SET', KEYS[1], canary, 'PX', ARGV[3])
redis.call('SET', KEYS[2], ARGV[2] .. ' ' .. last, 'PX', ARGV[3])
return last
"""
# An absent lease means something only in a Redis that has the last tide: both are read in one
# step, for between two steps it may be flushed. The key decides between a late worker and us: who
# sets it first has the attempt.
_READ_LEASE: Final = """
local tide = string.match(redis.call('GET', KEYS[2]) or '', '^%S*')
if tide == '' or tide ~= ARGV[1] then return '?' end
local value = redis.call('GET', KEYS[1])
if not value and ARGV[2] ~= '' then redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) end
return value
"""
_FLUSHED: Final = "?"


def canary_key(prefix: str) -> str:
    """Name the key by whose loss a flush is seen; the holder of the lock keeps it."""
    return f"{prefix}:canary"


class Lease(Enum):
    """What is under a run key, unless it is the execution's outcome."""

    HELD = "held"
    GONE = "gone"
    UNREADABLE = "unreadable"


@dataclass(slots=True)
class Estate:
    """What a worker has by the database: runs, and runs that go on after their end."""

    running: list[RunningTask] = field(default_factory=list)
    stopping: list[StoppingRun] = field(default_factory=list)


class Deaths:
    """Declares workers dead when it may, and settles their runs as found or LOST."""

    def __init__(self, ground: Ground, prober: Prober, settler: Settler) -> None:
        self._database = ground.database
        self._redis = ground.redis
        self._bus = ground.bus
        self._metrics = ground.metrics
        self._prefix = ground.settings.redis_prefix
        self._canary_key = canary_key(self._prefix)
        self._tide_key = f"{self._canary_key}:tide"
        self._stall_ms = ground.settings.stall_seconds * 1000
        self._prober = prober
        self._settler = settler
        self._sealer = ground.sealer
        self._reads = asyncio.Semaphore(LEASES_AT_ONCE)
        self._tide: str | None = None
        self._redis_good_since: float | None = None
        self._quiet_since = float("inf")

    def start_quiet_time(self) -> None:
        """Declare nobody dead for a while: the lock changed hands, or the database was away."""
        self._quiet_since = time.monotonic()

    async def watch_redis(self) -> None:
        """See whether Redis still has all that was written to it before the last look."""
        tide = uuid.uuid4().hex
        try:
            found = await self._redis.eval(
                _WATCH, 2, self._canary_key, self._tide_key, uuid.uuid4().hex, tide, CANARY_LIFE_MS
            )
        except REDIS_ERRORS as error:
            if self._redis_good_since is not None:
                log.warning("redis_not_trusted", reason=str(error))
            self._redis_good_since = None
            return
        if self._redis_good_since is None or str(found) != self._tide:
            if self._redis_good_since is not None:
                log.warning("redis_not_trusted", reason="it has not what was written last")
            self._redis_good_since = time.monotonic()
        self._tide = tide

    async def bury(
        self, nodes: Sequence[Node], running: Sequence[RunningTask], *, holds: Callable[[], bool]
    ) -> None:
        """Look at every silent worker, and at what workers declared dead before still have.

        `running` was read before `nodes`. All ends once the lock is no longer held.
        """
        estates = await self._estates(running)
        now = await self._database.now()
        silent = [
            node
            for node in nodes
            if node.state is not WorkerState.DOWN
            and now - node.last_heartbeat > LEASE_SECONDS * 1000
        ]
        probes = await asyncio.gather(*(self._prober.probe(node) for node in silent))
        if not self._may_declare:
            return
        for node, probe in zip(silent, probes, strict=True):
            if not holds():
                return
            quiet_ms = now - node.last_heartbeat
            if probe is Probe.FAILED or (probe is Probe.STALLED and quiet_ms >= self._stall_ms):
                reason = f"worker dead: no beat for {quiet_ms / 1000:.0f} s, probe {probe.value}"
                await self._declare(node, estates.get(node.worker_id, Estate()), reason)
        alive = {node.worker_id for node in nodes if node.state is not WorkerState.DOWN}
        for worker_id, estate in estates.items():
            if worker_id not in alive and holds():
                await self._take_back(worker_id, estate, "worker dead: declared before")

    @property
    def is_quiet(self) -> bool:
        """True for a lease after a hand-over, or a failure of the database: beats are late then."""
        return time.monotonic() - self._quiet_since < LEASE_SECONDS

    @property
    def _may_declare(self) -> bool:
        """Nobody is declared dead within a lease of a hand-over, or of a flush of Redis."""
        now = time.monotonic()
        return (
            not self.is_quiet
            and self._redis_good_since is not None
            and now - self._redis_good_since >= LEASE_SECONDS
        )

    async def _estates(self, running: Sequence[RunningTask]) -> dict[str, Estate]:
        estates: dict[str, Estate] = {}
        for task in running:
            estates.setdefault(task.worker_id, Estate()).running.append(task)
        for run in await self._database.read(read_stopping):
            estates.setdefault(run.worker_id, Estate()).stopping.append(run)
        return estates

    async def _declare(self, node: Node, estate: Estate, reason: str) -> None:
        held: list[RunningTask | StoppingRun] = [*estate.running, *estate.stopping]
        leases = await asyncio.gather(*(self._lease(run) for run in held))
        if Lease.HELD in leases or Lease.UNREADABLE in leases:
            log.info("worker_doubted", worker_id=node.worker_id, reason=reason)
            return
        if not await self._database.write(
            lambda connection: mark_down(
                connection, node.worker_id, last_heartbeat=node.last_heartbeat
            )
        ):
            return
        log.warning("worker_down", worker_id=node.worker_id, reason=reason, runs=len(leases))
        self._metrics.recovered.labels("worker_down").inc()
        self._bus.publish(BEAT, [node.worker_id])
        await self._take_back(node.worker_id, estate, f"{reason}, leases gone")

    async def _take_back(self, worker_id: str, estate: Estate, reason: str) -> None:
        """Settle what the dead worker had; a lease that is not gone waits for the next look.

        An attempt without a lease is marked as given up first: if its `/run` is still on the way
        to a process that is not dead after all, it must find nothing to begin.
        """
        leases = await asyncio.gather(*(self._lease(run, give_up=True) for run in estate.running))
        endings = [
            _found(lease, reason) if isinstance(lease, Ending) else _lost(task, reason)
            for task, lease in zip(estate.running, leases, strict=True)
            if lease not in (Lease.HELD, Lease.UNREADABLE)
        ]
        for ending in endings:
            found = ending.status is not ExecutionStatus.LOST
            self._metrics.recovered.labels("outcome_found" if found else "lost").inc()
        await asyncio.gather(*(self._settler.settle(ending) for ending in endings))
        await self._release(worker_id, estate.stopping)

    async def _release(self, worker_id: str, stopping: Sequence[StoppingRun]) -> None:
        leases = await asyncio.gather(*(self._lease(run, give_up=True) for run in stopping))
        over = [
            run.execution_id
            for run, lease in zip(stopping, leases, strict=True)
            if lease not in (Lease.HELD, Lease.UNREADABLE)
        ]

        owed = await self._database.read(
            lambda connection: find_deliveries_of(
                connection, self._database, worker_id, limit=DELIVERIES_RELEASED
            )
        )
        if not over and not owed:
            return

        async def write(connection: AsyncConnection) -> list[Released]:
            released = await release_stopped(connection, over) if over else []
            await release_deliveries(connection, self._database, worker_id, owed)
            return released

        released = await self._database.write(write)
        wakes = [
            [one.queue_id, one.priority, one.due_ms] for one in released if one.due_ms is not None
        ]
        if wakes:
            self._bus.publish(WAKE, wakes)
        if owed:
            self._bus.publish(OWED, [])

    async def _lease(
        self, run: RunningTask | StoppingRun, *, give_up: bool = False
    ) -> Lease | Ending:
        """Read a run key: a lease, the outcome of this very execution, or nothing of it.

        A lease of whatever boot counts as held: it says that somebody runs this attempt. A
        cancelled run has its lease still under the run key as long as its worker has not heard
        of the cancel; it gets the lease of its own in the step that puts its end there.
        """
        key = run_key(self._prefix, run.job_id, run.trigger_ts)
        mark = run_mark(GIVEN_UP, GIVEN_UP) if give_up else ""
        found = await self._read_lease(key, run.execution_id, mark)
        if isinstance(run, StoppingRun) and found not in (Lease.HELD, Lease.UNREADABLE):
            return await self._read_lease(stopping_key(key), run.execution_id, "")
        return found

    async def _read_lease(self, key: str, execution_id: str, mark: str) -> Lease | Ending:
        value: object = _FLUSHED
        async with self._reads:
            with suppress(*REDIS_ERRORS):
                value = await self._redis.eval(
                    _READ_LEASE, 2, key, self._tide_key, self._tide or "", mark, TOMBSTONE_MS
                )
        if value == _FLUSHED:
            return Lease.UNREADABLE
        if value is None:
            return Lease.GONE
        boot_id, owner, outcome = str(value).split(" ", 2)
        if not outcome and boot_id != GIVEN_UP:
            return Lease.HELD
        if owner != execution_id:
            return Lease.GONE
        return self._read_outcome(execution_id, outcome)

    def _read_outcome(self, execution_id: str, outcome: str) -> Lease | Ending:
        try:
            return ending_of(Outcome.model_validate_json(outcome), None, self._sealer)
        except CannotOpen:
            # It has ended well: to run it again would be wrong while its key may come.
            log.warning("result_cannot_be_opened", execution_id=execution_id)
            return Lease.UNREADABLE
        except (ValidationError, Unencodable):
            log.warning("unreadable_outcome", execution_id=execution_id)
            return Lease.GONE


def _lost(task: RunningTask, reason: str) -> Ending:
    return Ending(
        execution_id=task.execution_id,
        job_id=task.job_id,
        status=ExecutionStatus.LOST,
        error_code="worker_lost",
        error_message="The worker died while it ran this.",
        reason=reason[:MAX_REASON_LENGTH],
    )


def _found(ending: Ending, reason: str) -> Ending:
    told = f"{reason}; its outcome was found under the run key"
    return replace(ending, reason=told[:MAX_REASON_LENGTH])
