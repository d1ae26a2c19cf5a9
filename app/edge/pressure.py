"""How long a submission would wait, from what is under way and what was lately done (pure).

By Little's law a new one waits for as long as those before it take to be answered: their number
through the rate of answers. That holds whatever is slow, the database or this process. The rate
is measured only while there is enough to do: an idle process answers few, and could answer many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

Why = Literal["wait", "lag", "memory"]

WINDOW_SECONDS: Final = 0.05
SMOOTHING_SECONDS: Final = 0.5
FIRST_RATE: Final = 2000.0
"""Answers a second that are hoped for before any were measured."""
FORGOTTEN_SECONDS: Final = 5.0
"""A rate that was not measured for so long says nothing about now."""
LAG_KEPT: Final = 0.8
"""Of the event loop's lag at each measurement, so that a single quick turn does not hide it."""
LONGEST_WAIT_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What is still let in.

    So many requests as `few` at once are let in however long they wait, and as `some` however late
    the event loop is, both only while they are fewer units than `free_units`.
    """

    wait_seconds: float
    lag_seconds: float
    few: int
    some: int
    free_units: int
    most_bytes: int


class Pressure:
    """What is under way; `now` is monotonic seconds.

    Counted are requests and units (one job each, about) whose bodies are there, those that are
    expected to be there at once, and the bytes of bodies so far as they have come. By what is
    only expected no rate is measured.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.requests = 0
        self.units = 0
        self.expected_requests = 0
        self.expected_units = 0
        self.bytes = 0
        self.lag_seconds = 0.0
        self._rate = FIRST_RATE
        self._measured_at = float("-inf")
        self._began = float("-inf")
        self._done = 0
        self._most = 0

    def lacks_room(self, size: int, *, own: int = 0) -> bool:
        """Tell whether `size` bytes more are too many, of one that has `own`: one alone fits."""
        return self.bytes > own and self.bytes + size > self._limits.most_bytes

    def why_not(self, now: float) -> Why | None:
        """Say why nothing more is let in, or None."""
        self._roll(now)
        limits = self._limits
        requests = self.requests + self.expected_requests
        free = self.units + self.expected_units < limits.free_units
        if free and requests < limits.few:
            return None
        if self.lag_seconds > limits.lag_seconds and not (free and requests < limits.some):
            return "lag"
        return "wait" if self.wait_seconds() > limits.wait_seconds else None

    def wait_seconds(self) -> float:
        """Return how long a new one would wait: in the event loop, and for those before it."""
        units = self.units + self.expected_units
        if not units:
            return self.lag_seconds
        return self.lag_seconds + units / max(self._rate, units / LONGEST_WAIT_SECONDS)

    def hold(self, size: int) -> None:
        """Count bytes that have come; a negative number are gone."""
        self.bytes += size

    def expect(self, units: int) -> None:
        """Count one whose head was let in, and whose body should follow."""
        self.expected_requests += 1
        self.expected_units += units

    def expect_no_more(self, units: int) -> None:
        """Stop counting one that was expected: its body is there, or is late."""
        self.expected_requests -= 1
        self.expected_units -= units

    def enter(self, now: float, units: int, *, requests: int = 1) -> None:
        """Count one that is let in; with no request, units that it has more, or fewer."""
        self._roll(now)
        self.requests += requests
        self.units += units
        self._most = max(self._most, self.units)

    def leave(self, now: float, units: int) -> None:
        """Count one that is answered."""
        self._roll(now)
        self.requests -= 1
        self.units -= units
        self._done += units

    def note_lag(self, seconds: float) -> None:
        """Learn by how much the event loop was late."""
        self.lag_seconds = max(seconds, self.lag_seconds * LAG_KEPT)

    def _roll(self, now: float) -> None:
        """At the end of a window, learn its rate if it had enough to do."""
        took = now - self._began
        if took < WINDOW_SECONDS:
            return
        if self._most >= self._limits.few:
            if now - self._measured_at > FORGOTTEN_SECONDS:
                self._rate = FIRST_RATE
            weight = -math.expm1(-took / SMOOTHING_SECONDS)
            self._rate += (self._done / took - self._rate) * weight
            self._measured_at = now
        self._began, self._done, self._most = now, 0, self.units
