"""Wires one worker together: `open_parts` makes every part, starts it, and closes it again."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import structlog

from oncue.handlers import REGISTRY, RegisteredHandler
from oncue.protocol import DeliveryResult
from worker.capture import catching
from worker.clock import DatabaseClock
from worker.cost import RecentCost
from worker.deliver import Deliverer
from worker.execute import CUT_OFF, LEASE_LOST, SHUT_DOWN, UNWANTED, Executor
from worker.handlers.built_in import built_in_handlers
from worker.heartbeat import Beats, Identity
from worker.held import Execution, Held, Phase, Terms
from worker.isolate import kill_group
from worker.lease import Leases
from worker.liveness import Liveness, Watchdog
from worker.metrics import Metrics
from worker.offered import describe_offer, offer
from worker.outcome import RunTimes, encode_outcome
from worker.outside import Outside, reach_outside
from worker.renew import Renewal
from worker.report import Reporter
from worker.run import Intake
from worker.settings import WorkerSettings
from worker.ship import Shipper
from worker.store import OutcomeStore
from worker.verdict import Verdict, unstorable

LAST_BEAT_SECONDS: Final = 1.0
LAST_RUNS_SECONDS: Final = 0.2
Argument = TypeVar("Argument")

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Parts:
    """Everything of one running worker."""

    settings: WorkerSettings
    identity: Identity
    held: Held
    terms: Terms
    clock: DatabaseClock
    cost: RecentCost
    metrics: Metrics
    liveness: Liveness
    leases: Leases
    executor: Executor
    intake: Intake
    reporter: Reporter
    shipper: Shipper
    store: OutcomeStore
    deliverer: Deliverer
    beats: Beats
    unwanted_before: set[str] = field(default_factory=set)

    def drain(self) -> None:
        """Take no more runs and say so at once."""
        if not self.held.draining:
            log.info("draining", active=len(self.held.live))
        self.held.draining = True
        self.beats.beat_now()

    def end_run(self, execution: Execution, verdict: Verdict, stopping: bool) -> None:
        """Record how a run ended and have it reported."""
        # The clock may have been corrected meanwhile; a history never runs backwards.
        now = max(self.clock.now_ms(), execution.accepted_at, execution.started_at or 0)
        times = RunTimes(execution.accepted_at, execution.started_at, now)
        try:
            outcome = encode_outcome(execution.run, verdict, times, stopping=stopping)
        except Exception as error:
            # Whatever it is, a run whose end is not recorded would be held for ever.
            log.exception("an outcome cannot be encoded", execution_id=execution.id)
            why = unstorable(f"the outcome cannot be encoded: {type(error).__name__}")
            outcome = encode_outcome(execution.run, why, times, stopping=stopping)
        self.held.end(execution, outcome)
        duration_ms = now - execution.accepted_at
        self.cost.add(duration_ms, time.monotonic())
        self.metrics.count_run(execution.run.job_handler, verdict.status, duration_ms / 1000)
        self.reporter.expect(execution)
        self.store.add(execution)

    def release_run(self, execution: Execution) -> None:
        """Free the slot of a run that was reported as stopping and has now ended."""
        self.held.release(execution)
        self.reporter.add_stopped(execution)

    def drop_unwanted(self, execution_ids: list[str]) -> None:
        """Stop executions that the dispatcher does not want any more, and drop ended ones.

        An ended one is dropped when two beats say so: the first may only have overtaken the
        acknowledgement, or the repeated report that brings the job's open callback.
        """
        said_before, self.unwanted_before = self.unwanted_before, set(execution_ids)
        for execution_id in execution_ids:
            execution = self.held.live.get(execution_id)
            if execution is not None and execution.phase is Phase.RUNNING:
                log.info("a run is no longer wanted", execution_id=execution_id)
                self.executor.stop(execution, UNWANTED)
            elif execution_id in said_before:
                self.reporter.forget(execution_id)

    def stop_cut_off(self, executions: list[Execution]) -> None:
        """Stop runs by the rule of death."""
        for execution in executions:
            self.executor.stop(execution, CUT_OFF)

    def lose_lease(self, execution: Execution) -> None:
        """Stop a run whose attempt another execution holds."""
        log.error("another execution holds the lease of a run", execution_id=execution.id)
        self.executor.stop(execution, LEASE_LOST)

    def kill_children(self) -> None:
        """Kill the process groups of all isolated runs; any thread may ask."""
        for execution in self.held.running():
            kill_group(execution.child_pid)


@asynccontextmanager
async def open_parts(
    settings: WorkerSettings,
    handlers: Mapping[str, RegisteredHandler] = REGISTRY,
    outside: Outside | None = None,
) -> AsyncIterator[Parts]:
    """Start a worker's parts and close them at the end.

    `handlers` are offered beside the built-in ones; the modules that register them must have
    been imported before. `outside` is closed here too.
    """
    loop = asyncio.get_running_loop()
    outside = outside or reach_outside(settings)
    egress = outside.egress
    offered = offer(built_in_handlers(egress) if settings.builtin_handlers else {}, handlers)
    identity = Identity(
        name=settings.name,
        boot_id=uuid.uuid4().hex,
        url=settings.url,
        weight=settings.worker_weight,
        labels=settings.worker_labels,
        delivers=settings.delivers,
        egress_allow=egress.allowed,
        offer=describe_offer(offered),
    )
    held = Held(settings.worker_capacity)
    clock, cost, metrics = DatabaseClock(), RecentCost(), Metrics()
    terms = Terms(refused=metrics.stale_terms.inc)
    liveness = Liveness(has_runs=lambda: bool(held.running()))
    leases = Leases(outside.redis, settings.redis_prefix)
    dispatchers = outside.dispatchers

    # The last two are made after those that tell them something: nothing is told before the end.
    def tried(result: DeliveryResult) -> None:
        if result.not_tried:
            outcome = "not_tried"
        else:
            outcome = "delivered" if result.delivered else "gone" if result.gone else "failed"
        metrics.count_try(outcome)
        reporter.add_try(result)

    shipper = Shipper(
        identity.worker_id,
        dispatchers,
        clock.now_ms,
        shipped=metrics.count_shipped,
        dropped=metrics.log_lines_dropped.inc,
    )
    executor = Executor(
        capacity=settings.worker_capacity,
        clock=clock,
        modules=settings.handlers,
        open_log=shipper.buffers.open,
        ended=lambda *ending: parts.end_run(*ending),  # noqa: PLW0108 (parts come later)
        gone=lambda execution: parts.release_run(execution),  # noqa: PLW0108 (parts come later)
        may_begin=liveness.may_begin,
    )
    deliverer = Deliverer(
        egress, settings.webhook_secrets, limits=settings.delivery_limits, tried=tried
    )
    reporter = Reporter(
        worker_id=identity.worker_id,
        held=held,
        leases=leases,
        dispatchers=dispatchers,
        clock=clock,
        delivers=identity.delivers,
        deliver=deliverer.take_own,
        try_reported=deliverer.acknowledged,
    )
    store = OutcomeStore(leases, held, stored=reporter.add_outcome)
    intake = Intake(
        worker_id=identity.worker_id,
        boot_id=identity.boot_id,
        prefix=settings.redis_prefix,
        offered=offered,
        held=held,
        terms=terms,
        leases=leases,
        executor=executor,
        clock=clock,
        may_begin=liveness.may_begin,
    )
    beats = Beats(
        identity,
        outside.beat_sender,
        held,
        liveness=liveness,
        terms=terms,
        clock=clock,
        cost=cost,
        cpu_idle_percent=outside.cpu_idle_percent,
        held_deliveries=deliverer.held_ids,
        unwanted=lambda ids: _ask(loop, parts.drop_unwanted, ids),
        failed=metrics.beat_failures.inc,
        again=shipper.dispatcher_is_back,
    )
    renewal = Renewal(
        outside.blocking_redis,
        held,
        liveness,
        lost=lambda execution: _ask(loop, parts.lose_lease, execution),
        forgotten=lambda executions: _ask(loop, store.store_again, executions),
        failed=metrics.renewal_failures.inc,
    )
    parts = Parts(
        settings=settings,
        identity=identity,
        held=held,
        terms=terms,
        clock=clock,
        cost=cost,
        metrics=metrics,
        liveness=liveness,
        leases=leases,
        executor=executor,
        intake=intake,
        reporter=reporter,
        shipper=shipper,
        store=store,
        deliverer=deliverer,
        beats=beats,
    )
    watchdog = Watchdog(
        held,
        liveness,
        stop_runs=lambda runs: _ask(loop, parts.stop_cut_off, runs),
        kill_children=parts.kill_children,
        exit_process=outside.exit_process,
    )
    _watch_numbers(parts)
    store.start()
    reporter.start()
    shipper.start()
    for thread in (renewal, watchdog, beats):
        thread.start()
    try:
        with catching():
            yield parts
    finally:
        await _close(parts, renewal, watchdog)
        await dispatchers.close()
        await egress.close()
        await leases.close()


async def _close(parts: Parts, renewal: Renewal, watchdog: Watchdog) -> None:
    for execution in parts.held.running():
        parts.executor.stop(execution, SHUT_DOWN)
    parts.beats.finish()
    await asyncio.to_thread(parts.beats.join, LAST_BEAT_SECONDS)
    watchdog.end()
    renewal.end()
    parts.kill_children()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(parts.executor.wait_over(), LAST_RUNS_SECONDS)
    await parts.deliverer.close()
    await parts.store.close()
    await parts.reporter.close()
    await parts.shipper.close()
    parts.executor.close()
    await asyncio.to_thread(renewal.join, 1.0)


def _ask(
    loop: asyncio.AbstractEventLoop, function: Callable[[Argument], None], argument: Argument
) -> None:
    """Let the loop do something for another thread; a closed loop has nothing left to do."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, argument)


NUMBERS: Final[tuple[tuple[str, str, Callable[[Parts], float]], ...]] = (
    ("capacity", "Runs that fit at once.", lambda parts: parts.held.capacity),
    (
        "active",
        "Runs that hold a slot, stopping ones included.",
        lambda parts: len(parts.held.live),
    ),
    (
        "queued",
        "Accepted runs whose handler has not begun.",
        lambda parts: parts.held.queued,
    ),
    (
        "reports_unacknowledged",
        "Outcomes, ended threads and tries that no dispatcher has acknowledged.",
        lambda parts: parts.reporter.backlog,
    ),
    ("log_memory_bytes", "Lines not shipped.", lambda parts: parts.shipper.buffers.memory),
    ("deliveries_held", "Callbacks held.", lambda parts: parts.deliverer.backlog),
    (
        "breakers_open",
        "Hosts that gave no answer again and again, and are called by a trial only.",
        lambda parts: parts.deliverer.open_breakers,
    ),
    (
        "clock_offset_seconds",
        "How far the database's clock is ahead of this process.",
        lambda parts: parts.clock.offset_ms / 1000,
    ),
)
"""Gauges that are read when somebody asks: each name, text and value."""


def _watch_numbers(parts: Parts) -> None:
    for name, text, value in NUMBERS:
        parts.metrics.watch(name, text, partial(value, parts))
