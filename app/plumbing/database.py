"""The database: engines, transactions that survive cancellation, and the retry of normal errors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import structlog
from sqlalchemy import event, text
from sqlalchemy.engine import URL, ExceptionContext, make_url
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

log = structlog.get_logger(__name__)
Value = TypeVar("Value")
Connect = Callable[[], Awaitable[Any]]

MYSQL_DEADLOCK_OR_LOCK_WAIT: Final = frozenset({1205, 1213})
# Server gone or going, refused, lost during query, too many connections, host blocked.
MYSQL_LOST: Final = frozenset({1040, 1053, 1927, 2002, 2003, 2005, 2006, 2013, 2014, 2055, 4031})
# No connection, no answer: where one was waited for, it was for long.
MYSQL_SILENT: Final = frozenset({2003, 2055})
# Packet too large, out of range, invalid text, too long, invalid JSON, broken JSON for JSON_TABLE.
MYSQL_BAD_VALUE: Final = frozenset({1153, 1264, 1300, 1366, 1406, 3140, 4035, 4037, 4038})
LOCK_WAIT_SECONDS: Final = 2
IDLE_CONNECTION_SECONDS: Final = 60
IDLE_TRANSACTION_SECONDS: Final = 5
"""A dispatcher that vanishes in a transaction holds its row locks so long: less than the life of
the dispatch lock, whose next holder may wait for them. MySQL has no such limit for transactions:
there a connection that writes may be idle no longer than this at all."""
CLOSED_TRANSPORT: Final = ("Transport does not expose socket instance", "the handler is closed")
CLOSE_SECONDS: Final = 5
CUT_OFF_SECONDS: Final = 1
CONFLICT_TRIES: Final = 12
CONFLICT_SECONDS: Final = 10.0
"""So long after its first conflict a transaction is not begun anew."""
BUSY_SECONDS: Final = 5.0
"""So long SQLite itself waits for its write lock: three times, until a writer gives up."""
LOST_TRIES: Final = 3
ANSWER_SECONDS: Final = 10.0


NOW_MS: Final = {
    True: "CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)",
    False: "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS SIGNED)",
}
"""SQL for the database's UTC time in epoch milliseconds, the one clock of all due times, by
whether the database is SQLite."""


def keep_first(sqlite: bool, column: str) -> str:
    """End an INSERT so that a row whose key is taken changes nothing.

    `column` is any of the table but its AUTO_INCREMENT `id`: MySQL, and not MariaDB, refuses to set
    that beside ids that it gives itself (error 1869).
    """
    if column.rpartition(".")[2] == "id":
        raise ValueError("not the AUTO_INCREMENT column")
    return "ON CONFLICT DO NOTHING" if sqlite else f"ON DUPLICATE KEY UPDATE {column} = {column}"


class DatabaseUnavailable(Exception):
    """The database cannot be used now: it is away, stayed locked, or refuses for its own reasons.

    What was to be written may or may not be there; the same work may be repeated.
    """


class DatabaseAway(DatabaseUnavailable):
    """The database cannot be reached: nothing that it refuses, just nobody there."""


class Database:
    """One database, MySQL or SQLite, behind two kinds of transaction: `write` and `read`.

    SQLite has one writer: an asyncio lock keeps this process's writers in line, and BEGIN
    IMMEDIATE keeps other processes' out from before the first read. `connect` opens SQLite's
    driver connections in place of aiosqlite. `retried` is told why a transaction begins anew:
    `deadlock`, `lock_wait`, `busy` (SQLite) or `lost`. A MySQL that does not answer a statement
    within `answer_seconds` is away.
    """

    def __init__(
        self,
        url: str,
        *,
        pool_size: int = 16,
        answer_seconds: float = ANSWER_SECONDS,
        connect: Connect | None = None,
        retried: Callable[[str], None] | None = None,
    ) -> None:
        self._tell_retry = retried
        self._answer_seconds = answer_seconds
        self.url: URL = make_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._writer_lock = asyncio.Lock() if self.is_sqlite else None
        self._given_up_at = float("-inf")
        self._writing: set[asyncio.Future[Any]] = set()
        if self.is_sqlite:
            self._writers = _sqlite_engine(
                self.url, begin="BEGIN IMMEDIATE", pool_size=1, connect=connect
            )
            self._readers = _sqlite_engine(self.url, begin="BEGIN", pool_size=4, connect=connect)
        else:
            # Reads commit by themselves: a plain SELECT is one round trip, not three.
            self._writers = _mysql_engine(
                self.url,
                pool_size,
                answer_seconds=answer_seconds,
                isolation_level="READ COMMITTED",
                idle_on_mysql=IDLE_TRANSACTION_SECONDS,
            )
            self._readers = _mysql_engine(
                self.url,
                pool_size,
                answer_seconds=answer_seconds,
                isolation_level="AUTOCOMMIT",
                idle_on_mysql=IDLE_CONNECTION_SECONDS,
            )
        self.now_ms: Final = NOW_MS[self.is_sqlite]
        self._ask_now: Final = text(f"SELECT {self.now_ms}")

    @property
    def writing(self) -> int:
        """How many transactions of `write` are under way, or wait for their turn."""
        return len(self._writing)

    @property
    def file_is_missing(self) -> bool:
        """True for a SQLite database whose file is not there; connecting would create it."""
        return self.is_sqlite and not Path(self.url.database or "").exists()

    def keep_first(self, column: str) -> str:
        """End an INSERT as the function does."""
        return keep_first(self.is_sqlite, column)

    async def write(self, work: Callable[[AsyncConnection], Awaitable[Value]]) -> Value:
        """Run `work` in one transaction, commit, and return what it returned.

        The transaction is shielded: a cancelled caller neither leaves it open nor half done.
        Deadlocks, lock waits and lost connections are retried, so that `work` must be safe to
        repeat after a commit whose outcome is unknown (idempotent by key or guard).

        Raises:
            DatabaseUnavailable: after all tries, or some 10 s (SQLite: 15 s) in which none can
                succeed.
        """
        transaction = asyncio.ensure_future(self._write(work))
        self._writing.add(transaction)
        transaction.add_done_callback(self._writing.discard)
        return await asyncio.shield(transaction)

    async def read(self, work: Callable[[AsyncConnection], Awaitable[Value]]) -> Value:
        """Run `work` for its reads; on MySQL each statement sees what is committed by then.

        Raises:
            DatabaseUnavailable: after all tries.
        """
        return await self._retried(self._read_once, work)

    async def now(self) -> int:
        """Return the database's UTC time, epoch milliseconds."""

        async def ask(connection: AsyncConnection) -> int:
            return int((await connection.execute(self._ask_now)).scalar_one())

        return await self.read(ask)

    async def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Close every connection, after the writes whose callers have left; these may take 5 s."""
        if self._writing:
            _, late = await asyncio.wait(self._writing, timeout=min(seconds, CLOSE_SECONDS))
            if late:
                # Cut off, so that their connections are closed too.
                for one in late:
                    one.cancel()
                await asyncio.wait(late, timeout=CUT_OFF_SECONDS)
        await self._writers.dispose()
        await self._readers.dispose()

    async def _write(self, work: Callable[[AsyncConnection], Awaitable[Value]]) -> Value:
        if self._writer_lock is None:
            return await self._retried(self._write_once, work)
        loop = asyncio.get_running_loop()
        asked = loop.time()
        async with self._writer_lock:
            if self._given_up_at > asked:
                # Another writer of this process could not begin meanwhile: nor could this one.
                raise DatabaseUnavailable("the database stayed locked")
            try:
                return await self._retried(self._write_once, work)
            except DatabaseUnavailable as error:
                if error.__cause__ is not None and is_conflict(error.__cause__):
                    self._given_up_at = loop.time()
                raise

    async def _write_once(self, work: Callable[[AsyncConnection], Awaitable[Value]]) -> Value:
        async with self._writers.begin() as connection:
            return await work(connection)

    async def _read_once(self, work: Callable[[AsyncConnection], Awaitable[Value]]) -> Value:
        async with self._readers.connect() as connection:
            return await work(connection)

    async def _retried(
        self,
        once: Callable[[Callable[[AsyncConnection], Awaitable[Value]]], Awaitable[Value]],
        work: Callable[[AsyncConnection], Awaitable[Value]],
    ) -> Value:
        loop = asyncio.get_running_loop()
        conflicts = losses = 0
        conflicts_end, patience_end = float("inf"), loop.time() + self._answer_seconds
        while True:
            try:
                return await once(work)
            except (DBAPIError, PoolTimeout, OSError, RuntimeError) as error:
                if is_conflict(error):
                    conflicts += 1
                    conflicts_end = min(conflicts_end, loop.time() + CONFLICT_SECONDS)
                    if conflicts >= CONFLICT_TRIES or loop.time() >= conflicts_end:
                        raise DatabaseUnavailable("the database stayed locked") from error
                elif is_lost(error):
                    losses += 1
                    silent = is_silent(error) and loop.time() >= patience_end
                    if silent or losses >= LOST_TRIES:
                        raise DatabaseAway("the database cannot be reached") from error
                elif is_about_data(error) or isinstance(error, RuntimeError):
                    raise
                else:
                    # Read-only after a failover, disk full, a limit: no fault of the data.
                    log.exception("database_refuses")
                    raise DatabaseUnavailable("the database refuses") from error
                self._note_retry(error)
            # The first repeat comes at once: most conflicts are over when they are reported.
            await asyncio.sleep(random.uniform(0, 0.005 * 2 ** min(conflicts + losses, 6)))

    def _note_retry(self, error: BaseException) -> None:
        kind = _kind_of(error)
        # Somebody has held rows for longer than any transaction of ours takes.
        say = log.warning if kind == "lock_wait" else log.debug
        say("database_retry", kind=kind)
        if self._tell_retry is not None:
            self._tell_retry(kind)


def _kind_of(error: BaseException) -> str:
    """Name why a transaction begins anew."""
    if not is_conflict(error):
        return "lost"
    code = _driver_code(error) if isinstance(error, DBAPIError) else None
    return {1205: "lock_wait", 1213: "deadlock"}.get(code or 0, "busy")


def is_conflict(error: BaseException) -> bool:
    """Tell a deadlock, a lock wait or a busy SQLite, which are normal under load, from a fault."""
    if not isinstance(error, DBAPIError):
        return False
    code = _driver_code(error)
    return code in MYSQL_DEADLOCK_OR_LOCK_WAIT or "database is locked" in str(error.orig)


def is_about_data(error: BaseException) -> bool:
    """Tell an error that these values will always cause from one that passes with time."""
    if isinstance(error, (DataError, IntegrityError)):
        return True
    return isinstance(error, DBAPIError) and _driver_code(error) in MYSQL_BAD_VALUE


def is_lost(error: BaseException) -> bool:
    """Tell a lost or refused connection, after which a commit's outcome may be unknown."""
    if isinstance(error, (PoolTimeout, OSError)) or is_closed_transport(error):
        return True
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated or _driver_code(error) in MYSQL_LOST:
        return True
    return isinstance(error, (InterfaceError, OperationalError)) and (
        "unable to open database" in str(error.orig) or "disk I/O" in str(error.orig)
    )


def is_silent(error: BaseException) -> bool:
    """Tell that no connection was to be had, or no answer: the next try may take as long."""
    if isinstance(error, PoolTimeout):
        return True
    return isinstance(error, DBAPIError) and _driver_code(error) in MYSQL_SILENT


def is_closed_transport(error: BaseException) -> bool:
    """Tell uvloop's error of a connection that was reset a moment before it is used."""
    return isinstance(error, RuntimeError) and any(one in str(error) for one in CLOSED_TRANSPORT)


def _driver_code(error: DBAPIError) -> int | None:
    arguments: tuple[Any, ...] = getattr(error.orig, "args", ())
    return arguments[0] if arguments and isinstance(arguments[0], int) else None


def _sqlite_engine(url: URL, *, begin: str, pool_size: int, connect: Connect | None) -> AsyncEngine:
    options: dict[str, Any] = {} if connect is None else {"async_creator": connect}
    engine = create_async_engine(
        url, pool_size=pool_size, max_overflow=0, connect_args={"timeout": BUSY_SECONDS}, **options
    )

    @event.listens_for(engine.sync_engine, "connect")
    def set_pragmas(connection: Any, _record: Any) -> None:
        # The driver's own transactions start too late to guard a read: ours are explicit.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            f"busy_timeout={BUSY_SECONDS * 1000:.0f}",
            "foreign_keys=ON",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin_transaction(connection: Any) -> None:
        connection.exec_driver_sql(begin)

    return engine


def _mysql_engine(
    url: URL,
    pool_size: int,
    *,
    answer_seconds: float,
    isolation_level: Literal["READ COMMITTED", "AUTOCOMMIT"],
    idle_on_mysql: int,
) -> AsyncEngine:
    from app.plumbing.mysql import BY_DRIVER  # noqa: PLC0415 - SQLite needs none of it

    engine = create_async_engine(
        url.update_query_dict({"charset": "utf8mb4"}),
        pool_size=pool_size,
        max_overflow=pool_size,
        pool_timeout=5,
        # No ping before each use and no reset after it: a connection that the server dropped
        # shows at the first statement, and every transaction here may be repeated. The last used
        # is taken first, so that the others may run into the server's limit.
        pool_use_lifo=True,
        pool_recycle=IDLE_CONNECTION_SECONDS // 2,
        pool_reset_on_return=None,
        isolation_level=isolation_level,
        # What commits by itself has nothing to roll back: that would be a round trip a read.
        skip_autocommit_rollback=True,
        connect_args={
            "async_creator_fn": BY_DRIVER[url.get_driver_name()],
            "answer_seconds": answer_seconds,
            "connect_timeout": 5,
            # Strict mode refuses what it would otherwise cut; the short idle time frees the
            # row locks of a vanished process.
            "init_command": (
                "SET SESSION time_zone='+00:00', "
                # Backslashes mean nothing special: JSON as text is sent as it is, not escaped anew.
                "sql_mode='STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,NO_BACKSLASH_ESCAPES', "
                f"innodb_lock_wait_timeout={LOCK_WAIT_SECONDS}, "
                # Each server takes the other's words for a comment.
                f"/*M!100301 wait_timeout={IDLE_CONNECTION_SECONDS}, "
                f"idle_write_transaction_timeout={IDLE_TRANSACTION_SECONDS} */"
                f"/*!80000 wait_timeout={idle_on_mysql} */"
            ),
        },
    )

    @event.listens_for(engine.sync_engine, "handle_error")
    def note_closed_transport(context: ExceptionContext) -> None:
        if is_closed_transport(context.original_exception):
            context.is_disconnect = True

    return engine
