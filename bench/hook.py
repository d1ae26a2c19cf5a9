"""The receiver of webhooks: the least that is an HTTP server, so that it costs little.

It answers 200 and keeps what came and when; bodies are read when somebody asks.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, cast

FEWEST: Final = 1000
"""So many are read at a time."""
ANSWER: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def job_id(body: Any) -> int:
    """Return the job's id in a webhook, also in that of a reference stack."""
    return int(body["id"] if "id" in body else body["data"]["jobId"])


class Hook:
    """A receiver on a free loopback port; `job_of` finds the job's id in a body."""

    def __init__(self, job_of: Callable[[Any], int] = job_id) -> None:
        self._job_of = job_of
        self._server: asyncio.Server | None = None
        self._fresh: list[tuple[float, bytes]] = []
        self._received: dict[int, float] = {}
        self._wanted = 1
        self._enough = asyncio.Event()

    async def start(self) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self._keep), "127.0.0.1", 0, backlog=1024
        )

    async def close(self) -> None:
        """Stop listening, and drop all connections."""
        if self._server is not None:
            self._server.close()

    @property
    def url(self) -> str:
        """Where it listens."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/hook"

    def forget(self) -> None:
        """Begin anew."""
        self._fresh.clear()
        self._received.clear()

    def received(self) -> dict[int, float]:
        """When each job's first webhook came, in seconds of the monotonic clock."""
        for at, body in self._fresh:
            self._received.setdefault(self._job_of(json.loads(body)), at)
        self._fresh.clear()
        return self._received

    async def wait_for(self, count: int, silence: float = 20) -> dict[int, float]:
        """Return what came once that are `count` jobs, or after `silence` seconds.

        The seconds begin anew whenever something came.
        """
        while len(self.received()) < count:
            self._enough.clear()
            self._wanted = min(count - len(self._received), FEWEST)
            try:
                async with asyncio.timeout(silence):
                    await self._enough.wait()
            except TimeoutError:
                if not self._fresh:
                    break
        return self.received()

    def _keep(self, body: bytes) -> None:
        self._fresh.append((time.monotonic(), body))
        if len(self._fresh) >= self._wanted:
            self._enough.set()


@asynccontextmanager
async def listening(job_of: Callable[[Any], int] = job_id) -> AsyncIterator[Hook]:
    """Lend a receiver that listens."""
    hook = Hook(job_of)
    await hook.start()
    try:
        yield hook
    finally:
        await hook.close()


class _Connection(asyncio.Protocol):
    """One connection of a client that may send several requests."""

    def __init__(self, keep: Callable[[bytes], None]) -> None:
        self._keep = keep
        self._got = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep where to answer."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        """Answer each whole request."""
        assert self._transport is not None
        self._got += data
        while (end := self._got.find(b"\r\n\r\n")) >= 0:
            head = self._got[:end].lower()
            found = head.find(b"content-length:")
            length = int(head[found + 15 :].split(b"\r\n", 1)[0]) if found >= 0 else 0
            if len(self._got) < end + 4 + length:
                return
            self._keep(self._got[end + 4 : end + 4 + length])
            self._got = self._got[end + 4 + length :]
            self._transport.write(ANSWER)
