"""The term of the dispatch lock: a number in the database that fences the writes of old holders."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.reads import read_now
from app.plumbing.database import Database


class TermRowMissing(Exception):
    """The row that fences dispatch is gone: nothing may be dispatched until it is restored."""


async def begin_term(connection: AsyncConnection, database: Database, holder: str) -> int:
    """Raise the term for a new holder of the lock and return it.

    Raises:
        TermRowMissing: the row is not there.
    """
    now = await read_now(connection, database)
    done = await connection.execute(
        text(
            "UPDATE dispatch_term SET term = term + 1, holder = :holder, since = :now "
            "WHERE partition_no = 0"
        ),
        {"holder": holder, "now": now},
    )
    if done.rowcount != 1:
        raise TermRowMissing
    return await read_term(connection)


async def read_term(connection: AsyncConnection) -> int:
    """Return the current term.

    Raises:
        TermRowMissing: the row is not there.
    """
    term = (
        await connection.execute(text("SELECT term FROM dispatch_term WHERE partition_no = 0"))
    ).scalar_one_or_none()
    if term is None:
        raise TermRowMissing
    return int(term)
