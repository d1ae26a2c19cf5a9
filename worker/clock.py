"""The two clocks of a worker: time since boot for liveness, the database's time for records."""

from __future__ import annotations

import math
import threading
import time
from typing import Final

SLOW_ANSWER_SECONDS: Final = 1.0
DRIFT_MS_A_SECOND: Final = 0.5
"""So much may one clock run faster than the other: one that is wrong is slewed by no more."""


def boot_seconds() -> float:
    """Seconds on a clock that goes on while the machine sleeps, so that no silence is missed."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class LowerBound:
    """A moment that the database's clock is not before, by what dispatchers lately wrote.

    A message says a time that has passed when it comes. The one that came quickest says most, and
    less with every second, for the two clocks may run at different rates. Any thread may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead_ms = -math.inf
        """Database minus monotonic, ms, by the message that came at `_at`."""
        self._at = 0.0

    def hear(self, database_ms: int, at: float, *, asked_at: float | None = None) -> None:
        """Note that the database has passed `database_ms` at `at` (`time.monotonic`, seconds).

        If it was asked for its time, at `asked_at`, that had not come then: a bound that says
        otherwise is of a clock that was set back since.
        """
        ahead_ms = database_ms - at * 1000.0
        with self._lock:
            most_ms = math.inf if asked_at is None else database_ms + 1 - asked_at * 1000.0
            held_ms = self._held_ms(at)
            if ahead_ms >= held_ms or held_ms > most_ms:
                self._ahead_ms, self._at = ahead_ms, at

    def reached_at(self, database_ms: int) -> float:
        """Return when (`time.monotonic`) it is surely `database_ms` there; infinity: not known."""
        with self._lock:
            return (database_ms - self._held_ms(time.monotonic())) / 1000.0

    def _held_ms(self, now: float) -> float:
        return self._ahead_ms - max(0.0, now - self._at) * DRIFT_MS_A_SECOND


class DatabaseClock:
    """The database's time, as learned from the answers to beats.

    It goes on with the clock since boot: a step of this machine's wall clock does not move it.
    """

    def __init__(self) -> None:
        self._ahead_of_boot_ms: float | None = None
        self.lower_bound = LowerBound()

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
