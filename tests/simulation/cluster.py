"""A simulated cluster: dispatchers and workers made of the product's own parts."""

from __future__ import annotations

import asyncio
import contextvars
import random
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import cache
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Any, Final, cast

import aiohttp
import structlog
from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util.concurrency import greenlet_spawn

from app.ground import Ground
from app.lifecycle.states import DeliveryStatus, ExecutionStatus, JobKind, JobStatus
from app.main import create_app as create_dispatcher
from app.main import start_parts, stop_dispatching, stop_parts
from app.metrics import Metrics
from app.plumbing.bus import Bus
from app.plumbing.clock import DatabaseClock
from app.plumbing.database import Database, DatabaseUnavailable
from app.plumbing.http import InternalClient
from app.plumbing.sealed import Sealer
from app.settings import Settings
from tests.simulation.database import DatabaseServer
from tests.simulation.history import History
from tests.simulation.machine import EPOCH, Machine, Process, State
from tests.simulation.network import (
    BlockingConnection,
    Broken,
    Network,
    Refused,
    Session,
    Unreachable,
)
from tests.simulation.quick import QuickEngine
from tests.simulation.redis import BlockingRedis, RedisClient, RedisServer
from tests.simulation.workload import Receiver, receiver_process
from tests.support.checker import Died, Event, ExecutionRow, JobRow
from tests.support.fires import FireRow, ScheduleRow, SkipRow
from worker.dispatchers import CONNECT_TIMEOUT_SECONDS, Dispatchers
from worker.dispatchers import REQUEST_TIMEOUT_SECONDS as REPORT_SECONDS
from worker.egress import Egress, EgressFailed, EgressReply
from worker.heartbeat import REQUEST_TIMEOUT_SECONDS as BEAT_SECONDS
from worker.heartbeat import BeatSender
from worker.main import create_app as create_worker
from worker.outside import Outside
from worker.settings import WorkerSettings
from worker.shutdown import Shutdown

log = structlog.get_logger(__name__)

DISPATCHERS: Final = ("d1", "d2", "d3")
WORKERS: Final = ("w1", "w2", "w3", "w4")
TOKEN: Final = "simulated"
SECRET: Final = "whsec_" + "c2ltdWxhdGVk" * 4
CALLBACK_SCHEDULE: Final = (0.0, 1.0, 2.0, 4.0, *(8.0 for _ in range(46)))
CAPACITY: Final = 8
PATIENCE_OF_SERVER_SECONDS: Final = 25.0


class Cluster:
    """All nodes and what is between them; nodes start, end and die on request."""

    def __init__(
        self,
        machine: Machine,
        history: History,
        dice: random.Random,
        database: Path,
        *,
        quick: bool,
    ) -> None:
        self.machine = machine
        self.history = history
        self.dice = dice
        self.network = Network(machine.loop, dice, history)
        self.database = DatabaseServer(
            database, network=self.network, dice=dice, history=history, now=machine.loop.time
        )
        self.redis = RedisServer(
            network=self.network, dice=dice, history=history, now=machine.loop.time
        )
        self.receiver = Receiver(history, dice)
        self.restart_seconds = 15.0
        self.quick = quick
        self.partitions = 1
        self._boots: dict[str, int] = {}
        self._settings: dict[str, Any] = {}
        self._look: sqlite3.Connection | None = None
        self.network.crash = self.crash
        machine.exits = lambda process, code: self.crash(process, f"exit {code}")

    def start_all(self) -> None:
        """Start every node."""
        self.network.processes["hook"] = receiver_process(self.receiver)
        for node in (*DISPATCHERS, *WORKERS):
            self.start(node)

    def start(self, node: str) -> None:
        """Start a node unless it runs."""
        if self.process(node) is not None:
            return
        boot = self._boots[node] = self._boots.get(node, 0) + 1
        process = Process(
            node,
            boot,
            skew_seconds=self.dice.uniform(-0.8, 0.8),
            uptime_seconds=self.dice.uniform(100.0, 1e6),
        )
        self.network.processes[node] = process
        self.history.say(f"start {process.name}")
        run = self._run_dispatcher if node in DISPATCHERS else self._run_worker
        _ = process.run(run(process))

    def process(self, node: str) -> Process | None:
        """The living process of a node."""
        return self.network.processes.get(node)

    def crash(self, process: Process, why: str) -> None:
        """Kill a process at once; its node starts again after a while."""
        if process.state is State.DEAD:
            return
        self.history.say(f"{process.name} dies: {why}", mark="x")
        process.die()
        self._over(process, self.dice.uniform(0.3, self.restart_seconds))

    def terminate(self, process: Process) -> None:
        """Ask a process to end, as SIGTERM does."""
        process.stopping.set()

    def _over(self, process: Process, restart_after: float) -> None:
        if process.worker_id is not None:
            self.history.add(Died(self.history.now, process.worker_id))
        self.network.processes[process.node] = None
        self.machine.loop.call_later(
            restart_after, self.start, process.node, context=contextvars.Context()
        )

    def _end(self, process: Process) -> None:
        self.history.say(f"{process.name} has ended")
        process.die()
        self._over(process, self.dice.uniform(0.1, 3.0))

    async def _run_dispatcher(self, process: Process) -> None:
        settings = self._settings.get(process.node) or self._dispatcher_settings(process.node)
        app = create_dispatcher(settings, self._ground(settings, process))
        parts = app.state.parts
        try:
            await start_parts(parts)
        except DatabaseUnavailable:
            self.crash(process, "it cannot start without a database")
            return
        process.serves = app
        await process.stopping.wait()
        await stop_dispatching(parts)
        process.serves = None
        until = self.machine.loop.time() + PATIENCE_OF_SERVER_SECONDS
        while process.requests and self.machine.loop.time() < until:
            await asyncio.sleep(0.05)
        await stop_parts(parts)
        self._end(process)

    async def _run_worker(self, process: Process) -> None:
        settings = self._settings.get(process.node) or self._worker_settings(process.node)
        app = create_worker(settings, outside=lambda: self._outside(settings, process))
        left = asyncio.Event()
        async with app.router.lifespan_context(app):
            parts = app.state.parts
            process.worker_id = parts.identity.worker_id
            process.serves = app
            await process.stopping.wait()
            shutdown = Shutdown(settings.grace_seconds, lambda: parts, left.set)
            shutdown.ask(self.machine.loop)
            await left.wait()
            process.serves = None
        await greenlet_spawn(shutdown.finish)
        self._end(process)

    def _dispatcher_settings(self, node: str) -> Settings:
        settings = self._settings[node] = Settings(
            _env_file=None,
            database_url=f"sqlite+aiosqlite:///{self.database.path}",
            internal_token=SecretStr(TOKEN),
            dispatch_partitions=self.partitions,
            callback_schedule_seconds=CALLBACK_SCHEDULE,
        )
        return settings

    def _ground(self, settings: Settings, process: Process) -> Ground:
        database = Database(settings.database_url, connect=self.database.connect)
        if self.quick:
            database._writers = self._engine("BEGIN IMMEDIATE", pool_size=1)
            database._readers = self._engine("BEGIN", pool_size=4)
        redis = cast(Any, RedisClient(self.redis, process, text=True, repeats=2))
        session = cast(aiohttp.ClientSession, Session(self.network, process.node))
        return Ground(
            settings=settings,
            database=database,
            redis=redis,
            lock_redis=cast(Any, RedisClient(self.redis, process, text=True, repeats=0)),
            clock=DatabaseClock(database),
            bus=Bus(redis, settings.redis_prefix),
            client=InternalClient(TOKEN, lambda: session),
            metrics=_metrics(),
            sealer=Sealer(""),
        )

    def _engine(self, begin: str, *, pool_size: int) -> AsyncEngine:
        engine = QuickEngine(self.database.connect, begin=begin, pool_size=pool_size)
        return cast(AsyncEngine, engine)

    def _worker_settings(self, node: str) -> WorkerSettings:
        # Each has its own order of dispatchers, as behind a balancer.
        urls = [f"http://{one}:8080" for one in DISPATCHERS]
        self.dice.shuffle(urls)
        settings = self._settings[node] = WorkerSettings(
            _env_file=None,
            host="127.0.0.1",
            advertise_url=f"http://{node}:8081",
            worker_name=node,
            worker_capacity=CAPACITY,
            dispatcher_url=tuple(urls),
            internal_token=(SecretStr(TOKEN),),
            webhook_secret=SecretStr(SECRET),
            builtin_handlers=False,
        )
        return settings

    def _outside(self, settings: WorkerSettings, process: Process) -> Outside:
        network, node = self.network, process.node
        redis = RedisClient(self.redis, process, text=False, repeats=0)
        session = Session(
            network,
            node,
            headers={"authorization": f"Bearer {TOKEN}", "content-type": "application/json"},
            total_seconds=REPORT_SECONDS,
            connect_seconds=CONNECT_TIMEOUT_SECONDS,
        )
        return Outside(
            redis=cast(Any, redis),
            blocking_redis=cast(Any, BlockingRedis(redis)),
            dispatchers=Dispatchers(
                settings.dispatcher_url, TOKEN, cast(aiohttp.ClientSession, session)
            ),
            beat_sender=BeatSender(
                settings.dispatcher_url,
                TOKEN,
                lambda url: cast(Any, BlockingConnection(network, node, url, seconds=BEAT_SECONDS)),
            ),
            egress=SimulatedEgress(network, node),
            cpu_idle_percent=lambda: 90.0,
            exit_process=self.machine.exit,
        )

    def rows(self) -> tuple[list[JobRow], list[ExecutionRow]]:
        """What the database holds: tasks and executions."""
        now = self.history.now
        with closing(sqlite3.connect(self.database.path)) as connection:
            jobs = [
                JobRow(
                    now, job_id, request or f"fire {parent} {nominal}", JobStatus(status).name,
                    execution or "", _time(ended), error or "",
                )
                for job_id, request, status, execution, ended, error, parent, nominal
                in connection.execute(
                    "SELECT id, client_request_id, status, execution_id, finished_at, error_code, "
                    "parent_id, nominal_time FROM job_info WHERE kind = ? ORDER BY id",
                    (int(JobKind.TASK),),
                )
            ]  # fmt: skip
            executions = [
                ExecutionRow(
                    now, execution, job_id, trigger, worker, ExecutionStatus(status).name,
                    _told_by(result), stale is not None, _time(ended),
                )
                for execution, job_id, trigger, worker, status, result, stale, ended
                in connection.execute(
                    "SELECT execution_id, job_id, trigger_ts, worker_id, status, result, "
                    "stale_at, finished_at FROM job_log ORDER BY id"
                )
            ]  # fmt: skip
        return jobs, executions

    def schedule_rows(self) -> list[Event]:
        """What the database holds of schedules: themselves, their children, their ledger."""
        now = self.history.now
        with closing(sqlite3.connect(self.database.path)) as connection:
            schedules = [
                ScheduleRow(now, job_id, JobStatus(status).name, made, decided)
                for job_id, status, made, decided in connection.execute(
                    "SELECT id, status, created_at, trigger_ts FROM job_info WHERE kind = ? "
                    "ORDER BY id",
                    (int(JobKind.SCHEDULE),),
                )
            ]
            children = [
                FireRow(now, parent, job_id, nominal, own=not key)
                for job_id, parent, nominal, key in connection.execute(
                    "SELECT id, parent_id, nominal_time, child_key FROM job_info "
                    "WHERE parent_id IS NOT NULL ORDER BY id"
                )
            ]
            skips = [
                SkipRow(now, *row)
                for row in connection.execute(
                    "SELECT schedule_id, from_time, to_time, count, reason FROM schedule_skip "
                    "ORDER BY id"
                )
            ]
        return [*schedules, *children, *skips]

    def is_over(self) -> bool:
        """True when every task and every schedule has ended, and no callback is owed."""
        if self._look is None:
            self._look = sqlite3.connect(self.database.path, isolation_level=None)
        (open_jobs,) = self._look.execute(
            "SELECT COUNT(*) FROM job_info WHERE NOT status IN (?, ?, ?)",
            (int(JobStatus.SUCCEEDED), int(JobStatus.FAILED), int(JobStatus.CANCELLED)),
        ).fetchone()
        (owed,) = self._look.execute(
            "SELECT COUNT(*) FROM callback_delivery WHERE status = ?",
            (int(DeliveryStatus.PENDING),),
        ).fetchone()
        return not open_jobs and not owed

    def close(self) -> None:
        """Close every connection to the database."""
        if self._look is not None:
            self._look.close()
        self.database.close()


class SimulatedEgress(Egress):
    """Calls outside addresses over the simulated network."""

    def __init__(self, network: Network, node: str) -> None:
        self._network = network
        self._node = node
        self._allowed = ()

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_seconds: float,
        most_bytes: int,
        within: Sequence[IPv4Network | IPv6Network] | None = None,
    ) -> EgressReply:
        """Send one request.

        Raises:
            EgressFailed: no answer came.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                answer = await self._network.exchange(self._node, method, url, body, headers)
        except (Refused, Unreachable, Broken, TimeoutError) as error:
            raise EgressFailed(type(error).__name__) from None
        return EgressReply(
            answer.status, answer.headers, answer.body[:most_bytes], truncated=False, broken=False
        )

    async def close(self) -> None:
        """Close nothing: connections are not kept."""


@cache
def _metrics() -> Metrics:
    """Nobody reads them here, and a registry is slow to build."""
    return Metrics()


def _time(epoch_ms: int | None) -> float | None:
    return None if epoch_ms is None else epoch_ms / 1000 - EPOCH


def _told_by(result: str | None) -> str:
    return "" if result is None else result.partition('"executionId":"')[2].partition('"')[0]
