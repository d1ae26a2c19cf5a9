"""Long polls: each waits for a signal, and one query a second looks for all of them together."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Final

from app.ground import Ground
from app.lifecycle.reads import read_ended
from app.plumbing.bus import ENDED, KEYS, Signal
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.loops import Loop

LOOK_SECONDS: Final = 1.0


class Waiters:
    """Wakes callers who wait for a job when one of its executions is settled, here or elsewhere."""

    def __init__(self, ground: Ground) -> None:
        self._database = ground.database
        self._waiting: dict[int, dict[asyncio.Event, None]] = defaultdict(dict)
        self._any = asyncio.Event()
        self._closed = False
        self._loop = Loop("long-poll", self._look, expected=(DatabaseUnavailable,))
        ground.bus.subscribe(ENDED, self._on_ended)
        ground.bus.subscribe(KEYS, self._on_keys)

    @property
    def count(self) -> int:
        """How many callers wait now."""
        return sum(len(events) for events in self._waiting.values())

    def start(self) -> None:
        """Start looking for ends whose signal was lost."""
        self._loop.start()

    async def stop(self) -> None:
        """Let every waiting caller go, and stop."""
        self.close()
        await self._loop.stop()

    def close(self) -> None:
        """Let every waiting caller go: the process is about to end."""
        self._closed = True
        self._wake_all()

    def enter(self, job_id: int) -> asyncio.Event:
        """Register a caller before it reads the job, so that no end falls between."""
        event = asyncio.Event()
        self._waiting[job_id][event] = None
        self._any.set()
        if self._closed:
            event.set()
        return event

    def leave(self, job_id: int, event: asyncio.Event) -> None:
        """Forget a caller."""
        events = self._waiting.get(job_id)
        if events is not None:
            events.pop(event, None)
            if not events:
                del self._waiting[job_id]

    @property
    def closed(self) -> bool:
        """True once nobody should wait any more."""
        return self._closed

    async def _look(self) -> None:
        await self._any.wait()
        await asyncio.sleep(LOOK_SECONDS)
        job_ids = list(self._waiting)
        if not job_ids:
            self._any.clear()
            return
        for start in range(0, len(job_ids), 1000):
            chunk = job_ids[start : start + 1000]
            for job_id in await self._database.read(
                lambda connection, chunk=chunk: read_ended(connection, chunk)  # type: ignore[misc]
            ):
                self._wake(job_id)

    def _on_ended(self, signal: Signal) -> None:
        for job_id, _execution_id in signal:
            if job_id in self._waiting:
                self._wake(job_id)

    def _on_keys(self, _signal: Signal) -> None:
        # Those whose key has ended must not wait on.
        self._wake_all()

    def _wake_all(self) -> None:
        for job_id in list(self._waiting):
            self._wake(job_id)

    def _wake(self, job_id: int) -> None:
        for event in self._waiting.get(job_id, ()):
            event.set()
