"""What tenants chose for how long their finished jobs are kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.states import JobStatus


async def read_policies(connection: AsyncConnection) -> dict[int, dict[JobStatus, int]]:
    """Return the milliseconds by tenant and state, of all tenants that chose any."""
    rows = await connection.execute(text("SELECT tenant_id, status, keep_ms FROM retention_policy"))
    found: dict[int, dict[JobStatus, int]] = defaultdict(dict)
    for row in rows:
        found[row.tenant_id][JobStatus(row.status)] = row.keep_ms
    return found


async def read_policy(connection: AsyncConnection, tenant_id: int) -> dict[JobStatus, int]:
    """Return the milliseconds that one tenant chose, by state."""
    rows = await connection.execute(
        text("SELECT status, keep_ms FROM retention_policy WHERE tenant_id = :tenant"),
        {"tenant": tenant_id},
    )
    return {JobStatus(row.status): row.keep_ms for row in rows}


async def write_policy(
    connection: AsyncConnection, tenant_id: int, chosen: Mapping[JobStatus, int]
) -> None:
    """Put these in place of all that the tenant chose before."""
    await connection.execute(
        text("DELETE FROM retention_policy WHERE tenant_id = :tenant"), {"tenant": tenant_id}
    )
    if chosen:
        await connection.execute(
            text(
                "INSERT INTO retention_policy (tenant_id, status, keep_ms) "
                "VALUES (:tenant, :status, :keep)"
            ),
            [
                {"tenant": tenant_id, "status": int(status), "keep": keep_ms}
                for status, keep_ms in sorted(chosen.items())
            ],
        )


async def next_tenant(connection: AsyncConnection, after: int) -> int | None:
    """Return the next tenant that has jobs, by one step of an index."""
    found = await connection.execute(
        text("SELECT tenant_id FROM job_info WHERE tenant_id > :after ORDER BY tenant_id LIMIT 1"),
        {"after": after},
    )
    tenant: int | None = found.scalar_one_or_none()
    return tenant
