"""Whether this code may work with the schema that is there."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.tables import SCHEMA_REVISION
from app.plumbing.database import Database


class SchemaMismatch(Exception):
    """This code must not work with the database's schema; the message has the command to run."""


class Revisions(NamedTuple):
    """The schema's revision as it is, and the one that this code is for."""

    database: int
    code: int


async def check_schema(database: Database) -> Revisions:
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
    return Revisions(revision, SCHEMA_REVISION)


def _table_is_missing(error: DBAPIError) -> bool:
    arguments = getattr(error.orig, "args", ())
    return "no such table" in str(error.orig) or bool(arguments and arguments[0] == 1146)
