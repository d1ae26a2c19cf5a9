"""The rows of tenants. An id is never used again: jobs carry it for as long as they are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.audit import Actor, Deed, record_deed, wire_name
from app.lifecycle.limits import NO_LIMITS, TenantLimits, read_limits_of, write_limits
from app.lifecycle.reads import read_now
from app.plumbing.database import Database

DEFAULT_TENANT: Final = 0
MOST_TENANTS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant; times are epoch ms."""

    tenant_id: int
    name: str
    created_at: int
    disabled_at: int | None
    limits: TenantLimits = NO_LIMITS


class NameTaken(Exception):
    """Another tenant has this name."""


class TooManyTenants(Exception):
    """There are as many tenants as there may be."""


_COLUMNS: Final = "id, name, token, created_at, disabled_at"


async def read_tenant(connection: AsyncConnection, tenant_id: int) -> Tenant | None:
    """Return one tenant."""
    row = await _by(connection, "id", tenant_id)
    if row is None:
        return None
    limits = await read_limits_of(connection, [tenant_id])
    return _tenant(row, limits.get(tenant_id, NO_LIMITS))


async def list_tenants(
    connection: AsyncConnection, *, only: int | None, after: int | None, limit: int
) -> Sequence[Tenant]:
    """Return tenants by id, those behind `after`; or one alone."""
    where, values = "id > :after", {"after": -1 if after is None else after, "limit": limit}
    if only is not None:
        where, values = f"{where} AND id = :only", values | {"only": only}
    rows = await connection.execute(
        text(f"SELECT {_COLUMNS} FROM tenant WHERE {where} ORDER BY id LIMIT :limit"), values
    )
    found = rows.mappings().all()
    limits = await read_limits_of(connection, [row["id"] for row in found])
    return [_tenant(row, limits.get(row["id"], NO_LIMITS)) for row in found]


async def insert_tenant(
    connection: AsyncConnection, database: Database, name: str, token: str, actor: Actor
) -> Tenant:
    """Make a tenant; safe to repeat with the same token.

    Raises:
        NameTaken: another one has the name.
        TooManyTenants: there are enough.
    """
    await _lock(connection, database)
    known = await _by(connection, "name", name)
    if known is not None:
        if known["token"] == token:
            return _tenant(known)  # by an earlier try of this transaction
        raise NameTaken(name)
    last = (await connection.execute(text("SELECT MAX(id) FROM tenant"))).scalar_one()
    if last >= MOST_TENANTS:
        raise TooManyTenants
    now = await read_now(connection, database)
    await connection.execute(
        text("INSERT INTO tenant (id, name, token, created_at) VALUES (:id, :name, :token, :now)"),
        {"id": last + 1, "name": name, "token": token, "now": now},
    )
    made = Tenant(last + 1, name, now, None)
    await _tell(connection, made, actor, "create", now, {}, {"name": name})
    return made


async def change_tenant(
    connection: AsyncConnection,
    database: Database,
    tenant_id: int,
    actor: Actor,
    *,
    name: str | None,
    disabled: bool | None,
    limits: Mapping[str, Any] | None = None,
) -> Tenant | None:
    """Rename a tenant, refuse its callers, let them in again, limit it; safe to repeat.

    `limits` are the fields of its limits that change; a None takes a limit away.

    Raises:
        NameTaken: another one has the name.
    """
    await _lock(connection, database)
    row = await _by(connection, "id", tenant_id)
    if row is None:
        return None
    now = await read_now(connection, database)
    old: dict[str, Any] = {}
    new: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    if name is not None and name != row["name"]:
        if await _by(connection, "name", name) is not None:
            raise NameTaken(name)
        old["name"], new["name"] = row["name"], name
        changes["name"] = name
    if disabled is not None and disabled != (row["disabled_at"] is not None):
        old["disabled"], new["disabled"] = not disabled, disabled
        changes["disabled_at"] = now if disabled else None
    if changes:
        columns = ", ".join(f"{column} = :{column}" for column in changes)
        await connection.execute(
            text(f"UPDATE tenant SET {columns} WHERE id = :id"), {**changes, "id": tenant_id}
        )
    known = (await read_limits_of(connection, [tenant_id])).get(tenant_id, NO_LIMITS)
    limited = replace(known, **(limits or {}))
    if limited != known:
        await write_limits(connection, tenant_id, limited)
        for field in limits or {}:
            if getattr(known, field) != getattr(limited, field):
                shown = wire_name(field)
                old[shown], new[shown] = getattr(known, field), getattr(limited, field)
    if new:
        await _tell(connection, _tenant(row), actor, "change", now, old, new)
    return _tenant({**row, **changes}, limited)


async def _lock(connection: AsyncConnection, database: Database) -> None:
    """Let one change of tenants follow the other; SQLite's writers do so anyway."""
    if not database.is_sqlite:
        await connection.execute(
            text("SELECT id FROM tenant WHERE id = :id FOR UPDATE"), {"id": DEFAULT_TENANT}
        )


async def _by(connection: AsyncConnection, column: str, value: Any) -> RowMapping | None:
    found = await connection.execute(
        text(f"SELECT {_COLUMNS} FROM tenant WHERE {column} = :value"), {"value": value}
    )
    return found.mappings().one_or_none()


async def _tell(
    connection: AsyncConnection,
    tenant: Tenant,
    actor: Actor,
    verb: str,
    now: int,
    old: dict[str, Any],
    new: dict[str, Any],
) -> None:
    await record_deed(
        connection,
        Deed(actor, f"tenant.{verb}"),
        f"tenant:{tenant.tenant_id}",
        tenant_id=tenant.tenant_id,
        now_ms=now,
        old=old,
        new=new,
    )


def _tenant(row: Any, limits: TenantLimits = NO_LIMITS) -> Tenant:
    return Tenant(row["id"], row["name"], row["created_at"], row["disabled_at"], limits)
