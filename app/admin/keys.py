"""Keys for admins: made, looked at, given a new secret, ended."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.access.caller import Caller
from app.access.roles import Role
from app.access.tokens import Drawn, digest_of, draw, draw_key
from app.admin.schemas import DEFAULT_ROLES, CreateKey, RotateKey
from app.edge.bodies import parse_object
from app.edge.paging import decode_cursor, encode_cursor
from app.edge.problems import Problem, invalid, validation_problem
from app.lifecycle.api_keys import (
    KeyKind,
    KeyRow,
    NewKey,
    NoSuchTenant,
    insert_key,
    list_keys,
    lock_key,
    revoke_key,
    rotate_key,
)
from app.lifecycle.audit import Actor
from app.lifecycle.tenants import DEFAULT_TENANT
from app.plumbing.bus import KEYS, Bus
from app.plumbing.clock import DatabaseClock
from app.plumbing.database import Database
from app.plumbing.times import epoch_ms, rfc3339


async def make_key(
    database: Database,
    actor: Actor,
    request: CreateKey,
    *,
    tenant_id: int,
    drawn: Drawn | None = None,
) -> tuple[KeyRow, str]:
    """Store a new key and return it with what its owner sends, which is kept nowhere.

    `drawn` is what it shall be, if its owner has it already.

    Raises:
        NoSuchTenant: nothing was stored.
        DatabaseUnavailable: if it was stored, nobody knows its secret.
    """
    kind: KeyKind = "caller" if request.worker_group is None else "worker"
    made = draw(kind) if drawn is None else drawn
    new = NewKey(
        prefix=made.prefix,
        kind=kind,
        tenant_id=tenant_id,
        name=request.name,
        roles=_roles(request),
        worker_group=request.worker_group,
        digest=digest_of(made.key),
        expires_at=None if request.expires_at is None else epoch_ms(request.expires_at),
    )
    stored = await database.write(lambda connection: insert_key(connection, database, new, actor))
    return stored, made.key


def _roles(request: CreateKey) -> tuple[str, ...]:
    if request.worker_group is not None:
        return ()
    given = DEFAULT_ROLES if request.roles is None else request.roles
    return tuple(str(role) for role in Role if role in given)


class KeyDesk:
    """Keeps keys for admins: those of their tenant, or of all for admins of the platform."""

    def __init__(self, database: Database, bus: Bus, clock: DatabaseClock) -> None:
        self._database = database
        self._bus = bus
        self._clock = clock

    async def create(self, caller: Caller, body: bytes) -> dict[str, Any]:
        """Make a key.

        Raises:
            Problem: `invalid_json`, `validation_failed`, `forbidden` or `tenant_not_found`.
        """
        try:
            request = CreateKey.model_validate(parse_object(body))
        except ValidationError as error:
            raise validation_problem(list(error.errors(include_url=False)), CreateKey) from None
        tenant_id = caller.tenant_id if request.tenant_id is None else request.tenant_id
        if request.worker_group is not None:
            require_platform(caller)
            tenant_id = DEFAULT_TENANT
        if not caller.runs_the_platform and tenant_id != caller.tenant_id:
            raise no_such_tenant(tenant_id)
        roles = _roles(request)
        if caller.is_anybody and roles and (str(Role.ADMIN) not in roles or tenant_id):
            raise invalid(
                "the first key closes the API, so it must be an admin's of the tenant 0: make that "
                'one first (`oncue keys create NAME --role admin`, or {"name": NAME, "roles": '
                '["admin"]}), then this one with it (ONCUE_API_KEY, or Authorization: Bearer KEY)',
                "/roles",
            )
        if request.expires_at is not None and epoch_ms(request.expires_at) <= self._clock.now_ms():
            raise invalid("must be in the future", "/expiresAt")
        try:
            stored, key = await make_key(self._database, caller.actor, request, tenant_id=tenant_id)
        except NoSuchTenant:
            raise no_such_tenant(tenant_id) from None
        self._bus.publish(KEYS, [stored.prefix])
        return self._view(stored) | {"key": key}

    async def look(self, caller: Caller, key_id: int) -> dict[str, Any]:
        """Return a key.

        Raises:
            Problem: `key_not_found`.
        """

        async def read(connection: AsyncConnection) -> KeyRow | None:
            page = await list_keys(
                connection, tenant_id=_scope(caller), prefix=None, before=key_id + 1, limit=1
            )
            return page[0] if page and page[0].key_id == key_id else None

        found = await self._database.read(read)
        if found is None:
            raise _no_such_key(key_id)
        return self._view(found)

    async def list_page(
        self,
        caller: Caller,
        *,
        tenant_id: int | None,
        prefix: str | None,
        limit: int,
        cursor: str | None,
    ) -> dict[str, Any]:
        """Return a page of keys, newest first.

        Raises:
            Problem: `validation_failed`, for a foreign cursor.
        """
        before = decode_cursor(cursor)
        scope = tenant_id if caller.runs_the_platform else caller.tenant_id
        if tenant_id not in (None, scope):
            return {"items": [], "nextCursor": None}
        found = await self._database.read(
            lambda connection: list_keys(
                connection, tenant_id=scope, prefix=prefix, before=before, limit=limit + 1
            )
        )
        page = found[:limit]
        return {
            "items": [self._view(one) for one in page],
            "nextCursor": encode_cursor(page[-1].key_id) if len(found) > limit else None,
        }

    async def rotate(self, caller: Caller, key_id: int, body: bytes) -> dict[str, Any]:
        """Give a key a new secret, which works at once; the one before goes on for a while.

        Raises:
            Problem: `invalid_json`, `validation_failed`, `key_not_found` or `key_revoked`.
        """
        try:
            request = RotateKey.model_validate(parse_object(body) if body.strip() else {})
        except ValidationError as error:
            raise validation_problem(list(error.errors(include_url=False)), RotateKey) from None
        drawn: list[str] = []

        async def write(connection: AsyncConnection) -> KeyRow:
            locked = await lock_key(connection, self._database, key_id, tenant_id=_scope(caller))
            if locked is None:
                raise _no_such_key(key_id)
            key, now = locked
            if key.kind == "worker":
                require_platform(caller)
            if key.revoked_at is not None:
                raise Problem("key_revoked", f"Key {key_id} was revoked: make another one.")
            if not drawn:
                drawn.append(draw_key(key.prefix))
            await rotate_key(
                connection,
                key,
                caller.actor,
                digest=digest_of(drawn[0]),
                overlap_ms=request.overlap_seconds * 1000,
                now=now,
            )
            return await self._again(connection, caller, key_id)

        stored = await self._database.write(write)
        self._bus.publish(KEYS, [stored.prefix])
        return self._view(stored) | {"key": drawn[0]}

    async def revoke(self, caller: Caller, key_id: int) -> dict[str, Any]:
        """End a key for good; a repeat returns it as it is.

        Raises:
            Problem: `key_not_found`.
        """

        async def write(connection: AsyncConnection) -> KeyRow:
            locked = await lock_key(connection, self._database, key_id, tenant_id=_scope(caller))
            if locked is None:
                raise _no_such_key(key_id)
            key, now = locked
            await revoke_key(connection, key, caller.actor, now=now)
            return await self._again(connection, caller, key_id)

        stored = await self._database.write(write)
        self._bus.publish(KEYS, [stored.prefix])
        return self._view(stored)

    async def _again(self, connection: AsyncConnection, caller: Caller, key_id: int) -> KeyRow:
        locked = await lock_key(connection, self._database, key_id, tenant_id=_scope(caller))
        if locked is None:
            raise RuntimeError("a locked key is gone")
        return locked[0]

    def _view(self, key: KeyRow) -> dict[str, Any]:
        return key_view(key, now_ms=int(self._clock.now_ms()))


def key_view(key: KeyRow, *, now_ms: int) -> dict[str, Any]:
    """Show a key, without its secret."""
    expired = key.expires_at is not None and key.expires_at <= now_ms
    overlaps = key.old_until is not None and key.old_until > now_ms
    return {
        "keyId": key.key_id,
        "prefix": key.prefix,
        "name": key.name,
        "tenantId": key.tenant_id,
        "roles": list(key.roles),
        "workerGroup": key.worker_group,
        "state": "REVOKED" if key.revoked_at is not None else "EXPIRED" if expired else "ACTIVE",
        "createdAt": rfc3339(key.created_at),
        "createdBy": key.created_by,
        "rotatedAt": time_or_none(key.rotated_at),
        "oldWorksUntil": time_or_none(key.old_until) if overlaps else None,
        "expiresAt": time_or_none(key.expires_at),
        "revokedAt": time_or_none(key.revoked_at),
        "lastUsedAt": time_or_none(key.last_used_at),
    }


def time_or_none(moment: int | None) -> str | None:
    """Write a time that may be missing."""
    return None if moment is None else rfc3339(moment)


def require_platform(caller: Caller) -> None:
    """Return if the caller is an admin of the platform.

    Raises:
        Problem: `forbidden`.
    """
    if not caller.runs_the_platform:
        raise Problem(
            "forbidden",
            "Tenants and workers' keys are for admins of the tenant 'default' alone.",
            needs=str(Role.ADMIN),
        )


def no_such_tenant(tenant_id: int) -> Problem:
    """Return the problem of a tenant that is not there, or not this caller's."""
    return Problem("tenant_not_found", f"There is no tenant {tenant_id}.")


def _scope(caller: Caller) -> int | None:
    return None if caller.runs_the_platform else caller.tenant_id


def _no_such_key(key_id: int) -> Problem:
    return Problem("key_not_found", f"There is no key {key_id}.")
