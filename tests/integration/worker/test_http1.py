"""What the guarded client says and understands of HTTP/1.1."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ipaddress
import socket
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.wait import until_async
from worker import http1, idle
from worker.egress import Egress, EgressFailed, EgressReply
from worker.http1 import MOST_HEAD_BYTES, MOST_HEADER_LINES

LOOPBACK = ipaddress.ip_network("127.0.0.0/8")
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STEPS_TO_BEGIN = 20
"""More turns of the loop than lie between an accepted connection and its first read."""
SECRET = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecret"


@dataclass
class Site:
    """A receiver on loopback, and what came to it."""

    port: int = 0
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    ended: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


Talk = Callable[[Site, StreamReader, StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(talk: Talk, host: str = "127.0.0.1", **more: Any) -> AsyncIterator[Site]:
    """Serve by `talk`, once for each connection."""
    site = Site()
    writers = []

    async def connected(reader: StreamReader, writer: StreamWriter) -> None:
        site.connections += 1
        writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await talk(site, reader, writer)
        site.ended += 1
        writer.close()

    server = await asyncio.start_server(connected, host, 0, **more)
    site.port = server.sockets[0].getsockname()[1]
    yield site
    server.close()
    for _ in range(STEPS_TO_BEGIN):
        # One that was accepted a moment ago has not begun to be served yet.
        await asyncio.sleep(0)
    for writer in writers:
        writer.transport.abort()
    await until_async(lambda: site.ended == site.connections)
    for writer in writers:
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def read_request(reader: StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    _, told, rest = head.lower().partition(b"content-length: ")
    return head + (await reader.readexactly(int(rest.split(b"\r\n")[0])) if told else b"")


def answering(*answers: bytes, close: bool = False) -> Talk:
    """Answer the requests of all connections in turn, the last answer again and again."""

    async def talk(site: Site, reader: StreamReader, writer: StreamWriter) -> None:
        while True:
            site.requests.append(await read_request(reader))
            writer.write(answers[min(len(site.requests), len(answers)) - 1])
            if close:
                return

    return talk


async def call(egress: Egress, url: str, method: str = "POST", **changes: Any) -> EgressReply:
    given: dict[str, Any] = {
        "headers": {}, "body": b"{}" if method == "POST" else None, "timeout_seconds": 30,
        "most_bytes": 1000, **changes,
    }  # fmt: skip
    return await egress.request(method, url, **given)


@pytest.fixture
async def egress() -> AsyncIterator[Egress]:
    async with Egress([LOOPBACK]) as found:
        yield found
    assert not found._open
    assert not len(found._idle)


class Names:
    """A resolver that knows addresses by heart."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses

    async def resolve(self, host: str) -> list[str]:
        return list(self.addresses)

    async def close(self) -> None:
        pass


async def test_a_request_is_what_was_asked_and_nothing_else(egress: Egress) -> None:
    async with serving(answering(OK)) as site:
        url = f"{site.url}a%20b/é?q=1#part"
        await call(egress, url, headers={"X-One": "1\t2", "x-two": "ü"}, body=b"body")
        await call(egress, site.url, "GET")
        await call(egress, site.url, "PUT")
    head = (
        f"POST /a%20b/%C3%A9?q=1 HTTP/1.1\r\nhost: 127.0.0.1:{site.port}\r\naccept: */*\r\n"
        "accept-encoding: identity\r\nX-One: 1\t2\r\nx-two: ü\r\ncontent-length: 4\r\n\r\nbody"
    )
    assert site.requests[0] == head.encode()
    assert b"content-length" not in site.requests[1]
    assert b"content-length: 0\r\n" in site.requests[2]


async def test_headers_are_found_by_names_in_any_case_and_the_first_counts(
    egress: Egress,
) -> None:
    answer = (
        b"HTTP/1.1 200 OK\r\nRETRY-After: 7 \r\nset-cookie: a=1\r\nSet-Cookie: b=2\r\nx-empty:\r\n"
        b"content-length: 0\r\n\r\n"
    )
    async with serving(answering(answer)) as site:
        reply = await call(egress, site.url)
        await call(egress, site.url)
    assert reply.headers["Retry-After"] == reply.headers["retry-after"] == "7"
    assert (reply.headers["Set-Cookie"], reply.headers["x-empty"]) == ("a=1", "")
    assert reply.headers.get("x-other") is None
    assert list(reply.headers) == ["retry-after", "set-cookie", "x-empty", "content-length"]
    assert len(reply.headers) == 4
    assert b"cookie" not in site.requests[1].lower()


async def test_a_compressed_body_stays_as_it_is(egress: Egress) -> None:
    body = gzip.compress(b"a" * 1000)
    head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(body)}\r\n\r\n"
    async with serving(answering(head.encode() + body)) as site:
        assert (await call(egress, site.url)).body == body


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("POST", {"x": "a\r\nb: c"}), ("POST", {"x": "a\nb"}), ("POST", {"x": "a\0"}),
        ("POST", {"x": "\ud800"}), ("POST", {"x\r\ny": "a"}), ("POST", {"x\0": "a"}),
        ("POST", {"é": "a"}), ("POST", {"": "a"}), ("POST", {"x ": "a"}), ("POST", {"x:y": "a"}),
        ("POST /\r\n", {}), ("PO ST", {}), ("", {}), ("PÖST", {}),
        ("POST", {"Host": "inner"}), ("POST", {"content-length": "5"}),
        ("POST", {"Transfer-Encoding": "chunked"}), ("POST", {"connection": "host"}),
        ("POST", {"upgrade": "h2c"}),
    ],
)  # fmt: skip
async def test_what_would_be_read_as_something_else_is_not_sent(
    egress: Egress, method: str, headers: dict[str, str]
) -> None:
    async with serving(answering(OK)) as site:
        with pytest.raises(EgressFailed, match=r"^the request cannot be sent$"):
            await call(egress, site.url, method, headers=headers)
    assert site.connections == 0


@pytest.mark.parametrize(
    "answer",
    [
        OK,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;x=y\r\no\r\n1\r\nk\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
        b"HTTP/1.1 102 Wait\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + OK,
    ],
)
async def test_a_connection_is_used_again_after_a_whole_answer(
    egress: Egress, answer: bytes
) -> None:
    async with serving(answering(answer)) as site:
        for _ in range(3):
            assert (await call(egress, site.url)).body == b"ok"
        assert len(egress._idle) == 1
    assert site.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
    ],
)
async def test_a_connection_that_the_server_wants_to_close_is_not_used_again(
    egress: Egress, answer: bytes
) -> None:
    async with serving(answering(answer)) as site:
        for _ in range(2):
            assert (await call(egress, site.url)).body == b"ok"
        assert site.connections == 2


@pytest.mark.parametrize("more", [b"", b"transfer-encoding: gzip\r\n"])
async def test_an_answer_without_a_length_ends_with_its_connection(
    egress: Egress, more: bytes
) -> None:
    answer = b"HTTP/1.1 200 OK\r\n" + more + b"\r\nok"
    async with serving(answering(answer, close=True)) as site:
        for _ in range(2):
            reply = await call(egress, site.url)
            assert (reply.body, reply.broken) == (b"ok", False)
    assert site.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\nno number\r\n",
    ],
)
async def test_a_status_counts_although_its_body_breaks(egress: Egress, answer: bytes) -> None:
    async with serving(answering(answer, close=True)) as site:
        reply = await call(egress, site.url)
    assert (reply.status, reply.body, reply.broken) == (200, b"ok", True)


async def test_a_reset_is_no_end_of_an_answer(egress: Egress) -> None:
    async def talk(site: Site, reader: StreamReader, writer: StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nok")
        await until_async(lambda: any(one._body for one in egress._open))
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    async with serving(talk) as site:
        reply = await call(egress, site.url)
    assert (reply.status, reply.body, reply.broken) == (200, b"ok", True)


@pytest.mark.parametrize(
    ("method", "status", "connections"), [("POST", 204, 2), ("POST", 304, 2), ("HEAD", 200, 2)]
)
async def test_some_answers_have_no_body_whatever_length_they_name(
    egress: Egress, method: str, status: int, connections: int
) -> None:
    async with serving(
        answering(f"HTTP/1.1 {status} X\r\nContent-Length: 5\r\n\r\n".encode())
    ) as site:
        for _ in range(2):
            reply = await call(egress, site.url, method)
            assert (reply.status, reply.body, reply.broken) == (status, b"", False)
            assert reply.headers["content-length"] == "5"
        assert site.connections == connections


async def test_trailers_are_read_over_and_are_nothing_of_the_next_answer(egress: Egress) -> None:
    chunked = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        b"2\r\nok\r\n0\r\nretry-after: 9\r\nx: y\r\n\r\n"
    )
    async with serving(answering(chunked, OK)) as site:
        first, second = await call(egress, site.url), await call(egress, site.url)
    assert (first.body, list(first.headers)) == (b"ok", ["transfer-encoding"])
    assert list(second.headers) == ["content-length"]
    assert site.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n" + OK,
        b"HTTP/1.1 101 Switching\r\n\r\n" + OK,
        b"HTTP/1.1 000 X\r\ncontent-length: 0\r\n\r\n" + OK,
        b"SSH-2.0-OpenSSH_9.0\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * (MOST_HEAD_BYTES + 1) + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * (MOST_HEADER_LINES + 1) + b"\r\n",
        b"HTTP/1.1 200 OK\r\nx: \0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length : 2\r\n\r\nok",
        b"HTTP/1.1 199 X\r\ncontent-length: 2\r\n\r\nno" + OK,
        b"HTTP/1.1 200 " + b"a" * 2 * MOST_HEAD_BYTES,
    ],
)
async def test_what_is_no_answer_fails_the_call(egress: Egress, answer: bytes) -> None:
    async with serving(answering(answer)) as site:
        with pytest.raises(EgressFailed, match=r"^the exchange broke off \(BadAnswer\)$"):
            await call(egress, site.url)
        await until_async(lambda: site.ended)


async def test_a_head_of_as_much_as_may_be_is_read(egress: Egress) -> None:
    lines = b"".join(b"x-%d: %s\r\n" % (n, b"a" * 200) for n in range(MOST_HEADER_LINES - 1))
    answer = b"HTTP/1.1 200 OK\r\n" + lines + b"content-length: 2\r\n\r\nok"
    async with serving(answering(answer)) as site:
        assert len((await call(egress, site.url)).headers) == MOST_HEADER_LINES


@pytest.mark.parametrize(
    ("begin", "again"),
    [
        (b"HTTP/1.1 200 OK\r\nx: ", b"a" * 500),
        (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n"),
        (b"", b"\r\n"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;", b"a" * 500),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ", b"a" * 500),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n"),
    ],
)
async def test_nothing_but_a_body_comes_without_end(
    egress: Egress, begin: bytes, again: bytes
) -> None:
    async def talk(site: Site, reader: StreamReader, writer: StreamWriter) -> None:
        await read_request(reader)
        writer.write(begin)
        while not writer.is_closing():
            writer.write(again)
            await writer.drain()
            await asyncio.sleep(0)

    async with serving(talk) as site:
        if b"chunked" in begin:
            assert (await call(egress, site.url)).broken
        else:
            with pytest.raises(EgressFailed, match="broke off"):
                await call(egress, site.url)


async def test_a_body_without_end_is_cut_and_its_connection_closed(egress: Egress) -> None:
    async def talk(site: Site, reader: StreamReader, writer: StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"a" * 100_000)
            await writer.drain()

    async with serving(talk) as site:
        reply = await call(egress, site.url)
        assert (reply.body, reply.truncated, reply.broken) == (b"a" * 1000, True, False)
        assert not len(egress._idle)
        await until_async(lambda: site.ended)


async def test_a_body_of_just_the_cap_is_whole(egress: Egress) -> None:
    async with serving(answering(OK)) as site:
        reply = await call(egress, site.url, most_bytes=2)
        assert (reply.body, reply.truncated) == (b"ok", False)
        reply = await call(egress, site.url, most_bytes=1)
        assert (reply.body, reply.truncated) == (b"o", True)


async def test_what_comes_behind_an_answer_is_nobodys_answer(egress: Egress) -> None:
    async with serving(answering(OK + SECRET, OK)) as site:
        assert (await call(egress, site.url)).body == b"ok"
        assert not len(egress._idle)
        assert (await call(egress, site.url)).body == b"ok"
        assert site.connections == 2


async def test_what_comes_on_an_idle_connection_closes_it(egress: Egress) -> None:
    may_go_on = asyncio.Event()

    async def talk(site: Site, reader: StreamReader, writer: StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        if site.connections == 1:
            await may_go_on.wait()
            writer.write(SECRET)
        await reader.read()

    async with serving(talk) as site:
        await call(egress, site.url)
        assert len(egress._idle) == 1
        may_go_on.set()
        await until_async(lambda: not len(egress._idle))
        assert (await call(egress, site.url)).body == b"ok"
        assert site.connections == 2


async def test_an_idle_connection_that_was_closed_is_not_used(egress: Egress) -> None:
    async with serving(answering(OK, close=True)) as site:
        await call(egress, site.url)
        await until_async(lambda: not len(egress._idle))
        assert (await call(egress, site.url)).body == b"ok"


@pytest.mark.parametrize(("method", "sent"), [("POST", 2), ("PATCH", 2), ("GET", 3), ("PUT", 3)])
async def test_only_what_may_be_done_twice_is_sent_again(
    egress: Egress, method: str, sent: int
) -> None:
    """The server takes the second request on a connection and goes without a word."""

    async def talk(site: Site, reader: StreamReader, writer: StreamWriter) -> None:
        for answer in (OK, b""):
            site.requests.append(await read_request(reader))
            writer.write(answer)

    async with serving(talk) as site:
        await call(egress, site.url, method)
        if sent == 3:
            assert (await call(egress, site.url, method)).body == b"ok"
        else:
            with pytest.raises(EgressFailed, match=r"broke off \(ServerDisconnected\)"):
                await call(egress, site.url, method)
        assert len(site.requests) == sent


async def test_a_request_is_not_sent_again_once_an_answer_has_begun(egress: Egress) -> None:
    async def talk(site: Site, reader: StreamReader, writer: StreamWriter) -> None:
        for answer in (OK, b"HTTP/1.1 2"):
            site.requests.append(await read_request(reader))
            writer.write(answer)

    async with serving(talk) as site:
        await call(egress, site.url, "GET")
        with pytest.raises(EgressFailed, match="broke off"):
            await call(egress, site.url, "GET")
        assert len(site.requests) == 2


async def test_an_answer_before_the_end_of_its_request_leaves_no_connection(
    egress: Egress,
) -> None:
    async def talk(site: Site, reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Much\r\ncontent-length: 0\r\n\r\n")
        await until_async(lambda: site.requests)

    async with serving(talk, limit=1024) as site:
        assert (await call(egress, site.url, body=b"a" * 32_000_000)).status == 413
        assert not len(egress._idle)
        site.requests.append(b"")


async def test_a_refusal_of_a_long_request_leaves_no_connection(egress: Egress) -> None:
    """All of it may have been sent, and the rest of it be unread."""
    refusal = b"HTTP/1.1 413 Too Much\r\ncontent-length: 0\r\n\r\n"
    async with serving(answering(refusal, OK), limit=2**20) as site:
        for _ in range(3):
            await call(egress, site.url, body=b"a" * 20_000)
        # The second answer is no refusal: its connection serves the third request too.
        assert site.connections == 2


async def test_a_call_cancelled_when_its_answer_is_there_closes_its_connection(
    egress: Egress, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[asyncio.Task[Any]] = []
    settle = http1.Connection._settle

    def settle_and_cancel(self: http1.Connection, **how: Any) -> None:
        settle(self, **how)
        called[0].cancel()

    monkeypatch.setattr(http1.Connection, "_settle", settle_and_cancel)
    async with serving(answering(OK)) as site:
        called.append(asyncio.create_task(call(egress, site.url)))
        with pytest.raises(asyncio.CancelledError):
            await called[0]
        await until_async(lambda: not egress._open)


async def test_a_long_body_arrives_whole(egress: Egress) -> None:
    async with serving(answering(OK), limit=1024) as site:
        await call(egress, site.url, body=b"ab" * 2_000_000)
        await call(egress, site.url)
        assert site.requests[0].endswith(b"\r\n\r\n" + b"ab" * 2_000_000)
        assert site.connections == 1


async def test_a_narrowed_call_neither_takes_nor_leaves_a_connection(egress: Egress) -> None:
    async with serving(answering(OK)) as site:
        await call(egress, site.url)
        for _ in range(2):
            assert (await call(egress, site.url, within=[LOOPBACK])).body == b"ok"
        await call(egress, site.url)
        assert site.connections == 3
        await until_async(lambda: site.ended == 2)
    assert [b"\r\nconnection: close\r\n" in one for one in site.requests] == [
        *(False, True, True, False)
    ]


async def test_idle_connections_are_few(egress: Egress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "MOST_IDLE", 2)
    async with (
        serving(answering(OK)) as one,
        serving(answering(OK)) as two,
        serving(answering(OK)) as three,
    ):
        for site in (one, two, three):
            await call(egress, site.url)
        assert len(egress._idle) == 2
        await until_async(lambda: one.ended)
        for site in (two, three):
            await call(egress, site.url)
        assert (two.connections, three.connections) == (1, 1)


async def test_idle_connections_are_closed_when_their_time_is_over(
    egress: Egress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "IDLE_SECONDS", 0.2)
    async with serving(answering(OK)) as site:
        await asyncio.gather(*(call(egress, site.url) for _ in range(3)))
        await until_async(lambda: site.ended == site.connections)
        assert not len(egress._idle)
        monkeypatch.setattr(idle, "IDLE_SECONDS", 0.0)
        before = site.connections
        for _ in range(2):
            await call(egress, site.url)
        assert site.connections == before + 2


async def test_a_cancelled_call_closes_its_connection(egress: Egress) -> None:
    async def talk(site: Site, reader: StreamReader, writer: StreamWriter) -> None:
        site.requests.append(await read_request(reader))
        await reader.read()

    async with serving(talk) as site:
        called = asyncio.create_task(call(egress, site.url))
        await until_async(lambda: site.requests)
        called.cancel()
        with pytest.raises(asyncio.CancelledError):
            await called
        await until_async(lambda: site.ended)
        assert not egress._open


async def test_closing_ends_the_calls_under_way() -> None:
    async def talk(site: Site, reader: StreamReader, writer: StreamWriter) -> None:
        site.requests.append(await read_request(reader))
        await reader.read()

    async with serving(talk) as site:
        egress = Egress([LOOPBACK])
        called = asyncio.create_task(call(egress, site.url))
        await until_async(lambda: site.requests)
        await egress.close()
        assert not egress._open
        with pytest.raises(EgressFailed, match="broke off"):
            await called
        with pytest.raises(EgressFailed, match="no connection"):
            await call(egress, site.url)
        assert site.connections == 1


async def test_an_answer_that_does_not_come_is_not_waited_for(egress: Egress) -> None:
    async def talk(site: Site, reader: StreamReader, writer: StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 2")
        await reader.read()

    async with serving(talk) as site:
        with pytest.raises(EgressFailed, match=r"^no answer in time$"):
            await call(egress, site.url, timeout_seconds=0.3)
        await until_async(lambda: site.ended)


async def test_a_name_that_is_not_resolved_in_time_is_not_waited_for() -> None:
    class Slow(Names):
        async def resolve(self, host: str) -> list[str]:
            await asyncio.Event().wait()
            return []

    async with Egress(resolver=Slow()) as egress:
        with pytest.raises(EgressFailed, match=r"^no answer in time$"):
            await call(egress, "http://slow.example/", timeout_seconds=0.1)


@pytest.mark.parametrize("found", [[], OSError("no such name"), UnicodeError("label too long")])
async def test_a_name_without_addresses_fails(found: Any) -> None:
    class Unknown(Names):
        async def resolve(self, host: str) -> list[str]:
            if isinstance(found, Exception):
                raise found
            return list(found)

    async with Egress(resolver=Unknown()) as egress:
        with pytest.raises(EgressFailed, match=r"^the host name cannot be resolved$"):
            await call(egress, "http://unknown.example/")


async def test_the_next_address_is_tried_when_one_refuses() -> None:
    async with serving(answering(OK)) as dead:
        pass
    async with (
        serving(answering(OK)) as site,
        Egress([LOOPBACK], resolver=Names("127.0.0.2", "127.0.0.1")) as egress,
    ):
        reply = await call(egress, f"http://two.example:{site.port}/")
        assert reply.status == 200
        assert f"\r\nhost: two.example:{site.port}\r\n".encode() in site.requests[0]
        with pytest.raises(EgressFailed, match=r"^no connection$"):
            await call(egress, f"http://two.example:{dead.port}/")


async def test_the_next_address_is_tried_when_one_says_nothing() -> None:
    async with serving(answering(OK)) as site:
        # It takes no more connections than fit in its queue, and none is taken out.
        with contextlib.ExitStack() as sockets:
            silent = sockets.enter_context(socket.socket())
            silent.bind(("127.0.0.2", site.port))
            silent.listen(0)
            for _ in range(4):
                filler = sockets.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.2", site.port))
            async with Egress([LOOPBACK], resolver=Names("127.0.0.2", "127.0.0.1")) as egress:
                url = f"http://two.example:{site.port}/"
                assert (await call(egress, url, timeout_seconds=2)).status == 200
