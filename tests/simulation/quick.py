"""SQLAlchemy's engine in little: pooled connections, transactions, rows, and errors by its names.

The product's statements are all `text(...)`, so that most of what the real engine does (greenlets,
events, compiling, types) is time spent for nothing here: it was half of what a seed cost. The pool
is SQLAlchemy's in what matters to a failure: who gets which connection, and which are used again.
Every 20th seed is played with the real one.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections import deque, namedtuple
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cache
from types import TracebackType
from typing import Any, Final, cast

from sqlalchemy import RowMapping
from sqlalchemy.dialects.sqlite.aiosqlite import SQLiteDialect_aiosqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.sql.elements import TextClause

from tests.simulation.database import Connection

POOL_SECONDS: Final = 30.0
DIALECT: Final = SQLiteDialect_aiosqlite()
EMPTY_SET: Final = "SELECT 1 FROM (SELECT 1) WHERE 1!=1"
_NAME: Final = re.compile(r"(?<![:\w\\]):(\w+)(?!:)")
_ESCAPED: Final = re.compile(r"\\(:[\w$]*)(?![:\w$])")


class QuickEngine:
    """What `AsyncEngine` is to the product's `Database`, over simulated connections."""

    def __init__(
        self, connect: Callable[[], Awaitable[Connection]], *, begin: str, pool_size: int
    ) -> None:
        self._connect = connect
        self._begin = begin
        self._idle: deque[Connection | None] = deque()
        self._room = pool_size
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._era = 0

    def begin(self) -> _Use:
        """Give a connection within a transaction, which is committed in the end."""
        return _Use(self, writes=True)

    def connect(self) -> _Use:
        """Give a connection whose first statement begins a transaction, which is undone."""
        return _Use(self, writes=False)

    async def take(self) -> QuickConnection:
        """Wait for a connection, and take it out of the pool."""
        await self._enter()
        try:
            return QuickConnection(self, await self._take(), self._begin)
        except BaseException:
            self._leave()
            raise

    def give_back(self, connection: QuickConnection) -> None:
        """Put it back; what it has not committed is undone."""
        driver = connection.driver
        if connection.lost:
            driver.drop()
            self._idle.append(None)
        else:
            driver.undo()
            self._idle.append(driver)
        self._leave()

    async def dispose(self) -> None:
        """Close what nobody uses."""
        for driver in self._idle:
            if driver is not None:
                driver.drop()
        self._idle.clear()

    def forget(self) -> None:
        """Use no connection again that is there now: one was broken, so the others may be, too."""
        self._era += 1

    async def _enter(self) -> None:
        if self._room:
            self._room -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(POOL_SECONDS):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._leave()
            if isinstance(error, TimeoutError):
                raise PoolTimeout("the pool is exhausted") from None
            raise

    def _leave(self) -> None:
        """Give one's place to the first that waits, if any."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._room += 1

    async def _take(self) -> Connection:
        if not self._idle:
            return await self._open()
        driver = self._idle.popleft()
        if driver is not None:
            if driver.made_for == self._era:
                return driver
            driver.drop()
        try:
            return await self._open()
        except BaseException:
            self._idle.append(None)
            raise

    async def _open(self) -> Connection:
        try:
            driver = await self._connect()
        except sqlite3.Error as error:
            raise _wrapped(None, error, lost=False) from error
        driver.made_for = self._era
        return driver


class _Use:
    """The time in which somebody has a connection of the pool."""

    __slots__ = ("_connection", "_engine", "_writes")

    def __init__(self, engine: QuickEngine, *, writes: bool) -> None:
        self._engine = engine
        self._writes = writes

    async def __aenter__(self) -> QuickConnection:
        connection = self._connection = await self._engine.take()
        if self._writes:
            try:
                await connection.begin()
            except BaseException as error:
                self._end(error)
                raise
        return connection

    async def __aexit__(
        self, _kind: object, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if error is None and self._writes:
            try:
                await self._connection.commit()
            except BaseException as refused:
                self._end(refused)
                raise
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, Exception):
            # What its server does at this moment cannot be known.
            self._connection.lost = True
        self._engine.give_back(self._connection)


class QuickConnection:
    """What `AsyncConnection` is to the product's statements."""

    def __init__(self, engine: QuickEngine, driver: Connection, begin: str) -> None:
        self.engine = engine
        self.dialect = DIALECT
        self.lost = False
        self.driver = driver
        self._begin = begin
        self._begun = False

    async def begin(self) -> None:
        """Begin the transaction."""
        self._begun = True
        await self._run(self._begin, ())

    async def commit(self) -> None:
        """Commit the transaction."""
        try:
            await self.driver.commit()
        except sqlite3.Error as error:
            raise self._error("COMMIT", error) from error

    async def execute(self, statement: Any, parameters: Any = None) -> QuickResult:
        """Run `text(...)` with the parameters of one or of many rows."""
        if not isinstance(statement, TextClause):
            raise NotImplementedError(f"the quick engine runs text(...) only: {statement}")
        if isinstance(parameters, Sequence):
            if len(parameters) > 1:
                rendered = [_rendered(statement, one) for one in parameters]
                sql = rendered[0][0]
                return await self._execute(sql, [values for _, values in rendered], many=True)
            (parameters,) = parameters
        sql, values = _rendered(statement, parameters or {})
        return await self._execute(sql, values)

    async def exec_driver_sql(self, sql: str, parameters: Any = ()) -> QuickResult:
        """Run a statement as it stands."""
        return await self._execute(sql, parameters)

    async def _execute(self, sql: str, values: Any, *, many: bool = False) -> QuickResult:
        if not self._begun:
            await self.begin()
        return await self._run(sql, values, many=many)

    async def _run(self, sql: str, values: Any, *, many: bool = False) -> QuickResult:
        try:
            cursor = await self.driver.run(sql, values, many=many)
        except sqlite3.Error as error:
            raise self._error(sql, error) from error
        return QuickResult(cursor, sql)

    def _error(self, sql: str, error: sqlite3.Error) -> DBAPIError:
        lost = str(error) == "connection closed"
        if lost:
            self.lost = True
            self.engine.forget()
        return _wrapped(sql, error, lost=lost)


class QuickResult:
    """The rows of a statement, or how many it changed."""

    __slots__ = ("_names", "_rows", "lastrowid", "rowcount")

    def __init__(self, cursor: sqlite3.Cursor | None, sql: str = "") -> None:
        self.rowcount = -1
        self.lastrowid: int | None = None
        self._rows: list[Any] = []
        self._names: tuple[str, ...] = ()
        if cursor is None:
            return
        self.rowcount, self.lastrowid = cursor.rowcount, cursor.lastrowid
        rows = cursor.fetchall()
        if rows:
            names = _names_of.get(sql)
            if names is None:
                names = _names_of[sql] = tuple(column[0] for column in cursor.description)
            self._names = names
            self._rows = list(map(_row_type(names)._make, rows))

    def __iter__(self) -> Iterator[Any]:
        """Go over all rows."""
        return iter(self._rows)

    def all(self) -> list[Any]:
        """All rows."""
        return self._rows

    def first(self) -> Any:
        """The first row, or None."""
        return self._rows[0] if self._rows else None

    def one_or_none(self) -> Any:
        """The only row, or None."""
        assert len(self._rows) <= 1, "several rows where one was asked for"
        return self.first()

    def one(self) -> Any:
        """The only row."""
        (row,) = self._rows
        return row

    def scalar_one(self) -> Any:
        """The first value of the only row."""
        return self.one()[0]

    def scalar_one_or_none(self) -> Any:
        """The first value of the only row, or None."""
        row = self.one_or_none()
        return None if row is None else row[0]

    def scalar(self) -> Any:
        """The first value of the first row, or None."""
        row = self.first()
        return None if row is None else row[0]

    def scalars(self) -> QuickResult:
        """The first value of each row."""
        return self._of([row[0] for row in self._rows])

    def mappings(self) -> QuickResult:
        """Each row as a mapping, which says of itself that it is SQLAlchemy's."""
        return self._of([_Mapping(zip(self._names, row, strict=True)) for row in self._rows])

    def _of(self, rows: list[Any]) -> QuickResult:
        result = QuickResult(None)
        result._rows = rows
        return result


class _Mapping(dict[str, Any]):
    @property  # type: ignore[misc] # mypy knows it as an attribute
    def __class__(self) -> Any:
        return RowMapping


def _wrapped(sql: str | None, error: sqlite3.Error, *, lost: bool) -> DBAPIError:
    wrapped = DBAPIError.instance(sql, None, error, sqlite3.Error, connection_invalidated=lost)
    return cast(DBAPIError, wrapped)


_names_of: Final[dict[str, tuple[str, ...]]] = {}


@cache
def _row_type(names: tuple[str, ...]) -> Any:
    class Row(namedtuple("Named", names, rename=True)):  # type: ignore[misc]
        __slots__ = ()

        @property
        def _mapping(self) -> dict[str, Any]:
            return dict(zip(names, self, strict=True))

    return Row


def _rendered(statement: TextClause, given: Mapping[str, Any]) -> tuple[str, Sequence[Any]]:
    known = statement._bindparams
    sql, names, lists = _parsed(
        statement.text, tuple(name for name, one in known.items() if one.expanding)
    )
    if not names:
        return sql, ()
    values: list[Any] = []
    for name in names:
        value: Any = given[name] if name in given else known[name].effective_value
        if name in lists:
            values.extend(value)
        else:
            values.append(value)
    if lists:
        for name in lists:
            marks = ", ".join("?" * len(given[name])) or EMPTY_SET
            sql = sql.replace(f":[{name}]", f"({marks})")
    return sql, values


@cache
def _parsed(text: str, lists: tuple[str, ...]) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    names: list[str] = []

    def mark(found: re.Match[str]) -> str:
        names.append(found[1])
        return f":[{found[1]}]" if found[1] in lists else "?"

    sql = _ESCAPED.sub(lambda found: found[1], _NAME.sub(mark, text))
    return sql, tuple(names), lists
