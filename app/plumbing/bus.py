"""Signals between the parts of one dispatcher and between dispatchers: hints, never facts.

A signal that is lost delays something by at most a second, since every reader also looks at the
database by itself; so Redis may lose them all.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import orjson
import structlog
from redis.asyncio import Redis

from app.plumbing.loops import Loop
from app.plumbing.redis import REDIS_ERRORS

log = structlog.get_logger(__name__)

Signal = list[Any]
MAX_UNSENT: Final = 10_000


class Bus:
    """Publishes small JSON lists under a topic, at once in this process and soon in the others."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis = redis
        self._channel = f"{prefix}:bus"
        self._sender = uuid.uuid4().hex
        self._callbacks: dict[str, list[Callable[[Signal], None]]] = defaultdict(list)
        self._unsent: list[tuple[str, Signal]] = []
        self._has_unsent = asyncio.Event()
        self._loops = (
            Loop("bus-sender", self._send, expected=REDIS_ERRORS),
            Loop("bus-listener", self._listen, expected=REDIS_ERRORS),
        )

    def subscribe(self, topic: str, callback: Callable[[Signal], None]) -> None:
        """Call `callback` for each signal of the topic; it must not block."""
        self._callbacks[topic].append(callback)

    def publish(
        self, topic: str, signal: Signal, *, here: Signal | None = None, here_only: bool = False
    ) -> None:
        """Tell this process now and, unless `here_only`, the other dispatchers soon.

        This process is told `here` in place of `signal`, where that says more.
        """
        self._call(topic, signal if here is None else here)
        if not here_only and len(self._unsent) < MAX_UNSENT:
            self._unsent.append((topic, signal))
            self._has_unsent.set()

    def start(self) -> None:
        """Start sending and listening."""
        for loop in self._loops:
            loop.start()

    async def stop(self) -> None:
        """Send what is left, as far as Redis takes it, and stop."""
        for loop in self._loops:
            await loop.stop()
        if self._unsent:
            try:
                async with asyncio.timeout(1):
                    await self._flush()
            except REDIS_ERRORS as error:
                log.info("signals_dropped", error=str(error))

    async def _send(self) -> None:
        await self._has_unsent.wait()
        await self._flush()

    async def _flush(self) -> None:
        signals, self._unsent = self._unsent, []
        self._has_unsent.clear()
        await self._redis.publish(self._channel, orjson.dumps([self._sender, signals]))

    async def _listen(self) -> None:
        async with self._redis.pubsub(ignore_subscribe_messages=True) as subscription:
            await subscription.subscribe(self._channel)
            while True:
                message = await subscription.get_message(timeout=1.0)
                if message is not None:
                    sender, signals = orjson.loads(message["data"])
                    if sender != self._sender:
                        for topic, signal in signals:
                            self._call(topic, signal)

    def _call(self, topic: str, signal: Signal) -> None:
        for callback in self._callbacks[topic]:
            try:
                callback(signal)
            except Exception:
                log.exception("signal_fault", topic=topic)


WAKE: Final = "wake"
"""[[queue id, priority, due epoch ms], ...]: tasks became claimable. Here a job id may follow: that
task is new, and nothing has happened to it yet."""
LOAD: Final = "load"
"""[worker id, sequence number, active]: a worker's own count."""
ENDED: Final = "ended"
"""[[job id, execution id], ...]: these executions are settled; `?wait=` looks again."""
BEAT: Final = "beat"
"""[worker id]: a worker's row changed in a way that dispatch should know now."""
CANCEL: Final = "cancel"
"""[worker id, execution id]: the worker is to stop a run that was cancelled."""
LOCK: Final = "lock"
"""[]: the dispatch lock was released."""
FIRE: Final = "fire"
"""[]: a schedule is new, has changed, or waits for something that has ended: look at them now."""
OWED: Final = "owed"
"""[due epoch ms]: a callback must be handed over."""
BULK: Final = "bulk"
"""[]: a bulk operation was asked for."""
LOGGED: Final = "logged"
"""[[execution id, job id], ...]: these runs said something; streams look again."""
LIMITS: Final = "limits"
"""[]: the limits of a tenant have changed."""
KEYS: Final = "keys"
"""[prefix, ...]: these keys were changed or made; without any: a tenant was."""
