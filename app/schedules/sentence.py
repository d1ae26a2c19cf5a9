"""What an expression means, as a sentence.

It is made from the sets of numbers that were read, not from the text, so it says what will
happen, also where that surprises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from app.schedules.grammar import DayRule, Fields

MOST_TIMES: Final = 6
"""Up to so many times of day are listed one by one."""
MOST_NUMBERS: Final = 5
"""More numbers than these are told as a progression where they are one."""
_WEEKDAYS: Final = (
    *("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"),
)
_MONTHS: Final = (
    *("", "January", "February", "March", "April", "May", "June", "July", "August"),
    *("September", "October", "November", "December"),
)
_NTH: Final = ("", "first", "second", "third", "fourth", "fifth")
_ALL_60: Final = tuple(range(60))
_ALL_24: Final = tuple(range(24))
_ALL_DAYS: Final = (2 << 31) - 2
_ALL_WEEK: Final = (1 << 7) - 1
_ALL_MONTHS: Final = (2 << 12) - 2


def sentence(fields: Fields) -> str:
    """Return the sentence: `At 02:30, on Monday to Friday.` is one."""
    seconds, minutes, hours = (
        _members(mask) for mask in (fields.seconds, fields.minutes, fields.hours)
    )
    when, is_repeated = _time(seconds, minutes, hours)
    rest = [
        _days(fields.days) or ("" if is_repeated else "every day"),
        _months(fields.months),
        "" if fields.years is None else f"in {_numbers(sorted(fields.years), 'year')}",
    ]
    told = ", ".join([when, *(part for part in rest if part)])
    return f"{told[0].upper()}{told[1:]}."


def _time(seconds: list[int], minutes: list[int], hours: list[int]) -> tuple[str, bool]:
    """The time of day, and whether it needs no `every day` beside it."""
    if len(seconds) * len(minutes) * len(hours) <= MOST_TIMES:
        times = [
            _clock(hour, minute, second, with_seconds=seconds != [0])
            for hour in hours
            for minute in minutes
            for second in seconds
        ]
        return f"at {_listed(times)}", False
    return _repeated(seconds, minutes, hours), len(hours) == len(_ALL_24)


def _repeated(seconds: list[int], minutes: list[int], hours: list[int]) -> str:
    if seconds != [0]:
        return _by_second(seconds, minutes, hours)
    if (each := _pace(minutes, 60)) is not None:
        what = "every minute" if each == 1 else f"every {each} minutes"
        return what + _between(hours, f"{minutes[0]:02}", f"{minutes[-1]:02}")
    at = f"at {_numbers(minutes, 'minute')}"
    if len(minutes) == 1 and (each := _pace_of_run(hours)) is not None:
        span = f" from {hours[0]:02}:{minutes[0]:02} to {hours[-1]:02}:{minutes[0]:02}"
        what = "every hour" if each == 1 else f"every {each} hours"
        return f"{at} of every hour" if len(hours) == len(_ALL_24) else what + span
    return f"{at} of {_hours(hours)}"


def _by_second(seconds: list[int], minutes: list[int], hours: list[int]) -> str:
    each = _pace(seconds, 60)
    if each is None:
        what = f"at {_numbers(seconds, 'second')}"
    else:
        what = "every second" if each == 1 else f"every {each} seconds"
    if len(minutes) == len(_ALL_60):
        if each is None:
            return f"{what} of every minute" + _of_hours(hours)
        return what + _between(hours, f"00:{seconds[0]:02}", f"59:{seconds[-1]:02}")
    return f"{what} of {_numbers(minutes, 'minute')} of {_hours(hours)}"


def _between(hours: list[int], first: str, last: str) -> str:
    """Where hours without a hole between them are all that matters: from the first to the last."""
    if len(hours) == len(_ALL_24):
        return ""
    if len(hours) == hours[-1] - hours[0] + 1:
        return f" from {hours[0]:02}:{first} to {hours[-1]:02}:{last}"
    return f" of {_hours(hours)}"


def _of_hours(hours: list[int]) -> str:
    return "" if len(hours) == len(_ALL_24) else f" of {_hours(hours)}"


def _hours(hours: list[int]) -> str:
    return "every hour" if len(hours) == len(_ALL_24) else _numbers(hours, "hour")


def _days(rule: DayRule) -> str:
    if rule.joined == "month":
        return _on(_month_days(rule))
    if rule.joined == "week":
        return _on(_weekdays(rule))
    month, week = _month_days(rule), _weekdays(rule)
    if rule.joined == "or":
        # A field that holds every day is enough on its own.
        return f"on {month} or on {week} (either is enough)" if month and week else ""
    if month and week:
        return f"on {month} if that day is {week.replace(' and ', ' or ')}"
    return _on(month or week)


def _on(days: str) -> str:
    return f"on {days}" if days else ""


def _month_days(rule: DayRule) -> str:
    """Days of the month; empty when they are all."""
    if rule.days == _ALL_DAYS:
        return ""
    told = []
    if rule.days:
        told.append(f"{_numbers(_members(rule.days), 'day')} of the month")
    told += [f"{_from_last(offset)} of the month" for offset in rule.from_last]
    told += [
        "the last weekday (Monday to Friday) of the month"
        if offset == 0
        else f"the weekday (Monday to Friday) nearest to {_from_last(offset)} of the month"
        for offset in rule.weekday_from_last
    ]
    told += [
        f"the weekday (Monday to Friday) nearest to day {day} of the month" for day in rule.nearest
    ]
    return _listed(told)


def _from_last(offset: int) -> str:
    if offset == 0:
        return "the last day"
    return f"the day {offset} {'day' if offset == 1 else 'days'} before the last day"


def _weekdays(rule: DayRule) -> str:
    """Days of the week; empty when they are all."""
    if rule.weekdays == _ALL_WEEK:
        return ""
    # A week of people begins on Monday: Friday to Sunday is one run.
    week = [day for day in (1, 2, 3, 4, 5, 6, 0) if rule.weekdays >> day & 1]
    told = _runs([(day - 1) % 7 for day in week], lambda day: _WEEKDAYS[(day + 1) % 7])
    told += [f"the {_NTH[nth]} {_WEEKDAYS[day]} of the month" for day, nth in rule.nth]
    told += [f"the last {_WEEKDAYS[day]} of the month" for day in _members(rule.last)]
    return _listed(told)


def _months(mask: int) -> str:
    if mask == _ALL_MONTHS:
        return ""
    return f"in {_listed(_runs(_members(mask), lambda month: _MONTHS[month]))}"


def _numbers(numbers: list[int], what: str) -> str:
    """Numbers with their noun: `minute 5`, `hours 9 to 17 and 20`, `every 7th day from 1 to 29`."""
    noun = "" if what == "year" else f"{what} "
    nouns = "" if what == "year" else f"{what}s "
    if len(numbers) == 1:
        return f"{noun}{numbers[0]}"
    step = numbers[1] - numbers[0]
    if len(numbers) > MOST_NUMBERS and step > 1 and _is_progression(numbers, step):
        return f"every {_ordinal(step)} {what} from {numbers[0]} to {numbers[-1]}"
    return nouns + _listed(_runs(numbers, str))


def _runs(numbers: list[int], name: Callable[[int], str]) -> list[str]:
    """Ascending numbers as names, three or more neighbours as `first to last`."""
    told: list[str] = []
    position = 0
    while position < len(numbers):
        end = position
        while end + 1 < len(numbers) and numbers[end + 1] == numbers[end] + 1:
            end += 1
        if end - position >= 2:
            told.append(f"{name(numbers[position])} to {name(numbers[end])}")
        else:
            told += [name(number) for number in numbers[position : end + 1]]
        position = end + 1
    return told


def _pace(numbers: list[int], cycle: int) -> int | None:
    """The step of numbers that go evenly round a cycle: 0, 15, 30, 45; None for others."""
    if len(numbers) < 2:
        return None
    step = numbers[1] - numbers[0]
    goes_round = numbers[0] == 0 and numbers[-1] + step == cycle
    return step if goes_round and _is_progression(numbers, step) else None


def _pace_of_run(numbers: list[int]) -> int | None:
    """The step of numbers that are one progression, however they begin and end."""
    if len(numbers) < 2:
        return None
    step = numbers[1] - numbers[0]
    return step if _is_progression(numbers, step) else None


def _is_progression(numbers: list[int], step: int) -> bool:
    return numbers == list(range(numbers[0], numbers[-1] + 1, step))


def _members(mask: int) -> list[int]:
    return [number for number in range(mask.bit_length()) if mask >> number & 1]


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _ordinal(number: int) -> str:
    if number % 100 in {11, 12, 13}:
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def _clock(hour: int, minute: int, second: int, *, with_seconds: bool) -> str:
    text = f"{hour:02}:{minute:02}"
    return f"{text}:{second:02}" if with_seconds else text
