"""Lets only those with a token that fits send work, and bounds what they send."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oncue.failures import Failures
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
        self._failures = Failures(MOST_WRONG, WRONG_SECONDS)
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
        wait = self._failures.wait_seconds(address, given.hex(), now)
        if wait > 0:
            return _unauthorized(
                f"too many wrong tokens came from {address}: wait {wait:.0f} s",
                {"retry-after": str(max(1, round(wait)))},
            )
        # All are compared, so that the time says nothing about which one fits.
        fits = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() == b"bearer" and any(fits):
            self._failures.note_success(address, given.hex())
            return None
        if authorization:  # one that was not sent at all is no attempt to guess one
            self._failures.note_failure(address, now)
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


def _declared_length(headers: dict[bytes, bytes]) -> int:
    text = headers.get(b"content-length", b"0")
    return int(text) if text.isdigit() else 0
