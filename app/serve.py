"""Running the dispatcher under uvicorn, with a stop that is in our own hands."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator

import structlog
import uvicorn
from fastapi import FastAPI
from sqlalchemy.exc import DBAPIError

from app.access.keys import BadKeys
from app.lifecycle.schema import SchemaMismatch, check_schema
from app.main import Parts, create_app, stop_dispatching, why_too_open
from app.plumbing.database import Database, DatabaseAway, DatabaseUnavailable
from app.plumbing.doorway import ANSWER_HEADERS, Doorway
from app.plumbing.grace import REST_SECONDS, Grace
from app.plumbing.sealed import BadSecretKeys
from app.settings import Settings

log = structlog.get_logger(__name__)

FIRST_LOOK_SECONDS = 5.0
BACKLOG = 2048
COLLECT_AFTER = (20_000, 20, 20)


class StartRefused(Exception):
    """The process cannot start; the message is one sentence for the operator."""


class Server(uvicorn.Server):
    """A uvicorn server that leaves the signals to us: uvicorn would end the process too soon."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the port and say so: who starts a dispatcher must see that it serves, and where."""
        await super().startup(sockets=sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            log.info("listening", host=host, port=port)


async def serve(
    settings: Settings,
    *,
    beside: Callable[[asyncio.Event], Awaitable[None]] | None = None,
    sockets: list[socket.socket] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; `beside` runs along and is told by the event to end.

    With `sockets`, which listen already, another process has started this one, and it ends when
    that one does.

    Raises:
        StartRefused: the schema, the keys, the port, or a database that refuses forbid it.
    """
    stopping = asyncio.Event()
    parts: Parts | None = None

    def held() -> dict[str, int]:
        return {} if parts is None else parts.unfinished()

    def stop() -> None:
        grace.begin()
        stopping.set()

    grace = Grace(settings.grace_seconds, held)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if sockets is not None:
        structlog.contextvars.bind_contextvars(pid=os.getpid())
        loop.add_reader(sys.stdin, lambda: _end_with_stdin(loop, stop))
    if not await _checked(settings, stopping):
        return
    try:
        app = create_app(settings)
    except (BadKeys, BadSecretKeys) as error:
        raise StartRefused(str(error)) from None
    parts = app.state.parts
    assert isinstance(parts, Parts)
    parts.seconds_left = grace.left_for_commits
    server = http_server(app, settings)
    serving = asyncio.create_task(_serve(server, settings, sockets))
    companion = asyncio.create_task(
        _nothing(stopping) if beside is None else _run(beside, stopping)
    )
    told = asyncio.create_task(stopping.wait())
    await asyncio.wait({serving, companion, told}, return_when=asyncio.FIRST_COMPLETED)
    stop()
    # What runs beside (the worker of `oncue up`) still needs the API to report to.
    if not serving.done():
        await stop_dispatching(parts)
    results = [await _result(companion)]
    server.config.timeout_graceful_shutdown = max(1, int(grace.left_for_requests()))
    server.should_exit = True
    results.append(await _result(serving))
    told.cancel()
    for result in results:
        if result is not None:
            raise result


def http_server(app: FastAPI, settings: Settings) -> Server:
    """Return the server of an application; nothing listens yet."""
    return Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            loop="none",
            http=Doorway,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            headers=ANSWER_HEADERS,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, int(settings.grace_seconds - REST_SECONDS)),
        )
    )


def _end_with_stdin(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    if not os.read(sys.stdin.fileno(), 1024):
        loop.remove_reader(sys.stdin)
        stop()


async def _serve(server: Server, settings: Settings, sockets: list[socket.socket] | None) -> None:
    try:
        await server.serve(sockets=sockets)
    except SystemExit:
        raise StartRefused(
            f"the dispatcher could not start on {settings.host}:{settings.port}: "
            "is the port in use?"
        ) from None
    if not server.started:
        raise StartRefused(f"the dispatcher could not start on {settings.host}:{settings.port}")


async def _checked(settings: Settings, stopping: asyncio.Event) -> bool:
    """Check what can be; False if the process was told to end meanwhile."""
    checking = asyncio.create_task(_check(settings))
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({checking, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if stopping.is_set():
        checking.cancel()
        await asyncio.wait({checking})
        return False
    await checking
    return True


async def _check(settings: Settings) -> None:
    database = Database(
        settings.database_url,
        pool_size=1,
        answer_seconds=min(settings.database_seconds, FIRST_LOOK_SECONDS),
    )
    try:
        await check_schema(database)
        reason = await why_too_open(settings, database)
    except SchemaMismatch as error:
        raise StartRefused(settings.why_too_open() or str(error)) from None
    except DatabaseAway as error:
        # It may come back: until then the process says so where readiness is asked for, and
        # serves nothing.
        reason = None
        log.warning(
            "database_away_at_start",
            database=database.url.render_as_string(),
            reason=str(error),
        )
    except DatabaseUnavailable:
        raise StartRefused(
            f"the database {database.url.render_as_string()} cannot be used: see the log"
        ) from None
    except DBAPIError as error:
        raise StartRefused(f"the database refuses: {error.orig}") from None
    finally:
        await database.close()
    if reason is not None:
        raise StartRefused(reason)


async def _nothing(stopping: asyncio.Event) -> None:
    await stopping.wait()


async def _run(beside: Callable[[asyncio.Event], Awaitable[None]], stopping: asyncio.Event) -> None:
    await beside(stopping)


async def _result(task: asyncio.Task[None]) -> BaseException | None:
    try:
        await task
    except (Exception, SystemExit) as error:  # noqa: BLE001 - raised again by the caller, in order
        return error
    return None


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine on the fastest event loop at hand."""

    async def call() -> None:
        # What was imported lives as long as the process: the collector need not walk it again.
        gc.collect()
        gc.freeze()
        # Jobs under way are many objects and hardly a cycle: look for cycles more rarely.
        gc.set_threshold(*COLLECT_AFTER)
        await main()

    if sys.platform == "win32":
        asyncio.run(call())
        return
    import uvloop  # noqa: PLC0415 - not there on every platform

    uvloop.run(call())
