"""Free loopback ports that no other test process on this machine picks at the same time."""

from __future__ import annotations

import functools
import random
import socket
import sys
from pathlib import Path

_USUAL = range(15_000, 32_000)
_UNPRIVILEGED = range(1_024, 65_536)
_FEW = 2_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_dice = random.Random()  # its own: a test may seed the global one
_reserved: list[socket.socket] = []


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now and ours while this process lives."""
    for _ in range(1_000):
        port = _dice.choice(_choices())
        if _is_free(port) and _reserve(port):
            return port
    raise RuntimeError("no free loopback port found")


def free_ports_in_a_row(count: int) -> int:
    """Return the first of so many TCP ports, each as `free_port` gives them."""
    for _ in range(1_000):
        first = free_port()
        rest = range(first + 1, first + count)
        if all(_is_free(port) and _reserve(port) for port in rest):
            return first
    raise RuntimeError(f"no {count} free loopback ports in a row found")


def outside(first: int, last: int) -> list[int]:
    """Return ports that outgoing connections, which take those from first to last, do not take."""
    for ports in (_USUAL, _UNPRIVILEGED):
        left = [port for port in ports if not first <= port <= last]
        if len(left) >= _FEW:
            return left
    return list(_USUAL)


@functools.cache
def _choices() -> list[int]:
    if not _EPHEMERAL.exists():
        return list(_USUAL)
    first, last = _EPHEMERAL.read_text().split()
    return outside(int(first), int(last))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _reserve(port: int) -> bool:
    """Hold the port's name in the abstract socket space, which the kernel frees with us."""
    if sys.platform != "linux":
        return True
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(f"\0oncue-test-port-{port}")
    except OSError:
        mark.close()
        return False
    _reserved.append(mark)
    return True
