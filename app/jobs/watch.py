"""Streams that wait for news: signals wake them, and one query a second looks for all together."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Generic, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from app.edge.problems import Problem
from app.ground import Ground
from app.lifecycle.run_logs import read_job_stamps, read_log_stamps
from app.plumbing.bus import ENDED, KEYS, LOGGED, Signal
from app.plumbing.database import Database, DatabaseUnavailable
from app.plumbing.loops import Loop

LOOK_SECONDS: Final = 1.0
KEYS_AT_ONCE: Final = 500
Key = TypeVar("Key", int, str)
Stamp = tuple[Any, ...]
LetsOn = Callable[[], Awaitable[bool]]
"""Tells whether the reader of a stream may still read it. It is asked before each look, which
comes at once when a key has changed and no later than the next line of silence."""


class Watch(Generic[Key]):
    """Wakes those who wait for news of a key, here or elsewhere; a lost signal costs a second."""

    def __init__(
        self,
        name: str,
        database: Database,
        read: Callable[[AsyncConnection, Sequence[Key]], Awaitable[dict[Key, Stamp]]],
    ) -> None:
        self._database = database
        self._read: Callable[[AsyncConnection, Sequence[Key]], Awaitable[dict[Key, Stamp]]] = read
        self._waiting: dict[Key, dict[asyncio.Event, None]] = defaultdict(dict)
        self._stamps: dict[Key, Stamp] = {}
        self._any = asyncio.Event()
        self._loop = Loop(name, self._look, expected=(DatabaseUnavailable,))

    def start(self) -> None:
        """Start looking for news whose signal was lost."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop looking."""
        await self._loop.stop()

    @contextmanager
    def waiting(self, key: Key) -> Iterator[asyncio.Event]:
        """Give an event that is set when there may be news of the key."""
        event = asyncio.Event()
        self._waiting[key][event] = None
        self._any.set()
        try:
            yield event
        finally:
            events = self._waiting[key]
            events.pop(event, None)
            if not events:
                del self._waiting[key]
                self._stamps.pop(key, None)

    def wake(self, key: Key) -> None:
        """Say that there may be news of a key."""
        for event in self._waiting.get(key, ()):
            event.set()

    def wake_all(self) -> None:
        """Let everybody look."""
        for key in list(self._waiting):
            self.wake(key)

    async def _look(self) -> None:
        await self._any.wait()
        await asyncio.sleep(LOOK_SECONDS)
        keys = list(self._waiting)
        if not keys:
            self._any.clear()
            return
        for start in range(0, len(keys), KEYS_AT_ONCE):
            chunk = keys[start : start + KEYS_AT_ONCE]
            found = await self._database.read(partial(self._stamps_of, chunk))
            for key in chunk:
                stamp = found.get(key, ())
                if key in self._waiting and self._stamps.get(key) != stamp:
                    self._stamps[key] = stamp
                    self.wake(key)

    async def _stamps_of(
        self, keys: Sequence[Key], connection: AsyncConnection
    ) -> dict[Key, Stamp]:
        return await self._read(connection, keys)


class Streams:
    """The open event streams of this process: how many there may be, and what wakes them."""

    def __init__(self, ground: Ground) -> None:
        self._most = ground.settings.most_streams
        self._metrics = ground.metrics
        self._open = 0
        self.closed = False
        """True once every stream should end: the process is about to."""
        self.logs: Watch[str] = Watch("log-streams", ground.database, read_log_stamps)
        self.jobs: Watch[int] = Watch("job-streams", ground.database, read_job_stamps)
        ground.bus.subscribe(ENDED, self._on_ended)
        ground.bus.subscribe(LOGGED, self._on_logged)
        ground.bus.subscribe(KEYS, self._on_keys)

    def start(self) -> None:
        """Start looking for news."""
        self.logs.start()
        self.jobs.start()

    def close(self) -> None:
        """Let every stream end; its caller goes on at another dispatcher."""
        self.closed = True
        self._wake_all()

    async def stop(self) -> None:
        """Let every stream end, and stop."""
        self.close()
        await self.logs.stop()
        await self.jobs.stop()

    @property
    def count(self) -> int:
        """How many streams are open."""
        return self._open

    def admit(self) -> None:
        """Count one more stream, until `leave`.

        Raises:
            Problem: `too_many_streams`, or `not_ready` when the process is about to end.
        """
        if self.closed:
            raise Problem("not_ready", "This process is about to end: connect again.")
        if self._open >= self._most:
            raise Problem(
                "too_many_streams",
                f"This process has {self._most} streams open: try again later, or read pages.",
            )
        self._open += 1
        self._metrics.streams.set(self._open)

    def leave(self) -> None:
        """Count one stream less."""
        self._open -= 1
        self._metrics.streams.set(self._open)

    def _on_ended(self, signal: Signal) -> None:
        for job_id, execution_id in signal:
            self.jobs.wake(job_id)
            self.logs.wake(execution_id)

    def _on_keys(self, _signal: Signal) -> None:
        # Those whose key has ended must end.
        self._wake_all()

    def _wake_all(self) -> None:
        self.logs.wake_all()
        self.jobs.wake_all()

    def _on_logged(self, signal: Signal) -> None:
        for execution_id, job_id in signal:
            self.logs.wake(execution_id)
            self.jobs.wake(job_id)
