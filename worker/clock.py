"""The two clocks of a worker: time since boot for liveness, the database's time for records."""

from __future__ import annotations

import time
from typing import Final

SLOW_ANSWER_SECONDS: Final = 1.0


def boot_seconds() -> float:
    """Seconds on a clock that goes on while the machine sleeps, so that no silence is missed."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class DatabaseClock:
    """The database's time, as learned from the answers to beats.

    It goes on with the clock since boot: a step of this machine's wall clock does not move it.
    """

    def __init__(self) -> None:
        self._ahead_of_boot_ms: float | None = None

    def learn(self, database_ms: int, sent: float, received: float) -> None:
        """Take `database_ms` as the time midway between `sent` and `received` (`boot_seconds`)."""
        # A slow answer says little about when in between the time was read.
        if self._ahead_of_boot_ms is not None and received - sent > SLOW_ANSWER_SECONDS:
            return
        self._ahead_of_boot_ms = database_ms - (sent + received) * 500.0

    @property
    def offset_ms(self) -> float:
        """How far the database is ahead of this process's wall clock."""
        return self._exact_ms() - time.time() * 1000.0

    def now_ms(self) -> int:
        """The database's time in epoch milliseconds; before the first answer, this machine's."""
        return int(self._exact_ms())

    def _exact_ms(self) -> float:
        if self._ahead_of_boot_ms is None:
            return time.time() * 1000.0
        return boot_seconds() * 1000.0 + self._ahead_of_boot_ms
