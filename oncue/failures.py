"""Failed attempts by the address they came from: too many, and the address must wait.

Of keys at the dispatcher, and of internal tokens at a worker.
"""

from __future__ import annotations

import ipaddress
from typing import Final

MOST_ADDRESSES: Final = 10_000
MOST_GOOD: Final = 10_000


class Failures:
    """Counts wrong keys or tokens of each address in a window; memory is bounded, the oldest leave.

    Behind one address there may be many callers: what was right from there before stays right.
    IPv6 addresses count by their /64, which one caller may have to itself.
    """

    def __init__(self, most: int, window_seconds: float) -> None:
        self._most = most
        self._window = window_seconds
        self._counts: dict[str, tuple[int, float]] = {}
        self._good: dict[tuple[str, str], None] = {}

    def wait_seconds(self, address: str, digest: str, now: float) -> float:
        """Return how long this one from this address is not even looked at; 0: it is."""
        found = self._counts.get(_network(address))
        if found is None:
            return 0.0
        count, until = found
        if count < self._most or now >= until or (address, digest) in self._good:
            return 0.0
        return until - now

    def note_failure(self, address: str, now: float) -> None:
        """Count a wrong one."""
        network = _network(address)
        count, until = self._counts.pop(network, (0, 0.0))
        if now >= until:
            count, until = 0, now + self._window
        self._counts[network] = (count + 1, until)
        if len(self._counts) > MOST_ADDRESSES:
            del self._counts[next(iter(self._counts))]

    def note_success(self, address: str, digest: str) -> None:
        """Remember what was right, where somebody else may be wrong."""
        if (address, digest) not in self._good:
            self._good[(address, digest)] = None
            if len(self._good) > MOST_GOOD:
                del self._good[next(iter(self._good))]

    @property
    def size(self) -> int:
        """How much is remembered."""
        return len(self._counts) + len(self._good)


def _network(address: str) -> str:
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    except ValueError:
        return address
