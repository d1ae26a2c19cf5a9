"""Bearer keys: of callers (`ONCUE_API_KEYS`) and of workers (`ONCUE_INTERNAL_TOKEN`)."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from app.edge.problems import Problem


class BadKeys(ValueError):
    """A setting with keys or tokens is set, and holds none that can be used."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: the name of its key, and the tenant whose jobs it sees."""

    name: str
    tenant_id: int = 0


OPEN_CALLER = Caller("open")


class ApiKeys:
    """Knows callers by the hash of their key; without any key the API is open."""

    def __init__(self, configured: str) -> None:
        self._callers: dict[bytes, Caller] = {}
        for entry in filter(None, (part.strip() for part in configured.split(","))):
            name, separator, key = entry.partition(":")
            if not separator or not name or len(key) < 8:
                raise BadKeys("ONCUE_API_KEYS is name:key,... with keys of 8 characters or more")
            self._callers[_digest(key)] = Caller(name)
        if configured and not self._callers:
            raise BadKeys("ONCUE_API_KEYS is set and has no key in it")

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Return who sent these headers.

        Raises:
            Problem: `unauthorized`.
        """
        if not self._callers:
            return OPEN_CALLER
        given = _digest(_bearer(headers))
        # Every known hash is compared, so that the time tells nothing about which came close.
        found = None
        for known, caller in self._callers.items():
            if hmac.compare_digest(known, given):
                found = caller
        if found is None:
            raise Problem("unauthorized", "Send a valid key as 'Authorization: Bearer KEY'.")
        return found


class InternalTokens:
    """The tokens that workers may present; without any, internal routes are open."""

    def __init__(self, configured: str) -> None:
        self._tokens = [part.strip() for part in configured.split(",") if part.strip()]
        self._digests = [_digest(token) for token in self._tokens]
        if configured and not self._tokens:
            raise BadKeys("ONCUE_INTERNAL_TOKEN is set and has no token in it")

    @property
    def sent(self) -> str:
        """The token this process sends: the first."""
        return self._tokens[0] if self._tokens else ""

    def check(self, headers: Mapping[str, str]) -> None:
        """Return if the headers carry one of the tokens.

        Raises:
            Problem: `unauthorized`.
        """
        if not self._digests:
            return
        given = _digest(_bearer(headers))
        if not any(hmac.compare_digest(known, given) for known in self._digests):
            raise Problem(
                "unauthorized", "Send the internal token as 'Authorization: Bearer TOKEN'."
            )


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
