"""The dispatcher: the only place that wires its parts, starts them and stops them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import structlog
from fastapi import FastAPI
from fastapi.responses import RedirectResponse
from fastapi_standalone_docs import StandaloneDocs
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.types import ASGIApp

from app.access.keys import ApiKeys, Gate, InternalTokens, require_roles
from app.access.limits import LimitBook
from app.admin.keys import KeyDesk
from app.admin.routes import audit_routes, drain_routes, key_routes, tenant_routes
from app.admin.tenants import TenantDesk
from app.callbacks.handover import Handover
from app.callbacks.routes import callback_routes
from app.callbacks.secrets import SecretDesk
from app.dispatch.at_once import AtOnce
from app.dispatch.death import Deaths
from app.dispatch.expire import Expiry
from app.dispatch.lock import DispatchLock
from app.dispatch.loop import DispatchLoop
from app.dispatch.probe import Prober
from app.dispatch.queues import QueueBook
from app.dispatch.recover import Recovery
from app.dispatch.seats import Seats
from app.dispatch.send import Sender
from app.dispatch.standing import Standing
from app.dispatch.stop import Stopper
from app.dispatch.stored import StoredCounter
from app.dispatch.unblock import Unblocker
from app.document import TITLE, VERSION, install_document, operation_id
from app.edge.admission import Admission, Turnstile
from app.edge.problems import install_problems
from app.edge.requests import MAX_BODY_BYTES, CompressDocuments, RequestEdge
from app.edge.short import ShortWays
from app.fleet.dress import Dresser
from app.fleet.heartbeat import Heartbeats
from app.fleet.live import LiveFleet
from app.fleet.logs import RunLogs
from app.fleet.reports import Reports
from app.fleet.roster import Roster
from app.fleet.routes import fleet_routes
from app.fleet.settler import Settler
from app.ground import Ground, lay_ground
from app.health import health_routes
from app.jobs.batch import MAX_BATCH_BYTES, MAX_JOBS
from app.jobs.bulk import BulkDesk
from app.jobs.bulk_routes import bulk_routes
from app.jobs.callback_fields import Receivers
from app.jobs.callback_routes import redelivery_routes
from app.jobs.change import Changes
from app.jobs.change_routes import change_routes
from app.jobs.explain import Explainer
from app.jobs.explain_routes import explain_routes
from app.jobs.keeping_routes import keeping_routes
from app.jobs.list_routes import list_routes
from app.jobs.retention import Retention
from app.jobs.routes import job_routes
from app.jobs.stream_routes import stream_routes
from app.jobs.submit import Submitter
from app.jobs.sweeper import Sweeper
from app.jobs.wait import Waiters
from app.jobs.watch import Streams
from app.lifecycle.api_keys import any_key
from app.lifecycle.moves.fire import find_next
from app.lifecycle.reads import TaskCounts, count_tasks
from app.lifecycle.schema import SchemaMismatch, check_schema
from app.lifecycle.term import TermRowMissing, read_term
from app.plumbing.database import Database, DatabaseAway, DatabaseUnavailable
from app.plumbing.loops import Loop
from app.plumbing.redis import ensure_writable
from app.pulse import Pulse
from app.schedules.routes import schedule_routes
from app.schedules.spawn import Spawner
from app.settings import Settings
from oncue.protocol import MAX_INTERNAL_BODY_BYTES

log = structlog.get_logger(__name__)

CLOCK_SECONDS: Final = 5.0
FIRST_ANSWER_SECONDS: Final = 3.0
"""The port opens after so long though the database has not answered: it says what it waits for."""
LONGEST_COMMIT_SECONDS: Final = 60.0
FIRST_PAUSE_SECONDS: Final = 0.2
LONGEST_PAUSE_SECONDS: Final = 5.0
COUNT_LIMIT: Final = 10_000
COUNT_SECONDS: Final = 2.0
BATCH_JOB_BYTES: Final = 512
"""A batch counts at the door as a job for each of so many bytes, until it is read."""
_BODY_LIMITS: Final = {
    "/internal/": MAX_INTERNAL_BODY_BYTES,
    "/openapi/jobs/batch": MAX_BATCH_BYTES,
}


@dataclass(slots=True)
class Parts:
    """Everything that one dispatcher process is made of."""

    ground: Ground
    admission: Admission
    fleet: LiveFleet
    limits: LimitBook
    waiters: Waiters
    streams: Streams
    submitter: Submitter
    settler: Settler
    dresser: Dresser
    seats: Seats
    lock: DispatchLock
    sender: Sender
    loop: DispatchLoop
    at_once: AtOnce
    recovery: Recovery
    stopper: Stopper
    expiry: Expiry
    unblocker: Unblocker
    stored: StoredCounter
    spawner: Spawner
    handover: Handover
    retention: Retention
    sweeper: Sweeper
    standing: Standing
    gate: Gate
    clock_loop: Loop
    pulse: Pulse
    waits_for: str | None = "the process has not begun to serve"
    """Why nothing is served yet; None once everything is started."""
    is_stopping: bool = False
    seconds_left: Callable[[], float] = lambda: float("inf")
    """How long commits that are under way at the stop may still take."""

    def unfinished(self) -> dict[str, int]:
        """Count what a process that ends now leaves undone."""
        return {
            "submissions": self.submitter.backlog,
            "writes": self.ground.database.writing,
        }


def build_parts(ground: Ground) -> Parts:
    """Build and connect the parts; nothing is opened or started yet.

    Raises:
        BadKeys: a setting with keys has none that can be used.
    """
    settings = ground.settings
    keys = ApiKeys(settings.api_keys.get_secret_value())
    tokens = InternalTokens(settings.internal_token.get_secret_value())
    fleet = LiveFleet(ground)
    settler = Settler(ground)
    dresser = Dresser(ground)
    seats = Seats(ground)
    lock = seats.first
    roster = Roster(ground.clock.now_ms)
    queues = QueueBook()
    limits = LimitBook(ground.database, ground.bus)
    prober = Prober(ground, roster, seats)
    sender = Sender(ground, seats, roster, queues, settler, dresser)
    standing = Standing(ground, lock, roster)
    admission = Admission(ground.settings, ground.metrics)
    loop = DispatchLoop(ground, seats, roster, queues, prober, sender, limits)
    at_once = AtOnce(ground, seats, roster, queues, sender, limits, loop)

    async def measure() -> None:
        await asyncio.sleep(CLOCK_SECONDS)
        await ground.clock.measure()

    return Parts(
        ground=ground,
        admission=admission,
        fleet=fleet,
        limits=limits,
        waiters=Waiters(ground),
        streams=Streams(ground),
        submitter=Submitter(ground, fleet, Receivers(fleet, dresser), limits, at_once),
        settler=settler,
        dresser=dresser,
        seats=seats,
        lock=lock,
        sender=sender,
        loop=loop,
        at_once=at_once,
        recovery=Recovery(ground, seats, queues, sender, prober, Deaths(ground, prober, settler)),
        stopper=Stopper(ground, lock, roster),
        expiry=Expiry(ground, lock),
        unblocker=Unblocker(ground, lock),
        stored=StoredCounter(ground, lock, limits),
        spawner=Spawner(ground, lock),
        handover=Handover(ground, lock, roster, dresser),
        retention=Retention(ground, lock, lambda: admission.is_strained or loop.tempo.is_slow),
        sweeper=Sweeper(ground, lock),
        standing=standing,
        gate=Gate(ground, keys, tokens),
        clock_loop=Loop("clock", measure, expected=(DatabaseUnavailable,)),
        pulse=Pulse(ground),
    )


class TooOpen(Exception):
    """The API would be open to other machines."""


async def why_too_open(settings: Settings, database: Database) -> str | None:
    """Say which key is missing before the API may serve beyond this machine, if any.

    Raises:
        DatabaseUnavailable: its keys cannot be read.
    """
    if settings.why_too_open() is None:
        return None
    return settings.why_too_open(
        caller_keys=await database.read(lambda connection: any_key(connection, "caller")),
        worker_keys=await database.read(lambda connection: any_key(connection, "worker")),
    )


async def start_parts(parts: Parts) -> None:
    """Check the schema and start every loop.

    Raises:
        SchemaMismatch: this code must not touch this database.
        TooOpen: without a key this process must not serve where it listens.
        DatabaseUnavailable: the database did not answer.
    """
    revisions = await check_schema(parts.ground.database)
    for of, revision in revisions._asdict().items():
        parts.ground.metrics.schema.labels(of).set(revision)
    if revisions.database > revisions.code:
        log.warning("schema_is_newer", **revisions._asdict())
    reason = await why_too_open(parts.ground.settings, parts.ground.database)
    if reason is not None:
        raise TooOpen(reason)
    await parts.ground.clock.measure()
    await _warn_unless_durable(parts.ground.database)
    parts.clock_loop.start()
    parts.ground.bus.start()
    parts.waiters.start()
    parts.standing.start()
    parts.streams.start()
    parts.gate.start()
    parts.limits.start()
    if not parts.ground.settings.no_dispatch:
        parts.sender.start()
        parts.loop.start()
        parts.recovery.start()
        parts.expiry.start()
        parts.unblocker.start()
        parts.stored.start()
        parts.spawner.start()
        parts.stopper.start()
        parts.handover.start()
        parts.retention.start()
        parts.sweeper.start()
        parts.seats.start()
    parts.waits_for = None


async def start_when_the_database_is_there(parts: Parts, begun: asyncio.Task[None]) -> None:
    """Await the start that has begun; then try, with pauses of up to 5 s, until all is started."""
    pause, start = FIRST_PAUSE_SECONDS, begun
    while parts.waits_for is not None:
        try:
            await start
        except (DatabaseUnavailable, SchemaMismatch, TooOpen) as error:
            parts.waits_for = str(error)
            log.warning("start_waits", reason=str(error), again_in_seconds=pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
            start = asyncio.create_task(start_parts(parts), name="start")


async def _begin(parts: Parts) -> asyncio.Task[None] | None:
    """Start everything; where the database is not there now return what goes on with it.

    Raises:
        Exception: as `start_parts`, for what waiting would not mend.
    """
    begun = asyncio.create_task(start_parts(parts), name="start")
    await asyncio.wait({begun}, timeout=FIRST_ANSWER_SECONDS)
    if begun.done():
        try:
            await begun
        except DatabaseAway as error:
            parts.waits_for = str(error)
        else:
            return None
    else:
        parts.waits_for = "the database has not answered"
    # The door is open meanwhile: it says what is missing, and to come back.
    return asyncio.create_task(start_when_the_database_is_there(parts, begun), name="late start")


async def stop_dispatching(parts: Parts) -> None:
    """Stop claiming, release the lock so that another takes over at once, let those who wait go.

    Requests are served on; stopping twice does nothing more.
    """
    parts.is_stopping = True
    parts.waiters.close()
    parts.streams.close()
    if not parts.ground.settings.no_dispatch:
        await parts.spawner.stop()
        await parts.loop.stop()
        await parts.seats.stop()
        await parts.recovery.stop()
        await parts.stopper.stop()
        await parts.expiry.stop()
        await parts.unblocker.stop()
        await parts.stored.stop()
        await parts.handover.stop()
        await parts.retention.stop()
        await parts.sweeper.stop()
        await parts.sender.stop()


async def stop_parts(parts: Parts) -> None:
    """Stop dispatching, finish what is being committed, close every connection.

    What a database does not take in the time that is left is given up, and was acknowledged to
    nobody.
    """
    await stop_dispatching(parts)
    try:
        async with asyncio.timeout(min(parts.seconds_left(), LONGEST_COMMIT_SECONDS)):
            await parts.submitter.drained()
            await parts.settler.drained()
    except TimeoutError:
        log.warning("commits_given_up", **parts.unfinished())
    await parts.waiters.stop()
    await parts.standing.stop()
    await parts.streams.stop()
    await parts.gate.stop()
    await parts.limits.stop()
    await parts.ground.bus.stop()
    await parts.clock_loop.stop()
    await parts.admission.stop()
    await parts.pulse.stop()
    await parts.ground.close(parts.seconds_left())


def create_app(settings: Settings, ground: Ground | None = None) -> FastAPI:
    """Return the dispatcher's application; its lifespan starts and stops the parts.

    `ground` is what the parts stand on, if not on what the settings name.
    """
    sent = InternalTokens(settings.internal_token.get_secret_value()).sent
    parts = build_parts(ground or lay_ground(settings, internal_token=sent))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        late = await _begin(parts)
        parts.pulse.start()
        parts.admission.start()
        try:
            yield
        finally:
            if late is not None:
                late.cancel()
                await asyncio.wait({late})
            await stop_parts(parts)

    edge: dict[str, Any] = {
        "limits": _BODY_LIMITS,
        "waits_for": lambda: parts.waits_for,
        "crowd": parts.admission.crowd,
        "ends": lambda: parts.is_stopping,
    }
    app = _bare_app(lifespan, edge)
    app.state.parts = parts
    keys = parts.gate
    app.include_router(
        job_routes(
            settings=settings,
            database=parts.ground.database,
            keys=keys,
            submitter=parts.submitter,
            waiters=parts.waiters,
            fleet=parts.fleet,
        )
    )
    app.include_router(explain_routes(keys=keys, explainer=Explainer(parts.ground, parts.standing)))
    changes = Changes(parts.ground, parts.fleet, Receivers(parts.fleet, parts.dresser))
    app.include_router(change_routes(ground=parts.ground, keys=keys, changes=changes))
    app.include_router(redelivery_routes(ground=parts.ground, keys=keys))
    app.include_router(bulk_routes(keys=keys, desk=BulkDesk(parts.ground)))
    app.include_router(callback_routes(keys=keys, desk=SecretDesk(parts.ground, parts.dresser)))
    app.include_router(list_routes(database=parts.ground.database, keys=keys))
    app.include_router(keeping_routes(ground=parts.ground, keys=keys))
    app.include_router(schedule_routes(keys=keys))
    key_desk = KeyDesk(parts.ground.database, parts.ground.bus, parts.ground.clock)
    app.include_router(key_routes(keys=keys, key_desk=key_desk))
    tenant_desk = TenantDesk(parts.ground.database, parts.ground.bus)
    app.include_router(tenant_routes(keys=keys, tenant_desk=tenant_desk))
    app.include_router(drain_routes(ground=parts.ground, keys=keys))
    app.include_router(audit_routes(database=parts.ground.database, keys=keys))
    app.include_router(
        stream_routes(database=parts.ground.database, keys=keys, streams=parts.streams)
    )
    app.include_router(
        fleet_routes(
            keys=keys,
            heartbeats=Heartbeats(parts.ground),
            reports=Reports(parts.ground, parts.settler, parts.dresser),
            logs=RunLogs(parts.ground),
        )
    )
    app.include_router(
        health_routes(_checks(parts), lambda: _render_metrics(parts), parts.standing.name)
    )
    require_roles(app)
    install_document(app)
    _shorten(app, edge, parts.admission)
    return app


def _shorten(app: ShortWays, edge: dict[str, Any], admission: Admission) -> None:
    """Serve what every job passes past the framework; submissions pass the turnstile first."""

    def way(route: ASGIApp) -> ASGIApp:
        return RequestEdge(route, **edge)

    app.shorten("report", way)
    app.shorten(
        "submit_job", lambda route: Turnstile(way(route), admission, longest=MAX_BODY_BYTES)
    )
    app.shorten(
        "submit_jobs",
        lambda route: Turnstile(
            way(route),
            admission,
            longest=MAX_BATCH_BYTES,
            job_bytes=BATCH_JOB_BYTES,
            most_jobs=MAX_JOBS,
        ),
    )


def openapi_document() -> dict[str, Any]:
    """Return the dispatcher's OpenAPI document; needs no environment and opens nothing."""
    return create_app(Settings.model_construct()).openapi()


def _bare_app(lifespan: Any, edge: dict[str, Any]) -> ShortWays:
    app = ShortWays(
        title=TITLE,
        version=VERSION,
        lifespan=lifespan,
        generate_unique_id_function=operation_id,
        redoc_url=None,
        redirect_slashes=False,
    )
    StandaloneDocs(app=app)

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        """Lead a browser to the documentation."""
        return RedirectResponse("docs")

    install_problems(app)
    app.add_middleware(CompressDocuments)
    app.add_middleware(RequestEdge, **edge)
    return app


def _checks(parts: Parts) -> dict[str, Any]:
    async def database() -> str | None:
        if parts.waits_for is not None:
            return parts.waits_for
        try:
            await parts.ground.database.read(read_term)
        except TermRowMissing:
            return "the row that fences dispatch is missing: nothing will be dispatched"
        return None

    async def redis() -> str | None:
        await ensure_writable(parts.ground.redis, parts.ground.settings.redis_prefix)
        return None

    async def clock() -> str | None:
        if parts.ground.clock.may_dispatch:
            return None
        return f"{parts.ground.clock.skew_ms / 1000:.1f} s off the database's clock"

    return {"database": database, "redis": redis, "clock": clock}


async def _render_metrics(parts: Parts) -> bytes:
    metrics = parts.ground.metrics
    metrics.backlog.set(parts.submitter.backlog)
    metrics.expected_wait.set(parts.admission.wait_seconds)
    metrics.long_polls.set(parts.waiters.count)
    metrics.partitions_held.labels(parts.standing.name).set(len(parts.seats.terms))
    metrics.skew.set(parts.ground.clock.skew_ms / 1000)
    with suppress(DatabaseUnavailable, TimeoutError):
        # Without the database the last counts stand; the other metrics are still served.
        async with asyncio.timeout(COUNT_SECONDS):
            counts, overdue_ms = await parts.ground.database.read(
                lambda connection: _count(connection, parts.ground.database)
            )
        metrics.waiting.set(counts.waiting)
        metrics.running.set(counts.running)
        metrics.due.set(counts.due)
        metrics.schedule_overdue.set(max(0, overdue_ms) / 1000)
    return metrics.render()


async def _count(connection: AsyncConnection, database: Database) -> tuple[TaskCounts, int]:
    first = await find_next(connection, database)
    overdue_ms = 0 if first is None else first.now_ms - first.due_ms
    return await count_tasks(connection, database, limit=COUNT_LIMIT), overdue_ms


async def _warn_unless_durable(database: Database) -> None:
    """An accepted job must survive a power cut: say so when MySQL is set up otherwise."""
    if database.is_sqlite:
        return

    async def ask(connection: AsyncConnection) -> dict[str, int]:
        row = (
            await connection.execute(
                text(
                    "SELECT @@innodb_flush_log_at_trx_commit AS flush, @@sync_binlog AS binlog, "
                    "@@log_bin AS log_bin"
                )
            )
        ).one()
        return {"flush": row.flush, "binlog": row.binlog, "log_bin": row.log_bin}

    found = await database.read(ask)
    if found["flush"] != 1 or (found["log_bin"] and found["binlog"] != 1):
        log.warning(
            "commits_not_flushed",
            innodb_flush_log_at_trx_commit=found["flush"],
            sync_binlog=found["binlog"],
            advice="set both to 1: an accepted job must survive a power cut",
        )
