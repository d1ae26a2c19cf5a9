"""No spelling of an inner address, and no resolver, opens a connection to it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from worker.egress import Egress, EgressFailed, EgressRefused


@dataclass
class Listener:
    """A server on loopback that counts what connects to it."""

    port: int = 0
    connections: int = 0


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    found = Listener()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.connections += 1
        await reader.readuntil(b"\r\n\r\n")
        body = b"a" * 100_000
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nset-cookie: a=b\r\n\r\n"
        writer.write(head.encode() + body)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    second = None
    # Both families on one port, so that mapped and native spellings would all arrive.
    with contextlib.suppress(OSError):
        second = await asyncio.start_server(connected, "::1", found.port)
    yield found
    server.close()
    if second is not None:
        second.close()


class Liar:
    """A resolver that gives other addresses each time it is asked."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def resolve(self, host: str) -> list[str]:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        return answer

    async def close(self) -> None:
        pass


async def call(egress: Egress, url: str) -> int:
    reply = await egress.request(
        "GET", url, headers={}, body=None, timeout_seconds=30, most_bytes=1000
    )
    assert len(reply.body) <= 1000
    return reply.status


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.0.0.1.", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1",
        "0177.0.0.1", "017700000001", "0", "0.0.0.0", "localhost", "LOCALHOST",
        "[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]",
        "[2001:0:7f00:1::]", "[fe80::1%25lo]", "[fe80::1]", "[::1%25lo]", "①②⑦.⓪.⓪.①",
        "127。0。0。1", "１２７.0.0.1", "user@127.0.0.1", "user:password@127.0.0.1",
        "@127.0.0.1", ":@127.0.0.1", "example.com\\@127.0.0.1", "127.0.0.1\t", " 127.0.0.1",
        "127.0.0.1\r\nhost: x", "ⓛocalhost", "169.254.169.254",
        "10.0.0.1", "[fd00:ec2::254]", "",
    ],
)  # fmt: skip
async def test_no_spelling_of_an_inner_address_connects(listener: Listener, host: str) -> None:
    async with Egress() as egress:
        with pytest.raises(EgressRefused) as refusal:
            await call(egress, f"http://{host}:{listener.port}/")
    assert str(refusal.value) == "egress_refused: this address may not be called"
    assert listener.connections == 0


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1%00", "127.0.0.1%2f", "%31%32%37.0.0.1", "localhost..", "a..b", "[v1.x]",
        ".127.0.0.1", "256.256.256.256", "127.0.0.256", "4294967296", "0x", "a!b",
        f"{'b' * 64}.example", f"{'é' * 60}.example",
    ],
)  # fmt: skip
async def test_a_host_that_can_be_nothing_is_refused_as_an_inner_one_is(
    listener: Listener, host: str
) -> None:
    resolver = Liar(["127.0.0.1"])
    async with Egress([ipaddress.ip_network("127.0.0.0/8")], resolver=resolver) as egress:
        with pytest.raises(EgressRefused) as refusal:
            await call(egress, f"http://{host}:{listener.port}/")
    assert str(refusal.value) == "egress_refused: this address may not be called"
    assert (listener.connections, resolver.asked) == (0, 0)


async def test_a_name_of_this_machine_does_not_connect(listener: Listener) -> None:
    async with Egress() as egress:
        with pytest.raises((EgressRefused, EgressFailed)):
            await call(egress, f"http://localhost.:{listener.port}/")
    assert listener.connections == 0


@pytest.mark.parametrize(
    "url",
    [
        "ftp://127.0.0.1/", "file:///etc/passwd", "gopher://127.0.0.1/", "//127.0.0.1/", "/path",
        "", "http:", "http://", "http:///x", "https://127.0.0.1:0/", "http://127.0.0.1:99999/",
        "http://[::1/", "http://[2606:4700::1]@/x", "data:,x", "unix:///tmp/socket", "HTTP+unix://x/",
    ],
)  # fmt: skip
async def test_what_is_no_plain_http_url_is_refused(url: str) -> None:
    async with Egress() as egress:
        with pytest.raises(EgressRefused):
            await call(egress, url)


@pytest.mark.parametrize(
    "answer",
    [["127.0.0.1"], ["::1"], ["93.184.215.14", "127.0.0.1"], ["::ffff:127.0.0.1"], ["not-an-ip"]],
)
async def test_a_name_with_one_inner_address_is_refused(
    listener: Listener, answer: list[str]
) -> None:
    async with Egress(resolver=Liar(answer)) as egress:
        with pytest.raises(EgressRefused):
            await call(egress, f"http://rebound.example:{listener.port}/")
    assert listener.connections == 0


async def test_a_name_is_resolved_once_for_each_connection(listener: Listener) -> None:
    liar = Liar(["127.0.0.1"], ["10.0.0.1"])
    async with Egress([network("127.0.0.0/8")], resolver=liar) as egress:
        assert await call(egress, f"http://rebound.example:{listener.port}/") == 200
        assert liar.asked == 1
        with pytest.raises(EgressRefused):
            await call(egress, f"http://rebound.example:{listener.port}/")
    assert listener.connections == 1


async def test_the_last_check_stands_even_if_the_resolver_check_fails(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar = Liar(["127.0.0.1"])
    monkeypatch.setattr("worker.egress.GuardedResolver.resolve", liar.resolve)
    async with Egress() as egress:
        with pytest.raises(EgressRefused):
            await call(egress, f"http://rebound.example:{listener.port}/")
    assert listener.connections == 0


async def test_proxies_of_the_environment_are_not_used(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{listener.port}")
    async with Egress(resolver=Liar(["127.0.0.2"])) as egress:
        with pytest.raises(EgressRefused):
            await call(egress, "http://outside.example/")
    assert listener.connections == 0


async def test_an_allowed_network_is_reached_and_the_answer_cut(listener: Listener) -> None:
    async with Egress([network("127.0.0.0/8")]) as egress:
        assert await call(egress, f"http://127.0.0.1:{listener.port}/") == 200
    assert listener.connections == 1


async def test_a_zone_of_an_address_is_a_zone_and_no_name(listener: Listener) -> None:
    async with Egress([network("::1/128")]) as egress:
        assert await call(egress, f"http://[::1%25lo]:{listener.port}/") == 200
        with pytest.raises(EgressFailed, match="no connection"):
            await call(egress, f"http://[::1%25x.example]:{listener.port}/")
    assert listener.connections == 1


async def test_a_dead_end_is_a_failure_and_not_a_refusal() -> None:
    async with Egress([network("127.0.0.0/8")]) as egress:
        with pytest.raises(EgressFailed, match="no connection"):
            await call(egress, "http://127.0.0.1:9/")


def network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(text)


async def test_interim_answers_without_end_break_the_exchange() -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Egress([network("127.0.0.0/8")]) as egress:
        with pytest.raises(EgressFailed, match="broke off"):
            await call(egress, f"http://127.0.0.1:{port}/")
    server.close()
    await server.wait_closed()


async def test_a_few_interim_answers_are_read_over_whatever_came_before() -> None:
    """A connection that is kept counts them anew for each answer."""
    early = b"HTTP/1.1 103 Early Hints\r\n\r\n" * 10
    final = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(early + final)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Egress([network("127.0.0.0/8")]) as egress:
        for _ in range(3):
            assert await call(egress, f"http://127.0.0.1:{port}/") == 200
    server.close()
    await server.wait_closed()
