"""What the guarded client asks of TLS."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ipaddress
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tests.support.wait import until_async
from worker.egress import Egress, EgressFailed

LOOPBACK = ipaddress.ip_network("127.0.0.0/8")
NAME = "receiver.example"


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and a certificate of `receiver.example`, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "receiver.pem"
    file.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + made.public_bytes(Encoding.PEM)
    )
    return file


class Loopback:
    """A resolver for which every name is 127.0.0.1."""

    async def resolve(self, host: str) -> list[str]:
        return ["127.0.0.1"]

    async def close(self) -> None:
        pass


class Receiver:
    """A server with TLS that answers each request; it notes what it was told in the handshake."""

    def __init__(self) -> None:
        self.port = 0
        self.connections = 0
        self.ended = 0
        self.writers: list[StreamWriter] = []
        self.closes = False
        self.falls_silent = False
        self.names: list[str | None] = []
        self.protocols: list[str | None] = []

    def url(self, host: str = NAME) -> str:
        return f"https://{host}:{self.port}/"

    async def answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        self.protocols.append(writer.get_extra_info("ssl_object").selected_alpn_protocol())
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                if self.falls_silent:
                    writer.transport.pause_reading()  # type: ignore[attr-defined]
                if self.closes:
                    break
        except (asyncio.IncompleteReadError, OSError):
            pass
        writer.close()
        self.ended += 1


@pytest.fixture
async def receiver(certificate: Path) -> AsyncIterator[Receiver]:
    found = Receiver()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.set_alpn_protocols(["h2", "http/1.1"])
    context.sni_callback = lambda _, name, __: found.names.append(name)
    server = await asyncio.start_server(found.answer, "127.0.0.1", 0, ssl=context)
    found.port = server.sockets[0].getsockname()[1]
    yield found
    server.close()
    for writer in found.writers:
        writer.transport.abort()
    await until_async(lambda: found.ended == found.connections)
    for writer in found.writers:
        await _hang_up(writer)


@asynccontextmanager
async def opened(trusted: Path | None) -> AsyncIterator[Egress]:
    tls = None
    if trusted is not None:
        tls = ssl.create_default_context(cafile=trusted)
        tls.set_alpn_protocols(["http/1.1"])
    async with Egress([LOOPBACK], resolver=Loopback(), tls=tls) as egress:
        yield egress
    assert not egress._open


async def call(egress: Egress, url: str, seconds: float = 30) -> int:
    reply = await egress.request(
        "GET", url, headers={}, body=None, timeout_seconds=seconds, most_bytes=1000
    )
    return reply.status


async def test_the_name_of_the_url_is_asked_for_and_proved(
    receiver: Receiver, certificate: Path
) -> None:
    async with opened(certificate) as egress:
        for host in (NAME, NAME, f"{NAME}."):
            assert await call(egress, receiver.url(host)) == 200
        assert receiver.connections == 2
    assert receiver.names == [NAME, NAME]
    assert receiver.protocols == ["http/1.1", "http/1.1"]


@pytest.mark.parametrize("host", ["other.example", "127.0.0.1"])
async def test_a_certificate_of_another_name_is_not_trusted(
    receiver: Receiver, certificate: Path, host: str
) -> None:
    async with opened(certificate) as egress:
        with pytest.raises(EgressFailed, match=r"^the connection is not trusted or TLS failed$"):
            await call(egress, receiver.url(host))


async def test_a_certificate_that_nobody_vouches_for_is_not_trusted(receiver: Receiver) -> None:
    async with opened(None) as egress:
        with pytest.raises(EgressFailed, match=r"^the connection is not trusted or TLS failed$"):
            await call(egress, receiver.url())


async def test_what_the_client_trusts_by_itself_is_verified() -> None:
    async with opened(None) as egress:
        assert egress._tls.verify_mode == ssl.CERT_REQUIRED
        assert egress._tls.check_hostname


async def test_plain_text_where_tls_was_due_is_a_failure() -> None:
    ended = asyncio.Event()

    async def connected(reader: StreamReader, writer: StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await _hang_up(writer)
        ended.set()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with opened(None) as egress:
        with pytest.raises(EgressFailed, match="TLS failed"):
            await call(egress, f"https://{NAME}:{server.sockets[0].getsockname()[1]}/")
        await asyncio.wait_for(ended.wait(), 30)
    server.close()


async def _hang_up(writer: StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def test_a_handshake_without_an_answer_is_not_waited_for() -> None:
    ended = asyncio.Event()

    async def connected(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.read()
        await _hang_up(writer)
        ended.set()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with opened(None) as egress:
        with pytest.raises(EgressFailed, match=r"^no answer in time$"):
            await call(egress, f"https://{NAME}:{server.sockets[0].getsockname()[1]}/", 0.3)
        await asyncio.wait_for(ended.wait(), 30)
    server.close()


async def test_a_peer_that_says_no_good_bye_is_not_waited_for(
    receiver: Receiver, certificate: Path
) -> None:
    receiver.falls_silent = True
    loop = asyncio.get_running_loop()
    async with opened(certificate) as egress:
        await call(egress, receiver.url())
        began = loop.time()
        await egress.close()
        assert not egress._open
        assert loop.time() - began < 5


async def test_an_idle_connection_that_was_closed_is_not_used(
    receiver: Receiver, certificate: Path
) -> None:
    receiver.closes = True
    async with opened(certificate) as egress:
        await call(egress, receiver.url())
        await until_async(lambda: not egress._open)
        assert not len(egress._idle)
        assert await call(egress, receiver.url()) == 200
        assert receiver.connections == 2
