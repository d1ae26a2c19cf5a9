"""What every answer carries, and what no request may cost: both services, as processes."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from app.edge.requests import NOTHING
from app.plumbing.doorway import Doorway
from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform

ROOT = Path(__file__).parents[2]
DEEP = b"[" * 100_000
SAFE = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
}


def operations(service: str) -> list[tuple[str, str]]:
    """Return method and path of all operations of a service, its path parameters filled in."""
    document = json.loads((ROOT / "openapi" / f"{service}.json").read_text())
    return [
        (method.upper(), re.sub(r"\{[^}]*\}", "1", path))
        for path, methods in document["paths"].items()
        for method in methods
    ]


@pytest.fixture
def platform(sqlite_engine: Engine, new_platform: NewPlatform) -> Platform:
    return new_platform(sqlite_engine).start()


def clients(platform: Platform) -> list[tuple[str, httpx.Client]]:
    headers = {"Authorization": f"Bearer {platform.internal_token}"}
    return [
        (service, httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=30))
        for service, url in (
            ("dispatcher", platform.url),
            ("worker", platform.services["worker-1"].url),
        )
    ]


def test_every_answer_says_how_it_may_be_used_and_no_body_harms(platform: Platform) -> None:
    for service, client in clients(platform):
        with client:
            for method, path in [*operations(service), ("GET", "/docs"), ("GET", "/nowhere")]:
                if path.endswith("/events") or path == "/drain":
                    continue
                answer = client.request(method, path)
                _has_safe_headers(answer)
            for method, path in operations(service):
                if method in ("POST", "PUT", "PATCH") and path != "/drain":
                    _refuses(client, method, path)
    assert platform.http.get("/readyz").status_code == 200


def _has_safe_headers(answer: httpx.Response) -> None:
    path = answer.request.url.path
    got = {name: answer.headers.get(name) for name in SAFE}
    assert got == SAFE, path
    assert "server" not in answer.headers, path
    policy = answer.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in policy
    if path.startswith(("/openapi/", "/internal/", "/run", "/cancel", "/deliver")):
        assert answer.headers["cache-control"] == "no-store", path
        assert policy == NOTHING


def _refuses(client: httpx.Client, method: str, path: str) -> None:
    """A body that is nested too deep, and one that is too long, are the caller's fault."""
    json_type = {"Content-Type": "application/json"}
    deep = client.request(method, path, content=DEEP, headers={**json_type, "If-Match": '"0"'})
    assert 400 <= deep.status_code < 500, (method, path, deep.text)
    for deep_value in (b'{"params":' + DEEP, b'{"a":' * 50_000 + b"1" + b"}" * 50_000):
        answer = client.request(method, path, content=deep_value, headers=json_type)
        assert 400 <= answer.status_code < 500, (method, path, answer.text)
    with closing(HTTPConnection(client.base_url.netloc.decode(), timeout=30)) as connection:
        connection.putrequest(method, path)
        for name, value in {**dict(client.headers), **json_type, "If-Match": '"0"'}.items():
            connection.putheader(name, value)
        connection.putheader("Content-Length", str(64 * 1024 * 1024))
        connection.endheaders()
        assert connection.getresponse().status == 413, (method, path)


class Small(Doorway):
    """The same door, narrow enough to be seen."""

    most_head_bytes = 2000
    most_header_lines = 10
    idle_seconds = 0.6
    head_seconds = 0.3
    body_seconds = 0.4
    most_connections = 3


class Patient(Small):
    """As narrow, but it waits."""

    idle_seconds = head_seconds = body_seconds = 60


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body or b"none"})


@asynccontextmanager
async def door(kind: type[Doorway] = Small) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(_echo, http=kind, lifespan="off", log_config=None, ws="none")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


async def _talk(port: int, *parts: bytes, pause: float = 0) -> bytes:
    """Send parts, and return all that came until the server closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.create_task(_all_of(reader))
    try:
        for part in parts:
            if answer.done():
                break
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
    except ConnectionError:
        pass
    try:
        return await asyncio.wait_for(answer, 30)
    finally:
        writer.close()


async def _all_of(reader: asyncio.StreamReader) -> bytes:
    """Read to the end: a reset, for what was sent too late, takes nothing of what came before."""
    came = b""
    with suppress(ConnectionError):
        while piece := await reader.read(65536):
            came += piece
    return came


HEAD = b"POST / HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    ("parts", "pause", "status"),
    [
        ((HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\n", b"ok"), 0, 200),
        ((HEAD + b"A: " + b"x" * 3000 + b"\r\n\r\n",), 0, 431),
        ((HEAD + b"A: ", *[b"x" * 1500] * 3), 0.02, 431),  # a line without an end
        ((HEAD + b"A: b\r\n" * 20 + b"\r\n",), 0, 431),
        ((b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\n\r\n",), 0, 431),
        ((HEAD, *[b"A"] * 12), 0.1, 408),  # a byte now and then
        ((HEAD + b"Content-Length: 50\r\n\r\n", *[b"x"] * 12), 0.1, 408),
        ((b"\x16\x03\x01 nonsense\r\n\r\n",), 0, 400),
    ],
)
async def test_a_request_has_so_many_bytes_and_so_much_time(
    parts: tuple[bytes, ...], pause: float, status: int
) -> None:
    async with door(Small if status == 408 else Patient) as port:
        answer = await _talk(port, *parts, pause=pause)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    if status != 200:
        assert b"application/problem+json" in answer
        assert b"X-Content-Type-Options: nosniff" in answer


async def test_a_connection_without_a_request_is_closed_and_so_is_one_too_many() -> None:
    async with door() as port:
        assert await _talk(port) == b""
    async with door(Patient) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert await _talk(port, HEAD + b"\r\n") == b""
        for _, writer in held:
            writer.close()


def test_both_services_have_the_same_door() -> None:
    doors = [(ROOT / name).read_text() for name in ("app/plumbing/doorway.py", "worker/doorway.py")]
    texts = [door.replace("The dispatcher has", "The worker has") for door in doors]
    assert texts[0] == texts[1]
