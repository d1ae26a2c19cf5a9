"""The dispatcher: the only place that wires its parts, starts them and stops them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import structlog
from fastapi import FastAPI
from fastapi_standalone_docs import StandaloneDocs
from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.middleware.gzip import GZipMiddleware

from app.access.keys import ApiKeys, InternalTokens
from app.callbacks.handover import Handover
from app.dispatch.lock import DispatchLock
from app.dispatch.loop import DispatchLoop
from app.dispatch.queues import QueueBook
from app.dispatch.recover import Recovery
from app.dispatch.send import Sender
from app.document import TITLE, VERSION, install_document, operation_id
from app.edge.problems import install_problems
from app.edge.requests import RequestEdge
from app.fleet.heartbeat import Heartbeats
from app.fleet.live import LiveFleet
from app.fleet.reports import Reports
from app.fleet.roster import Roster
from app.fleet.routes import fleet_routes
from app.fleet.settler import Settler
from app.health import health_routes
from app.jobs.retention import Retention
from app.jobs.routes import job_routes
from app.jobs.submit import Submitter
from app.jobs.wait import Waiters
from app.lifecycle.reads import count_due
from app.lifecycle.term import TermRowMissing, read_term
from app.metrics import Metrics
from app.migrate import check_schema
from app.plumbing.bus import Bus
from app.plumbing.clock import DatabaseClock
from app.plumbing.database import Database, DatabaseUnavailable
from app.plumbing.http import InternalClient
from app.plumbing.loops import Loop
from app.plumbing.redis import patient_redis, single_shot_redis
from app.settings import Settings
from oncue.protocol import MAX_INTERNAL_BODY_BYTES

log = structlog.get_logger(__name__)

CLOCK_SECONDS: Final = 5.0
COUNT_LIMIT: Final = 100_000


@dataclass(slots=True)
class Parts:
    """Everything that one dispatcher process is made of."""

    settings: Settings
    database: Database
    redis: Redis
    lock_redis: Redis
    clock: DatabaseClock
    metrics: Metrics
    bus: Bus
    fleet: LiveFleet
    waiters: Waiters
    submitter: Submitter
    settler: Settler
    heartbeats: Heartbeats
    reports: Reports
    client: InternalClient
    lock: DispatchLock
    roster: Roster
    sender: Sender
    loop: DispatchLoop
    recovery: Recovery
    handover: Handover
    retention: Retention
    clock_loop: Loop


def build_parts(settings: Settings) -> Parts:
    """Build and connect the parts; nothing is opened or started yet."""
    database = Database(settings.database_url)
    redis = patient_redis(settings.redis_url)
    lock_redis = single_shot_redis(settings.redis_url)
    clock = DatabaseClock(database)
    metrics = Metrics()
    bus = Bus(redis, settings.redis_prefix)
    fleet = LiveFleet(database, clock, bus)
    settler = Settler(database, bus, metrics)
    tokens = InternalTokens(settings.internal_token.get_secret_value())
    client = InternalClient(tokens.sent)
    lock = DispatchLock(
        lock_redis,
        database,
        clock,
        bus,
        metrics,
        prefix=settings.redis_prefix,
        life_seconds=settings.lock_seconds,
    )
    roster = Roster(clock.now_ms)
    queues = QueueBook()
    default_timeout_ms = round(settings.default_timeout_seconds * 1000)
    sender = Sender(
        database,
        clock,
        lock,
        roster,
        queues,
        settler,
        client,
        bus,
        metrics,
        default_timeout_ms=default_timeout_ms,
        policy=settings.balance,
    )

    async def measure() -> None:
        await asyncio.sleep(CLOCK_SECONDS)
        await clock.measure()

    return Parts(
        settings=settings,
        database=database,
        redis=redis,
        lock_redis=lock_redis,
        clock=clock,
        metrics=metrics,
        bus=bus,
        fleet=fleet,
        waiters=Waiters(database, bus),
        submitter=Submitter(
            database,
            bus,
            fleet,
            metrics,
            batch_limit=settings.submit_batch,
            backlog_limit=settings.submit_backlog,
        ),
        settler=settler,
        heartbeats=Heartbeats(database, bus),
        reports=Reports(
            database,
            bus,
            settler,
            metrics,
            callback_schedule_seconds=settings.callback_schedule_seconds,
        ),
        client=client,
        lock=lock,
        roster=roster,
        sender=sender,
        loop=DispatchLoop(
            database,
            clock,
            lock,
            roster,
            queues,
            sender,
            bus,
            metrics,
            policy=settings.balance,
            claim_batch=settings.claim_batch,
        ),
        recovery=Recovery(
            database,
            clock,
            lock,
            roster,
            sender,
            settler,
            redis,
            client,
            bus,
            metrics,
            prefix=settings.redis_prefix,
            default_timeout_ms=default_timeout_ms,
            overdue_grace_ms=round(settings.overdue_grace_seconds * 1000),
            stall_ms=round(settings.stall_seconds * 1000),
        ),
        handover=Handover(database, clock, lock, roster, client, bus),
        retention=Retention(database, clock, lock, metrics, retention_days=settings.retention_days),
        clock_loop=Loop("clock", measure, expected=(DatabaseUnavailable,)),
    )


async def start_parts(parts: Parts) -> None:
    """Check the schema and start every loop.

    Raises:
        SchemaMismatch: this code must not touch this database.
        DatabaseUnavailable: the database did not answer.
    """
    await check_schema(parts.database)
    await parts.clock.measure()
    await _warn_unless_durable(parts.database)
    parts.clock_loop.start()
    parts.bus.start()
    parts.waiters.start()
    if parts.settings.dispatch:
        parts.sender.start()
        parts.loop.start()
        parts.recovery.start()
        parts.handover.start()
        parts.retention.start()
        parts.lock.start()


async def stop_dispatching(parts: Parts) -> None:
    """Stop claiming, release the lock so that another takes over at once, let long polls go.

    Requests are served on; stopping twice does nothing more.
    """
    parts.waiters.close()
    if parts.settings.dispatch:
        await parts.loop.stop()
        await parts.lock.stop()
        await parts.recovery.stop()
        await parts.handover.stop()
        await parts.retention.stop()
        await parts.sender.stop()


async def stop_parts(parts: Parts) -> None:
    """Stop dispatching, finish what is being committed, close every connection."""
    await stop_dispatching(parts)
    await parts.submitter.drained()
    await parts.settler.drained()
    await parts.waiters.stop()
    await parts.bus.stop()
    await parts.clock_loop.stop()
    await parts.client.close()
    await parts.redis.aclose()
    await parts.lock_redis.aclose()
    await parts.database.close()


def create_app(settings: Settings) -> FastAPI:
    """Return the dispatcher's application; its lifespan starts and stops the parts."""
    parts = build_parts(settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await start_parts(parts)
        try:
            yield
        finally:
            await stop_parts(parts)

    app = _bare_app(lifespan)
    app.state.parts = parts
    app.include_router(
        job_routes(
            settings=settings,
            database=parts.database,
            keys=ApiKeys(settings.api_keys.get_secret_value()),
            submitter=parts.submitter,
            waiters=parts.waiters,
            fleet=parts.fleet,
        )
    )
    app.include_router(
        fleet_routes(
            tokens=InternalTokens(settings.internal_token.get_secret_value()),
            heartbeats=parts.heartbeats,
            reports=parts.reports,
        )
    )
    app.include_router(health_routes(_checks(parts), lambda: _render_metrics(parts)))
    install_document(app)
    return app


def openapi_document() -> dict[str, Any]:
    """Return the dispatcher's OpenAPI document; needs no environment and opens nothing."""
    return create_app(Settings.model_construct()).openapi()


def _bare_app(lifespan: Any) -> FastAPI:
    app = FastAPI(
        title=TITLE,
        version=VERSION,
        lifespan=lifespan,
        generate_unique_id_function=operation_id,
        redoc_url=None,
    )
    StandaloneDocs(app=app)
    install_problems(app)
    app.add_middleware(GZipMiddleware, minimum_size=16 * 1024, compresslevel=5)
    app.add_middleware(RequestEdge, limits={"/internal/": MAX_INTERNAL_BODY_BYTES})
    return app


def _checks(parts: Parts) -> dict[str, Any]:
    async def database() -> str | None:
        try:
            await parts.database.read(read_term)
        except TermRowMissing:
            return "the row that fences dispatch is missing: nothing will be dispatched"
        return None

    async def redis() -> str | None:
        await parts.redis.ping()
        return None

    async def clock() -> str | None:
        if parts.clock.may_dispatch:
            return None
        return f"{parts.clock.skew_ms / 1000:.1f} s off the database's clock"

    return {"database": database, "redis": redis, "clock": clock}


async def _render_metrics(parts: Parts) -> bytes:
    metrics = parts.metrics
    metrics.backlog.set(parts.submitter.backlog)
    metrics.long_polls.set(parts.waiters.count)
    metrics.skew.set(parts.clock.skew_ms / 1000)
    with suppress(DatabaseUnavailable):
        # Without the database the last counts stand; the other metrics are still served.
        counts = await parts.database.read(
            lambda connection: count_due(connection, parts.database, limit=COUNT_LIMIT)
        )
        metrics.waiting.set(counts["waiting"])
        metrics.running.set(counts["running"])
        metrics.due.set(counts["due"])
    return metrics.render()


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
