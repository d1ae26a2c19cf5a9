"""One call for all who ask while it is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import structlog

log = structlog.get_logger(__name__)

Key = TypeVar("Key")
Value = TypeVar("Value")


class SingleFlight(Generic[Key, Value]):
    """Makes one call for all who ask for the same key while it is under way.

    All of them are woken together, and an error is told to all of them. In a line for a lock each
    would wait for a turn of the event loop of its own: a thousand for seconds.
    """

    def __init__(self) -> None:
        self._calls: dict[Key, asyncio.Task[Value]] = {}

    def begin(
        self, key: Key, make: Callable[[], Coroutine[Any, Any, Value]]
    ) -> asyncio.Task[Value]:
        """Return the call that is under way, or make one; only `call` may wait for it."""
        task = self._calls.get(key)
        if task is None:
            task = self._calls[key] = asyncio.create_task(make())
            task.add_done_callback(lambda _task: self._calls.pop(key, None))
            task.add_done_callback(_hear)
        return task

    async def call(self, key: Key, make: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        """Return what the call returns; an asker that is cancelled does not cancel it.

        Raises:
            Exception: what the call raises.
        """
        return await asyncio.shield(self.begin(key, make))


def _hear(task: asyncio.Task[Any]) -> None:
    # Where all who asked have left, or nobody waits, nobody else takes notice of its error.
    if not task.cancelled() and (error := task.exception()) is not None:
        log.info("shared_call_failed", error=str(error) or type(error).__name__)
