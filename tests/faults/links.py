"""TCP links that can be broken: a proxy of our own between any two parts of the platform."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import Enum
from typing import Final, TypeVar

from tests.support.ports import free_port

CHUNK_BYTES: Final = 65_536
RESET: Final = b"\x01\x00\x00\x00\x00\x00\x00\x00"
"""SO_LINGER with no time: closing sends a reset, as a machine that is gone would get one."""
Value = TypeVar("Value")


class Mode(Enum):
    """How a link is broken."""

    OPEN = "open"
    SLOW = "slow"
    """Each piece of data is late."""
    DOWN = "down"
    """Connections are reset, and new ones are closed at once."""
    SILENT = "silent"
    """Connections are accepted, and nothing arrives on the other side."""
    DEAF = "deaf"
    """What is asked arrives; the answers do not."""
    HALF_CLOSED = "half-closed"
    """The asking side is closed for the other one; its last answers still come."""


class Link:
    """One way from a port of its own to another; it carries what clients of that port say."""

    def __init__(self, name: str, target: int, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.target = target
        self.port = free_port()
        self._loop = loop
        self._mode = Mode.OPEN
        self._delay_seconds = 0.0
        self._opened = asyncio.Event()
        self._opened.set()
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)

    async def close(self) -> None:
        """Stop listening and reset what is connected."""
        if self._server is not None:
            self._server.close()
        self._reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def switch(self, mode: Mode, delay_seconds: float) -> None:
        """Break the link in a way, or mend it; bytes that were lost fail their connections."""
        lossy = self._mode in (Mode.SILENT, Mode.DEAF)
        self._mode, self._delay_seconds = mode, delay_seconds
        if mode is Mode.DOWN or (lossy and mode is Mode.OPEN):
            self._reset()
        if mode is Mode.HALF_CLOSED:
            for _client, server in list(self._pairs):
                with suppress(OSError, RuntimeError):
                    server.write_eof()

    def _reset(self) -> None:
        for pair in list(self._pairs):
            for writer in pair:
                _abort(writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._mode is Mode.DOWN:
                _abort(writer)
                return
            try:
                there, back = await asyncio.open_connection("127.0.0.1", self.target)
            except OSError:
                _abort(writer)
                return
            pair = (writer, back)
            self._pairs.add(pair)
            try:
                await asyncio.gather(
                    self._pump(reader, back, asks=True), self._pump(there, writer, asks=False)
                )
            finally:
                self._pairs.discard(pair)
                for one in pair:
                    _abort(one)
        except asyncio.CancelledError:
            _abort(writer)
        finally:
            self._tasks.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, asks: bool
    ) -> None:
        with suppress(OSError, RuntimeError):
            while data := await reader.read(CHUNK_BYTES):
                if self._mode is Mode.SLOW:
                    await asyncio.sleep(self._delay_seconds)
                if self._mode is Mode.SILENT or (self._mode is Mode.DEAF and not asks):
                    continue
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
            return
        _abort(writer)


class Links:
    """All links of one cluster, served by a thread of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()
        self._links: dict[str, Link] = {}

    def add(self, name: str, target: int = 0) -> Link:
        """Open a link, by a name such as `worker-1>redis`; `target` may be set later."""
        link = self._call(lambda: _made(Link(name, target, self._loop)))
        self._links[name] = link
        return link

    def __getitem__(self, name: str) -> Link:
        """The link of that name."""
        return self._links[name]

    def names(self) -> list[str]:
        """The names of all links, in the order in which they were added."""
        return list(self._links)

    def switch(self, name: str, mode: Mode, delay_seconds: float = 0.0) -> None:
        """Break or mend a link; returns when it has happened."""
        self._call(lambda: self._links[name].switch(mode, delay_seconds))

    def mend(self) -> None:
        """Mend all links."""
        for name in self._links:
            self.switch(name, Mode.OPEN)

    def close(self) -> None:
        """Close all links and end the thread."""
        for link in self._links.values():
            self._call(link.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Callable[[], Awaitable[Value]]) -> Value:
        async def run() -> Value:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)


async def _made(link: Link) -> Link:
    await link.open()
    return link


def _abort(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, ValueError):
        found = writer.get_extra_info("socket")
        if found is not None and not writer.transport.is_closing():
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
