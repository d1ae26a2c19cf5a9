"""A whole platform inside the process of a test: `Platform`, and `AsyncPlatform` to be awaited.

It is the real dispatcher and the real worker, each in a thread with an event loop of its own,
over SQLite and an embedded Valkey. Their code is found through the entry points of the group
`oncue.platform`, so this file imports neither.
"""

from __future__ import annotations

import asyncio
import importlib
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final, Self

import httpx

from oncue._given import POOL
from oncue._receiver import AsyncWebhooks, Webhooks
from oncue.async_client import AsyncClient
from oncue.client import Client
from oncue.handlers import REGISTRY, RegisteredHandler, describe_handler

GROUP: Final = "oncue.platform"
START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 30.0

Handlers = Mapping[str, Callable[..., Any]] | Iterable[Callable[..., Any] | ModuleType | str] | None


class PlatformUnavailable(RuntimeError):
    """A platform cannot be run here; the message is one sentence that says what is missing."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What a part of a platform tells once it runs.

    `environment` is what its worker must be told, as `ONCUE_*` variables; `unknown` names the
    given settings that are none of this part.
    """

    url: str
    environment: Mapping[str, str] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()


Part = AbstractAsyncContextManager[Opened]


class Platform:
    """The whole platform for a test: submit with `client`, look at what came to `webhooks`.

        with Platform(handlers=[send_invoice]) as platform:
            job = platform.client.submit("send-invoice", {"order": 1})
            assert platform.client.wait(job, timeout=10).succeeded

    `handlers` are decorated functions, modules or their names (the handlers that stand in and
    below them), or a mapping of names to plain functions; left out, all that are registered. The
    built-in ones are always there. A handler runs in this process, so it sees what a test has
    patched; one with `isolation="process"` runs in a child that imports its module.

    `settings` are what the two processes could be told, under their `ONCUE_*` names; this
    process's environment and `.env` are not read. State lives in a directory of its own that
    goes with the platform; any number of platforms may run at once.

    Raises:
        PlatformUnavailable: the server is not installed, or refuses to start.
        ValueError: a handler or a setting is not usable.
    """

    def __init__(
        self,
        handlers: Handlers = None,
        *,
        capacity: int = 32,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._handlers = chosen_handlers(handlers)
        self._settings = {"ONCUE_WORKER_CAPACITY": str(capacity), **(settings or {})}
        self._ends = ExitStack()
        self._environment: Mapping[str, str] = {}
        self._webhooks: Webhooks | None = None
        self._client: Client | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """Where the API listens, as http://127.0.0.1:PORT."""
        self._must_run()
        return self._url

    @property
    def client(self) -> Client:
        """A client of this platform; it is closed with it."""
        self._must_run()
        assert self._client is not None
        return self._client

    @property
    def webhooks(self) -> Webhooks:
        """The receiver of callbacks: submit with `callback_url=platform.webhooks.url`."""
        self._must_run()
        assert self._webhooks is not None
        return self._webhooks

    @property
    def webhook_secret(self) -> str:
        """The secret that callbacks are signed with, for a receiver of your own."""
        self._must_run()
        return self._environment["ONCUE_WEBHOOK_SECRET"]

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which code under test finds this platform: `Client()` reads them."""
        return {"ONCUE_URL": self.url, "ONCUE_API_KEY": ""}

    def start(self) -> Self:
        """Start it and return once jobs are taken and run; a `with` statement does so."""
        if self._client is not None:
            raise RuntimeError("this platform runs already")
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End everything that belongs to it; what still runs is stopped, and its state removed."""
        self._client = None
        self._ends.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        open_dispatcher, open_worker = _load("dispatcher"), _load("worker")
        # A short path: a unix socket lives in it.
        home = Path(tempfile.mkdtemp(prefix="oncue-"))
        self._ends.callback(shutil.rmtree, home, ignore_errors=True)
        self._webhooks = Webhooks(lambda: self._environment["ONCUE_WEBHOOK_SECRET"])
        self._ends.callback(self._webhooks.close)
        dispatcher = self._run("oncue-dispatcher", lambda: open_dispatcher(home, self._settings))
        self._environment = dispatcher.environment
        told = {**dispatcher.environment, **self._settings}
        worker = self._run("oncue-worker", lambda: open_worker(told, self._handlers))
        if unknown := dispatcher.unknown & worker.unknown & self._settings.keys():
            raise ValueError(
                f"there is no setting {', '.join(sorted(unknown))}: see docs/reference"
            )
        self._url = dispatcher.url
        # A transport of its own: a developer's proxy does not know this address.
        client = Client(
            self._url,
            api_key="",
            transport=httpx.HTTPTransport(limits=POOL, trust_env=False),
        )
        self._ends.callback(client.close)
        self._client = client

    def _run(self, name: str, open_part: Callable[[], Part]) -> Opened:
        running = _PartThread(name, open_part)
        self._ends.callback(running.end)
        return running.begin()

    def _must_run(self) -> None:
        if self._client is None:
            raise RuntimeError("this platform does not run: use it in a `with` statement")


class AsyncPlatform:
    """`Platform` for async tests: the same arguments, with an `AsyncClient`.

        async with AsyncPlatform(handlers=[send_invoice]) as platform:
            job = await platform.client.submit("send-invoice", {"order": 1})
            await platform.client.wait(job, timeout=10, check=True)

    It runs in threads of its own, so a test that blocks its loop does not stop it.
    """

    def __init__(
        self,
        handlers: Handlers = None,
        *,
        capacity: int = 32,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._platform = Platform(handlers, capacity=capacity, settings=settings)
        self._client: AsyncClient | None = None

    @property
    def url(self) -> str:
        """Where the API listens."""
        return self._platform.url

    @property
    def client(self) -> AsyncClient:
        """A client of this platform; it is closed with it."""
        if self._client is None:
            raise RuntimeError("this platform does not run: use it in an `async with` statement")
        return self._client

    @property
    def webhooks(self) -> AsyncWebhooks:
        """The receiver of callbacks, whose `wait` is awaited."""
        return AsyncWebhooks(self._platform.webhooks)

    @property
    def webhook_secret(self) -> str:
        """The secret that callbacks are signed with, for a receiver of your own."""
        return self._platform.webhook_secret

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which code under test finds this platform."""
        return self._platform.environment

    async def start(self) -> Self:
        """Start it: see `Platform.start`."""
        await asyncio.to_thread(self._platform.start)
        self._client = AsyncClient(
            self._platform.url,
            api_key="",
            transport=httpx.AsyncHTTPTransport(limits=POOL, trust_env=False),
        )
        return self

    async def aclose(self) -> None:
        """End everything that belongs to it: see `Platform.close`."""
        client, self._client = self._client, None
        try:
            if client is not None:
                await client.aclose()
        finally:
            await asyncio.to_thread(self._platform.close)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


class _PartThread:
    """One part of a platform, in a thread and an event loop of its own."""

    def __init__(self, name: str, open_part: Callable[[], Part]) -> None:
        self._open = open_part
        self._opened: Future[Opened] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        # A daemon: a platform that nobody closed must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def begin(self) -> Opened:
        """Start it and return what it tells.

        Raises:
            PlatformUnavailable: it refuses to start, or takes over a minute.
        """
        self._thread.start()
        try:
            return self._opened.result(START_SECONDS)
        except TimeoutError:
            raise PlatformUnavailable(
                f"{self._thread.name} has not started within {START_SECONDS:g} s"
            ) from None

    def end(self) -> None:
        """Stop it and return when its thread has ended."""
        if not self._thread.is_alive():
            return
        if self._loop is not None and self._stopping is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            warnings.warn(
                f"{self._thread.name} has not ended within {STOP_SECONDS:g} s",
                RuntimeWarning,
                stacklevel=2,
            )

    def _main(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)

    async def _live(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        async with self._open() as opened:
            self._opened.set_result(opened)
            await self._stopping.wait()


def _load(name: str) -> Callable[..., Part]:
    """Load what opens a part.

    Raises:
        PlatformUnavailable: it, or what it needs, is not installed.
    """
    found = list(entry_points(group=GROUP, name=name))
    try:
        if not found:
            raise ModuleNotFoundError(f"no entry point {name!r} in the group {GROUP!r}")
        opener: Callable[..., Part] = found[0].load()
    except ImportError as error:
        raise PlatformUnavailable(
            "a platform in this process needs the server: pip install 'oncue[server]' "
            f"({error.msg})"
        ) from error
    return opener


def chosen_handlers(handlers: Handlers) -> dict[str, RegisteredHandler]:
    """Return the handlers that are meant, by name.

    Raises:
        ValueError: a function has no name, a name is taken twice, or a handler that wants a child
            process cannot be imported by one.
    """
    if handlers is None:
        found = dict(REGISTRY)
    elif isinstance(handlers, Mapping):
        found = {name: _named(name, function) for name, function in handlers.items()}
    elif isinstance(handlers, str):
        raise ValueError(f"handlers is a list, as [{handlers!r}]")
    else:
        found = {}
        for one in handlers:
            for registered in _registered(one):
                if found.setdefault(registered.name, registered) is not registered:
                    raise ValueError(f"two handlers are named {registered.name!r}")
    for registered in found.values():
        _must_be_importable(registered)
    return found


def modules_for_children(handlers: Iterable[RegisteredHandler]) -> tuple[str, ...]:
    """Return the modules that a child process imports to find the handlers that want one."""
    found = {one.function.__module__ for one in handlers if one.isolation == "process"}
    return tuple(sorted(found))


def _named(name: str, function: Callable[..., Any]) -> RegisteredHandler:
    known = next((one for one in REGISTRY.values() if one.function is function), None)
    if known is not None and known.name == name:
        return known
    return describe_handler(name, function)


def _registered(one: Callable[..., Any] | ModuleType | str) -> Sequence[RegisteredHandler]:
    if isinstance(one, str):
        one = importlib.import_module(one)
    if isinstance(one, ModuleType):
        name = one.__name__
        found = [
            known
            for known in REGISTRY.values()
            if f"{known.function.__module__}.".startswith(f"{name}.")
        ]
        if not found:
            raise ValueError(f"the module {name!r} registers no handler")
        return found
    found = [known for known in REGISTRY.values() if known.function is one]
    if not found:
        name = getattr(one, "__qualname__", repr(one))
        raise ValueError(f"{name} is no handler: decorate it, or pass {{name: function}}")
    return found


def _must_be_importable(registered: RegisteredHandler) -> None:
    if registered.isolation != "process":
        return
    function = registered.function
    module = sys.modules.get(function.__module__)
    local = "<locals>" in function.__qualname__ or function.__module__ == "__main__"
    if local or module is None:
        raise ValueError(
            f"handler {registered.name!r} runs in a child process, which imports it: "
            "define it at the top level of a module that can be imported"
        )


__all__ = [
    "AsyncPlatform",
    "Handlers",
    "Opened",
    "Platform",
    "PlatformUnavailable",
    "chosen_handlers",
    "modules_for_children",
]
