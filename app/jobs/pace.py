"""How much retention deletes at once, and how long it rests: never in the way of work (pure)."""

from __future__ import annotations

from typing import Final

FEWEST, MOST = 50, 500
FIRST: Final = 100
AIM_SECONDS: Final = 0.05
"""A transaction that takes about so long is no burden: it locks nothing that others want."""
AIM_ALONE_SECONDS: Final = 0.02
"""Where there is one writer at a time."""
REST: Final = 2.0
"""Rest for each second of work, while nothing else is slow."""
SHORTEST_REST_SECONDS: Final = 0.01
LONGEST_REST_SECONDS: Final = 2.0


class Pace:
    """Learns from each transaction; `strained` says that claims or submissions are slow now."""

    def __init__(self, *, one_writer: bool = False) -> None:
        self.batch = FIRST
        self._aim = AIM_ALONE_SECONDS if one_writer else AIM_SECONDS
        self._backing_off = 0.0

    def rest_after(self, took_seconds: float, *, strained: bool) -> float:
        """Return the seconds to rest, having learned how many jobs to delete next."""
        if strained:
            self.batch = max(FEWEST, self.batch // 2)
            doubled = max(2 * self._backing_off, SHORTEST_REST_SECONDS, REST * took_seconds)
            self._backing_off = min(doubled, LONGEST_REST_SECONDS)
            return self._backing_off
        self._backing_off = 0.0
        if took_seconds > 2 * self._aim:
            self.batch = max(FEWEST, self.batch * 2 // 3)
        elif took_seconds < self._aim:
            self.batch = min(MOST, self.batch * 5 // 4)
        return min(max(SHORTEST_REST_SECONDS, REST * took_seconds), LONGEST_REST_SECONDS)
