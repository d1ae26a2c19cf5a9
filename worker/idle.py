"""Connections that wait for their next request: by receiver, few, and not for long."""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from worker.http1 import Connection

MOST_IDLE: Final = 512
IDLE_SECONDS: Final = 15.0
"""Less than most servers wait, so that seldom one closes while a request is on its way to it."""


class Origin(NamedTuple):
    """Where a connection leads; `host` is a name, or an address without brackets."""

    tls: bool
    host: str
    port: int


class IdleConnections:
    """Keeps usable connections. The latest is used first; the one that waits longest gives way."""

    def __init__(self) -> None:
        self._by_origin: dict[Origin, list[Connection]] = {}
        self._waiting: dict[Connection, tuple[Origin, float]] = {}
        """All of them, and since when; the longest first."""
        self._sweeper: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, origin: Origin, connection: Connection) -> None:
        """Keep a connection for the next request."""
        loop = asyncio.get_running_loop()
        self._waiting[connection] = origin, loop.time()
        self._by_origin.setdefault(origin, []).append(connection)
        if len(self._waiting) > MOST_IDLE:
            self._end(next(iter(self._waiting)))
        if self._sweeper is None:
            self._sweeper = loop.call_later(IDLE_SECONDS, self._sweep)

    def take(self, origin: Origin) -> Connection | None:
        """Return a connection to `origin` and keep it no more; None if there is none."""
        oldest = asyncio.get_running_loop().time() - IDLE_SECONDS
        while found := self._by_origin.get(origin):
            connection = found[-1]
            _, since = self._waiting[connection]
            if connection.usable and since > oldest:
                self.drop(connection)
                return connection
            self._end(connection)
        return None

    def drop(self, connection: Connection) -> None:
        """Keep a connection no more, if it was kept: it is taken, or has ended."""
        kept = self._waiting.pop(connection, None)
        if kept is None:
            return
        of_origin = self._by_origin[kept[0]]
        of_origin.remove(connection)
        if not of_origin:
            del self._by_origin[kept[0]]

    def close(self) -> None:
        """End them all."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in list(self._waiting):
            self._end(connection)

    def _sweep(self) -> None:
        """End those whose time is over, and come back for the next."""
        loop = asyncio.get_running_loop()
        self._sweeper = None
        for connection, (_, since) in list(self._waiting.items()):
            left = since + IDLE_SECONDS - loop.time()
            if left > 0:
                self._sweeper = loop.call_later(left, self._sweep)
                return
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        self.drop(connection)
        connection.abort()
