"""Migrations: bring the schema up to date."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.engine import URL, make_url

from app.lifecycle.tables import SCHEMA_REVISION

_IN_WHEEL = Path(__file__).parent / "migrations"
SCRIPTS = _IN_WHEEL if _IN_WHEEL.exists() else Path(__file__).parent.parent / "alembic"
LOCK_NAME = "oncue-migrate"
LOCK_SECONDS = 60


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
        # In this order: whoever gets the lock next has to read what this one committed.
        with engine.connect() as connection, _exclusive(connection), connection.begin():
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
    connection.rollback()
    if got != 1:
        raise MigrationBusy("another process is migrating this database; try again later")
    try:
        yield
    finally:
        connection.execute(text("SELECT RELEASE_LOCK(:name)"), {"name": name})
        connection.rollback()
