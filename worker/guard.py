"""Lets only those with a token that fits send work, and bounds what they send."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Callable, Sequence
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oncue.protocol import (
    CANCEL_PATH,
    DELIVER_PATH,
    DRAIN_PATH,
    MAX_INTERNAL_BODY_BYTES,
    RUN_PATH,
)
from worker.problems import problem

GUARDED_PATHS: Final = frozenset({RUN_PATH, CANCEL_PATH, DELIVER_PATH, DRAIN_PATH})


NOTHING: Final = "default-src 'none'; frame-ancestors 'none'"
OWN_PAGES: Final = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""For the documentation, whose scripts stand in its page: nothing comes from, or goes, elsewhere.
"""
TOO_LARGE: Final = f"a body may have {MAX_INTERNAL_BODY_BYTES} bytes"
CLOSE: Final = {"connection": "close"}
MOST_WRONG: Final = 20
"""Wrong tokens from one address in `WRONG_SECONDS`; further ones are not looked at until then."""
WRONG_SECONDS: Final = 60.0
MOST_REMEMBERED: Final = 10_000


class Guesses:
    """Counts wrong tokens of each address in a window; memory is bounded, the oldest leave.

    As at the dispatcher: what was right from an address before stays right, whatever others there
    try, and IPv6 addresses count by their /64.
    """

    def __init__(self) -> None:
        self._wrong: dict[str, tuple[int, float]] = {}
        self._right: dict[tuple[str, bytes], None] = {}

    def wait_seconds(self, address: str, digest: bytes, now: float) -> float:
        """Return how long this token from this address is not even looked at; 0: it is."""
        count, until = self._wrong.get(_network(address), (0, 0.0))
        if count < MOST_WRONG or now >= until or (address, digest) in self._right:
            return 0.0
        return until - now

    def note_wrong(self, address: str, now: float) -> None:
        """Count a wrong token."""
        network = _network(address)
        count, until = self._wrong.pop(network, (0, 0.0))
        if now >= until:
            count, until = 0, now + WRONG_SECONDS
        self._wrong[network] = (count + 1, until)
        if len(self._wrong) > MOST_REMEMBERED:
            del self._wrong[next(iter(self._wrong))]

    def note_right(self, address: str, digest: bytes) -> None:
        """Remember what was right, where somebody else may be wrong."""
        if (address, digest) not in self._right:
            self._right[address, digest] = None
            if len(self._right) > MOST_REMEMBERED:
                del self._right[next(iter(self._right))]


class Guard:
    """ASGI middleware: 401 without a token that fits, 413 for a body over 8 MiB.

    After many wrong tokens from an address no other is looked at for a while: that is a 401 too,
    so that a dispatcher gives its runs to another worker meanwhile.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Sequence[str],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]
        self._guesses = Guesses()
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        guarded = scope["path"] in GUARDED_PATHS

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered["Content-Security-Policy"] = NOTHING if guarded else OWN_PAGES
                if guarded:
                    answered["Cache-Control"] = "no-store"
            await send(message)

        await (self._check if guarded else self._app)(scope, receive, send_safely)

    async def _check(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        address = (scope.get("client") or ("",))[0]
        refusal = self._refusal(headers.get(b"authorization", b""), address)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        if _declared_length(headers) > MAX_INTERNAL_BODY_BYTES:
            await problem(413, TOO_LARGE, headers=CLOSE)(scope, receive, send)
            return
        await self._pass_bounded(scope, receive, send)

    def _refusal(self, authorization: bytes, address: str) -> JSONResponse | None:
        """Return the answer to a token that is not let in; None: it is."""
        if not self._digests:
            return None
        scheme, _, token = authorization.partition(b" ")
        given = hashlib.sha256(token.strip()).digest()
        now = self._now()
        wait = self._guesses.wait_seconds(address, given, now)
        if wait > 0:
            return _unauthorized(
                f"too many wrong tokens came from {address}: wait {wait:.0f} s",
                {"retry-after": str(max(1, round(wait)))},
            )
        # All are compared, so that the time says nothing about which one fits.
        fits = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() == b"bearer" and any(fits):
            self._guesses.note_right(address, given)
            return None
        if authorization:  # one that was not sent at all is no attempt to guess one
            self._guesses.note_wrong(address, now)
        return _unauthorized("the internal token is missing or wrong", {})

    async def _pass_bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = MAX_INTERNAL_BODY_BYTES

        async def receive_bounded() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                # FastAPI passes on this kind of error only; problems.py makes the answer.
                raise HTTPException(413, TOO_LARGE, headers=CLOSE)
            return message

        await self._app(scope, receive_bounded, send)


def _unauthorized(detail: str, headers: dict[str, str]) -> JSONResponse:
    return problem(401, detail, headers={"www-authenticate": "Bearer", **headers})


def _network(address: str) -> str:
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    except ValueError:
        return address


def _declared_length(headers: dict[bytes, bytes]) -> int:
    text = headers.get(b"content-length", b"0")
    return int(text) if text.isdigit() else 0
