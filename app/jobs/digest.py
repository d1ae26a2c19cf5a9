"""The digest of a request: a short hash of each field as it was sent, before defaults.

A field that holds a secret is kept as a keyed hash: from a plain one a short secret is guessed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import orjson

from app.plumbing.json_text import plain_bytes
from app.plumbing.sealed import Sealer

_OFTEN_THE_SAME: Final = frozenset(("jobHandler", "callbackUrl"))
"""Fields of short text that most submissions have in common: what their hash is, is kept."""
_NO_KEYS: Final = Sealer("")


def request_digest(sent: Mapping[str, Any]) -> str:
    """Return `{"field": "hash", ...}` of the fields that were sent; null counts as not sent.

    Raises:
        Unencodable: a value has no JSON form.
    """
    digests = {
        name: _digest_of_known(value)
        if name in _OFTEN_THE_SAME and type(value) is str
        else _digest_of(value)
        for name, value in sorted(sent.items())
        if value is not None
    }
    return orjson.dumps(digests).decode()


def _digest_of(value: Any) -> str:
    return hashlib.sha256(plain_bytes(value, sort_keys=True)).hexdigest()[:16]


_digest_of_known = lru_cache(maxsize=1024)(_digest_of)


def secret_fields(sent: Mapping[str, Any]) -> list[str]:
    """Name the fields of a valid submission that hold a secret."""
    found = ["params"] if sent.get("secretParams") else []
    headers = sent.get("callbackHeaders")
    if headers and any(isinstance(value, dict) for value in headers.values()):
        found.append("callbackHeaders")
    return found


def kept_digest(digest: str, secret: Iterable[str], owner: str, sealer: Sealer) -> str:
    """Return a digest as it is stored: the hashes of these fields keyed, and the owner's own."""
    digests = json.loads(digest)
    for name in secret:
        if name in digests:
            digests[name] = sealer.keyed_digest(f"{owner}:{name}:{digests[name]}")
    return json.dumps(digests, separators=(",", ":"))


def differing_fields(
    stored: str, sent: str, *, owner: str = "", sealer: Sealer = _NO_KEYS
) -> list[str]:
    """Name the fields in which a stored digest and that of a request differ, sorted.

    A keyed hash whose key is gone counts as equal: an honest repeat is never refused.
    """
    before, now = json.loads(stored), json.loads(sent)

    def differ(name: str) -> bool:
        old, new = before.get(name), now.get(name)
        if old is not None and new is not None and "." in old:
            return not sealer.may_be(old, f"{owner}:{name}:{new}")
        return bool(old != new)

    return sorted(name for name in before.keys() | now.keys() if differ(name))
