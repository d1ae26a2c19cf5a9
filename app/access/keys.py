"""Bearer keys: who calls, by `ONCUE_API_KEYS` or a key of the database, and which worker."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final, NoReturn

import structlog
from fastapi import FastAPI, Request
from fastapi.routing import iter_route_contexts

from app.access.caller import OPEN, Caller
from app.access.key_cache import KeyCache
from app.access.roles import NEEDED, RouteWithoutRole, allowed
from app.access.tokens import digest_of, is_digest, read_token
from app.edge.heads import header_of
from app.edge.problems import Problem
from app.edge.unasked import refuse_unasked
from app.ground import Ground
from app.lifecycle.api_keys import KeyKind, KeyRow, note_uses
from app.lifecycle.nodes import GroupKey
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.loops import Loop
from oncue.failures import Failures

log = structlog.get_logger(__name__)

USES_SECONDS: Final = 60.0
"""The last use of a key is written at most so often by each dispatcher."""
LOOK_SECONDS: Final = 5.0
MOST_USES: Final = 10_000
_SEND_A_KEY: Final = "Send a valid key as 'Authorization: Bearer KEY'."
_SEND_A_WORKERS: Final = (
    "Send the internal token, or a worker's key, as 'Authorization: Bearer TOKEN'."
)


class BadKeys(ValueError):
    """A setting with keys or tokens is set, and holds none that can be used."""


@dataclass(frozen=True, slots=True)
class Door:
    """How one kind of callers is let in: the part that callers and workers share."""

    kind: KeyKind
    advice: str


_CALLERS: Final = Door("caller", _SEND_A_KEY)
_WORKERS: Final = Door("worker", _SEND_A_WORKERS)


class Gate:
    """Lets callers and workers in, by keys that are in memory: no statement a request."""

    def __init__(self, ground: Ground, configured: ApiKeys, tokens: InternalTokens) -> None:
        self._configured = configured
        self._tokens = tokens
        self._database = ground.database
        self._clock = ground.clock
        self._metrics = ground.metrics
        self._cache = KeyCache(ground.database, ground.bus)
        settings = ground.settings
        self._failures = Failures(settings.most_failed_keys, settings.failed_keys_seconds)
        self._uses: dict[int, int] = {}
        self._written: dict[int, float] = {}
        self._loop = Loop("key-uses", self._step, expected=(DatabaseUnavailable,))

    def start(self) -> None:
        """Start writing when keys were used."""
        self._loop.start()

    async def stop(self) -> None:
        """Write what is left, and stop."""
        await self._loop.stop()
        try:
            await self.write_uses(list(self._uses))
        except DatabaseUnavailable:
            log.warning("key_uses_dropped", keys=len(self._uses))

    async def caller(self, request: Request) -> Caller:
        """Return who sent this request, once it may do what the route does, and asks no more.

        Raises:
            Problem: `unauthorized`, `forbidden`, `tenant_disabled`, `too_many_failures`, or
                `validation_failed` for what the route does not take.
            DatabaseUnavailable: the key is not in memory, and cannot be looked up.
        """
        caller = await self._identify(request)
        needed = NEEDED[request.scope["route"].name]
        if needed not in caller.roles:
            raise Problem(
                "forbidden",
                f"The key '{caller.name}' may not do this: it needs the role {needed}.",
                needs=str(needed),
            )
        await refuse_unasked(request)
        return caller

    async def lets_on(self, request: Request, caller: Caller) -> bool:
        """Tell whether a caller that was let in might still do what its request does.

        A stream asks this while it goes on; a key that has ended meanwhile is no failed attempt.
        """
        try:
            if caller.is_anybody:
                return not await self._cache.any("caller")
            token = read_token(key_of(request))
            if caller.key_id is None or token is None:
                return True  # one of the settings, which hold as long as this process
            key = await self._cache.find(token.prefix)
        except DatabaseUnavailable:
            return True  # it is looked at again as soon as that is possible
        now = int(self._clock.now_ms())
        return (
            key is not None
            and fits(key, digest_of(key_of(request)), now)
            and not has_ended(key, now)
            and not key.tenant_disabled
            and NEEDED[request.scope["route"].name] in allowed(key.roles)
        )

    async def worker(self, request: Request) -> GroupKey | None:
        """Return by which group's key a worker calls; None for the internal token.

        Raises:
            Problem: `unauthorized` or `too_many_failures`.
            DatabaseUnavailable: the key is not in memory, and cannot be looked up.
        """
        given = key_of(request)
        address = address_of(request)
        digest = self._refuse_if_many(address, given)
        if self._tokens.knows(digest):
            self._failures.note_success(address, digest)
            return None
        if not self._tokens.is_set and not await self._cache.any("worker"):
            return None
        key = await self._known(_WORKERS, given, digest, address)
        if key.worker_group is None:
            raise RuntimeError("a worker's key has no group")
        return GroupKey(key.worker_group, digest)

    async def _identify(self, request: Request) -> Caller:
        given = key_of(request)
        address = address_of(request)
        request_id: str = request.scope.get("request_id", "")
        if not self._configured.is_set and not await self._cache.any("caller"):
            return Caller(OPEN, address=address, request_id=request_id)
        digest = self._refuse_if_many(address, given)
        name = self._configured.name_of(digest)
        if name is not None:
            self._failures.note_success(address, digest)
            return Caller(name, address=address, request_id=request_id)
        key = await self._known(_CALLERS, given, digest, address)
        if key.tenant_disabled:
            raise Problem(
                "tenant_disabled",
                "The tenant of this key is disabled: ask an admin of the tenant 'default' to "
                "enable it.",
            )
        return Caller(
            key.name,
            key.tenant_id,
            allowed(key.roles),
            key.key_id,
            address,
            request_id,
        )

    async def _known(self, door: Door, given: str, digest: str, address: str) -> KeyRow:
        """Return the key that was sent, which works now."""
        token = read_token(given)
        key = None
        if token is not None and token.kind == door.kind:
            key = await self._cache.find(token.prefix)
        now = int(self._clock.now_ms())
        if key is None or not fits(key, digest, now):
            self._fail(door, given, address)
        if has_ended(key, now):
            word = "has expired" if key.revoked_at is None else "was revoked"
            self._metrics.refused_keys.labels("ended").inc()
            raise Problem("unauthorized", f"The key {key.prefix} {word}. {door.advice}")
        self._failures.note_success(address, digest)
        if key.key_id in self._uses or len(self._uses) < MOST_USES:
            self._uses[key.key_id] = now
        return key

    def _refuse_if_many(self, address: str, given: str) -> str:
        digest = digest_of(given)
        wait = self._failures.wait_seconds(address, digest, time.monotonic()) if given else 0
        if wait > 0:
            self._metrics.refused_keys.labels("too_many").inc()
            raise Problem(
                "too_many_failures",
                f"Too many wrong keys came from {address}: wait {wait:.0f} s.",
                retry_after_seconds=max(1, round(wait)),
            )
        return digest

    def _fail(self, door: Door, given: str, address: str) -> NoReturn:
        """Refuse a key; one that was not sent at all is no attempt to guess one."""
        if given:
            self._failures.note_failure(address, time.monotonic())
            self._metrics.refused_keys.labels("wrong").inc()
        raise Problem("unauthorized", door.advice)

    async def _step(self) -> None:
        await asyncio.sleep(LOOK_SECONDS)
        await self.write_uses(self.due_uses())

    def due_uses(self) -> list[int]:
        """Return the keys that were used, and whose last use was not written lately."""
        now = time.monotonic()
        return [
            key_id
            for key_id in self._uses
            if now - self._written.get(key_id, float("-inf")) >= USES_SECONDS
        ]

    async def write_uses(self, key_ids: list[int]) -> None:
        """Write when these keys were last used.

        Raises:
            DatabaseUnavailable: they are written later.
        """
        used = {key_id: self._uses[key_id] for key_id in key_ids}
        if not used:
            return
        await self._database.write(lambda connection: note_uses(connection, used))
        now = time.monotonic()
        self._written = {
            key_id: at for key_id, at in self._written.items() if now - at < USES_SECONDS
        } | dict.fromkeys(used, now)
        for key_id, at in used.items():
            if self._uses.get(key_id) == at:
                del self._uses[key_id]


class ApiKeys:
    """The keys of `ONCUE_API_KEYS`, by their hash; they have every right in tenant 0."""

    def __init__(self, configured: str) -> None:
        self._names: dict[str, str] = {}
        for entry in filter(None, (part.strip() for part in configured.split(","))):
            name, separator, key = entry.partition(":")
            if not separator or not name or len(key) < 8:
                raise BadKeys("ONCUE_API_KEYS is name:key,... with keys of 8 characters or more")
            self._names[digest_of(key)] = name
        if configured and not self._names:
            raise BadKeys("ONCUE_API_KEYS is set and has no key in it")

    @property
    def is_set(self) -> bool:
        """Whether there is any."""
        return bool(self._names)

    def name_of(self, digest: str) -> str | None:
        """Return the name of a key."""
        # Every known hash is compared, so that the time tells nothing about which came close.
        found = None
        for known, name in self._names.items():
            if is_digest(known, digest):
                found = name
        return found


class InternalTokens:
    """The tokens that workers may present: `ONCUE_INTERNAL_TOKEN`."""

    def __init__(self, configured: str) -> None:
        self._tokens = [part.strip() for part in configured.split(",") if part.strip()]
        self._digests = [digest_of(token) for token in self._tokens]
        if configured and not self._tokens:
            raise BadKeys("ONCUE_INTERNAL_TOKEN is set and has no token in it")

    @property
    def sent(self) -> str:
        """The token this process sends: the first."""
        return self._tokens[0] if self._tokens else ""

    @property
    def is_set(self) -> bool:
        """Whether there is any."""
        return bool(self._tokens)

    def knows(self, digest: str) -> bool:
        """Tell whether this is one of them."""
        # All are compared, so that the time says nothing about which one fits.
        fits = [is_digest(known, digest) for known in self._digests]
        return any(fits)


def routes_of_callers(app: FastAPI) -> list[str]:
    """Return the name of every route under `/openapi`."""
    # What is in a router that was included is not in `app.routes` itself.
    found = iter_route_contexts(app.routes)
    return [str(one.name) for one in found if str(one.path).startswith("/openapi/")]


def require_roles(app: FastAPI) -> None:
    """Return if every route of callers has a role that it needs.

    Raises:
        RouteWithoutRole: the name of one that has none.
    """
    without = [name for name in routes_of_callers(app) if name not in NEEDED]
    if without:
        raise RouteWithoutRole(", ".join(without))


def address_of(request: Request) -> str:
    """Return the address of the peer; what a proxy says of others is not believed."""
    peer = request.scope.get("client")
    return "" if peer is None else str(peer[0])


def key_of(request: Request) -> str:
    """Return the key that was sent, or nothing."""
    return bearer(header_of(request.scope, b"authorization"))


def bearer(authorization: str) -> str:
    """Return the key in a header, or nothing."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def has_ended(key: KeyRow, now_ms: int) -> bool:
    """Tell whether a key was revoked, or has expired."""
    return key.revoked_at is not None or (key.expires_at is not None and key.expires_at <= now_ms)


def fits(key: KeyRow, digest: str, now_ms: int) -> bool:
    """Tell whether this is the digest of a key, or of the one before it while that works on."""
    fits = is_digest(key.digest, digest)
    fits_old = is_digest(key.old_digest, digest)
    return fits or (fits_old and key.old_until is not None and now_ms < key.old_until)
