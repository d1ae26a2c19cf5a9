"""When a host that gives no answer is called again: a circuit breaker, without a clock of its own.

Closed, every call goes. After some calls in a row without an answer it opens: no call is made for
a pause, which doubles each time. Then one call is the trial: an answer closes it. Any answer
counts, also a 500: what a host says to one delivery is that delivery's matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LONGEST_PAUSE_FACTOR: Final = 12


@dataclass(slots=True)
class Breaker:
    """Of one host. `now` is in seconds of any clock that runs evenly."""

    limit: int
    first_pause_seconds: float
    failures: int = 0
    open_until: float | None = None
    pause_seconds: float = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether calls go without a question."""
        return self.open_until is None

    def wait_seconds(self, now: float) -> float:
        """How long no call may be made, 0 when one may (of an open one: the trial)."""
        return 0.0 if self.open_until is None else max(0.0, self.open_until - now)

    def note(self, *, answered: bool, now: float) -> None:
        """Learn how a call ended."""
        if answered:
            self.failures, self.open_until, self.pause_seconds = 0, None, 0.0
            return
        self.failures += 1
        # Calls that were under way when it opened say nothing new.
        if self.failures >= self.limit and self.wait_seconds(now) == 0:
            longest = self.first_pause_seconds * LONGEST_PAUSE_FACTOR
            self.pause_seconds = min(self.pause_seconds * 2 or self.first_pause_seconds, longest)
            self.open_until = now + self.pause_seconds
