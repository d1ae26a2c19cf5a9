"""When a cron expression fires: real instants, through every clock change of a zone.

A day rule gives days, these give wall times (`walls`), and a zone's stretches between two clock
changes (`zone`) turn them into instants. Expressions with a wildcard minute or hour follow real
time: they fire whenever the zone's clock shows a time that matches. All others have fixed times,
each of which fires once a day, as `dst_gap` and `dst_fold` say when a clock change is in the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from app.schedules.grammar import FIRST_YEAR, LAST_YEAR, CronError, Dialect, Fields, read_expression
from app.schedules.walls import DAY, Walls
from app.schedules.zone import Stretch, ZoneClock

DstGap = Literal["shift", "skip"]
DstFold = Literal["first", "both", "second"]
ClockChange = Literal["shifted", "first_pass", "second_pass"]

LONGEST_SHIFTED_GAP: Final = 3 * 3600
"""Seconds: as in Debian's cron, a clock that is moved this far or farther was set anew, and what
it jumped over is not made up for: a skipped day has no fires."""
FIRST_INSTANT: Final = -2 * DAY
LAST_INSTANT: Final = 7_258_118_400 + 2 * DAY  # 2200-01-01T00:00:00Z, and every zone's offset
_FAR: Final = 2 * DAY


@dataclass(frozen=True, slots=True)
class Cron:
    """An expression that can match, with its dialect."""

    expression: str
    fields: Fields
    walls: Walls

    @property
    def dialect(self) -> Dialect:
        """The dialect that the expression was read in."""
        return self.fields.dialect

    @property
    def real_time(self) -> bool:
        """Whether the minute or hour is a wildcard, so that it follows real time."""
        return self.fields.real_time


@lru_cache(maxsize=4096)
def parse_cron(expression: str, dialect: Dialect | None = None) -> Cron:
    """Read an expression and make sure that it can match.

    Raises:
        CronError: it is not an expression, or no day from 1970 to 2199 matches it.
    """
    fields = read_expression(expression, dialect)
    walls = Walls(fields)
    if walls.next(0) is None:
        raise CronError(
            f"no day from {FIRST_YEAR} to {LAST_YEAR} matches this day, month and year together",
            field="day of month",
            position=3 if len(expression.split()) == 5 else 4,
        )
    return Cron(expression.strip(), fields, walls)


class CronTimes:
    """The instants at which an expression fires in a zone; they ascend, and none is twice.

    Instants are epoch milliseconds; fires are on whole seconds.
    """

    def __init__(
        self,
        cron: Cron,
        clock: ZoneClock,
        *,
        dst_gap: DstGap = "shift",
        dst_fold: DstFold = "first",
    ) -> None:
        self._walls = cron.walls
        self._stretch = clock.stretch
        self._shift = dst_gap == "shift" and not cron.real_time
        self._first_only = dst_fold == "first" and not cron.real_time
        self._second_only = dst_fold == "second" and not cron.real_time

    def next_after(self, instant_ms: int) -> int | None:
        """Return the first fire strictly after an instant, or None when there is no more."""
        found = self._next(instant_ms // 1000 + 1)
        return None if found is None else found * 1000

    def previous_before(self, instant_ms: int) -> int | None:
        """Return the last fire strictly before an instant, or None when there was none."""
        found = self._previous(-(-instant_ms // 1000) - 1)
        return None if found is None else found * 1000

    def count(self, after_ms: int, until_ms: int) -> int:
        """Count the fires after the first instant, up to and with the second, by arithmetic."""
        instant = max(after_ms // 1000 + 1, FIRST_INSTANT)
        end = min(until_ms // 1000 + 1, LAST_INSTANT)
        total = 0
        while instant < end:
            stretch = self._stretch(instant)
            stop = min(stretch.stop, end)
            total += self._count_in(stretch, instant, stop)
            instant = stop
        return total

    def clock_change(self, fire_ms: int) -> ClockChange | None:
        """Tell what a clock change has to do with a fire, if anything."""
        instant = fire_ms // 1000
        stretch = self._stretch(instant)
        wall = instant + stretch.offset
        if instant == stretch.start and self._shifts_to(stretch):
            return "shifted"
        if wall < stretch.start + stretch.offset_before:
            return "second_pass"
        if wall >= stretch.end + stretch.offset_after:
            return "first_pass"
        return None

    def _next(self, instant: int) -> int | None:
        instant = max(instant, FIRST_INSTANT)
        while instant < LAST_INSTANT:
            stretch = self._stretch(instant)
            if instant == stretch.start and self._shifts_to(stretch):
                return instant
            wall = self._walls.next(instant + stretch.offset)
            if self._first_only and wall is not None:
                repeated_until = stretch.start + stretch.offset_before
                if wall < repeated_until and wall - stretch.offset < stretch.stop:
                    wall = self._walls.next(repeated_until)
            if wall is not None and (found := wall - stretch.offset) < stretch.stop:
                if not self._second_only or wall < stretch.end + stretch.offset_after:
                    return found
                instant = stretch.stop
            elif stretch.stop - instant <= _FAR:
                instant = stretch.stop  # a fold there may show again what has just passed
            elif wall is None:
                return None
            else:
                instant = max(stretch.stop, wall - stretch.offset - _FAR)
        return None

    def _previous(self, instant: int) -> int | None:
        instant = min(instant, LAST_INSTANT)
        while instant >= FIRST_INSTANT:
            stretch = self._stretch(instant)
            wall = self._walls.previous(instant + stretch.offset)
            if self._second_only and wall is not None:
                repeated_from = stretch.end + stretch.offset_after
                if wall >= repeated_from and wall - stretch.offset >= stretch.floor:
                    wall = self._walls.previous(repeated_from - 1)
            is_here = wall is not None and wall - stretch.offset >= stretch.floor
            repeated_until = stretch.start + stretch.offset_before if self._first_only else 0
            if wall is not None and is_here and wall >= repeated_until:
                return wall - stretch.offset
            if stretch.floor == stretch.start and self._shifts_to(stretch):
                return stretch.start
            if is_here or instant - stretch.floor <= _FAR:
                instant = stretch.floor - 1
            elif wall is None:
                return None
            else:
                instant = min(stretch.floor - 1, wall - stretch.offset + _FAR)
        return None

    def _shifts_to(self, stretch: Stretch) -> bool:
        """Whether a fixed time lies in the gap that the stretch begins with, and is made up for."""
        gap = stretch.offset - stretch.offset_before
        if not self._shift or not 0 < gap < LONGEST_SHIFTED_GAP:
            return False
        wall = self._walls.next(stretch.start + stretch.offset_before)
        return wall is not None and wall < stretch.start + stretch.offset

    def _count_in(self, stretch: Stretch, start: int, stop: int) -> int:
        """Count the fires of a part of one stretch."""
        low, high = start + stretch.offset, stop + stretch.offset
        total = self._walls.count(low, high)
        if self._first_only:
            total -= self._walls.count(low, min(high, stretch.start + stretch.offset_before))
        if self._second_only:
            total -= self._walls.count(max(low, stretch.end + stretch.offset_after), high)
        if start == stretch.start and self._shifts_to(stretch) and self._walls.next(low) != low:
            total += 1
        return total
