"""Random expressions together with what they mean, put together without the grammar under test."""

from __future__ import annotations

import calendar
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

DayTest = Callable[[datetime], bool]
WEEKDAYS: Final = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
MONTHS: Final = tuple(name.upper() for name in calendar.month_abbr[1:])


@dataclass(frozen=True)
class Sample:
    """An expression, its meaning, and the same as the libraries write it, where they can."""

    expression: str
    dialect: str
    matches: Callable[[datetime], bool]
    real_time: bool
    every_second: bool
    for_croniter: str | None
    for_cronsim: str | None


def draw_sample(dice: random.Random) -> Sample:
    """Draw an expression of either dialect."""
    return _unix(dice) if dice.random() < 0.6 else _quartz(dice)


def _numbers(
    dice: random.Random, low: int, high: int, *, wraps: bool = False
) -> tuple[str, set[int]]:
    """A list of one to three items, as text and as a set."""
    if dice.random() < 0.3:
        return "*", set(range(low, high + 1))
    texts, found = [], set()
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        text, numbers = _item(dice, low, high, wraps=wraps)
        texts.append(text)
        found |= numbers
    return ",".join(texts), found


def _item(dice: random.Random, low: int, high: int, *, wraps: bool) -> tuple[str, set[int]]:
    step = dice.randint(1, max(1, (high - low) // 2))
    first, last = dice.randint(low, high), dice.randint(low, high)
    form = dice.choice(("one", "one", "one", "range", "range step", "star step", "from step"))
    if form == "one":
        return str(first), {first}
    if form == "star step":
        return f"*/{step}", set(range(low, high + 1, step))
    if form == "from step":
        return f"{first}/{step}", set(range(first, high + 1, step))
    if first > last and not wraps:
        first, last = last, first
    if first > last:
        round_trip = [*range(first, high + 1), *range(low, last + 1)]
    else:
        round_trip = list(range(first, last + 1))
    if form == "range":
        return f"{first}-{last}", set(round_trip)
    return f"{first}-{last}/{step}", set(round_trip[::step])


def _unix(dice: random.Random) -> Sample:
    with_seconds = dice.random() < 0.15
    second_text, seconds = _numbers(dice, 0, 59) if with_seconds else ("", {0})
    minute_text, minutes = _numbers(dice, 0, 59)
    hour_text, hours = _numbers(dice, 0, 23)
    month_text, months = _month(dice)
    day_text, days = _numbers(dice, 1, 31)
    week_text, week = _numbers(dice, 0, 7)
    weekdays = {number % 7 for number in week}
    has_star = day_text.startswith("*") or week_text.startswith("*")

    def matches(wall: datetime) -> bool:
        in_month = wall.day in days
        in_week = wall.isoweekday() % 7 in weekdays
        return (
            wall.second in seconds
            and wall.minute in minutes
            and wall.hour in hours
            and wall.month in months
            and (in_month and in_week if has_star else in_month or in_week)
        )

    plain = f"{minute_text} {hour_text} {day_text} {month_text} {week_text}"
    # croniter ends 1/2 at 6, and takes only a star alone for one in a list
    odd = "7" in week_text or "/" in week_text or ",*" in f"{day_text} {week_text}"
    # croniter takes a range with equal ends for the whole cycle, cronsim 3-3/2 for 3/2
    items = plain.upper().replace(" ", ",").split(",")
    equal = [one for one in items if "-" in one and len(set(one.split("/")[0].split("-"))) == 1]
    return Sample(
        f"{second_text} {plain}".strip(),
        "unix",
        matches,
        real_time=minute_text.startswith("*") or hour_text.startswith("*"),
        every_second=with_seconds,
        for_croniter=None if with_seconds or odd or equal else plain,
        for_cronsim=None if with_seconds or any("/" in one for one in equal) else plain,
    )


def _quartz(dice: random.Random) -> Sample:
    with_seconds = dice.random() < 0.2
    second_text, seconds = _numbers(dice, 0, 59, wraps=True) if with_seconds else ("0", {0})
    minute_text, minutes = _numbers(dice, 0, 59, wraps=True)
    hour_text, hours = _numbers(dice, 0, 23, wraps=True)
    month_text, months = _month(dice, wraps=True)
    years = None
    year_text = ""
    if dice.random() < 0.15:
        first = dice.randint(1990, 2040)
        years = set(range(first, first + 3))
        year_text = f" {first}-{first + 2}"
    if dice.random() < 0.5:
        day_text, is_day = _quartz_day(dice)
        week_text, simple = "?", None
    else:
        day_text = "?"
        week_text, is_day, simple = _quartz_weekday(dice)

    def matches(wall: datetime) -> bool:
        return (
            wall.second in seconds
            and wall.minute in minutes
            and wall.hour in hours
            and wall.month in months
            and (years is None or wall.year in years)
            and is_day(wall)
        )

    def starts_wild(text: str) -> bool:
        return text.startswith(("*", "0/", "/"))

    # cronsim knows no wrapping ranges: it gets the sets
    plain: str | None = None
    if not with_seconds and years is None and day_text == "?" and simple is not None:
        lists = (",".join(map(str, sorted(numbers))) for numbers in (minutes, hours))
        plain = f"{' '.join(lists)} * {','.join(map(str, sorted(months)))} {simple}"
    return Sample(
        f"{second_text} {minute_text} {hour_text} {day_text} {month_text} {week_text}{year_text}",
        "quartz",
        matches,
        real_time=starts_wild(minute_text) or starts_wild(hour_text),
        every_second=with_seconds,
        for_croniter=None,
        for_cronsim=plain,
    )


def _month(dice: random.Random, *, wraps: bool = False) -> tuple[str, set[int]]:
    if dice.random() < 0.5:
        return "*", set(range(1, 13))
    if dice.random() < 0.3:
        first = dice.randint(1, 11)
        last = dice.randint(first, 12)
        return f"{MONTHS[first - 1]}-{MONTHS[last - 1].lower()}", set(range(first, last + 1))
    return _numbers(dice, 1, 12, wraps=wraps)


def _length(wall: datetime) -> int:
    return calendar.monthrange(wall.year, wall.month)[1]


def _nearest(wall: datetime, day: int) -> int | None:
    """The weekday nearest to a day of the wall's month, by looking at its neighbours."""
    length = _length(wall)
    if not 1 <= day <= length:
        return None
    for candidate in (day, day - 1, day + 1, day - 2, day + 2):
        if 1 <= candidate <= length and wall.replace(day=candidate).weekday() < 5:
            return candidate
    raise AssertionError("every five days have a weekday")


def _quartz_day(dice: random.Random) -> tuple[str, DayTest]:
    form = dice.choice(("plain", "plain", "L", "L-n", "LW", "nW", "L-nW"))
    number = dice.randint(1, 31)
    back = dice.randint(1, 30)
    if form == "L":
        return "L", lambda wall: wall.day == _length(wall)
    if form == "L-n":
        return f"L-{back}", lambda wall: wall.day == _length(wall) - back
    if form == "LW":
        return "LW", lambda wall: wall.day == _nearest(wall, _length(wall))
    if form == "L-nW":
        return f"L-{back}W", lambda wall: wall.day == _nearest(wall, _length(wall) - back)
    if form == "nW":
        return f"{number}W", lambda wall: wall.day == _nearest(wall, number)
    text, days = _numbers(dice, 1, 31, wraps=True)
    return text, lambda wall: wall.day in days


def _quartz_weekday(dice: random.Random) -> tuple[str, DayTest, str | None]:
    form = dice.choice(("plain", "plain", "names", "nth", "last"))
    number = dice.randint(1, 7)
    name = dice.choice((str(number), WEEKDAYS[number - 1]))

    def is_weekday(wall: datetime) -> bool:
        return wall.isoweekday() % 7 == number - 1

    if form == "nth":
        nth = dice.randint(1, 5)
        return (
            f"{name}#{nth}",
            lambda wall: is_weekday(wall) and (wall.day - 1) // 7 + 1 == nth,
            f"{number - 1}#{nth}",
        )
    if form == "last":
        return (
            f"{name}L",
            lambda wall: is_weekday(wall) and wall.day + 7 > _length(wall),
            f"{number - 1}L",
        )
    if form == "names":
        last = dice.randint(1, 7)
        span = (last - number) % 7
        days = {(number - 1 + more) % 7 for more in range(span + 1)}
        text = f"{WEEKDAYS[number - 1]}-{WEEKDAYS[last - 1]}"
    else:
        text, numbers = _numbers(dice, 1, 7, wraps=True)
        days = {one - 1 for one in numbers}
    simple = ",".join(map(str, sorted(days)))
    return text, lambda wall: wall.isoweekday() % 7 in days, simple
