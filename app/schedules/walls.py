"""The wall times of an expression: what a clock on the wall shows when it matches.

A wall time is a number of seconds since 1970-01-01T00:00:00 on that clock; no time zone is known
here. Every search ends after at most the 2760 months from 1970 to 2199.
"""

from __future__ import annotations

from datetime import date
from typing import Final

from app.schedules.grammar import FIRST_YEAR, LAST_YEAR, DayRule, Fields

DAY: Final = 86_400
_EPOCH: Final = date(FIRST_YEAR, 1, 1).toordinal()
_MONTH_COUNT: Final = (LAST_YEAR - FIRST_YEAR + 1) * 12
_MONTH_STARTS: Final = tuple(
    date(FIRST_YEAR + month // 12, month % 12 + 1, 1).toordinal() - _EPOCH
    for month in range(_MONTH_COUNT + 1)
)
"""The number of the first day of each month, and of the month after the last."""
_DAY_COUNT: Final = _MONTH_STARTS[-1]
_THURSDAY: Final = 4  # 1970-01-01
_WEEKLY: Final = sum(1 << day for day in range(0, 35, 7))
_SATURDAY: Final = 6


class Walls:
    """Finds and counts the wall times that match."""

    __slots__ = (
        "_first_time",
        "_hours",
        "_last_time",
        "_minutes",
        "_months",
        "_per_day",
        "_seconds",
        "_shapes",
        "_years",
    )

    def __init__(self, fields: Fields) -> None:
        self._seconds = fields.seconds
        self._minutes = fields.minutes
        self._hours = fields.hours
        self._months = fields.months
        self._years = fields.years
        self._shapes = tuple(
            month_days(fields.days, first_weekday, length)
            for first_weekday in range(7)
            for length in range(28, 32)
        )
        self._first_time = (
            _lowest(self._hours) * 3600 + _lowest(self._minutes) * 60 + _lowest(self._seconds)
        )
        self._last_time = (
            _highest(self._hours) * 3600 + _highest(self._minutes) * 60 + _highest(self._seconds)
        )
        self._per_day = (
            self._hours.bit_count() * self._minutes.bit_count() * self._seconds.bit_count()
        )

    def next(self, wall: int) -> int | None:
        """Return the first one at `wall` or later, or None."""
        day, second = divmod(wall, DAY)
        if day < 0:
            day = second = 0
        elif day >= _DAY_COUNT:
            return None
        today = date.fromordinal(day + _EPOCH)
        month = (today.year - FIRST_YEAR) * 12 + today.month - 1
        later = self.days(month) >> today.day
        if later & 1 and (found := self._time_from(second)) >= 0:
            return day * DAY + found
        if later := later >> 1:
            return (day + 1 + _lowest(later)) * DAY + self._first_time
        for other in range(month + 1, _MONTH_COUNT):
            if days := self.days(other):
                return (_MONTH_STARTS[other] + _lowest(days) - 1) * DAY + self._first_time
        return None

    def previous(self, wall: int) -> int | None:
        """Return the last one at `wall` or earlier, or None."""
        day, second = divmod(wall, DAY)
        if day < 0:
            return None
        if day >= _DAY_COUNT:
            day, second = _DAY_COUNT - 1, DAY - 1
        today = date.fromordinal(day + _EPOCH)
        month = (today.year - FIRST_YEAR) * 12 + today.month - 1
        days = self.days(month)
        if days >> today.day & 1 and (found := self._time_until(second)) >= 0:
            return day * DAY + found
        if earlier := days & ((1 << today.day) - 1):
            return (_MONTH_STARTS[month] + _highest(earlier) - 1) * DAY + self._last_time
        for other in range(month - 1, -1, -1):
            if days := self.days(other):
                return (_MONTH_STARTS[other] + _highest(days) - 1) * DAY + self._last_time
        return None

    def count(self, start: int, end: int) -> int:
        """Count those at `start` or later and before `end`, without walking over them."""
        start, end = max(start, 0), min(end, _DAY_COUNT * DAY)
        if start >= end:
            return 0
        (first_month, days_before), (last_month, days_until) = (
            self._days_of_month_before(start),
            self._days_of_month_before(end),
        )
        whole = sum(self.days(month).bit_count() for month in range(first_month, last_month))
        days = whole + days_until - days_before
        return days * self._per_day + self._times_before(end) - self._times_before(start)

    def days(self, month: int) -> int:
        """Return the mask of the matching days of a month, counted from January 1970."""
        if not self._months >> (month % 12 + 1) & 1:
            return 0
        if self._years is not None and FIRST_YEAR + month // 12 not in self._years:
            return 0
        start = _MONTH_STARTS[month]
        length = _MONTH_STARTS[month + 1] - start
        return self._shapes[(start + _THURSDAY) % 7 * 4 + length - 28]

    def _time_from(self, second: int) -> int:
        """The first time of a day at `second` or later, or -1."""
        hour, rest = divmod(second, 3600)
        minute, second = divmod(rest, 60)
        if self._hours >> hour & 1:
            if self._minutes >> minute & 1 and (later := self._seconds >> second):
                return hour * 3600 + minute * 60 + second + _lowest(later)
            if later := self._minutes >> (minute + 1):
                minute += 1 + _lowest(later)
                return hour * 3600 + minute * 60 + _lowest(self._seconds)
        if later := self._hours >> (hour + 1):
            return (hour + 1 + _lowest(later)) * 3600 + self._first_time % 3600
        return -1

    def _time_until(self, second: int) -> int:
        """The last time of a day at `second` or earlier, or -1."""
        hour, rest = divmod(second, 3600)
        minute, second = divmod(rest, 60)
        if self._hours >> hour & 1:
            if self._minutes >> minute & 1 and (earlier := self._seconds & ((2 << second) - 1)):
                return hour * 3600 + minute * 60 + _highest(earlier)
            if earlier := self._minutes & ((1 << minute) - 1):
                return hour * 3600 + _highest(earlier) * 60 + _highest(self._seconds)
        if earlier := self._hours & ((1 << hour) - 1):
            return _highest(earlier) * 3600 + self._last_time % 3600
        return -1

    def _days_of_month_before(self, wall: int) -> tuple[int, int]:
        """The month of a wall time, and how many days match in it before that day."""
        if wall >= _DAY_COUNT * DAY:
            return _MONTH_COUNT, 0
        today = date.fromordinal(wall // DAY + _EPOCH)
        month = (today.year - FIRST_YEAR) * 12 + today.month - 1
        return month, (self.days(month) & ((1 << today.day) - 1)).bit_count()

    def _times_before(self, wall: int) -> int:
        """How many times match on the day of a wall time before it."""
        if wall >= _DAY_COUNT * DAY:
            return 0
        today = date.fromordinal(wall // DAY + _EPOCH)
        month = (today.year - FIRST_YEAR) * 12 + today.month - 1
        if not self.days(month) >> today.day & 1:
            return 0
        hour, rest = divmod(wall % DAY, 3600)
        minute, second = divmod(rest, 60)
        seconds, minutes = self._seconds.bit_count(), self._minutes.bit_count()
        count = (self._hours & ((1 << hour) - 1)).bit_count() * minutes * seconds
        if self._hours >> hour & 1:
            count += (self._minutes & ((1 << minute) - 1)).bit_count() * seconds
            if self._minutes >> minute & 1:
                count += (self._seconds & ((1 << second) - 1)).bit_count()
        return count


def month_days(rule: DayRule, first_weekday: int, length: int) -> int:
    """Return the mask of the days that match in a month that begins on this weekday."""
    in_month = (2 << length) - 2
    match rule.joined:
        case "month":
            return _by_month(rule, first_weekday, length) & in_month
        case "week":
            return _by_week(rule, first_weekday, length) & in_month
        case "and":
            return (
                _by_month(rule, first_weekday, length)
                & _by_week(rule, first_weekday, length)
                & in_month
            )
        case "or":
            return (
                _by_month(rule, first_weekday, length) | _by_week(rule, first_weekday, length)
            ) & in_month


def _by_month(rule: DayRule, first_weekday: int, length: int) -> int:
    days = rule.days
    for offset in rule.from_last:
        if offset < length:
            days |= 1 << (length - offset)
    for offset in rule.weekday_from_last:
        if offset < length:
            days |= 1 << _nearest_weekday(length - offset, first_weekday, length)
    for day in rule.nearest:
        if day <= length:
            days |= 1 << _nearest_weekday(day, first_weekday, length)
    return days


def _by_week(rule: DayRule, first_weekday: int, length: int) -> int:
    days = 0
    for weekday in range(7):
        first = 1 + (weekday - first_weekday) % 7
        if rule.weekdays >> weekday & 1:
            days |= _WEEKLY << first
        if rule.last >> weekday & 1:
            days |= 1 << (first + (length - first) // 7 * 7)
    for weekday, nth in rule.nth:
        days |= 1 << (1 + (weekday - first_weekday) % 7 + (nth - 1) * 7)
    return days


def _nearest_weekday(day: int, first_weekday: int, length: int) -> int:
    """Monday to Friday, in the same month: Saturday goes to Friday, Sunday to Monday."""
    weekday = (first_weekday + day - 1) % 7
    if weekday == _SATURDAY:
        return day - 1 if day > 1 else day + 2
    if weekday == 0:
        return day + 1 if day < length else day - 2
    return day


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _highest(mask: int) -> int:
    return mask.bit_length() - 1
