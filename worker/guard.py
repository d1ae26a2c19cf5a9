"""Lets only those with a token that fits send work, and bounds what they send."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
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


class Guard:
    """ASGI middleware: 401 without a token that fits, 413 for a body over 8 MiB."""

    def __init__(self, app: ASGIApp, *, tokens: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

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
        if not self._is_allowed(headers.get(b"authorization", b"")):
            response = problem(
                401,
                "the internal token is missing or wrong",
                headers={"www-authenticate": "Bearer"},
            )
            await response(scope, receive, send)
            return
        if _declared_length(headers) > MAX_INTERNAL_BODY_BYTES:
            await problem(413, TOO_LARGE, headers=CLOSE)(scope, receive, send)
            return
        await self._pass_bounded(scope, receive, send)

    def _is_allowed(self, authorization: bytes) -> bool:
        if not self._digests:
            return True
        scheme, _, token = authorization.partition(b" ")
        given = hashlib.sha256(token.strip()).digest()
        # All are compared, so that the time says nothing about which one fits.
        fits = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == b"bearer" and any(fits)

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


def _declared_length(headers: dict[bytes, bytes]) -> int:
    text = headers.get(b"content-length", b"0")
    return int(text) if text.isdigit() else 0
