"""The rows of tenants' own lists of networks that may be called for them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.plumbing.database import Database


async def read_networks(connection: AsyncConnection, tenant_id: int) -> tuple[str, ...] | None:
    """Return a tenant's list, None if it has none."""
    found = await connection.execute(
        text("SELECT networks FROM egress_allow WHERE tenant_id = :tenant"), {"tenant": tenant_id}
    )
    value = found.scalar_one_or_none()
    return None if value is None else tuple(json.loads(value))


async def set_networks(
    connection: AsyncConnection,
    database: Database,
    tenant_id: int,
    networks: Sequence[str] | None,
) -> None:
    """Store a tenant's list; None: it has none of its own any more."""
    await connection.execute(
        text("DELETE FROM egress_allow WHERE tenant_id = :tenant"), {"tenant": tenant_id}
    )
    if networks is not None:
        await connection.execute(
            text(
                "INSERT INTO egress_allow (tenant_id, networks, updated_at) "
                f"VALUES (:tenant, :networks, {database.now_ms})"
            ),
            {"tenant": tenant_id, "networks": json.dumps(list(networks))},
        )
