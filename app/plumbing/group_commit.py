"""Group commit: what arrives while a commit is in flight goes into the next.

Without a timer, as long as few share a commit. Where many do, most of them come again as soon as
they have their answers: the next commit may wait a moment for as many again. It costs the less
for each, the more share it, and those who wait are answered sooner than in two small ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

GATHER_FROM: Final = 16
"""Where fewer callers share a commit, the next one is not put off."""
ENOUGH: Final = 64
"""Where so many items wait, more would make a commit hardly cheaper for each: it begins."""
Item = TypeVar("Item")
Result = TypeVar("Result")
Entries: TypeAlias = list[tuple[Item, "asyncio.Future[Result]"]]


class Overloaded(Exception):
    """More items wait than the group commit may hold; nothing was taken."""


class GroupCommit(Generic[Item, Result]):
    """Commits concurrent items in shared batches, at most one batch in flight.

    `commit` gets up to `batch_limit` items and returns one result for each, in order; what was
    entered together is not divided, however long. If it raises anything but one of
    `shared_errors`, the batch is split until the offender stands alone and only its caller gets
    the error; shared errors (the database is away) go to all, those that wait among them: they
    would wait as long again to learn the same.

    After a commit that at least `GATHER_FROM` callers shared, the next begins when as many wait, or
    `ENOUGH` items, or `gather_seconds` later.
    """

    def __init__(
        self,
        commit: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        *,
        batch_limit: int,
        backlog_limit: int,
        shared_errors: tuple[type[Exception], ...] = (),
        gather_seconds: float = 0.0,
    ) -> None:
        self._commit = commit
        self._batch_limit = batch_limit
        self._backlog_limit = backlog_limit
        self._shared_errors = shared_errors
        self._gather_seconds = gather_seconds
        self._most_gathered = min(ENOUGH, batch_limit, backlog_limit)
        self._shared = 0
        self._enough = asyncio.Event()
        self._waiting: deque[Entries[Item, Result]] = deque()
        self._backlog = 0
        self._flush: asyncio.Task[None] | None = None

    @property
    def backlog(self) -> int:
        """How many items wait for the next commit."""
        return self._backlog

    async def add(self, item: Item) -> Result:
        """Return the item's own result once its batch is committed.

        Raises:
            Overloaded: too many items wait.
            Exception: whatever `commit` raised for this item.
        """
        self._ensure_room()
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._take([(item, future)])
        return await future

    def enter(self, items: Sequence[Item]) -> list[asyncio.Future[Result]]:
        """Let items into one commit, and return the result of each as a future, in order.

        Raises:
            Overloaded: too many items wait; none of these was taken.
        """
        self._ensure_room()
        loop = asyncio.get_running_loop()
        entries: Entries[Item, Result] = [(item, loop.create_future()) for item in items]
        if entries:
            self._take(entries)
        return [future for _, future in entries]

    async def drained(self) -> None:
        """Return when nothing waits and nothing is in flight."""
        while self._flush is not None:
            await asyncio.wait([self._flush])

    def _ensure_room(self) -> None:
        if self._backlog >= self._backlog_limit:
            raise Overloaded

    def _take(self, entries: Entries[Item, Result]) -> None:
        self._waiting.append(entries)
        self._backlog += len(entries)
        if self._has_enough():
            self._enough.set()
        if self._flush is None:
            self._flush = asyncio.create_task(self._flush_all())

    async def _flush_all(self) -> None:
        try:
            while self._waiting:
                await self._commit_batch(self._next_batch())
                await self._gather()
        finally:
            self._flush = None

    def _has_enough(self) -> bool:
        """Tell whether as many callers wait as shared the last commit, or enough items."""
        return len(self._waiting) >= self._shared or self._backlog >= self._most_gathered

    async def _gather(self) -> None:
        """Wait for those who shared the last commit to come again, but not for long."""
        if not self._gather_seconds or self._shared < GATHER_FROM or self._has_enough():
            return
        self._enough.clear()
        timer = asyncio.get_running_loop().call_later(self._gather_seconds, self._enough.set)
        try:
            await self._enough.wait()
        finally:
            timer.cancel()

    def _next_batch(self) -> Entries[Item, Result]:
        batch = self._waiting.popleft()
        self._shared = 1
        while self._waiting and len(batch) + len(self._waiting[0]) <= self._batch_limit:
            batch += self._waiting.popleft()
            self._shared += 1
        self._backlog -= len(batch)
        return batch

    async def _commit_batch(self, batch: Entries[Item, Result]) -> None:
        try:
            results = await self._commit([item for item, _ in batch])
            if len(results) != len(batch):
                raise RuntimeError("a group commit returned another number of results than items")
        except self._shared_errors as error:
            for entries in (batch, *self._waiting):
                for _, future in entries:
                    if not future.done():
                        future.set_exception(error)
            self._waiting.clear()
            self._backlog = 0
        except Exception as error:  # noqa: BLE001 - it goes to the one whose it is
            if len(batch) == 1:
                if not batch[0][1].done():
                    batch[0][1].set_exception(error)
                return
            middle = len(batch) // 2
            await self._commit_batch(batch[:middle])
            await self._commit_batch(batch[middle:])
        else:
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)
