"""Free loopback ports that no other test process on this machine picks at the same time."""

from __future__ import annotations

import random
import socket
import sys

_LOWEST, _HIGHEST = 15_000, 32_000  # below the ephemeral ports, which outgoing connections take
_dice = random.Random()  # its own: a test may seed the global one
_reserved: list[socket.socket] = []


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now and ours while this process lives."""
    for _ in range(1_000):
        port = _dice.randrange(_LOWEST, _HIGHEST)
        if _is_free(port) and _reserve(port):
            return port
    raise RuntimeError("no free loopback port found")


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
