"""MySQL's connections: none waits for ever for a server that says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import aiomysql.connection  # type: ignore[import-untyped]
import asyncmy.connection
import asyncmy.errors
from pymysql.constants import CR
from pymysql.err import OperationalError

Value = TypeVar("Value")
_Asyncmy: Any = asyncmy.connection.Connection

LAST_LOOK_SECONDS: Final = 0.5
NO_ANSWER: Final = CR.CR_SERVER_LOST_EXTENDED
"""Of the codes for a lost connection the one that the drivers never give themselves."""


async def _in_time(
    answer: Awaitable[Value],
    seconds: float,
    drop: Callable[[], None],
    lost: type[Exception],
) -> Value:
    """Wait so long for an answer of the server; without one drop the connection, and raise `lost`.

    The drivers bound how long the connecting of TCP takes, and nothing after it: a server that is
    stopped, or whose packets are dropped, would be waited for until TCP gives up. What waits is
    cancelled in here, below SQLAlchemy, which sees an error of the driver like any other lost
    connection, and forgets this one. What was asked may still be done once the server goes on.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as bound:
            # Where it was this process that stood still, the answer is there: it is read first.
            over = loop.call_later(
                seconds, lambda: bound.reschedule(loop.time() + LAST_LOOK_SECONDS)
            )
            try:
                return await answer
            finally:
                over.cancel()
    except TimeoutError:
        drop()
        raise lost(NO_ANSWER, f"the server gave no answer in {seconds:g} s") from None


class BoundedAiomysql(aiomysql.connection.Connection):  # type: ignore[misc] # it has no types
    """The connection of `mysql+aiomysql`: lost when an answer, or the greeting, takes too long."""

    def __init__(self, *, answer_seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._answer_seconds = answer_seconds

    @classmethod
    async def open(cls, **options: Any) -> BoundedAiomysql:
        """Connect with the options of the driver and `answer_seconds`.

        Raises:
            OperationalError: the server cannot be reached, refuses, or says nothing.
        """
        connection = cls(**options)
        try:
            await connection._connect()
        except BaseException:
            # The driver closes nothing when it is cancelled in the middle of a greeting.
            connection._close_on_cancel()
            raise
        return connection

    async def query(self, sql: str | bytes, unbuffered: bool = False) -> int:
        """Run one statement and read its whole answer."""
        return int(await self._bounded(super().query(sql, unbuffered)))

    async def ensure_closed(self) -> None:
        """Say farewell and close; a server that has hung up before is no reason to stay open."""
        try:
            await super().ensure_closed()
        finally:
            self.close()

    async def _connect(self) -> None:
        await self._bounded(super()._connect())

    async def show_warnings(self) -> Any:
        """Ask what the server warned of."""
        return await self._bounded(super().show_warnings())

    async def _read_ok_packet(self) -> bool:
        # What ends a transaction reads its answer by this alone.
        return bool(await self._bounded(super()._read_ok_packet()))

    async def _bounded(self, answer: Awaitable[Value]) -> Value:
        return await _in_time(answer, self._answer_seconds, self._close_on_cancel, OperationalError)

    def _close_on_cancel(self) -> None:
        # To close it would be to wait until the server has read what was sent.
        if self._writer is not None:
            self._writer.transport.abort()
        super()._close_on_cancel()


class BoundedAsyncmy(_Asyncmy):  # type: ignore[misc] # its types lack most of it
    """The connection of `mysql+asyncmy`: lost when an answer, or the greeting, takes too long."""

    def __init__(self, *, answer_seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._answer_seconds = answer_seconds

    @classmethod
    async def open(cls, **options: Any) -> BoundedAsyncmy:
        """Connect with the options of the driver and `answer_seconds`.

        Raises:
            OperationalError: the server cannot be reached, refuses, or says nothing.
        """
        connection = cls(**options)
        await connection.connect()
        return connection

    async def connect(self) -> Any:
        """Connect, and wait for the greeting."""
        return await self._bounded(super().connect())

    async def query(self, sql: str | bytes, unbuffered: bool = False) -> Any:
        """Run one statement and read its whole answer."""
        return await self._bounded(super().query(sql, unbuffered))

    async def show_warnings(self) -> Any:
        """Ask what the server warned of."""
        return await self._bounded(super().show_warnings())

    async def ensure_closed(self) -> None:
        """Say farewell and close; a server that says nothing is not waited for."""
        try:
            await self._bounded(super().ensure_closed())
        finally:
            self.close()

    async def _read_ok_packet(self) -> Any:
        # What ends a transaction reads its answer by this alone.
        return await self._bounded(super()._read_ok_packet())

    async def _bounded(self, answer: Awaitable[Value]) -> Value:
        return await _in_time(
            answer, self._answer_seconds, self._close_on_cancel, asyncmy.errors.OperationalError
        )

    def _close_on_cancel(self) -> None:
        # To close it would be to wait until the server has read what was sent.
        if self._transport is not None:
            self._transport.abort()
        super()._close_on_cancel()


BY_DRIVER: Final[dict[str, Callable[..., Awaitable[Any]]]] = {
    "aiomysql": BoundedAiomysql.open,
    "asyncmy": BoundedAsyncmy.open,
}
