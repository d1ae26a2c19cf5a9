"""Which addresses may be called on behalf of callers: the list, and how URLs spell addresses.

The worker checks every address before it connects; the dispatcher refuses a callback whose URL
spells an address that no worker may call.
"""

from __future__ import annotations

import ipaddress
import socket
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

HOST_LENGTH: Final = 255
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
def spelled_address(url: str) -> Address | None:
    """Return the address that the host of a URL spells in any way, None if it is a name.

    `0x7f.1`, `2130706433` and `017700000001` are 127.0.0.1 for resolvers, so they are here.
    """
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return None
    # As resolvers read it: other digits are digits, and other full stops are dots.
    host = unicodedata.normalize("NFKC", host).replace("\u3002", ".").removesuffix(".")
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, UnicodeError):
        return None


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
