"""The audit log for admins: that of their tenant, or of all for admins of the platform."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import RowMapping

from app.access.caller import Caller
from app.edge.paging import decode_end, encode_end
from app.lifecycle.audit import AuditFilter, list_audit
from app.plumbing.database import Database
from app.plumbing.times import rfc3339


async def list_audit_page(
    database: Database,
    caller: Caller,
    wanted: AuditFilter,
    *,
    limit: int,
    cursor: str | None,
) -> dict[str, Any]:
    """Return a page of entries, newest first; it may be short while `nextCursor` is set.

    Raises:
        Problem: `validation_failed`, for a foreign cursor.
    """
    before = decode_end(cursor)
    if not caller.runs_the_platform and wanted.tenant_id != caller.tenant_id:
        return {"items": [], "nextCursor": None}
    page = await database.read(
        lambda connection: list_audit(connection, wanted, before=before, limit=limit)
    )
    return {
        "items": [entry_view(row) for row in page.entries],
        "nextCursor": None if page.onward is None else encode_end(*page.onward),
    }


def entry_view(row: RowMapping) -> dict[str, Any]:
    """Show an entry."""
    return {
        "entryId": row["id"],
        "at": rfc3339(row["at"]),
        "tenantId": row["tenant_id"],
        "actor": row["actor"],
        "actorKeyId": row["actor_key_id"],
        "actorTenantId": row["actor_tenant_id"],
        "action": row["action"],
        "target": row["target"],
        "before": _values(row["old_values"]),
        "after": _values(row["new_values"]),
        "address": row["address"],
        "requestId": row["request_id"],
    }


def _values(text: str | None) -> dict[str, Any] | None:
    return None if text is None else json.loads(text)
