"""The webhook secrets of tenants: set, rotated with an overlap, shown once and then masked."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from app.access.caller import Caller
from app.callbacks.schemas import (
    RotateWebhookSecret,
    SetEgressAllow,
    SetWebhookSecret,
)
from app.edge.bodies import parse_object
from app.edge.problems import validation_problem
from app.fleet.dress import Dresser
from app.ground import Ground
from app.jobs.callback_fields import no_secret_keys
from app.lifecycle.audit import record_deed
from app.lifecycle.egress_lists import read_networks, set_networks
from app.lifecycle.reads import read_now
from app.lifecycle.webhook_secrets import (
    WORKERS_OWN,
    NewSecret,
    lock_secrets,
    read_secrets,
    rotate_secret,
    set_secret,
)
from app.plumbing.sealed import NoSecretKeys
from app.plumbing.times import rfc3339
from oncue.webhooks import PRIVATE_PREFIX, PUBLIC_PREFIX, SECRET_PREFIX, public_key_of

SECRET_BYTES: Final = 32
Model = TypeVar("Model", bound=BaseModel)


class SecretDesk:
    """Keeps what tenants say of their callbacks; other dispatchers know it within 5 s."""

    def __init__(self, ground: Ground, dresser: Dresser) -> None:
        self._database = ground.database
        self._sealer = ground.sealer
        self._dresser = dresser

    async def look(self, caller: Caller) -> dict[str, Any]:
        """Return what signs now, masked."""
        rows = await self._database.read(
            lambda connection: read_secrets(connection, self._database, caller.tenant_id)
        )
        return _view(rows)

    async def set(self, caller: Caller, body: bytes) -> dict[str, Any]:
        """Let one secret alone sign from now on, and show it this once.

        Raises:
            Problem: `invalid_json`, `validation_failed` or `secret_keys_missing`.
        """
        request = _read(SetWebhookSecret, body)
        clear, new = self._new(request)

        async def write(connection: AsyncConnection) -> Sequence[RowMapping]:
            return await set_secret(connection, self._database, caller.tenant_id, new)

        return await self._write(caller, "webhook_secret.set", write, clear)

    async def rotate(self, caller: Caller, body: bytes) -> dict[str, Any]:
        """Let a new secret sign beside the one before, for the overlap, and show it this once.

        Raises:
            Problem: `invalid_json`, `validation_failed` or `secret_keys_missing`.
        """
        request = _read(RotateWebhookSecret, body)
        clear, new = self._new(request)

        async def write(connection: AsyncConnection) -> Sequence[RowMapping]:
            return await rotate_secret(
                connection,
                self._database,
                caller.tenant_id,
                new,
                overlap_ms=request.overlap_seconds * 1000,
            )

        return await self._write(caller, "webhook_secret.rotate", write, clear)

    async def forget(self, caller: Caller) -> dict[str, Any]:
        """Let the operator's secret alone sign again."""

        async def write(connection: AsyncConnection) -> Sequence[RowMapping]:
            return await set_secret(connection, self._database, caller.tenant_id, None)

        return await self._write(caller, "webhook_secret.forget", write, None)

    async def look_at_networks(self, caller: Caller) -> dict[str, Any]:
        """Return the tenant's own list of networks."""
        networks = await self._database.read(
            lambda connection: read_networks(connection, caller.tenant_id)
        )
        return {"networks": None if networks is None else list(networks)}

    async def set_networks(self, caller: Caller, body: bytes) -> dict[str, Any]:
        """Store the tenant's own list of networks, or that it has none.

        Raises:
            Problem: `invalid_json` or `validation_failed`.
        """
        request = _read(SetEgressAllow, body)

        async def write(connection: AsyncConnection) -> None:
            before = await read_networks(connection, caller.tenant_id)
            await set_networks(connection, self._database, caller.tenant_id, request.networks)
            await record_deed(
                connection,
                caller.doing("egress_allow.set"),
                f"tenant:{caller.tenant_id}",
                tenant_id=caller.tenant_id,
                now_ms=await read_now(connection, self._database),
                old={"networks": None if before is None else list(before)},
                new={"networks": request.networks},
            )

        await self._database.write(write)
        self._dresser.forget(caller.tenant_id)
        return {"networks": request.networks}

    def _new(self, request: SetWebhookSecret) -> tuple[str, NewSecret]:
        given = request.secret
        clear = _draw(request.kind or "symmetric") if given is None else given.get_secret_value()
        if clear.startswith(PRIVATE_PREFIX):
            shown = public_key_of(clear)
        else:
            shown = f"{SECRET_PREFIX}{'*' * 8}{clear[-4:]}"
        try:
            return clear, NewSecret(self._sealer.seal(clear), shown)
        except NoSecretKeys:
            raise no_secret_keys("/secret") from None

    async def _write(
        self,
        caller: Caller,
        action: str,
        change: Callable[[AsyncConnection], Awaitable[Sequence[RowMapping]]],
        clear: str | None,
    ) -> dict[str, Any]:
        async def write(connection: AsyncConnection) -> Sequence[RowMapping]:
            # So that of two at once the second tells what the first has left.
            await lock_secrets(connection, self._database, caller.tenant_id)
            before = await read_secrets(connection, self._database, caller.tenant_id)
            rows = await change(connection)
            await record_deed(
                connection,
                caller.doing(action),
                f"tenant:{caller.tenant_id}",
                tenant_id=caller.tenant_id,
                now_ms=await read_now(connection, self._database),
                # What is shown of a secret, which is masked or public.
                old={"signs": [row["shown"] for row in before]},
                new={"signs": [row["shown"] for row in rows]},
            )
            return rows

        rows = await self._database.write(write)
        self._dresser.forget(caller.tenant_id)
        view = _view(rows)
        if clear is not None:
            view["items"][0]["secret"] = clear
        return view


def _draw(kind: str) -> str:
    prefix = SECRET_PREFIX if kind == "symmetric" else PRIVATE_PREFIX
    return prefix + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def _view(rows: Sequence[RowMapping]) -> dict[str, Any]:
    return {"items": [_secret_view(row) for row in rows]}


def _secret_view(row: RowMapping) -> dict[str, Any]:
    public = row["shown"].startswith(PUBLIC_PREFIX)
    own = row["sealed"] == WORKERS_OWN
    return {
        "kind": "default" if own else "ed25519" if public else "symmetric",
        "masked": None if own or public else row["shown"],
        "publicKey": row["shown"] if public else None,
        "createdAt": rfc3339(row["created_at"]),
        "expiresAt": None if row["expires_at"] is None else rfc3339(row["expires_at"]),
        "secret": None,
    }


def _read(model: type[Model], body: bytes) -> Model:
    try:
        return model.model_validate(parse_object(body) if body.strip() else {})
    except ValidationError as error:
        raise validation_problem(
            list(error.errors(include_url=False, include_input=False)), model
        ) from None
