"""The short way of the busiest routes: past the framework's layers, to the same answers.

A request passes some twenty functions of the framework before its route sees it, which costs
more than to store a job. The routes stay in the application, where they are documented; what
they do is the same function.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.edge.problems import problem_of, problem_response

Answer: TypeAlias = Callable[[Headers, bytes], Awaitable[Response]]


class ShortWays(FastAPI):
    """An application in which some routes, by method and path, are served by `short_ways`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.short_ways: dict[tuple[str, str], ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        way = None
        if scope["type"] == "http":
            way = self.short_ways.get((scope["method"], scope["path"]))
        await (super().__call__ if way is None else way)(scope, receive, send)


class Endpoint:
    """ASGI: gives headers and body to `answer`; what it raises becomes a problem."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; a caller that left before its body had come gets no answer."""
        body = await _read(receive)
        if body is None:
            return
        try:
            response = await self._answer(Headers(scope=scope), body)
        except Exception as error:  # noqa: BLE001 - every error is an answer
            response = problem_response(problem_of(error, scope["path"]))
        await response(scope, receive, send)


async def _read(receive: Receive) -> bytes | None:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
