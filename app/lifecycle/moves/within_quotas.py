"""What may be claimed by quota, where several dispatchers claim for the same tenants.

One that claims alone counts before it deals. Several would each find the last free run: here the
tenant's row of limits is locked, what runs is counted, and the claim follows in the same
transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.limits import count_running_of
from app.lifecycle.moves.claim import Assignment
from app.plumbing.database import Database

_TENANTS: Final = text("SELECT id, tenant_id FROM job_info WHERE id IN :ids").bindparams(
    bindparam("ids", expanding=True)
)
# SQLite's write lock covers all rows.
_LIMITS: Final = {
    sqlite: text(
        "SELECT tenant_id, running_jobs FROM tenant_limits WHERE tenant_id IN :ids "
        f"AND running_jobs IS NOT NULL AND may_borrow = 0 ORDER BY tenant_id{lock}"
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite, lock in ((True, ""), (False, " FOR UPDATE"))
}


async def keep_within_quotas(
    connection: AsyncConnection, database: Database, assignments: Sequence[Assignment]
) -> list[Assignment]:
    """Return the assignments without those that are too many for their tenants.

    Only tenants that may not borrow are held to their quota: what others borrow is nobody's loss.
    """
    tenant_of = {
        row.id: row.tenant_id
        for row in await connection.execute(_TENANTS, {"ids": [one.job_id for one in assignments]})
    }
    limited = await connection.execute(
        _LIMITS[database.is_sqlite], {"ids": sorted(set(tenant_of.values()))}
    )
    too_many: set[int] = set()
    for tenant_id, most in limited.all():
        own = [one.job_id for one in assignments if tenant_of.get(one.job_id) == tenant_id]
        left = max(0, most - await count_running_of(connection, tenant_id))
        too_many.update(own[left:])
    return [one for one in assignments if one.job_id not in too_many]
