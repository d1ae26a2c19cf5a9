"""Which handlers live workers offer, for callers; at most a second old."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from app.ground import Ground
from app.lifecycle.nodes import Node, read_nodes
from app.plumbing.bus import BEAT
from oncue.protocol import LEASE_SECONDS, WorkerState

FRESH_SECONDS: Final = 1.0


class LiveFleet:
    """The workers that beat within the last 15 s, read at most once a second for all askers."""

    def __init__(self, ground: Ground) -> None:
        self._database = ground.database
        self._clock = ground.clock
        self._nodes: list[Node] = []
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()
        ground.bus.subscribe(BEAT, lambda _signal: self._expire())

    async def nodes(self) -> list[Node]:
        """Return the live workers that take runs."""
        if time.monotonic() - self._read_at > FRESH_SECONDS:
            async with self._reading:
                if time.monotonic() - self._read_at > FRESH_SECONDS:
                    self._nodes = await self._database.read(read_nodes)
                    self._read_at = time.monotonic()
        oldest = self._clock.now_ms() - LEASE_SECONDS * 1000
        return [
            node
            for node in self._nodes
            if node.state is WorkerState.UP and node.last_heartbeat >= oldest
        ]

    async def offers(self, handler: str) -> bool:
        """Tell whether a live worker offers a handler."""
        return any(handler in node.handler_names for node in await self.nodes())

    def _expire(self) -> None:
        self._read_at = float("-inf")
