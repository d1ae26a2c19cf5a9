"""The worker's app and its process: `create_app`, `openapi_document`, `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import structlog
import uvicorn
import uvloop
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi_standalone_docs import StandaloneDocs

from oncue import __version__
from oncue.handlers import REGISTRY, RegisteredHandler
from worker.doorway import ANSWER_HEADERS, Doorway
from worker.guard import Guard
from worker.logs import configure_logs
from worker.offered import HandlersNotLoaded, import_handlers
from worker.outside import Outside
from worker.parts import Parts, open_parts
from worker.problems import PROBLEM_SCHEMA, install_problems
from worker.routes import guarded, opened
from worker.settings import SettingsError, WorkerSettings, read_settings
from worker.short import ShortRun
from worker.shutdown import Shutdown

BAD_SETTINGS_EXIT_CODE: Final = 2
HURRY_SECONDS: Final = 0.2
"""Between two signals: of two at once the process may see only one."""
BACKLOG: Final = 2048
COLLECT_AFTER: Final = (20_000, 20, 20)

log = structlog.get_logger(__name__)


def create_app(
    settings: WorkerSettings,
    *,
    handlers: Mapping[str, RegisteredHandler] = REGISTRY,
    outside: Callable[[], Outside] | None = None,
) -> FastAPI:
    """Build the app; its parts are opened and closed by its lifespan.

    `handlers` are offered beside the built-in ones. `outside` opens the connections in the event
    loop, if not as the settings say.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        import_handlers(settings.handlers)
        async with open_parts(settings, handlers, outside() if outside else None) as parts:
            app.state.parts = parts
            log.info(
                "worker started",
                worker_id=parts.identity.worker_id,
                url=parts.identity.url,
                capacity=parts.held.capacity,
                handlers=[one.name for one in parts.identity.handlers],
            )
            yield

    app = FastAPI(
        title="Oncue worker",
        version=__version__,
        summary="What a dispatcher asks of a worker.",
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,
        strict_content_type=False,
        generate_unique_id_function=_operation_id,
    )
    app.include_router(guarded)
    app.include_router(opened)
    install_problems(app)
    app.add_middleware(ShortRun)
    app.add_middleware(Guard, tokens=settings.accepted_tokens)
    StandaloneDocs(app=app)
    _describe_exactly(app)
    return app


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document of the worker; needs no environment and opens nothing."""
    return create_app(WorkerSettings.model_construct(internal_token=())).openapi()


def serve(settings: WorkerSettings) -> int:
    """Run a worker until it is told to end; the exit code is 0 after an orderly end."""
    configure_logs(settings.log_level, settings.log_json)
    try:
        import_handlers(settings.handlers)
        listener = listen(settings)
    except (HandlersNotLoaded, OSError) as error:
        sys.stderr.write(f"oncue worker: {_say(error, settings)}\n")
        return BAD_SETTINGS_EXIT_CODE
    actual = settings.model_copy(update={"port": listener.getsockname()[1]})
    if actual.exit_with_stdin:
        threading.Thread(target=_end_with_stdin, name="oncue-stdin", daemon=True).start()
    return _run_loop(create_app(actual), actual, listener)


def main() -> int:
    """Run a worker as the environment says."""
    try:
        return serve(read_settings())
    except SettingsError as error:
        sys.stderr.write(f"oncue worker: {error}\n")
        return BAD_SETTINGS_EXIT_CODE


class Server(uvicorn.Server):
    """A server that leaves the signals to us: its own handling would end the process too early."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


def http_server(app: FastAPI) -> Server:
    """Return the server of a worker's app; nothing listens yet."""
    config = uvicorn.Config(
        app,
        loop="none",
        http=Doorway,
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        headers=ANSWER_HEADERS,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=75,
    )
    return Server(config)


def _run_loop(app: FastAPI, settings: WorkerSettings, listener: socket.socket) -> int:
    server = http_server(app)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    shutdown = Shutdown(
        settings.grace_seconds, lambda: _parts(app), lambda: setattr(server, "should_exit", True)
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: shutdown.ask(loop))
    # What was imported lives as long as the process: the collector need not walk it again.
    gc.collect()
    gc.freeze()
    # Runs under way are many objects and hardly a cycle: look for cycles more rarely.
    gc.set_threshold(*COLLECT_AFTER)
    serving = loop.create_task(server.serve(sockets=[listener]))
    while not serving.done():
        try:
            loop.run_until_complete(serving)
        except (SystemExit, KeyboardInterrupt):
            if serving.done():
                raise
            # A task that a handler started raised it: that ends the run, not the worker.
            log.exception("a task of a handler tried to end the worker")
    shutdown.finish()
    return 0 if server.started else 1


def _parts(app: FastAPI) -> Parts | None:
    return getattr(app.state, "parts", None)


def listen(settings: WorkerSettings) -> socket.socket:
    """Return a socket that listens where the settings say."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    listener.setblocking(False)
    return listener


def _say(error: Exception, settings: WorkerSettings) -> str:
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return f"cannot listen on {settings.host} port {settings.port}: {reason}"
    return str(error)


def _end_with_stdin() -> None:
    """Ask for a quick end when the parent, who holds the other end, is gone.

    Its dispatcher is gone with it: there is nobody to report to, and the port is wanted.
    """
    with contextlib.suppress(OSError, ValueError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(HURRY_SECONDS)
    # The second one means: do not wait for the runs, return them.
    os.kill(os.getpid(), signal.SIGTERM)


def _operation_id(route: APIRoute) -> str:
    return route.name


def _describe_exactly(app: FastAPI) -> None:
    """Add to the document what FastAPI cannot know: problem details, and 64 bits for integers."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas["Problem"] = PROBLEM_SCHEMA
            _widen_integers(schemas)
            for own in (
                "ReceivedRuns",
                "UnreadableRun",
            ):  # how RunRequest is read; none of the wire
                schemas.pop(own, None)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _widen_integers(node: Any) -> None:
    if isinstance(node, dict):
        if node.get("type") == "integer":
            node.setdefault("format", "int64")
            for limit in node.keys() & {"minimum", "maximum"}:
                node[limit] = int(node[limit])  # FastAPI writes 1.0
                if abs(node[limit]) >= 2**63 - 1:
                    del node[limit]  # the format says it
        for child in node.values():
            _widen_integers(child)
    elif isinstance(node, list):
        for child in node:
            _widen_integers(child)
