"""Which addresses may be called on behalf of callers: the list, and how URLs spell addresses.

The worker checks every address before it connects; the dispatcher refuses a callback whose URL
spells an address that no worker may call, or a host that can be nothing.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

HOST_LENGTH: Final = 255
NAME_LENGTH: Final = 253
LABEL_LENGTH: Final = 63
LOCALHOST: Final = (ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1"))
NOWHERE: Final = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",  # "this network", and the unspecified address
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
        "::/128",  # unspecified
        "ff00::/8",  # multicast
    )
)
"""Where no receiver can be, whatever a list says."""
FORBIDDEN_V4: Final = tuple(
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # "this network", and the unspecified address
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT, and a cloud's metadata service
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # a cloud's host services
        "169.254.0.0/16",  # link-local, and most metadata services
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments, and a cloud's metadata service
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # automatic multicast tunnelling
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
GLOBAL_V6: Final = ipaddress.IPv6Network("2000::/3")
"""All else in IPv6 is refused: loopback, mapped, NAT64, unique local, link-local, multicast."""
FORBIDDEN_V6: Final = tuple(
    ipaddress.IPv6Network(text)
    for text in (
        "2001::/23",  # Teredo, ORCHID and other protocol assignments
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: an IPv4 address inside
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
)


_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_NO_NAME: Final = re.compile(r"[^a-z0-9._\u0080-\U0010ffff-]")


class NoHost(ValueError):
    """The host of a URL is neither an address nor a name; the message says what is wrong."""


def is_nowhere(address: Address) -> bool:
    """Tell whether no receiver can be at `address`, in whatever network."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in network for network in NOWHERE if network.version == address.version)


def is_allowed(address: Address, allowed: Sequence[Network]) -> bool:
    """Tell whether a socket may be opened to `address`."""
    if any(address in network for network in allowed if network.version == address.version):
        return True
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in FORBIDDEN_V4)
    return address in GLOBAL_V6 and not any(address in network for network in FORBIDDEN_V6)


def narrowed(allowed: Sequence[Network], asked: Sequence[Network]) -> tuple[Network, ...]:
    """Return what is in one of `allowed` and in one of `asked`: a list never widens another."""
    found: list[Network] = []
    for one in asked:
        for bound in allowed:
            if _is_within(one, bound):
                found.append(one)
            elif _is_within(bound, one):
                found.append(bound)
    return tuple(dict.fromkeys(found))


def _is_within(inner: Network, outer: Network) -> bool:
    return (
        inner.version == outer.version
        and outer.prefixlen <= inner.prefixlen
        and inner.network_address in outer
    )


@lru_cache(maxsize=1024)
def spelled_addresses(url: str) -> tuple[Address, ...]:
    """Return the addresses that the host of a URL spells in any way, none if it is a name.

    `0x7f.1`, `2130706433` and `017700000001` are 127.0.0.1 for resolvers, so they are here.
    `localhost` and the names below it are the two addresses that they stand for.

    Raises:
        NoHost: it is neither.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        raise NoHost("is not a URL") from None
    if "[" in parts.netloc:
        try:
            return (ipaddress.IPv6Address(host.partition("%")[0]),)
        except ValueError:
            raise NoHost("has a host in brackets that is no IPv6 address") from None
    return read_host(host)


def read_host(host: str) -> tuple[Address, ...]:
    """Return the addresses that a host without brackets spells: see `spelled_addresses`.

    Raises:
        NoHost: it is neither the text of an address nor a name that could be one.
    """
    # As resolvers read it: other digits are digits, and other full stops are dots.
    host = unicodedata.normalize("NFKC", host).replace("\u3002", ".").removesuffix(".").lower()
    try:
        return (ipaddress.ip_address(host),)
    except ValueError:
        pass
    try:
        return (ipaddress.IPv4Address(socket.inet_aton(host)),)
    except (OSError, UnicodeError):
        pass
    labels = host.split(".")
    if not all(labels):
        raise NoHost("has a host with an empty label")
    if _NUMBER.fullmatch(labels[-1]):
        raise NoHost("has a host that ends in a number and is no IPv4 address")
    if strange := _NO_NAME.search(host):
        raise NoHost(f"has a host with the character {strange[0]!r}")
    # Of a name in other letters, what counts is how it is encoded.
    if host.isascii() and (len(host) > NAME_LENGTH or max(map(len, labels)) > LABEL_LENGTH):
        raise NoHost(
            f"has a host of more than {NAME_LENGTH} characters, or {LABEL_LENGTH} between two dots"
        )
    return LOCALHOST if labels[-1] == "localhost" else ()


@lru_cache(maxsize=1024)
def callback_host(url: str) -> str:
    """Name the receiver that a URL is for, as `host:port`: the key by which receivers take turns.

    Two that share the last 255 characters take their turns together.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme.lower() == "https" else 80)
        host = (parts.hostname or "").removesuffix(".")
    except ValueError:
        return ""
    return f"{host}:{port}"[-HOST_LENGTH:] if host else ""
