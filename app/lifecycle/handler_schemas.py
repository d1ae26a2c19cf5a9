"""The JSON Schemas that workers published, by digest: stored once, kept while they are in use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.plumbing.database import NOW_MS, Database

UNUSED_MS: Final = 7 * 24 * 3600 * 1000
"""How long a schema is kept that no worker has offered."""

_READ: Final = text("SELECT digest, body FROM handler_schema WHERE digest IN :digests").bindparams(
    bindparam("digests", expanding=True)
)
_KNOWN: Final = text("SELECT digest FROM handler_schema WHERE digest IN :digests").bindparams(
    bindparam("digests", expanding=True)
)
_SEE: Final = {
    sqlite: text(f"UPDATE handler_schema SET seen_at = {now} WHERE digest IN :digests").bindparams(
        bindparam("digests", expanding=True)
    )
    for sqlite, now in NOW_MS.items()
}
_STORE: Final = {
    sqlite: text(
        "INSERT INTO handler_schema (digest, body, seen_at) VALUES (:digest, :body, "
        f"{now}) "
        + ("ON CONFLICT DO NOTHING" if sqlite else "ON DUPLICATE KEY UPDATE digest = digest")
    )
    for sqlite, now in NOW_MS.items()
}
_PRUNE: Final = {
    sqlite: text(f"DELETE FROM handler_schema WHERE seen_at < {now} - {UNUSED_MS}")
    for sqlite, now in NOW_MS.items()
}


async def store_schemas(
    connection: AsyncConnection, database: Database, schemas: Mapping[str, str]
) -> None:
    """Store bodies by their digest; one that is there stays."""
    for digest, body in sorted(schemas.items()):
        await connection.execute(_STORE[database.is_sqlite], {"digest": digest, "body": body})


async def see_schemas(
    connection: AsyncConnection, database: Database, digests: Collection[str]
) -> set[str]:
    """Note that workers offer these digests, and return those that are stored."""
    wanted = {"digests": sorted(digests)}
    known = set((await connection.execute(_KNOWN, wanted)).scalars())
    if known:
        await connection.execute(_SEE[database.is_sqlite], {"digests": sorted(known)})
    return known


async def read_schemas(connection: AsyncConnection, digests: Collection[str]) -> dict[str, str]:
    """Return the bodies of the digests that are stored."""
    rows = await connection.execute(_READ, {"digests": sorted(digests)})
    return {row.digest: row.body for row in rows}


async def prune_schemas(connection: AsyncConnection, database: Database) -> int:
    """Delete what no worker has offered for a week; return how many."""
    return (await connection.execute(_PRUNE[database.is_sqlite])).rowcount
