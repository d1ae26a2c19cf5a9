"""The short way gives what the application gives: every error is a problem, no body is cut."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from app.edge.problems import Problem, install_problems
from app.edge.requests import RequestEdge
from app.edge.short import ShortWays
from app.plumbing.database import DatabaseUnavailable

ERRORS = [
    Problem("unauthorized", "no key"),
    Problem("request_conflict", "another", jobId=7, fields=["params"]),
    Problem("overloaded", "later"),
    DatabaseUnavailable("away"),
    RuntimeError("a fault"),
]


def both() -> tuple[FastAPI, FastAPI]:
    """The same answer by the framework and by the short way."""
    long, short = FastAPI(), ShortWays()
    for app in (long, short):
        install_problems(app)
        app.add_middleware(RequestEdge, limits={})

        @app.post("/jobs")
        async def route(request: Request) -> Response:
            assert request.scope["route"].name == "route", "its role goes by its name"
            if "x-raise" in request.headers:
                raise ERRORS[int(request.headers["x-raise"])]
            return Response(await request.body(), status_code=202, headers={"etag": '"0"'})

    short.shorten("route", RequestEdge)
    return long, short


async def asked(
    app: FastAPI, method: str = "POST", path: str = "/jobs", **options: Any
) -> tuple[int, Any, dict[str, str]]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.request(method, path, **options)
    # What the edge adds stands in the answer to a fault too: the framework's is outside of it.
    of_the_route = ("content-type", "content-length", "etag", "retry-after", "www-authenticate")
    headers = {name: reply.headers[name] for name in of_the_route if name in reply.headers}
    return reply.status_code, reply.content, headers


async def test_a_path_that_the_framework_takes_for_the_route_takes_the_short_way_too() -> None:
    passed: list[str] = []

    def edge(app: Any) -> Any:
        async def note(scope: Any, receive: Any, send: Any) -> None:
            passed.append(scope["path"])
            await app(scope, receive, send)

        return RequestEdge(note)

    _, app = both()
    assert isinstance(app, ShortWays)
    app.shorten("route", edge)
    for path in ("/jobs", "/jobs%0A"):
        assert (await asked(app, path=path))[0] == 202
    assert passed == ["/jobs", "/jobs\n"]


@pytest.mark.parametrize("number", range(len(ERRORS)))
async def test_an_error_is_the_same_problem(number: int) -> None:
    headers = {"x-raise": str(number), "x-request-id": "r-1"}
    long, short = [await asked(app, headers=headers) for app in both()]
    assert short == long
    assert json.loads(short[1])["status"] == short[0]


@pytest.mark.parametrize("size", [0, 1, 256 * 1024, 256 * 1024 + 1])
async def test_a_body_has_the_same_limit(size: int) -> None:
    async def parts() -> Any:
        for start in range(0, size, 50_000):
            yield b"a" * min(50_000, size - start)

    for body in (b"a" * size, parts):
        content = body if isinstance(body, bytes) else None
        answers = [
            await asked(
                app, content=parts() if content is None else content, headers={"x-request-id": "r"}
            )
            for app in both()
        ]
        assert answers[0] == answers[1]
        assert answers[0][0] == (202 if size <= 256 * 1024 else 413)


async def test_other_methods_take_the_long_way() -> None:
    long, short = [await asked(app, "GET", headers={"x-request-id": "r"}) for app in both()]
    assert short == long
    assert short[0] == 405


async def test_a_caller_that_leaves_gets_no_answer() -> None:
    sent: list[Any] = []
    messages = iter(
        [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    )

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/jobs", "headers": []}
    await both()[1](scope, receive, send)
    assert sent == []
