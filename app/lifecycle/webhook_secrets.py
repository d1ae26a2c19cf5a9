"""The rows of tenants' webhook secrets: sealed, the newest first, and until when old ones sign."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.reads import read_now
from app.plumbing.database import NOW_MS, Database
from oncue.protocol import MAX_SIGNING_SECRETS

WORKERS_OWN: Final = ""
"""Stands in `sealed` for the secret that workers are set to."""

_ACTIVE: Final = {
    sqlite: text(
        "SELECT id, sealed, shown, created_at, expires_at FROM webhook_secret "
        f"WHERE tenant_id = :tenant AND (expires_at IS NULL OR expires_at > {NOW_MS[sqlite]}) "
        f"ORDER BY id DESC LIMIT {MAX_SIGNING_SECRETS}"
    )
    for sqlite in (True, False)
}
_LOCK_TENANT: Final = text("SELECT id FROM tenant WHERE id = :tenant FOR UPDATE")
_INSERT: Final = text(
    "INSERT INTO webhook_secret (tenant_id, sealed, shown, created_at, expires_at) "
    "VALUES (:tenant, :sealed, :shown, :now, :expires)"
)
_FORGET: Final = text("DELETE FROM webhook_secret WHERE tenant_id = :tenant")
_FORGET_OLDER: Final = text("DELETE FROM webhook_secret WHERE tenant_id = :tenant AND id < :id")
_EXPIRE: Final = text(
    "UPDATE webhook_secret SET expires_at = :expires WHERE tenant_id = :tenant AND id = :id"
)


@dataclass(frozen=True, slots=True)
class NewSecret:
    """A secret to store: sealed, and as it may be shown for ever after."""

    sealed: str
    shown: str


async def read_secrets(
    connection: AsyncConnection, database: Database, tenant_id: int
) -> Sequence[RowMapping]:
    """Return the secrets that sign for a tenant now, the newest first; none: the workers' own."""
    rows = await connection.execute(_ACTIVE[database.is_sqlite], {"tenant": tenant_id})
    return rows.mappings().all()


async def lock_secrets(connection: AsyncConnection, database: Database, tenant_id: int) -> None:
    """Let no other transaction change the tenant's secrets until this one ends."""
    if not database.is_sqlite:  # which has one writer at a time
        await connection.execute(_LOCK_TENANT, {"tenant": tenant_id})


async def set_secret(
    connection: AsyncConnection, database: Database, tenant_id: int, new: NewSecret | None
) -> Sequence[RowMapping]:
    """Let one secret alone sign from now on; None: the workers' own. Returns what then signs."""
    await connection.execute(_FORGET, {"tenant": tenant_id})
    if new is not None:
        await _insert(connection, tenant_id, new, await read_now(connection, database))
    return await read_secrets(connection, database, tenant_id)


async def rotate_secret(
    connection: AsyncConnection,
    database: Database,
    tenant_id: int,
    new: NewSecret,
    *,
    overlap_ms: int,
) -> Sequence[RowMapping]:
    """Let a new secret sign, and the one before beside it for `overlap_ms` more.

    What was before that one signs no longer. Returns what then signs. Safe to repeat.
    """
    # Of two at once each would find, and let expire, only the one before both.
    await lock_secrets(connection, database, tenant_id)
    now = await read_now(connection, database)
    before = await read_secrets(connection, database, tenant_id)
    if before and before[0]["sealed"] == new.sealed:
        return before  # by an earlier try, whose commit was not answered
    if before:
        newest = before[0]["id"]
        await connection.execute(_FORGET_OLDER, {"tenant": tenant_id, "id": newest})
        await connection.execute(
            _EXPIRE, {"tenant": tenant_id, "id": newest, "expires": now + overlap_ms}
        )
    else:
        await connection.execute(_FORGET, {"tenant": tenant_id})
        await _insert(
            connection, tenant_id, NewSecret(WORKERS_OWN, "default"), now, now + overlap_ms
        )
    await _insert(connection, tenant_id, new, now)
    return await read_secrets(connection, database, tenant_id)


async def _insert(
    connection: AsyncConnection,
    tenant_id: int,
    new: NewSecret,
    now: int,
    expires: int | None = None,
) -> None:
    await connection.execute(
        _INSERT,
        {
            "tenant": tenant_id,
            "sealed": new.sealed,
            "shown": new.shown,
            "now": now,
            "expires": expires,
        },
    )
