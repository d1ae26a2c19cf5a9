"""MySQL's connections: none waits for ever for a server that says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Final, TypeVar

from aiomysql.connection import Connection  # type: ignore[import-untyped]
from pymysql.constants import CR
from pymysql.err import OperationalError

Value = TypeVar("Value")

LAST_LOOK_SECONDS: Final = 0.5
NO_ANSWER: Final = CR.CR_SERVER_LOST_EXTENDED
"""Of the codes for a lost connection the one that this driver never gives itself."""


class BoundedConnection(Connection):  # type: ignore[misc] # the driver has no types
    """A connection that is lost when the server lets a statement, or the greeting, wait too long.

    The driver bounds how long the connecting of TCP takes, and nothing after it: a server that is
    stopped, or whose packets are dropped, would be waited for until TCP gives up. What waits is
    cancelled in here, below SQLAlchemy, which sees an error of the driver like any other lost
    connection, and forgets this one. What was asked may still be done once the server goes on.
    """

    def __init__(self, *, answer_seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._answer_seconds = answer_seconds

    @classmethod
    async def open(cls, **options: Any) -> BoundedConnection:
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
        return int(await self._in_time(super().query(sql, unbuffered)))

    async def ensure_closed(self) -> None:
        """Say farewell and close; a server that has hung up before is no reason to stay open."""
        try:
            await super().ensure_closed()
        finally:
            self.close()

    async def _connect(self) -> None:
        await self._in_time(super()._connect())

    async def _read_ok_packet(self) -> bool:
        # What ends a transaction reads its answer by this alone.
        return bool(await self._in_time(super()._read_ok_packet()))

    def _close_on_cancel(self) -> None:
        # To close it would be to wait until the server has read what was sent.
        if self._writer is not None:
            self._writer.transport.abort()
        super()._close_on_cancel()

    async def _in_time(self, answer: Awaitable[Value]) -> Value:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as bound:
                # Where it was this process that stood still, the answer is there: it is read first.
                over = loop.call_later(
                    self._answer_seconds,
                    lambda: bound.reschedule(loop.time() + LAST_LOOK_SECONDS),
                )
                try:
                    return await answer
                finally:
                    over.cancel()
        except TimeoutError:
            self._close_on_cancel()
            raise OperationalError(
                NO_ANSWER, f"the server gave no answer in {self._answer_seconds:g} s"
            ) from None
