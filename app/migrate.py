"""The schema: bring it up to date, and tell whether this code may work with what is there."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.tables import SCHEMA_REVISION
from app.plumbing.database import Database

SCRIPTS = Path(__file__).parent.parent / "alembic"
LOCK_NAME = "oncue-migrate"
LOCK_SECONDS = 60


class SchemaMismatch(Exception):
    """This code must not work with the database's schema; the message has the command to run."""


class MigrationBusy(Exception):
    """Another process has been migrating this database for over a minute."""


def migrate(database_url: str) -> int:
    """Bring the schema to this code's revision and return it; safe to run twice and at once.

    Raises:
        MigrationBusy: another process holds the migration lock for over a minute.
        sqlalchemy.exc.DBAPIError: the database refuses or cannot be reached.
    """
    url = _sync_url(make_url(database_url))
    if url.get_backend_name() == "sqlite" and url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url)
    if url.get_backend_name() == "sqlite":
        event.listen(engine, "connect", _without_implicit_begin)
        event.listen(engine, "begin", lambda c: c.exec_driver_sql("BEGIN IMMEDIATE"))
    try:
        with engine.begin() as connection, _exclusive(connection):
            config = _config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        engine.dispose()
    return SCHEMA_REVISION


def offline_sql(dialect: str) -> str:
    """Return the SQL that the whole history would run on a fresh database of `dialect`."""
    output = io.StringIO()
    config = _config(output)
    config.set_main_option("dialect", dialect)
    command.upgrade(config, "head", sql=True)
    return output.getvalue()


async def check_schema(database: Database) -> None:
    """Return if the schema is this code's own or a later one that still accepts it.

    Raises:
        SchemaMismatch: it is missing, older, or too new.
        DatabaseUnavailable: the database did not answer.
    """
    if database.file_is_missing:
        raise SchemaMismatch(f"there is no database {database.url.database}: run `oncue migrate`")

    async def ask(connection: AsyncConnection) -> tuple[int, int] | None:
        try:
            row = (
                await connection.execute(text("SELECT revision, oldest_code FROM schema_revision"))
            ).one_or_none()
        except DBAPIError as error:
            if _table_is_missing(error):
                return None
            raise
        return None if row is None else (row[0], row[1])

    found = await database.read(ask)
    if found is None:
        raise SchemaMismatch("the database has no Oncue schema: run `oncue migrate`")
    revision, oldest_code = found
    if revision < SCHEMA_REVISION:
        raise SchemaMismatch(
            f"the database has schema revision {revision}, this version needs "
            f"{SCHEMA_REVISION}: run `oncue migrate`"
        )
    if oldest_code > SCHEMA_REVISION:
        raise SchemaMismatch(
            f"the database has schema revision {revision}, which this version (for "
            f"{SCHEMA_REVISION}) is too old for: upgrade this process"
        )


def _config(output: io.StringIO | None = None) -> Config:
    config = Config(stdout=io.StringIO(), output_buffer=output)
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    return config


def _sync_url(url: URL) -> URL:
    if url.get_backend_name() == "sqlite":
        return url.set(drivername="sqlite+pysqlite")
    return url.set(drivername="mysql+pymysql").update_query_dict({"charset": "utf8mb4"})


def _without_implicit_begin(connection: object, _record: object) -> None:
    connection.isolation_level = None  # type: ignore[attr-defined]
    # Batch mode rebuilds tables: with foreign keys on that would empty their children.
    connection.execute("PRAGMA busy_timeout=60000")  # type: ignore[attr-defined]
    connection.execute("PRAGMA foreign_keys=OFF")  # type: ignore[attr-defined]
    connection.execute("PRAGMA journal_mode=WAL")  # type: ignore[attr-defined]


@contextlib.contextmanager
def _exclusive(connection: Connection) -> Iterator[None]:
    if connection.dialect.name == "sqlite":
        yield
        return
    name = f"{LOCK_NAME}:{connection.engine.url.database}"[:64]
    got = connection.execute(
        text("SELECT GET_LOCK(:name, :seconds)"), {"name": name, "seconds": LOCK_SECONDS}
    ).scalar_one()
    if got != 1:
        raise MigrationBusy("another process is migrating this database; try again later")
    try:
        yield
    finally:
        connection.execute(text("SELECT RELEASE_LOCK(:name)"), {"name": name})


def _table_is_missing(error: DBAPIError) -> bool:
    arguments = getattr(error.orig, "args", ())
    return "no such table" in str(error.orig) or bool(arguments and arguments[0] == 1146)
