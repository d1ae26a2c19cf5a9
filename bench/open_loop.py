"""An open load: requests are sent when their time has come, whether or not others are answered.

A closed load (wrk) slows down with the server; callers in the world do not.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final, cast
from urllib.parse import urlsplit

from bench.drive import NUMBER

TICK_SECONDS: Final = 0.002
ANSWERED_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 0.05
_LENGTH: Final = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_RETRY: Final = re.compile(rb"retry-after: (\d+)", re.IGNORECASE)


@dataclass
class Offered:
    """What became of an open load. Latencies are seconds from when a request was to be sent."""

    by_status: Counter[int] = field(default_factory=Counter)
    accepted_seconds: list[float] = field(default_factory=list)
    refused_seconds: list[float] = field(default_factory=list)
    retry_after: Counter[int] = field(default_factory=Counter)
    sent: int = 0
    not_sent: int = 0
    """For want of a connection: the load was less than it should be."""
    broken: int = 0


class _Connection(asyncio.Protocol):
    """One keep-alive connection with one request at a time."""

    def __init__(self, load: OpenLoad) -> None:
        self._load = load
        self._got = b""
        self.due = 0.0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes, due: float) -> None:
        """Send a request that was due at a moment of the monotonic clock."""
        assert self.transport is not None
        self.due = due
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, end, body = self._got.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not end or length is None or len(body) < int(length[1]):
            return
        self._got = b""
        due, self.due = self.due, 0.0
        self._load.answered(self, head, time.monotonic() - due)

    def connection_lost(self, _error: Exception | None) -> None:
        self._load.lost(self)


class OpenLoad:
    """POSTs one body, each time under a number of its own, at a rate."""

    def __init__(self, url: str, body: str, *, connections: int) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        head = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body.encode())}\r\n\r\n"
        )
        before, _, after = body.partition(NUMBER)
        self._before, self._after = (head + before).encode(), after.encode()
        self._most = connections
        self._idle: deque[_Connection] = deque()
        self._open: set[_Connection] = set()
        self.offered = Offered()

    async def offer(self, rate: float, seconds: float) -> Offered:
        """Offer `rate` requests a second, and return once all that were sent are answered."""
        await self._connect()
        began = time.monotonic()
        number = 0
        while (elapsed := time.monotonic() - began) < seconds:
            while number < elapsed * rate:
                number += 1
                self._send(number, began + number / rate)
            await asyncio.sleep(TICK_SECONDS)
        await self._all_answered()
        for connection in list(self._open):
            assert connection.transport is not None
            connection.transport.close()
        return self.offered

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(self._most):
            _, connection = await loop.create_connection(
                lambda: _Connection(self), self._host, self._port
            )
            self._open.add(connection)
            self._idle.append(connection)

    def _send(self, number: int, due: float) -> None:
        if not self._idle:
            self.offered.not_sent += 1
            return
        self.offered.sent += 1
        request = b"%s%012d%s" % (self._before, number, self._after)
        # The one that was idle the longest: all of them are kept alive.
        self._idle.popleft().send(request, due)

    async def _all_answered(self) -> None:
        for _ in range(round(ANSWERED_SECONDS / LOOK_SECONDS)):
            if len(self._idle) == len(self._open):
                return
            await asyncio.sleep(LOOK_SECONDS)
        self.offered.broken += len(self._open) - len(self._idle)

    def answered(self, connection: _Connection, head: bytes, took: float) -> None:
        """Note an answer."""
        status = int(head[9:12])
        self.offered.by_status[status] += 1
        kept = self.offered.accepted_seconds if status < 300 else self.offered.refused_seconds
        kept.append(took)
        if (told := _RETRY.search(head)) is not None and status >= 300:
            self.offered.retry_after[int(told[1])] += 1
        self._idle.append(connection)

    def lost(self, connection: _Connection) -> None:
        """Note a connection that is gone; what it had asked is not answered."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        elif connection.due:
            self.offered.broken += 1
