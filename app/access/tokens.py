"""Keys as they are sent: `ock_PREFIX_SECRET`, and `ocw_PREFIX_SECRET` for workers.

The secret has 256 random bits, so a plain SHA-256 of the whole key is stored: there is nothing to
guess that a slow hash would have to protect, and each request must be checked in microseconds.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import Final

from app.lifecycle.api_keys import KeyKind

_START: Final[dict[KeyKind, str]] = {"caller": "ock_", "worker": "ocw_"}
_KIND: Final = {start: kind for kind, start in _START.items()}
_PREFIX_LETTERS: Final = "abcdefghijkmnpqrstuvwxyz23456789"
PREFIX_LENGTH: Final = 10
_SHAPE: Final = re.compile(r"(oc[kw]_)([a-z2-9]{10})_[A-Za-z0-9_-]{43}")


@dataclass(frozen=True, slots=True)
class Token:
    """What of a key says which one it is."""

    kind: KeyKind
    prefix: str
    """With its start, as `ock_abcdefghij`: no secret."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A key as its owner sends it, and what names it in lists and logs."""

    prefix: str
    key: str = field(repr=False)


def draw(kind: KeyKind) -> Drawn:
    """Draw a key with a prefix of its own."""
    drawn = "".join(secrets.choice(_PREFIX_LETTERS) for _ in range(PREFIX_LENGTH))
    prefix = _START[kind] + drawn
    return Drawn(prefix, draw_key(prefix))


def draw_key(prefix: str) -> str:
    """Draw a key with this prefix, as its owner will send it."""
    return f"{prefix}_{secrets.token_urlsafe(32)}"


def read_token(given: str) -> Token | None:
    """Read what was sent, or return None for what can be no key of ours."""
    found = _SHAPE.fullmatch(given)
    if found is None:
        return None
    return Token(_KIND[found[1]], found[1] + found[2])


def digest_of(secret: str) -> str:
    """Return the SHA-256 of a secret, in hex."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def is_digest(known: str | None, given: str) -> bool:
    """Compare two digests in constant time."""
    return known is not None and hmac.compare_digest(known, given)
