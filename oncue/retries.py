"""How often and how long the client repeats a request (pure)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and how long a request is repeated: connection errors, 429, 502, 503 and 504.

    `attempts` and `seconds` bound it together. Pauses double from `first_pause` to
    `longest_pause` seconds, with jitter, and are never shorter than the server's Retry-After. The
    defaults outlast the restart of a dispatcher.
    """

    attempts: int = 10
    seconds: float = 30.0
    first_pause: float = 0.2
    longest_pause: float = 5.0

    def pause(self, tried: int, *, retry_after: float = 0.0, jitter: float) -> float:
        """Seconds before the next try, after `tried` of them; `jitter` is from 0 to 1."""
        full = min(self.first_pause * 2.0 ** min(tried - 1, 30), self.longest_pause)
        return max(retry_after, full * (0.5 + jitter / 2))
