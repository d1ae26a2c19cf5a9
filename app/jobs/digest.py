"""The digest of a request: a short hash of each field as it was sent, before defaults."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from app.plumbing.json_text import plain_json


def request_digest(sent: Mapping[str, Any]) -> str:
    """Return `{"field": "hash", ...}` of the fields that were sent; null counts as not sent.

    Raises:
        Unencodable: a value has no JSON form.
    """
    digests = {
        name: hashlib.sha256(_bytes_of(value)).hexdigest()[:16]
        for name, value in sorted(sent.items())
        if value is not None
    }
    return json.dumps(digests, separators=(",", ":"))


def _bytes_of(value: Any) -> bytes:
    """Write most values, which are text or small numbers, without an encoder of their own."""
    if type(value) is int and -(2**63) <= value < 2**63:
        return b"%d" % value
    return plain_json(value, sort_keys=True).encode()


def differing_fields(stored: str, sent: str) -> list[str]:
    """Name the fields in which two digests differ, sorted."""
    before, now = json.loads(stored), json.loads(sent)
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
