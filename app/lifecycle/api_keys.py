"""The rows of keys: found by the part of a key that is no secret, never by the secret itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.audit import Actor, Deed, record_deed
from app.plumbing.database import Database
from app.plumbing.times import rfc3339

KeyKind = Literal["caller", "worker"]


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key as it is kept; times are epoch ms, digests SHA-256 in hex."""

    key_id: int
    prefix: str
    kind: KeyKind
    tenant_id: int
    name: str
    roles: tuple[str, ...]
    worker_group: str | None
    digest: str = field(repr=False)
    old_digest: str | None = field(repr=False)
    old_until: int | None
    created_at: int
    created_by: str
    rotated_at: int | None
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None
    tenant_disabled: bool


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key to be stored; its prefix was drawn anew and so tells own from other."""

    prefix: str
    kind: KeyKind
    tenant_id: int
    name: str
    roles: tuple[str, ...]
    worker_group: str | None
    digest: str = field(repr=False)
    expires_at: int | None = None


class NoSuchTenant(Exception):
    """The tenant of a new key is not there."""


_COLUMNS: Final = (
    "k.id, k.prefix, k.kind, k.tenant_id, k.name, k.roles, k.worker_group, k.digest, k.old_digest, "
    "k.old_until, k.created_at, k.created_by, k.rotated_at, k.expires_at, k.revoked_at, "
    "k.last_used_at, t.disabled_at AS tenant_disabled_at"
)
_FROM: Final = "FROM api_key AS k LEFT JOIN tenant AS t ON t.id = k.tenant_id"
_BY_PREFIX: Final = text(f"SELECT {_COLUMNS} {_FROM} WHERE k.prefix = :prefix")
_BY_ID: Final = text(f"SELECT {_COLUMNS} {_FROM} WHERE k.id = :id")
_ANY: Final = text("SELECT id FROM api_key WHERE kind = :kind LIMIT 1")
_INSERT: Final = (
    "INSERT INTO api_key (prefix, kind, tenant_id, name, roles, worker_group, digest, created_at, "
    "created_by, expires_at) VALUES (:prefix, :kind, :tenant, :name, :roles, :worker_group, "
    ":digest, {now}, :by, :expires)"
)
_USED: Final = text(
    "UPDATE api_key SET last_used_at = :at WHERE id = :id "
    "AND (last_used_at IS NULL OR last_used_at < :at)"
)


async def find_key(connection: AsyncConnection, prefix: str) -> KeyRow | None:
    """Return the key with this prefix, whatever has become of it."""
    row = (await connection.execute(_BY_PREFIX, {"prefix": prefix})).mappings().one_or_none()
    return None if row is None else _key_row(row)


async def any_key(connection: AsyncConnection, kind: KeyKind) -> bool:
    """Tell whether a key of the kind was ever made: a revoked one closes the door, too."""
    return (await connection.execute(_ANY, {"kind": kind})).one_or_none() is not None


async def insert_key(
    connection: AsyncConnection, database: Database, new: NewKey, actor: Actor
) -> KeyRow:
    """Store a key and who made it; safe to repeat.

    Raises:
        NoSuchTenant: as it says.
    """
    known = await find_key(connection, new.prefix)
    if known is not None:
        return known  # by an earlier try of this transaction
    found = await connection.execute(
        text("SELECT id FROM tenant WHERE id = :id"), {"id": new.tenant_id}
    )
    if found.one_or_none() is None:
        raise NoSuchTenant(new.tenant_id)
    await connection.execute(
        text(_INSERT.format(now=database.now_ms)),
        {
            "prefix": new.prefix,
            "kind": new.kind,
            "tenant": new.tenant_id,
            "name": new.name,
            "roles": ",".join(new.roles),
            "worker_group": new.worker_group,
            "digest": new.digest,
            "by": actor.name[:128],
            "expires": new.expires_at,
        },
    )
    stored = await find_key(connection, new.prefix)
    if stored is None:
        raise RuntimeError("a key that was inserted is not there")
    told: dict[str, Any] = {"name": stored.name, "prefix": stored.prefix}
    if stored.worker_group is None:
        told["roles"] = list(stored.roles)
    else:
        told["workerGroup"] = stored.worker_group
    if stored.expires_at is not None:
        told["expiresAt"] = rfc3339(stored.expires_at)
    await _tell(connection, stored, actor, "create", stored.created_at, {}, told)
    return stored


async def lock_key(
    connection: AsyncConnection, database: Database, key_id: int, *, tenant_id: int | None
) -> tuple[KeyRow, int] | None:
    """Return a key of the tenant (None: of any), locked, and the time, epoch ms."""
    lock = "" if database.is_sqlite else " FOR UPDATE"
    found = await connection.execute(
        text(f"SELECT {database.now_ms} AS now_ms FROM api_key WHERE id = :id{lock}"),
        {"id": key_id},
    )
    now = found.scalar_one_or_none()
    row = (await connection.execute(_BY_ID, {"id": key_id})).mappings().one_or_none()
    if now is None or row is None or tenant_id not in (None, row["tenant_id"]):
        return None
    return _key_row(row), int(now)


async def rotate_key(
    connection: AsyncConnection,
    key: KeyRow,
    actor: Actor,
    *,
    digest: str,
    overlap_ms: int,
    now: int,
) -> None:
    """Give a locked key a new secret; the one before works for `overlap_ms` more."""
    if key.digest == digest:
        return  # by an earlier try of this transaction
    until = now + overlap_ms
    await connection.execute(
        text(
            "UPDATE api_key SET old_digest = digest, old_until = :until, digest = :digest, "
            "rotated_at = :now WHERE id = :id"
        ),
        {"until": until, "digest": digest, "now": now, "id": key.key_id},
    )
    await _tell(connection, key, actor, "rotate", now, {}, {"oldWorksUntil": rfc3339(until)})


async def revoke_key(connection: AsyncConnection, key: KeyRow, actor: Actor, *, now: int) -> None:
    """End a locked key for good; one that is revoked stays as it is."""
    if key.revoked_at is not None:
        return
    await connection.execute(
        text(
            "UPDATE api_key SET revoked_at = :now, old_digest = NULL, old_until = NULL "
            "WHERE id = :id AND revoked_at IS NULL"
        ),
        {"now": now, "id": key.key_id},
    )
    await _tell(connection, key, actor, "revoke", now, {"revoked": False}, {"revoked": True})


async def list_keys(
    connection: AsyncConnection,
    *,
    tenant_id: int | None,
    prefix: str | None,
    before: int | None,
    limit: int,
) -> Sequence[KeyRow]:
    """Return keys, newest first, of the tenant (None: of all) whose prefix begins so."""
    conditions = ["1 = 1"]
    values: dict[str, Any] = {"limit": limit}
    for condition, name, value in (
        ("k.tenant_id = :tenant", "tenant", tenant_id),
        ("SUBSTR(k.prefix, 1, :length) = :prefix", "prefix", prefix),
        ("k.id < :before", "before", before),
    ):
        if value is not None:
            conditions.append(condition)
            values[name] = value
    if prefix is not None:
        values["length"] = len(prefix)
    rows = await connection.execute(
        text(
            f"SELECT {_COLUMNS} {_FROM} WHERE {' AND '.join(conditions)} "
            "ORDER BY k.id DESC LIMIT :limit"
        ),
        values,
    )
    return [_key_row(row) for row in rows.mappings()]


async def note_uses(connection: AsyncConnection, used: Mapping[int, int]) -> None:
    """Note when keys were last used (epoch ms by key id); an earlier time changes nothing."""
    for key_id in sorted(used):
        await connection.execute(_USED, {"id": key_id, "at": used[key_id]})


async def _tell(
    connection: AsyncConnection,
    key: KeyRow,
    actor: Actor,
    verb: str,
    now: int,
    old: dict[str, Any],
    new: dict[str, Any],
) -> None:
    await record_deed(
        connection,
        Deed(actor, f"key.{verb}"),
        f"key:{key.key_id}",
        tenant_id=key.tenant_id,
        now_ms=now,
        old=old,
        new=new,
    )


def _key_row(row: RowMapping) -> KeyRow:
    return KeyRow(
        key_id=row["id"],
        prefix=row["prefix"],
        kind=row["kind"],
        tenant_id=row["tenant_id"],
        name=row["name"],
        roles=tuple(filter(None, row["roles"].split(","))),
        worker_group=row["worker_group"],
        digest=row["digest"],
        old_digest=row["old_digest"],
        old_until=row["old_until"],
        created_at=row["created_at"],
        created_by=row["created_by"],
        rotated_at=row["rotated_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
        last_used_at=row["last_used_at"],
        tenant_disabled=row["tenant_disabled_at"] is not None,
    )
