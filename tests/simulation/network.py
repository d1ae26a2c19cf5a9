"""The simulated network: HTTP between nodes that is delayed, lost, doubled, cut or refused."""

from __future__ import annotations

import asyncio
import contextvars
import http.client
import random
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import structlog
from sqlalchemy.util.concurrency import await_only

from tests.simulation.history import History
from tests.simulation.lean import left_out
from tests.simulation.machine import PROCESS, Process, State, VirtualLoop
from tests.support.checker import RetryAsked

log = structlog.get_logger(__name__)

LATEST_COPY_SECONDS: Final = 20.0
"""How late a doubled request may come; a worker remembers runs for ten minutes."""
LONGEST_WAY_SECONDS: Final = 15.0
"""No message is on its way for longer: it would outlive the fault that slows it, with its locks."""
_RETRY: Final = re.compile(r"/openapi/jobs/(\d+)/retry$")


class Refused(Exception):
    """Nobody listens there."""


class Unreachable(Exception):
    """No connection within the time given."""


class Broken(Exception):
    """The connection ended before an answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer."""

    status: int
    body: bytes
    headers: Mapping[str, str]


class Network:
    """Who reaches whom, how fast, and what is lost on the way. Nodes are named, as hosts are."""

    def __init__(self, loop: VirtualLoop, dice: random.Random, history: History) -> None:
        self._dice = dice
        self._history = history
        self._loop = loop
        self.processes: dict[str, Process | None] = {}
        self.cuts: dict[tuple[str, str], int] = {}
        self.barred: set[tuple[str, str]] = set()
        """Who can open no connection to whom, as behind a firewall; answers still get through."""
        self.slowness: dict[str, float] = {}
        self.crash: Callable[[Process, str], None] = lambda process, _why: process.die()
        self.faults: list[str] = []
        """Requests that ended with an exception: none may."""
        self.loss = 0.0
        self.doubling = 0.0

    async def arrive(self, label: str) -> None:
        """Be at a point where a process meets the outside: here it may be made to die."""
        self._history.step(label)
        process = PROCESS.get()
        if process is not None and process.doomed_at[1] and process.doomed_at[0] in label:
            where, left = process.doomed_at
            process.doomed_at = (where, left - 1)
            if left == 1:
                self.crash(process, f"at {label}")
                await _never()

    def cut(self, a: str, b: str) -> None:
        """Let nothing pass from `a` to `b`."""
        self.cuts[a, b] = self.cuts.get((a, b), 0) + 1

    def mend(self, a: str, b: str) -> None:
        """Take back one cut."""
        left = self.cuts.pop((a, b)) - 1
        if left:
            self.cuts[a, b] = left

    def latency(self, a: str, b: str) -> float:
        """Seconds that a message takes now."""
        dice = self._dice
        seconds = 0.0002 + dice.expovariate(700.0)
        if dice.random() < 0.01:
            seconds += dice.uniform(0.0, 0.5)
        if self.slowness:
            seconds *= max(self.slowness.get(a, 1.0), self.slowness.get(b, 1.0))
            seconds = min(seconds, LONGEST_WAY_SECONDS)
        return seconds

    async def travel(self, a: str, b: str) -> None:
        """Be on the way from `a` to `b`."""
        await self._loop.after(self.latency(a, b))

    def listening(self, node: str) -> Process | None:
        """The process that a connection to a node reaches now; a frozen one's kernel accepts."""
        process = self.processes.get(node)
        return None if process is None or process.serves is None else process

    async def exchange(
        self,
        source: str,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str],
        *,
        connect_seconds: float = 1e9,
    ) -> Answer:
        """Send a request and return the answer; the caller bounds the whole time.

        Raises:
            Refused, Unreachable, Broken: there is none.
        """
        target = urlsplit(url).hostname or ""
        dice = self._dice
        ways = {(source, target), (target, source)}
        if not ways.isdisjoint(self.cuts) or (source, target) in self.barred:
            await asyncio.sleep(connect_seconds)
            raise Unreachable(target)
        await self.arrive(f"{source}>{target}")
        await self.travel(source, target)
        server = self.listening(target)
        if server is None:
            raise Refused(target)
        fate = dice.random()
        if fate < self.loss / 2:
            raise Broken("the request was lost")
        if fate < self.loss:
            await _never()
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._serve(server, method, url, body, headers, answer)
        if dice.random() < self.doubling:
            asyncio.get_running_loop().call_later(
                dice.uniform(0.0, LATEST_COPY_SECONDS),
                self._serve_copy,
                target, method, url, body, headers,
                context=contextvars.Context(),
            )  # fmt: skip
        reply = await answer
        await self.arrive(f"{source}<{target}")
        if (target, source) in self.cuts:
            await _never()
        fate = dice.random()
        if fate < self.loss / 2:
            raise Broken("the answer was lost")
        if fate < self.loss:
            await _never()
        await self.travel(target, source)
        return reply

    def _serve_copy(
        self, target: str, method: str, url: str, body: bytes | None, headers: Mapping[str, str]
    ) -> None:
        server = self.listening(target)
        if server is not None and server.state is not State.DEAD:
            self._history.say(f"a copy arrives: {method} {url}")
            if (asked := _RETRY.search(url)) is not None:
                # Each is one: a caller who may be heard twice has asked for two attempts.
                self._history.add(RetryAsked(self._history.now, int(asked[1])))
            self._serve(server, method, url, body, headers, None)

    def _serve(
        self,
        server: Process,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str],
        answer: asyncio.Future[Answer] | None,
    ) -> None:
        def lose() -> None:
            if answer is not None and not answer.done():
                answer.set_exception(Broken("the other side is gone"))

        application = server.serves
        server.requests += 1

        async def handle() -> None:
            try:
                reply = await call_application(application, method, url, body, headers)
            except Exception as error:
                log.exception("a request failed")
                self.faults.append(f"{method} {url} on {server.name} raised {error!r}")
                reply = Answer(500, b"", {})
            server.requests -= 1
            if lose in server.at_death:
                server.at_death.remove(lose)
            if answer is not None and not answer.done():
                answer.set_result(reply)

        server.at_death.append(lose)
        _ = server.run(handle())


async def call_application(
    application: Any, method: str, url: str, body: bytes | None, headers: Mapping[str, str]
) -> Answer:
    """Ask an ASGI application as an HTTP server would."""
    parts = urlsplit(url)
    content = body or b""
    given = {"host": parts.netloc, "content-length": str(len(content)), **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": parts.path,
        "raw_path": parts.path.encode(),
        "query_string": parts.query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        "client": ("client", 1),
        "server": (parts.hostname, parts.port),
        "state": {},
    }
    requests = [{"type": "http.request", "body": content, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop()
        await _never()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await application(scope, receive, send)
    if sent[0]["status"] in (404, 405) and left_out(method, parts.path):
        raise NotImplementedError(f"{method} {parts.path} is not among the routes in lean.py")
    return Answer(
        sent[0]["status"],
        b"".join(message.get("body", b"") for message in sent[1:]),
        {name.decode(): value.decode() for name, value in sent[0]["headers"]},
    )


class Session:
    """The part of `aiohttp.ClientSession` that the services use, over the simulated network."""

    def __init__(
        self,
        network: Network,
        node: str,
        *,
        headers: Mapping[str, str] | None = None,
        total_seconds: float = 300.0,
        connect_seconds: float = 30.0,
    ) -> None:
        self._network = network
        self._node = node
        self._headers = dict(headers or {})
        self._total = total_seconds
        self._connect = connect_seconds

    def post(self, url: str, *, data: bytes, allow_redirects: bool) -> _Exchange:
        """POST within the session's own limits."""
        return self._ask("POST", url, data, {}, self._total, self._connect)

    def request(
        self,
        method: str,
        url: str,
        *,
        data: bytes | None,
        headers: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
        allow_redirects: bool,
    ) -> _Exchange:
        """Send any request within its own limits."""
        total, connect = timeout.total or self._total, timeout.sock_connect or self._connect
        return self._ask(method, url, data, headers, total, connect)

    async def close(self) -> None:
        """Close nothing: connections are not kept."""

    def _ask(
        self,
        method: str,
        url: str,
        data: bytes | None,
        headers: Mapping[str, str],
        total: float,
        connect: float,
    ) -> _Exchange:
        return _Exchange(
            self._send(method, url, data, {**self._headers, **headers}, total, connect)
        )

    async def _send(
        self,
        method: str,
        url: str,
        data: bytes | None,
        headers: Mapping[str, str],
        total: float,
        connect: float,
    ) -> _Response:
        try:
            async with asyncio.timeout(total):
                return _Response(
                    await self._network.exchange(
                        self._node, method, url, data, headers, connect_seconds=connect
                    )
                )
        except Refused as error:
            raise aiohttp.ClientConnectionError(f"refused by {error}") from None
        except Unreachable as error:
            raise aiohttp.ConnectionTimeoutError(f"no way to {error}") from None
        except Broken as error:
            raise aiohttp.ServerDisconnectedError(str(error)) from None


class _Response:
    def __init__(self, answer: Answer) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self.content = self
        self.content_type = answer.headers.get("content-type", "").partition(";")[0]
        self._body = answer.body

    async def read(self) -> bytes:
        return self._body

    async def iter_chunked(self, _size: int) -> Any:
        yield self._body


class _Exchange:
    def __init__(self, work: Coroutine[Any, Any, _Response]) -> None:
        self._work = work

    async def __aenter__(self) -> _Response:
        return await self._work

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


class BlockingConnection:
    """The part of `http.client.HTTPConnection` that beats use, from a simulated thread."""

    def __init__(self, network: Network, node: str, url: str, *, seconds: float) -> None:
        self._network = network
        self._node = node
        self._base = url
        self._seconds = seconds
        self._answer: Answer | None = None

    def request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Send, and wait for the whole answer."""
        self._answer = await_only(self._ask(method, self._base + path, body, headers))

    def getresponse(self) -> BlockingConnection:
        """Return the answer."""
        return self

    @property
    def status(self) -> int:
        """The answer's status."""
        assert self._answer is not None
        return self._answer.status

    def read(self) -> bytes:
        """The answer's body."""
        assert self._answer is not None
        return self._answer.body

    def close(self) -> None:
        """Close nothing: connections are not kept."""

    async def _ask(self, method: str, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        try:
            async with asyncio.timeout(self._seconds):
                return await self._network.exchange(
                    self._node, method, url, body, headers, connect_seconds=self._seconds
                )
        except Refused as error:
            raise ConnectionRefusedError(str(error)) from None
        except Unreachable:
            raise TimeoutError from None
        except Broken as error:
            raise http.client.RemoteDisconnected(str(error)) from None


async def _never() -> None:
    await asyncio.get_running_loop().create_future()
