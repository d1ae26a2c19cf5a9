"""What every request passes: its id, the limit of its body, and the log line of its end."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import structlog
from starlette.datastructures import MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.edge.heads import header_of
from app.edge.problems import Problem, problem_response

log = structlog.get_logger(__name__)

Headers = list[tuple[bytes, bytes]]

MAX_BODY_BYTES: Final = 256 * 1024
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SERVED_ONCE_STARTED: Final = ("/openapi/", "/internal/")
_CALLERS: Final = "/openapi/"
_ALONE: Final = nullcontext()
_NEVER_KEPT: Final = ("/openapi/", "/internal/")
NOTHING: Final = "default-src 'none'; frame-ancestors 'none'"
OWN_PAGES: Final = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""For the documentation, whose scripts stand in its page: nothing comes from, or goes, elsewhere.
"""
_PAGE: Final = [(b"content-security-policy", OWN_PAGES.encode())]
_BARE: Final = [(b"content-security-policy", NOTHING.encode()), (b"cache-control", b"no-store")]
_OWN_NAMES: Final = frozenset((b"x-request-id", b"content-security-policy", b"cache-control"))
_ENDING: Final = Problem(
    "not_ready",
    "The process ends, and it is not known whether anything was stored: repeat the same request.",
)
_QUIET_PATHS: Final = ("/healthz", "/readyz", "/metrics", "/internal/")


class CompressDocuments:
    """ASGI middleware: compresses the documentation, and costs other requests nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._compressing = GZipMiddleware(app, minimum_size=4096, compresslevel=5)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        plain = scope["type"] != "http" or scope["path"].startswith(("/openapi/", "/internal/"))
        await (self._app if plain else self._compressing)(scope, receive, send)


def request_id_of(given: str) -> str:
    """Return the id that the caller gave its request, if it is a plain one, or a new one."""
    return given if _REQUEST_ID.fullmatch(given) else os.urandom(16).hex()


class RequestEdge:
    """ASGI middleware: binds `X-Request-Id`, bounds the body, and logs how the request ended.

    What `waits_for` says, unless None, is why requests to the API are not served yet. A request
    of a caller is served within `crowd`, which may refuse it. One that is cancelled while the
    process `ends` is told to come back: other servers are there, or this one will be.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: dict[str, int] | None = None,
        waits_for: Callable[[], str | None] = lambda: None,
        crowd: AbstractContextManager[None] | None = None,
        ends: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app = app
        self._limits = limits or {}
        self._waits_for = waits_for
        self._crowd = crowd or nullcontext()
        self._ends = ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(header_of(scope, b"x-request-id"))
        scope["request_id"] = request_id
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        path: str = scope["path"]
        limit = self._limit_of(path)
        own = [(b"x-request-id", request_id.encode()), *_own_headers(path)]
        status = 0
        started = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = _with_own(message["headers"], own)
            await send(message)

        received = 0

        async def bounded_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _too_large(limit)
            return message

        try:
            self._refuse_by_head(scope, path, limit)
            try:
                with self._crowd if path.startswith(_CALLERS) else _ALONE:
                    await self._app(scope, bounded_receive, send_with_id)
            except asyncio.CancelledError:
                if self._ends():
                    raise _ENDING from None
                raise
        except Problem as problem:
            if status:
                raise
            # What is left of a body that is not read would be taken for the next request.
            ends = {} if problem.body_was_read else {"Connection": "close"}
            response = problem_response(problem, ends)
            await response(scope, receive, send_with_id)
        if not path.startswith(_QUIET_PATHS):
            log.debug(
                "request",
                method=scope["method"],
                path=path,
                status=status,
                milliseconds=round((time.perf_counter() - started) * 1000, 1),
            )

    def _refuse_by_head(self, scope: Scope, path: str, limit: int) -> None:
        declared = header_of(scope, b"content-length", "0")
        if declared.isdecimal() and int(declared) > limit:
            raise _too_large(limit)
        if path.startswith(_SERVED_ONCE_STARTED) and (missing := self._waits_for()) is not None:
            raise Problem("not_ready", f"Repeat the request later: {missing}.")

    def _limit_of(self, path: str) -> int:
        for start, size in self._limits.items():
            if path.startswith(start):
                return size
        return MAX_BODY_BYTES


def _own_headers(path: str) -> Headers:
    """Return what every answer at a path tells besides its id."""
    return _BARE if path.startswith(_NEVER_KEPT) else _PAGE


def _with_own(headers: Headers, own: Headers) -> Headers:
    """Add headers to those of an answer; one that it has already is replaced where it stands."""
    if _OWN_NAMES.isdisjoint([name for name, _ in headers]):
        return [*headers, *own]
    answered = MutableHeaders(raw=[*headers])
    for name, value in own:
        answered[name.decode()] = value.decode()
    return answered.raw


def _too_large(limit: int) -> Problem:
    return Problem("body_too_large", f"Send at most {limit} bytes.")
