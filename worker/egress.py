"""The one guarded client for addresses that callers name: callbacks and the `http` handler.

A name is resolved once and every address is checked; the socket is opened only to an address
that passed, and checked once more right before it connects. So neither a hostile spelling of
an address nor a resolver that changes its mind reaches an inner host.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import aiohttp
from aiohttp import StreamReader
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_parser import RawResponseMessage
from yarl import URL

from oncue.addresses import Network, NoHost, is_allowed, narrowed, read_host, spelled_addresses

REFUSAL: Final = "egress_refused: this address may not be called"

RESOLVER_THREADS: Final = 512
"""Twice what calls of hosts that do not answer may be under way: a lookup outlives its call."""
MOST_INTERIM_ANSWERS: Final = 16
"""So many at once, and one more for each second: a long call may be kept alive by them."""


class EgressRefused(Exception):
    """The address may not be called; the text is the same whatever the reason."""

    def __init__(self) -> None:
        super().__init__(REFUSAL)


class EgressFailed(Exception):
    """No answer came; the message names the kind of failure and no inner detail."""


class _RefusedAddress(OSError):
    """Carries a refusal through aiohttp, which passes on only OSError."""


RUN_NETWORKS: ContextVar[list[str] | None] = ContextVar("run_networks", default=None)
"""What the run at hand may call besides public addresses, by its tenant's word. None: nothing said.
"""


@dataclass(frozen=True, slots=True)
class EgressReply:
    """An answer, its body cut to the cap; `broken` when the connection ended within the body."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    truncated: bool
    broken: bool


class _Answers(ResponseHandler):
    """A connection that ends when interim answers (1xx) come without end.

    The client reads over them for as long as the call may take, which would keep the event loop
    busy.
    """

    _interim = 0
    _asked_at = 0.0

    def set_response_params(self, **given: Any) -> None:
        """Begin to read an answer."""
        self._interim, self._asked_at = 0, time.monotonic()
        super().set_response_params(**given)

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Pass on the head of an answer."""
        if 100 <= data[0].code < 200:
            self._interim += 1
        if self._interim <= MOST_INTERIM_ANSWERS + (time.monotonic() - self._asked_at):
            super().feed_data(data, size)
        else:
            self.close()
            self.set_exception(aiohttp.ClientPayloadError("too many interim answers"))


class SystemResolver(AbstractResolver):
    """The system's own resolver, asked once for all addresses of a name.

    It has many threads of its own: names whose servers do not answer must not delay others.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="oncue-resolve")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return every address of `host`."""
        infos = await asyncio.get_running_loop().run_in_executor(
            self._threads, socket.getaddrinfo, host, port, family, socket.SOCK_STREAM
        )
        return [
            ResolveResult(
                hostname=host,
                host=str(sockaddr[0]),
                port=int(sockaddr[1]),
                family=info_family,
                proto=proto,
                flags=socket.AI_NUMERICHOST,
            )
            for info_family, _, proto, _, sockaddr in infos
        ]

    async def close(self) -> None:
        """Let the threads go; a lookup that hangs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class GuardedResolver(AbstractResolver):
    """Refuses a name when any one of its addresses is forbidden."""

    def __init__(self, inner: AbstractResolver, allowed: Sequence[Network]) -> None:
        self._inner = inner
        self._allowed = allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of `host`, all of them checked."""
        results = await self._inner.resolve(host, port, family)
        for result in results:
            check_host(result["host"], self._allowed)
        return results

    async def close(self) -> None:
        """Leave the inner resolver open: others use it."""


def check_host(host: str, allowed: Sequence[Network]) -> None:
    """Return only if `host` is the text of an allowed address.

    Raises:
        OSError: it is not.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        raise _RefusedAddress(REFUSAL) from None
    if not is_allowed(address, allowed):
        raise _RefusedAddress(REFUSAL)


class Egress:
    """Calls outside addresses: checked, without redirects, proxies or cookies, within caps."""

    def __init__(
        self, allowed: Sequence[Network] = (), *, resolver: AbstractResolver | None = None
    ) -> None:
        self._allowed = tuple(allowed)
        self._resolver = resolver or SystemResolver()
        self._session = _open_session(self._resolver, self._allowed, keep=True)

    @property
    def allowed(self) -> tuple[Network, ...]:
        """The networks that may be called besides public addresses."""
        return self._allowed

    async def __aenter__(self) -> Egress:
        """Use the client within a block."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections."""
        await self.close()

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_seconds: float,
        most_bytes: int,
        within: Sequence[Network] | None = None,
    ) -> EgressReply:
        """Send one request and read at most `most_bytes` of the answer.

        `within` narrows the networks that are allowed besides public ones; such a request has a
        connection of its own, since an open one may lead where it may not go.

        Raises:
            EgressRefused: the address may not be called; nothing was sent.
            EgressFailed: no answer came.
        """
        target = parse_target(url)
        try:
            async with (
                self._session_for(within) as session,
                session.request(
                    method,
                    target,
                    headers={"accept-encoding": "identity", **headers},
                    data=body,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=timeout_seconds),
                ) as response,
            ):
                reply = await _read(response, most_bytes)
                if reply.truncated or reply.broken:
                    response.close()
                return reply
        except aiohttp.InvalidURL:
            raise EgressRefused from None
        except TimeoutError:
            raise EgressFailed("no answer in time") from None
        except aiohttp.ClientConnectorDNSError as error:
            _raise_refusal(error)
            raise EgressFailed("the host name cannot be resolved") from None
        except aiohttp.ClientSSLError:
            raise EgressFailed("the connection is not trusted or TLS failed") from None
        except aiohttp.ClientConnectorError as error:
            _raise_refusal(error)
            raise EgressFailed("no connection") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EgressFailed(f"the exchange broke off ({type(error).__name__})") from None
        except ValueError:
            raise EgressFailed("the request cannot be sent") from None

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()
        await self._resolver.close()

    @contextlib.asynccontextmanager
    async def _session_for(
        self, within: Sequence[Network] | None
    ) -> AsyncIterator[aiohttp.ClientSession]:
        if within is None:
            yield self._session
            return
        allowed = narrowed(self._allowed, within)
        async with _open_session(self._resolver, allowed, keep=False) as session:
            yield session


def _open_session(
    resolver: AbstractResolver, allowed: tuple[Network, ...], *, keep: bool
) -> aiohttp.ClientSession:
    def open_socket(info: Any) -> socket.socket:
        """Make the socket for one address: the last point before a connection is opened."""
        family, kind, protocol, _, sockaddr = info
        check_host(str(sockaddr[0]), allowed)
        return socket.socket(family, kind, protocol)

    kept: dict[str, Any] = {"keepalive_timeout": 15} if keep else {"force_close": True}
    connector = aiohttp.TCPConnector(
        resolver=GuardedResolver(resolver, allowed),
        socket_factory=open_socket,
        use_dns_cache=False,
        happy_eyeballs_delay=None,
        limit=0,
        **kept,
    )
    # There is no other way to bound what precedes an answer.
    answers = functools.partial(_Answers, loop=asyncio.get_running_loop())
    connector._factory = answers  # type: ignore[assignment]  # noqa: SLF001 - a subclass
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
    )


def read_networks(texts: Sequence[str] | None) -> list[Network] | None:
    """Read networks as they go over the wire; None stays None."""
    return None if texts is None else [ipaddress.ip_network(text) for text in texts]


def parse_target(url: str) -> URL:
    """Read a URL that names a host by http or https, without user and password.

    A host that is neither an address nor a name is refused as an inner one is: nobody would answer,
    however often it is tried.

    Raises:
        EgressRefused: it does not.
    """
    if not url.isprintable() or " " in url or "\\" in url:
        raise EgressRefused
    try:
        target = URL(url)
        usable = target.scheme in ("http", "https") and target.host and target.port
    except ValueError:
        raise EgressRefused from None
    if not usable or target.raw_user is not None or target.raw_password is not None:
        raise EgressRefused
    try:
        spelled_addresses(url)
        # What is resolved is the name as it was encoded.
        if ":" not in (target.raw_host or ""):
            read_host(target.raw_host or "")
    except NoHost:
        raise EgressRefused from None
    return target


async def _read(response: aiohttp.ClientResponse, most_bytes: int) -> EgressReply:
    """Read up to the cap; a status that has arrived counts even if the body never ends."""
    parts: list[bytes] = []
    left, broken = most_bytes, False
    try:
        async for part in response.content.iter_any():
            parts.append(part[:left])
            left -= len(part)
            if left < 0:
                break
    except (aiohttp.ClientError, TimeoutError, OSError):
        broken = True
    return EgressReply(response.status, response.headers, b"".join(parts), left < 0, broken)


def _raise_refusal(error: aiohttp.ClientConnectorError) -> None:
    if isinstance(error.os_error, _RefusedAddress):
        raise EgressRefused from None
