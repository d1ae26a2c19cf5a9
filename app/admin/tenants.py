"""Tenants for admins of the platform; an admin of one tenant sees that one."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from app.access.caller import Caller
from app.admin.keys import no_such_tenant, require_platform, time_or_none
from app.admin.schemas import ChangeTenant, CreateTenant
from app.edge.bodies import parse_object
from app.edge.paging import decode_cursor, encode_cursor
from app.edge.problems import Problem, invalid, validation_problem
from app.lifecycle.tenants import (
    DEFAULT_TENANT,
    MOST_TENANTS,
    NameTaken,
    Tenant,
    TooManyTenants,
    change_tenant,
    insert_tenant,
    list_tenants,
    read_tenant,
)
from app.lifecycle.token import new_token
from app.plumbing.bus import KEYS, LIMITS, Bus
from app.plumbing.database import Database
from app.plumbing.times import rfc3339


class TenantDesk:
    """Makes and changes tenants."""

    def __init__(self, database: Database, bus: Bus) -> None:
        self._database = database
        self._bus = bus

    async def create(self, caller: Caller, body: bytes) -> dict[str, Any]:
        """Make a tenant.

        Raises:
            Problem: `invalid_json`, `validation_failed`, `forbidden`, `tenant_name_taken` or
                `too_many_tenants`.
        """
        require_platform(caller)
        try:
            request = CreateTenant.model_validate(parse_object(body))
        except ValidationError as error:
            raise validation_problem(list(error.errors(include_url=False)), CreateTenant) from None
        token = new_token()
        try:
            made = await self._database.write(
                lambda connection: insert_tenant(
                    connection, self._database, request.name, token, caller.actor
                )
            )
        except NameTaken:
            raise _name_taken(request.name) from None
        except TooManyTenants:
            raise Problem(
                "too_many_tenants", f"At most {MOST_TENANTS}: rename one that is not used."
            ) from None
        return tenant_view(made)

    async def look(self, caller: Caller, tenant_id: int) -> dict[str, Any]:
        """Return a tenant.

        Raises:
            Problem: `tenant_not_found`.
        """
        found = None
        if caller.runs_the_platform or tenant_id == caller.tenant_id:
            found = await self._database.read(lambda connection: read_tenant(connection, tenant_id))
        if found is None:
            raise no_such_tenant(tenant_id)
        return tenant_view(found)

    async def list_page(self, caller: Caller, *, limit: int, cursor: str | None) -> dict[str, Any]:
        """Return a page of tenants, by id.

        Raises:
            Problem: `validation_failed`, for a foreign cursor.
        """
        after = decode_cursor(cursor)
        only = None if caller.runs_the_platform else caller.tenant_id
        found = await self._database.read(
            lambda connection: list_tenants(connection, only=only, after=after, limit=limit + 1)
        )
        page = found[:limit]
        return {
            "items": [tenant_view(one) for one in page],
            "nextCursor": encode_cursor(page[-1].tenant_id) if len(found) > limit else None,
        }

    async def change(self, caller: Caller, tenant_id: int, body: bytes) -> dict[str, Any]:
        """Rename a tenant, refuse its callers, let them in again, or limit it.

        Raises:
            Problem: `invalid_json`, `validation_failed`, `forbidden`, `tenant_not_found` or
                `tenant_name_taken`.
        """
        require_platform(caller)
        try:
            request = ChangeTenant.model_validate(parse_object(body))
        except ValidationError as error:
            raise validation_problem(list(error.errors(include_url=False)), ChangeTenant) from None
        if tenant_id == DEFAULT_TENANT and request.disabled:
            raise invalid("the tenant 0 runs the platform and cannot be disabled", "/disabled")
        limits = None if request.limits is None else request.limits.changes()
        try:
            changed = await self._database.write(
                lambda connection: change_tenant(
                    connection,
                    self._database,
                    tenant_id,
                    caller.actor,
                    name=request.name,
                    disabled=request.disabled,
                    limits=limits,
                )
            )
        except NameTaken:
            raise _name_taken(request.name or "") from None
        if changed is None:
            raise no_such_tenant(tenant_id)
        self._bus.publish(KEYS, [])
        self._bus.publish(LIMITS, [])
        return tenant_view(changed)


def tenant_view(tenant: Tenant) -> dict[str, Any]:
    """Show a tenant."""
    return {
        "tenantId": tenant.tenant_id,
        "name": tenant.name,
        "disabled": tenant.disabled_at is not None,
        "createdAt": rfc3339(tenant.created_at),
        "disabledAt": time_or_none(tenant.disabled_at),
        "limits": {
            "weight": tenant.limits.weight,
            "submissionsPerSecond": tenant.limits.submissions_per_second,
            "waitingJobs": tenant.limits.waiting_jobs,
            "runningJobs": tenant.limits.running_jobs,
            "storedBytes": tenant.limits.stored_bytes,
            "mayBorrow": tenant.limits.may_borrow,
        },
    }


def _name_taken(name: str) -> Problem:
    return Problem("tenant_name_taken", f"Another tenant is called '{name}': choose a new name.")
