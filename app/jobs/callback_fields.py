"""What a caller may say of a job's callbacks: which events, which headers, and where they go."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
)

from app.edge.problems import SEALED_KIND, TEXT_KIND, Problem, invalid
from app.fleet.dress import Dresser
from app.fleet.live import LiveFleet
from app.lifecycle.callback_body import ENDS, EVENT_WORDS
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.sealed import HOW_TO, MASK, NoSecretKeys, Sealer
from oncue.addresses import (
    Address,
    Network,
    NoHost,
    is_allowed,
    is_nowhere,
    narrowed,
    spelled_addresses,
)

MAX_HEADERS: Final = 16
MOST_URLS: Final = 1024
"""So many are remembered with what is known of their addresses."""
MAX_HEADERS_BYTES: Final = 4096
EventWord = Literal["succeeded", "failed", "cancelled", "started", "retrying"]
DEFAULT_EVENTS: Final = tuple(EVENT_WORDS[status] for status in ENDS)

_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}", re.ASCII)
_OURS: Final = frozenset(
    {
        *("accept-encoding", "connection", "content-encoding", "content-length", "content-type"),
        *("cookie2", "expect", "host", "http2-settings", "keep-alive", "te", "trailer"),
        *("transfer-encoding", "upgrade", "user-agent", "via", "forwarded"),
    }
)
_OUR_PREFIXES: Final = ("webhook-", "proxy-", "x-forwarded-", "sec-")


def _distinct(words: list[EventWord]) -> list[EventWord]:
    if len(set(words)) != len(words):
        raise ValueError("each event once")
    return words


def _sendable(value: str) -> str:
    if not value.isascii() or not value.isprintable():
        raise ValueError("must be printable ASCII: no line breaks, no control characters")
    if value != value.strip():
        raise ValueError("must not begin or end with a space")
    return value


def _free_name(name: str) -> str:
    if not _TOKEN.fullmatch(name):
        raise ValueError("a header's name has up to 64 letters, digits and dashes")
    if name.lower() in _OURS or name.lower().startswith(_OUR_PREFIXES):
        raise ValueError("this header is not for callers to set")
    return name


HeaderValue = Annotated[
    str, StringConstraints(min_length=1, max_length=2048), AfterValidator(_sendable)
]


class SecretValue(BaseModel):
    """A header's value that is kept encrypted and never shown again."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    secret: HeaderValue = Field(repr=False)


def _kind(value: object) -> str:
    return SEALED_KIND if isinstance(value, dict | SecretValue) else TEXT_KIND


OneValue = Annotated[
    Annotated[HeaderValue, Tag(TEXT_KIND)] | Annotated[SecretValue, Tag(SEALED_KIND)],
    Discriminator(_kind),
]
"""A fault is told of the kind that was sent, not of both."""


def _bounded(headers: dict[str, HeaderValue | SecretValue]) -> dict[str, HeaderValue | SecretValue]:
    if len({name.lower() for name in headers}) != len(headers):
        raise ValueError("each header once, however it is written")
    size = sum(len(name) + len(_clear(value)) for name, value in headers.items())
    if size > MAX_HEADERS_BYTES:
        raise ValueError(f"at most {MAX_HEADERS_BYTES} bytes together")
    return headers


CallbackEvents = Annotated[
    list[EventWord], Field(min_length=1, max_length=5), AfterValidator(_distinct)
]
CallbackHeaders = Annotated[
    dict[Annotated[str, AfterValidator(_free_name)], OneValue],
    Field(max_length=MAX_HEADERS),
    AfterValidator(_bounded),
]


def _clear(value: str | SecretValue) -> str:
    return value if isinstance(value, str) else value.secret


def kept_events(events: Sequence[EventWord] | None) -> str | None:
    """Return events as they are stored: None is how a job ends, which is what it is by default."""
    if events is None or set(events) == set(DEFAULT_EVENTS):
        return None
    return ",".join(word for word in EVENT_WORDS.values() if word in events)


def shown_events(kept: str | None) -> list[str]:
    """Return events as callers see them."""
    return list(DEFAULT_EVENTS) if kept is None else kept.split(",")


def kept_headers(headers: Mapping[str, str | SecretValue] | None, sealer: Sealer) -> str | None:
    """Return headers as they are stored: JSON, secret values sealed.

    Raises:
        Problem: `secret_keys_missing`.
    """
    if not headers:
        return None
    try:
        kept = {
            name: value if isinstance(value, str) else {"sealed": sealer.seal(value.secret)}
            for name, value in headers.items()
        }
    except NoSecretKeys:
        raise no_secret_keys("/callbackHeaders") from None
    return json.dumps(kept)


def shown_headers(kept: str | None) -> dict[str, Any] | None:
    """Return headers as callers see them: of a secret one only that there is one."""
    if kept is None:
        return None
    return {
        name: value if isinstance(value, str) else {"secret": MASK}
        for name, value in json.loads(kept).items()
    }


def no_secret_keys(pointer: str) -> Problem:
    """Return the problem of a secret that cannot be kept."""
    detail = f"this server keeps no secrets: its operator must {HOW_TO}"
    return Problem(
        "secret_keys_missing",
        f"{pointer.strip('/') or 'the secret'}: {detail}.",
        errors=[{"pointer": pointer, "detail": detail}],
    )


class Receivers:
    """Which callback URLs can be called at all, as it stands now."""

    def __init__(self, fleet: LiveFleet, dresser: Dresser) -> None:
        self._fleet = fleet
        self._dresser = dresser
        self._lists: Sequence[Sequence[Network]] | None = None
        self._can_be_called: dict[str, bool] = {}
        """By URL, as long as the workers' lists are these."""

    async def refused(self, tenant_id: int, url: str | None) -> Problem | None:
        """Return the problem of a URL that can never be called for a tenant, else None.

        What a name leads to is known only when it is called: that is checked then. The tenant's
        own list is looked at only for an address that is not public.
        """
        if url is None:
            return None
        try:
            addresses = _not_public(url)
        except NoHost as error:
            return invalid(f"{error}: name a host that can be called", "/callbackUrl")
        if not addresses:
            return None
        try:
            why = await self._why_not(tenant_id, url, addresses)
        except DatabaseUnavailable:
            # What needs the database comes next, and tells the caller.
            return None
        return None if why is None else invalid(why, "/callbackUrl")

    async def _why_not(self, tenant_id: int, url: str, addresses: Sequence[Address]) -> str | None:
        """Tell who does not allow any of these, and what to change; None if they may be called."""
        lists = await self._fleet.egress_lists()
        if lists is not self._lists or len(self._can_be_called) >= MOST_URLS:
            self._lists, self._can_be_called = lists, {}
        allowed = self._can_be_called.get(url)
        if allowed is None:
            allowed = self._can_be_called[url] = _can_be_called(addresses, lists)
        if not allowed:
            return (
                "this address may not be called; use a public one, or have its network allowed by "
                "ONCUE_EGRESS_ALLOW of the workers"
            )
        own = (await self._dresser.wishes(tenant_id)).egress_allow
        if own is None or _can_be_called(addresses, _within(own, lists)):
            return None
        return (
            "this address may not be called for this tenant; use a public one, or have its network "
            "put on the tenant's own list (PUT /openapi/egress-allow), which narrows the workers'"
        )


@lru_cache(maxsize=MOST_URLS)
def _not_public(url: str) -> tuple[Address, ...]:
    """Return the addresses that a URL spells, none where one of them may be called by anybody.

    Raises:
        NoHost: see `spelled_addresses`.
    """
    addresses = spelled_addresses(url)
    return () if _are_allowed(addresses, ()) else addresses


def _are_allowed(addresses: Sequence[Address], networks: Sequence[Network]) -> bool:
    """Tell whether one of the addresses may be called: a name may lead to that one alone."""
    return any(is_allowed(address, networks) for address in addresses)


def _can_be_called(addresses: Sequence[Address], lists: Sequence[Sequence[Network]] | None) -> bool:
    """Tell whether some worker may call one of the addresses.

    Where it is not known what workers may call (None), one may come that may.
    """
    if lists is None:
        return not all(is_nowhere(address) for address in addresses)
    return any(_are_allowed(addresses, networks) for networks in lists)


def _within(
    own: Sequence[str], lists: Sequence[Sequence[Network]] | None
) -> list[Sequence[Network]]:
    """Return the lists of workers as a tenant's own one narrows them."""
    networks = [ipaddress.ip_network(one) for one in own]
    return [networks] if lists is None else [narrowed(one, networks) for one in lists]
