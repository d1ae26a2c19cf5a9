"""SQLite as a server among simulated nodes: each statement runs at once, and takes virtual time.

The file lies in memory (`/dev/shm` where there is one) and each pooled connection is a real one
of its own, so that snapshots, rollbacks and constraints are SQLite's. Only its two waits, for the
write lock and for the disk, are replaced.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from app.plumbing.database import BUSY_SECONDS
from tests.simulation.history import History
from tests.simulation.machine import EPOCH, PROCESS, Process
from tests.simulation.network import Network

LONGEST_POLL_SECONDS: Final = 0.05
STATEMENTS_KEPT: Final = 1000
NODE: Final = "db"


class DatabaseServer:
    """One database: its file, its clock, its write lock, and whether it can be reached."""

    def __init__(
        self,
        path: Path,
        *,
        network: Network,
        dice: random.Random,
        history: History,
        now: Callable[[], float],
    ) -> None:
        self.path = path
        self.network = network
        self.dice = dice
        self.history = history
        self.down = False
        self.writer: Connection | None = None
        self.waiting: list[asyncio.Future[None]] = []
        self.spare: list[sqlite3.Connection] = []
        self._now = now
        self._connections: list[Connection] = []

    def julian_day(self, _text: str) -> float:
        """SQLite's `julianday('now')`, by the virtual clock."""
        return (EPOCH + self._now()) / 86400.0 + 2440587.5

    async def connect(self) -> Any:
        """Open a connection of the running process.

        Raises:
            sqlite3.OperationalError: the database cannot be reached.
        """
        process = PROCESS.get()
        assert process is not None
        connection = Connection(self, process)
        await connection.reach("connect")
        connection.open()
        self._connections.append(connection)
        process.at_death.append(connection.drop)
        return connection

    def stop(self) -> None:
        """Go down: every connection breaks, what was not committed is undone."""
        self.down = True
        for connection in self._connections:
            connection.drop()
        self._connections.clear()

    def drop_transactions(self, process: Process) -> None:
        """Break a process's connections that are within a transaction, as an idle limit does."""
        for connection in self._connections:
            if connection.process is process and connection.in_transaction:
                connection.drop()

    def real_connection(self) -> sqlite3.Connection:
        """Return a real connection; a new one would have to read the schema."""
        if self.spare:
            return self.spare.pop()
        real = sqlite3.connect(
            self.path,
            isolation_level=None,
            timeout=0,
            check_same_thread=False,
            cached_statements=STATEMENTS_KEPT,
        )
        real.execute("PRAGMA synchronous=OFF")
        real.execute("PRAGMA foreign_keys=ON")
        real.create_function("julianday", 1, self.julian_day)
        return real

    def let_in(self) -> None:
        """Let those who wait for the write lock try again, each when its next poll happens."""
        for turn in self.waiting:
            asyncio.get_running_loop().call_later(
                self.dice.uniform(0.0, LONGEST_POLL_SECONDS), _try_again, turn,
                context=contextvars.Context(),
            )  # fmt: skip
        self.waiting.clear()

    def close(self) -> None:
        """Close every connection; nobody waits for one any more."""
        self.waiting.clear()
        for connection in self._connections:
            connection.drop()
        for real in self.spare:
            real.close()


def _try_again(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


class Connection:
    """What aiosqlite's connection is to SQLAlchemy, without its thread."""

    def __init__(self, server: DatabaseServer, process: Process) -> None:
        self.process = process
        self.made_for = 0
        """The era of its pool in which it was made."""
        self._server = server
        self._sqlite: sqlite3.Connection | None = None
        self.isolation_level: str | None = None
        self._conn = self
        self._tx = self

    def open(self) -> None:
        """Open the real connection."""
        self._sqlite = self._server.real_connection()

    @property
    def _connection(self) -> sqlite3.Connection | None:
        return self._sqlite

    @property
    def in_transaction(self) -> bool:
        """True between BEGIN and its end."""
        return self._sqlite is not None and self._sqlite.in_transaction

    @property
    def is_open(self) -> bool:
        """False once it is broken or closed."""
        return self._sqlite is not None

    def put_nowait(self, request: tuple[asyncio.Future[Any], Callable[[], Any]]) -> None:
        """Do at once what SQLAlchemy queues for aiosqlite's thread."""
        future, function = request
        future.set_result(function())

    async def create_function(self, *arguments: Any, **options: Any) -> None:
        """Define a function in SQL."""
        self.real.create_function(*arguments, **options)

    def cursor(self) -> Cursor:
        """Return a new cursor."""
        return Cursor(self)

    @property
    def real(self) -> sqlite3.Connection:
        """The real connection.

        Raises:
            sqlite3.OperationalError: it is broken.
        """
        if self._sqlite is None:
            raise sqlite3.OperationalError("connection closed")
        return self._sqlite

    async def reach(self, label: str) -> None:
        """Get to the server.

        Raises:
            sqlite3.OperationalError: it cannot be reached; the connection is broken.
        """
        server, node = self._server, self.process.node
        network = server.network
        await network.arrive(f"{node}>db {label}")
        if (node, NODE) in network.cuts or (NODE, node) in network.cuts:
            await asyncio.sleep(server.dice.uniform(0.5, 8.0))
            self.drop()
            raise sqlite3.OperationalError("disk I/O error")
        await network.travel(node, NODE)
        if server.down:
            self.drop()
            raise sqlite3.OperationalError("unable to open database file")
        if server.dice.random() < network.loss / 4:
            self.drop()
            raise sqlite3.OperationalError("disk I/O error")

    async def come_back(self, label: str) -> None:
        """Get back from the server.

        Raises:
            sqlite3.OperationalError: what was done is done, and the answer is lost.
        """
        server, node = self._server, self.process.node
        await server.network.arrive(f"{node}<db {label}")
        if server.dice.random() < server.network.loss / 4 or (NODE, node) in server.network.cuts:
            self.drop()
            raise sqlite3.OperationalError("disk I/O error")

    async def begin_writing(self) -> None:
        """Take the write lock: SQLite asks again and again, so that any of those who wait gets it.

        Raises:
            sqlite3.OperationalError: it stayed locked.
        """
        server = self._server
        loop = asyncio.get_running_loop()
        until = loop.time() + BUSY_SECONDS
        while server.writer is not None:
            turn = loop.create_future()
            server.waiting.append(turn)
            try:
                async with asyncio.timeout_at(until):
                    await turn
            except TimeoutError:
                raise sqlite3.OperationalError("database is locked") from None
            finally:
                if turn in server.waiting:
                    server.waiting.remove(turn)
        real = self.real
        server.writer = self
        real.execute("BEGIN IMMEDIATE")

    async def commit(self) -> None:
        """Commit."""
        if not self.in_transaction:
            return
        writes = self._server.writer is self
        if writes:
            await self.reach("commit")
        self.real.commit()
        self._leave()
        if writes:
            await self.come_back("commit")

    async def rollback(self) -> None:
        """Roll back."""
        self.undo()

    def undo(self) -> None:
        """Roll back, which takes no time."""
        if self._sqlite is not None and self._sqlite.in_transaction:
            self._sqlite.rollback()
        self._leave()

    async def close(self) -> None:
        """Close."""
        self.drop()

    async def run(self, sql: str, parameters: Any, *, many: bool = False) -> sqlite3.Cursor | None:
        """Run one statement, for one row or for many; BEGIN has no cursor.

        Raises:
            sqlite3.Error: it was refused, or the server cannot be reached.
        """
        self.real  # noqa: B018 - raises if the connection is broken
        if sql == "BEGIN IMMEDIATE":
            await self.reach("begin")
            await self.begin_writing()
            return None
        if sql == "BEGIN":
            self.real.execute(sql)
            return None
        await self.reach("statements" if many else "statement")
        return (
            self.real.executemany(sql, parameters) if many else self.real.execute(sql, parameters)
        )

    def stop(self) -> None:
        """Close at once."""
        self.drop()

    def drop(self) -> None:
        """Break it; the server undoes what was not committed."""
        if self._sqlite is not None:
            if self._sqlite.in_transaction:
                self._sqlite.rollback()
            self._server.spare.append(self._sqlite)
            self._sqlite = None
        self._leave()

    def _leave(self) -> None:
        if self._server.writer is self:
            self._server.writer = None
            self._server.let_in()


class Cursor:
    """A cursor whose statements run at once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._cursor = connection.real.cursor()
        self.arraysize = 1

    async def __aenter__(self) -> Cursor:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def description(self) -> Any:
        """Names of the columns."""
        return self._cursor.description

    @property
    def rowcount(self) -> int:
        """Rows changed."""
        return self._cursor.rowcount

    @property
    def lastrowid(self) -> int | None:
        """The last key made."""
        return self._cursor.lastrowid

    async def execute(self, operation: str, parameters: Any = ()) -> Cursor:
        """Run one statement."""
        if operation.startswith("PRAGMA"):
            if not operation.startswith(("PRAGMA busy_timeout", "PRAGMA synchronous")):
                self._connection.real.execute(operation)
            return self
        if operation == "BEGIN IMMEDIATE":
            await self._connection.reach("begin")
            await self._connection.begin_writing()
            return self
        if operation != "BEGIN":
            await self._connection.reach("statement")
        self._connection.real  # noqa: B018 - raises if the connection broke meanwhile
        self._cursor.execute(operation, parameters)
        return self

    async def executemany(self, operation: str, parameters: Any) -> Cursor:
        """Run one statement for many rows."""
        await self._connection.reach("statements")
        self._connection.real  # noqa: B018 - raises if the connection broke meanwhile
        self._cursor.executemany(operation, parameters)
        return self

    async def fetchall(self) -> list[Any]:
        """All rows left."""
        return self._cursor.fetchall()

    async def fetchone(self) -> Any:
        """The next row."""
        return self._cursor.fetchone()

    async def close(self) -> None:
        """Close, unless the connection has broken and closed it."""
        if self._connection.is_open:
            self._cursor.close()
