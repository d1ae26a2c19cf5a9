"""Whether something takes longer than it usually does (pure)."""

from __future__ import annotations


class Tempo:
    """Tells whether something takes longer than it usually does."""

    def __init__(self, *, quick: float = 0.2, usual: float = 0.01, floor_seconds: float) -> None:
        self._quick, self._usual, self._floor = quick, usual, floor_seconds
        self._now: float | None = None
        self._long_run = 0.0

    def note(self, seconds: float) -> None:
        """Learn how long it took this time."""
        if self._now is None:
            self._now = self._long_run = seconds
        self._now += self._quick * (seconds - self._now)
        self._long_run += self._usual * (seconds - self._long_run)

    @property
    def is_slow(self) -> bool:
        """True while it takes twice as long as usual, and long enough to matter."""
        return self._now is not None and self._now > max(self._floor, 2 * self._long_run)
