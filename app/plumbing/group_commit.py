"""Group commit: what arrives while a commit is in flight goes into the next, without a timer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Overloaded(Exception):
    """More items wait than the group commit may hold; nothing was taken."""


class GroupCommit(Generic[Item, Result]):
    """Commits concurrent items in shared batches, at most one batch in flight.

    `commit` gets up to `batch_limit` items and returns one result for each, in order. If it
    raises anything but one of `shared_errors`, the batch is split until the offender stands
    alone and only its caller gets the error; shared errors (the database is away) go to all.
    """

    def __init__(
        self,
        commit: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        *,
        batch_limit: int,
        backlog_limit: int,
        shared_errors: tuple[type[Exception], ...] = (),
    ) -> None:
        self._commit = commit
        self._batch_limit = batch_limit
        self._backlog_limit = backlog_limit
        self._shared_errors = shared_errors
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._flush: asyncio.Task[None] | None = None

    @property
    def backlog(self) -> int:
        """How many items wait for the next commit."""
        return len(self._waiting)

    async def add(self, item: Item) -> Result:
        """Return the item's own result once its batch is committed.

        Raises:
            Overloaded: too many items wait.
            Exception: whatever `commit` raised for this item.
        """
        if len(self._waiting) >= self._backlog_limit:
            raise Overloaded
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._flush is None:
            self._flush = asyncio.create_task(self._flush_all())
        return await future

    async def drained(self) -> None:
        """Return when nothing waits and nothing is in flight."""
        while self._flush is not None:
            await asyncio.wait([self._flush])

    async def _flush_all(self) -> None:
        try:
            while self._waiting:
                size = min(self._batch_limit, len(self._waiting))
                await self._commit_batch([self._waiting.popleft() for _ in range(size)])
        finally:
            self._flush = None

    async def _commit_batch(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results = await self._commit([item for item, _ in batch])
            if len(results) != len(batch):
                raise RuntimeError("a group commit returned another number of results than items")
        except self._shared_errors as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
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
