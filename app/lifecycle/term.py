"""The terms of the dispatch locks: numbers in the database that fence the writes of old holders.

Each partition has its lock and its row; a partition is in use as soon as it has one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.reads import read_now
from app.plumbing.database import Database

FIRST: Final = 0
"""The partition that is always there; what is not per partition goes with its lock."""


class TermRowMissing(Exception):
    """The row that fences dispatch is gone: nothing may be dispatched until it is restored."""


_BEGIN: Final = text(
    "UPDATE dispatch_term SET term = term + 1, holder = :holder, since = :now "
    "WHERE partition_no = :partition"
)
_READ: Final = text("SELECT term FROM dispatch_term WHERE partition_no = :partition")


async def begin_term(
    connection: AsyncConnection, database: Database, holder: str, partition: int = FIRST
) -> int:
    """Raise the term for a new holder of a partition's lock and return it.

    Raises:
        TermRowMissing: the row is not there.
    """
    now = await read_now(connection, database)
    done = await connection.execute(_BEGIN, {"holder": holder, "now": now, "partition": partition})
    if done.rowcount != 1:
        raise TermRowMissing
    return await read_term(connection, partition)


async def read_term(connection: AsyncConnection, partition: int = FIRST) -> int:
    """Return the current term of a partition.

    Raises:
        TermRowMissing: the row is not there.
    """
    term = (await connection.execute(_READ, {"partition": partition})).scalar_one_or_none()
    if term is None:
        raise TermRowMissing
    return int(term)


async def read_partitions(connection: AsyncConnection) -> list[int]:
    """Return the partitions in use: once one has been, it stays."""
    rows = await connection.execute(text("SELECT partition_no FROM dispatch_term"))
    return sorted(row[0] for row in rows)


async def open_partitions(
    connection: AsyncConnection, database: Database, partitions: Iterable[int]
) -> None:
    """Take partitions into use; those that are stay as they are.

    The first is never opened here: its row comes with the schema, and one that is lost must be
    seen. The others' terms begin with the time, so that a row which was lost never has a term again
    that somebody may still believe to hold.
    """
    rows = [{"partition": one} for one in sorted(partitions) if one != FIRST]
    if rows:
        await connection.execute(
            text(
                "INSERT INTO dispatch_term (partition_no, term, holder, since) "
                f"VALUES (:partition, {database.now_ms}, '', 0) "
                + database.keep_first("partition_no")
            ),
            rows,
        )
