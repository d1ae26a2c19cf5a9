"""The short way of the busiest routes: past the framework's layers, to the same functions.

A request passes some twenty functions of the framework before its route sees it, which costs
more than to store a job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import RouteContext, iter_route_contexts
from starlette.types import ASGIApp, Receive, Scope, Send

from app.edge.problems import problem_of, problem_response


class ShortWays(FastAPI):
    """An application in which some routes are called without the framework."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._short_ways: dict[tuple[str, str], ASGIApp] = {}

    def shorten(self, name: str, edge: Callable[[ASGIApp], ASGIApp]) -> None:
        """Call this route directly, behind `edge`: its path has no parts, it takes a request."""
        (route,) = (one for one in iter_route_contexts(self.routes) if one.name == name)
        for method in route.methods or ():
            self._short_ways[method, str(route.path)] = edge(_Endpoint(route))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        way = None
        if scope["type"] == "http":
            # The framework's routes match a path with a line feed behind it too.
            path = scope["path"].removesuffix("\n")
            way = self._short_ways.get((scope["method"], path))
        await (super().__call__ if way is None else way)(scope, receive, send)


class _Route(NamedTuple):
    """What of a route is asked while it serves a request: the framework looks it up each time."""

    name: str
    dependant: Any
    body_field: Any
    openapi_extra: dict[str, Any] | None


class _WholeRequest(Request):
    """A request whose body is there."""

    def __init__(self, scope: Scope, body: bytes) -> None:
        super().__init__(scope)
        self._whole = body

    async def body(self) -> bytes:
        """Return it."""
        return self._whole


class _Endpoint:
    """ASGI: gives the request to a route; what that raises becomes a problem."""

    def __init__(self, route: RouteContext) -> None:
        self._route = _Route(
            str(route.name), route.dependant, route.body_field, route.openapi_extra
        )
        self._answer: Any = route.endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; a caller that left before its body had come gets no answer."""
        body = await _read(receive)
        if body is None:
            return
        scope["route"] = self._route
        try:
            response: Response = await self._answer(_WholeRequest(scope, body))
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
