"""Background loops with one contract: started, guarded against every exception, stopped."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable

import structlog

log = structlog.get_logger(__name__)

FAULT_PAUSE_SECONDS = 0.2
FAULT_PAUSE_LIMIT_SECONDS = 5.0
CANCEL_AGAIN_SECONDS = 0.1


class Loop:
    """Calls `step` again and again until stopped; a fault is logged and followed by a pause.

    An exception that ended such a loop silently would strand jobs, so none does. `step` does
    its own waiting. Errors in `expected` (the database is away) are logged without a traceback.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], Awaitable[None]],
        *,
        expected: tuple[type[BaseException], ...] = (),
    ) -> None:
        self.name = name
        self._step = step
        self._expected = expected
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the loop in the running event loop."""
        self._task = asyncio.create_task(self._run(), name=self.name)

    async def stop(self) -> None:
        """Cancel the loop and wait until it has ended."""
        if self._task is None:
            return
        await _end([self._task])
        self._task = None

    async def _run(self) -> None:
        pause = FAULT_PAUSE_SECONDS
        while True:
            try:
                await self._step()
                pause = FAULT_PAUSE_SECONDS
            except self._expected as error:
                log.warning("loop_waits", loop=self.name, error=str(error) or type(error).__name__)
                await asyncio.sleep(pause * random.uniform(0.5, 1))
                pause = min(pause * 2, FAULT_PAUSE_LIMIT_SECONDS)
            except Exception:
                log.exception("loop_fault", loop=self.name)
                await asyncio.sleep(pause * random.uniform(0.5, 1))
                pause = min(pause * 2, FAULT_PAUSE_LIMIT_SECONDS)


class Tasks:
    """Background tasks that are kept until done, whose faults are logged, and that can be ended."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}

    def start(self, work: Awaitable[None], *, name: str) -> None:
        """Run `work` in the background."""
        task = asyncio.ensure_future(_guarded(work, name))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def stop(self) -> None:
        """Cancel what still runs and wait for it."""
        await _end(self._tasks)


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks until they have ended: redis-py swallows a cancellation now and then."""
    left = list(tasks)
    while left := [task for task in left if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=CANCEL_AGAIN_SECONDS)


async def _guarded(work: Awaitable[None], name: str) -> None:
    try:
        await work
    except Exception:
        log.exception("task_fault", task=name)
