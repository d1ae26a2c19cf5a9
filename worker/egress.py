"""The one guarded client for addresses that callers name: callbacks and the `http` handler.

A name is resolved once and every address is checked; the socket is opened only to an address
that passed, and checked once more right before it connects. So neither a hostile spelling of
an address nor a resolver that changes its mind reaches an inner host.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from types import TracebackType
from typing import Final, Protocol

from yarl import URL

from oncue.addresses import Network, NoHost, is_allowed, narrowed, read_host, spelled_addresses
from worker.http1 import Answer, BrokeOff, Connection, Request, ServerDisconnected
from worker.idle import IdleConnections, Origin

REFUSAL: Final = "egress_refused: this address may not be called"

RESOLVER_THREADS: Final = 512
"""Twice what calls of hosts that do not answer may be under way: a lookup outlives its call."""
EgressReply = Answer
"""An answer, its body cut to the cap; `broken` when the connection ended within the body."""


class EgressRefused(Exception):
    """The address may not be called; the text is the same whatever the reason."""

    def __init__(self) -> None:
        super().__init__(REFUSAL)


class EgressFailed(Exception):
    """No answer came; the message names the kind of failure and no inner detail."""


RUN_NETWORKS: ContextVar[list[str] | None] = ContextVar("run_networks", default=None)
"""What the run at hand may call besides public addresses, by its tenant's word. None: nothing said.
"""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a URL leads: what is connected to, and what the request names."""

    origin: Origin
    authority: str
    path: str

    @property
    def host(self) -> str:
        """The name or address to call, as it was encoded."""
        return self.origin.host


class Resolver(Protocol):
    """Finds the addresses of a name."""

    async def resolve(self, host: str) -> Sequence[str]:
        """Return every address of `host`.

        Raises:
            OSError: there is none.
        """

    async def close(self) -> None:
        """Let go of what it holds."""


class SystemResolver:
    """The system's own resolver, asked once for all addresses of a name.

    It has many threads of its own: names whose servers do not answer must not delay others.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="oncue-resolve")

    async def resolve(self, host: str) -> Sequence[str]:
        """Return every address of `host`.

        Raises:
            OSError: there is none.
        """
        infos = await asyncio.get_running_loop().run_in_executor(
            self._threads, socket.getaddrinfo, host, None, socket.AF_UNSPEC, socket.SOCK_STREAM
        )
        return [str(sockaddr[0]) for _, _, _, _, sockaddr in infos]

    async def close(self) -> None:
        """Let the threads go; a lookup that hangs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class GuardedResolver:
    """Refuses a name when any one of its addresses is forbidden."""

    def __init__(self, inner: Resolver, allowed: Sequence[Network]) -> None:
        self._inner = inner
        self._allowed = allowed

    async def resolve(self, host: str) -> Sequence[str]:
        """Return the addresses of `host`, all of them checked.

        Raises:
            EgressRefused: one of them may not be called.
            OSError: there is none.
        """
        addresses = await self._inner.resolve(host)
        for address in addresses:
            check_host(address, self._allowed)
        return addresses


def check_host(host: str, allowed: Sequence[Network]) -> None:
    """Return only if `host` is the text of an allowed address.

    Raises:
        EgressRefused: it is not.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        raise EgressRefused from None
    if not is_allowed(address, allowed):
        raise EgressRefused


class Egress:
    """Calls outside addresses: checked, without redirects, proxies or cookies, within caps."""

    def __init__(
        self,
        allowed: Sequence[Network] = (),
        *,
        resolver: Resolver | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._allowed = tuple(allowed)
        self._resolver = resolver or SystemResolver()
        self._tls = tls or _verified_tls()
        self._idle = IdleConnections()
        self._open: set[Connection] = set()
        self._closing = False
        self._none_open = asyncio.Event()

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
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        try:
            request = Request(
                method,
                target.path,
                target.authority,
                headers,
                body,
                most_bytes=most_bytes,
                keep=within is None,
            )
        except ValueError:
            raise EgressFailed("the request cannot be sent") from None
        try:
            if within is not None:
                allowed = narrowed(self._allowed, within)
                connection = await self._connect(target.origin, allowed, deadline)
                return await connection.exchange(request, deadline)
            return await self._send(target.origin, request, deadline)
        except TimeoutError:
            raise EgressFailed("no answer in time") from None
        except BrokeOff as error:
            raise EgressFailed(f"the exchange broke off ({type(error).__name__})") from None

    async def close(self) -> None:
        """Close the connections, those in use too."""
        self._closing = True
        self._idle.close()
        self._none_open.clear()
        for connection in list(self._open):
            connection.abort()
        if self._open:
            await self._none_open.wait()
        await self._resolver.close()

    async def _send(self, origin: Origin, request: Request, deadline: float) -> Answer:
        """Send by an idle connection, if there is one, and keep the connection afterwards."""
        connection = self._idle.take(origin)
        answer = None
        if connection is not None:
            try:
                answer = await connection.exchange(request, deadline)
            except ServerDisconnected:
                # It was closed while it was idle, most likely. What may be done twice is.
                if connection.has_answered or not request.is_idempotent:
                    raise
        if connection is None or answer is None:
            connection = await self._connect(origin, self._allowed, deadline)
            answer = await connection.exchange(request, deadline)
        if connection.usable:
            self._idle.put(origin, connection)
        return answer

    async def _connect(
        self, origin: Origin, allowed: Sequence[Network], deadline: float
    ) -> Connection:
        """Open a connection to the first address that takes one.

        Raises:
            EgressRefused: one of the addresses may not be called.
            EgressFailed: none takes a connection.
            TimeoutError: the time was over.
        """
        if self._closing:
            raise EgressFailed("no connection")
        loop = asyncio.get_running_loop()
        async with asyncio.timeout_at(deadline):
            addresses = await self._addresses(origin.host, allowed)
            failure = "the host name cannot be resolved"
            for left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
                # One that says nothing leaves time for the others.
                share = (deadline - loop.time()) / left
                try:
                    async with asyncio.timeout(share if left > 1 else None):
                        return await self._open_to(address, origin, allowed)
                except ssl.SSLError:
                    failure = "the connection is not trusted or TLS failed"
                except OSError:
                    failure = "no connection"
            raise EgressFailed(failure)

    async def _addresses(self, host: str, allowed: Sequence[Network]) -> Sequence[str]:
        if _is_address(host):
            return [host]
        try:
            return await GuardedResolver(self._resolver, allowed).resolve(host)
        except (OSError, UnicodeError):
            raise EgressFailed("the host name cannot be resolved") from None

    async def _open_to(
        self, address: str, origin: Origin, allowed: Sequence[Network]
    ) -> Connection:
        loop = asyncio.get_running_loop()
        # The last point before a connection is opened.
        check_host(address, allowed)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        host, _, zone = address.replace("%25", "%").partition("%")
        place = (host, origin.port)
        connection = Connection(self._opened, self._lost)
        to = socket.socket(family, socket.SOCK_STREAM)
        try:
            to.setblocking(False)
            # A zone in the text of an address would make the loop look it up as a name.
            await loop.sock_connect(to, (*place, 0, socket.if_nametoindex(zone)) if zone else place)
            await loop.create_connection(
                lambda: connection,
                sock=to,
                ssl=self._tls if origin.tls else None,
                # Certificates name hosts without the dot of a full name.
                server_hostname=origin.host.rstrip(".") if origin.tls else None,
            )
        except BaseException:
            connection.abort()
            to.close()
            raise
        return connection

    def _opened(self, connection: Connection) -> None:
        self._open.add(connection)
        if self._closing:
            connection.abort()

    def _lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._idle.drop(connection)
        if not self._open:
            self._none_open.set()


@cache
def _verified_tls() -> ssl.SSLContext:
    """What the system trusts; it takes a while to read, and is the same for all."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def read_networks(texts: Sequence[str] | None) -> list[Network] | None:
    """Read networks as they go over the wire; None stays None."""
    return None if texts is None else [ipaddress.ip_network(text) for text in texts]


@lru_cache(maxsize=1024)
def parse_target(url: str) -> Target:
    """Read a URL that names a host by http or https, without user and password.

    A host that is neither an address nor a name is refused as an inner one is: nobody would answer,
    however often it is tried. What is kept is how the URL reads, never where its name leads.

    Raises:
        EgressRefused: it does not.
    """
    if not url.isprintable() or " " in url or "\\" in url:
        raise EgressRefused
    try:
        read = URL(url)
        host, port = read.raw_host, read.port
    except (ValueError, IndexError):  # the second of an authority like [::1]@
        raise EgressRefused from None
    if read.scheme not in ("http", "https") or not host or not port:
        raise EgressRefused
    if read.raw_user is not None or read.raw_password is not None:
        raise EgressRefused
    try:
        spelled_addresses(url)
        # What is resolved is the name as it was encoded; `localhost` is one, and has two addresses.
        spelled = () if ":" in host else read_host(host)
    except NoHost:
        raise EgressRefused from None
    if len(spelled) == 1:
        host = str(spelled[0])
    origin = Origin(read.scheme == "https", host, port)
    return Target(origin, read.host_port_subcomponent or "", read.raw_path_qs)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
