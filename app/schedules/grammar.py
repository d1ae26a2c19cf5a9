"""One grammar, two dialects: what a cron expression says, field by field.

`unix` is crontab(5) with 5 fields, or 6 with seconds first. `quartz` has seconds first, 6 or 7
fields, and counts weekdays from 1 = SUN. Sets of numbers are bit masks: bit 5 stands for 5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

Dialect = Literal["unix", "quartz"]

MAX_EXPRESSION: Final = 128
FIRST_YEAR: Final = 1970
LAST_YEAR: Final = 2199
MAX_L_OFFSET: Final = 30

_FIELD_NAMES: Final = (
    *("second", "minute", "hour", "day of month", "month", "day of week", "year"),
)
_WEEKDAYS: Final = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_MONTHS: Final = (
    *("JAN", "FEB", "MAR", "APR", "MAY", "JUN"),
    *("JUL", "AUG", "SEP", "OCT", "NOV", "DEC"),
)
_MACROS: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_ITEM: Final = re.compile(
    r"(?:(?P<star>\*)|(?P<first>\w+)(?:-(?P<last>\w+))?)?(?:/(?P<step>[0-9]+))?", re.ASCII
)
_FROM_LAST: Final = re.compile(r"L(?:-(?P<offset>[0-9]{1,2}))?(?P<weekday>W)?", re.ASCII)
_NEAREST: Final = re.compile(r"(?P<day>[0-9]{1,2})W", re.ASCII)
_NTH: Final = re.compile(r"(?P<day>\w+)#(?P<nth>\w+)", re.ASCII)
_LAST_WEEKDAY: Final = re.compile(r"(?P<day>[0-9]+|[A-Z]{3})L", re.ASCII)
_NUMBER: Final = re.compile(r"[0-9]{1,4}", re.ASCII)


class CronError(ValueError):
    """An expression is refused; the message is a sentence that says what to change.

    `field` and `position` (from 1) name the field at fault, `allowed` what may stand there; all
    three are None when the expression as a whole is at fault.
    """

    def __init__(
        self,
        why: str,
        *,
        field: str | None = None,
        position: int | None = None,
        allowed: str | None = None,
    ) -> None:
        where = "" if field is None else f"{field} (field {position}): "
        hint = "" if allowed is None else f"; allowed: {allowed}"
        super().__init__(f"{where}{why}{hint}")
        self.field = field
        self.position = position
        self.allowed = allowed


@dataclass(frozen=True, slots=True)
class DayRule:
    """Which days match. Weekdays are 0 = Sunday to 6 = Saturday, whatever the dialect.

    `days` and `weekdays` are masks. `from_last` counts back from the last day of a month (0 is
    the last), `weekday_from_last` does so and then takes the nearest weekday, `nearest` holds
    days whose nearest weekday is meant, `nth` pairs (weekday, n), `last` a mask of weekdays.
    `joined` says whether a day must match both fields, one of them, or that of one field alone.
    """

    days: int = 0
    from_last: tuple[int, ...] = ()
    weekday_from_last: tuple[int, ...] = ()
    nearest: tuple[int, ...] = ()
    weekdays: int = 0
    nth: tuple[tuple[int, int], ...] = ()
    last: int = 0
    joined: Literal["and", "or", "month", "week"] = "and"


class Fields(NamedTuple):
    """An expression as sets; `years` is None for every year.

    `real_time` is true when the minute or the hour is a wildcard: such an expression follows
    real time through a clock change, any other has fixed times.
    """

    dialect: Dialect
    seconds: int
    minutes: int
    hours: int
    months: int
    days: DayRule
    years: frozenset[int] | None
    real_time: bool


def read_expression(expression: str, dialect: Dialect | None = None) -> Fields:
    """Read an expression; without a dialect, its form tells which it is.

    Raises:
        CronError: it is not one, or its fields do not make sense together.
    """
    texts, dialect = _split(expression, dialect)
    names = _FIELD_NAMES[1:6] if len(texts) == 5 else _FIELD_NAMES[: len(texts)]
    parts = {
        name: _Part(text, name, position, dialect)
        for position, (name, text) in enumerate(zip(names, texts, strict=True), start=1)
    }
    seconds = parts["second"].plain() if "second" in parts else 1
    return Fields(
        dialect=dialect,
        seconds=seconds,
        minutes=parts["minute"].plain(),
        hours=parts["hour"].plain(),
        months=parts["month"].plain(),
        days=_days(parts["day of month"], parts["day of week"], dialect),
        years=_years(parts.get("year")),
        real_time=parts["minute"].is_wild or parts["hour"].is_wild,
    )


def _split(expression: str, dialect: Dialect | None) -> tuple[list[str], Dialect]:
    if len(expression) > MAX_EXPRESSION:
        raise CronError(
            f"an expression has at most {MAX_EXPRESSION} characters, not {len(expression)}"
        )
    text = expression.strip()
    if not text:
        raise CronError("the expression is empty: write 5 fields, as `30 2 * * *`")
    if not text.isascii():
        raise CronError("an expression is written in ASCII")
    if text.startswith("@"):
        return _macro(text, dialect).split(), "unix"
    fields = text.upper().split()
    counts = {"unix": (5, 6), "quartz": (6, 7), None: (5, 6, 7)}[dialect]
    if len(fields) not in counts:
        *most, last = counts
        wanted = f"{', '.join(map(str, most))} or {last}"
        of_dialect = "" if dialect is None else f" in the {dialect} dialect"
        raise CronError(f"an expression has {wanted} fields{of_dialect}, not {len(fields)}")
    return fields, dialect or _recognise(fields)


def _macro(text: str, dialect: Dialect | None) -> str:
    known = ", ".join(_MACROS)
    if dialect == "quartz":
        raise CronError(f"{text} belongs to the unix dialect")
    if text.lower() == "@reboot":
        raise CronError("@reboot has no time: submit a job without a schedule")
    if text.lower().startswith("@every"):
        raise CronError("@every is no cron expression: use an interval schedule")
    if text.lower() not in _MACROS:
        raise CronError(f"{text} is not known; allowed: {known}")
    return _MACROS[text.lower()]


def _recognise(fields: list[str]) -> Dialect:
    """5 fields are unix, 7 are quartz; of 6, those with a mark that only Quartz has."""
    if len(fields) != 6:
        return "unix" if len(fields) == 5 else "quartz"
    days = f"{fields[3]} {fields[5]}"
    is_quartz = any(mark in days for mark in "?#L") or re.search("[0-9]W", days)
    return "quartz" if is_quartz else "unix"


class _Kind(NamedTuple):
    low: int
    high: int
    names: Mapping[str, int]
    allowed: str


_NO_NAMES: Final[dict[str, int]] = {}
_UNIX_DAYS: Final = {name: number for number, name in enumerate(_WEEKDAYS)}
_QUARTZ_DAYS: Final = {name: number for number, name in enumerate(_WEEKDAYS, start=1)}
_MONTH_KIND: Final = _Kind(
    1,
    12,
    {name: number for number, name in enumerate(_MONTHS, start=1)},
    "1 to 12 or JAN to DEC, *, lists, ranges and steps",
)
_KINDS: Final[dict[str, _Kind]] = {
    "second": _Kind(0, 59, _NO_NAMES, "0 to 59, *, lists, ranges and steps, as 0,30 or */20"),
    "minute": _Kind(0, 59, _NO_NAMES, "0 to 59, *, lists, ranges and steps, as 0,30 or */15"),
    "hour": _Kind(0, 23, _NO_NAMES, "0 to 23, *, lists, ranges and steps, as 9-17 or */2"),
    "day of month": _Kind(
        1, 31, _NO_NAMES, "1 to 31, *, lists, ranges, steps, L, L-3, LW, 15W{question}"
    ),
    "month": _MONTH_KIND,
    "day of week": _Kind(
        0, 7, _UNIX_DAYS, "0 to 7 (0 and 7 are Sunday) or SUN to SAT, *, lists, ranges, 5#3, 5L"
    ),
    "year": _Kind(
        FIRST_YEAR,
        LAST_YEAR,
        _NO_NAMES,
        f"{FIRST_YEAR} to {LAST_YEAR}, *, lists, ranges and steps",
    ),
}
_QUARTZ_WEEK: Final = _Kind(
    1, 7, _QUARTZ_DAYS, "1 (Sunday) to 7 or SUN to SAT, *, ?, lists, ranges, 6#3, 6L, L"
)


class _Part:
    """One field: its text, and what may stand in it."""

    def __init__(self, text: str, name: str, position: int, dialect: Dialect) -> None:
        quartz = dialect == "quartz"
        kind = _QUARTZ_WEEK if quartz and name == "day of week" else _KINDS[name]
        self.text = text
        self.name = name
        self.position = position
        self.quartz = quartz
        self.kind = kind._replace(allowed=kind.allowed.format(question=", ?" if quartz else ""))

    @property
    def starts_with_star(self) -> bool:
        return self.text.startswith("*")

    @property
    def is_wild(self) -> bool:
        """A field that starts with `*`; in Quartz `0/5` and `/5` are other words for `*/5`."""
        return self.starts_with_star or (self.quartz and bool(re.match(r"0*/", self.text)))

    def items(self) -> list[str]:
        """The parts of the list."""
        return self.text.split(",")

    def plain(self) -> int:
        """The mask of a field that holds numbers, names, ranges and steps alone."""
        mask = 0
        for item in self.items():
            mask |= self.mask_of(item)
        return mask

    def mask_of(self, item: str) -> int:
        """The mask of one item of the list."""
        mask = 0
        for number in self.numbers_of(item):
            mask |= 1 << number
        return mask

    def numbers_of(self, item: str) -> list[int]:
        """The numbers that one item stands for, in order."""
        kind = self.kind
        if item == "?":
            raise self.wrong(
                "'?' may stand for the day of month or the day of week alone"
                if self.quartz
                else "'?' belongs to the quartz dialect; write '*'"
            )
        found = _ITEM.fullmatch(item)
        if not item or found is None:
            raise self.wrong(f"{item!r} cannot be read" if item else "a part of the list is empty")
        star, first_text, last_text, step_text = found.group("star", "first", "last", "step")
        step = None if step_text is None else self._step(step_text)
        if first_text is None:
            if star is None and not self.quartz:
                raise self.wrong(f"{item!r} has nothing before the '/'; write '*{item}'")
            return list(range(kind.low, kind.high + 1, step or 1))
        first = self.number(first_text)
        if last_text is not None:
            return self._range(first, self.number(last_text), step or 1, item)
        return [first] if step is None else list(range(first, kind.high + 1, step))

    def number(self, text: str) -> int:
        """The number that a number or a name stands for."""
        kind = self.kind
        if text in kind.names:
            return kind.names[text]
        if not _NUMBER.fullmatch(text):
            raise self.wrong(f"{text!r} is not known")
        number = int(text)
        if not kind.low <= number <= kind.high:
            raise self.wrong(f"{text} is out of range")
        return number

    def wrong(self, why: str) -> CronError:
        """An error that points at this field."""
        return CronError(why, field=self.name, position=self.position, allowed=self.kind.allowed)

    def _step(self, text: str) -> int:
        if not _NUMBER.fullmatch(text) or int(text) == 0:
            raise self.wrong(f"a step is a number from 1 on, not {text}")
        span = self.kind.high if self.name != "year" else self.kind.high - self.kind.low
        if self.quartz and int(text) > span:
            raise self.wrong(f"a step of {text} is larger than the field")
        return int(text)

    def _range(self, first: int, last: int, step: int, item: str) -> list[int]:
        kind = self.kind
        if first <= last:
            return list(range(first, last + 1, step))
        if not self.quartz or self.name == "year":
            raise self.wrong(
                f"the range {item} runs backwards"
                + ("" if self.name == "year" else f"; write two, {self._two(first, last)}")
            )
        span = kind.high - kind.low + 1
        return [
            (number - kind.low) % span + kind.low for number in range(first, last + span + 1, step)
        ]

    def _two(self, first: int, last: int) -> str:
        if self.name == "day of week" and last == 0:
            return f"or {first}-7, where 7 is Sunday"
        return f"as {first}-{self.kind.high},{self.kind.low}-{last}"


def _days(month_part: _Part, week_part: _Part, dialect: Dialect) -> DayRule:
    joined: Literal["and", "or", "month", "week"]
    if dialect == "quartz":
        marks = [part.text == "?" for part in (month_part, week_part)]
        if marks == [True, True]:
            raise week_part.wrong("'?' stands in one of day of month and day of week, not in both")
        if marks == [False, False]:
            raise week_part.wrong("Quartz wants '?' in exactly one of day of month and day of week")
        joined = "week" if marks[0] else "month"
    else:
        # crontab(5): only when both fields are restricted is either of them enough, and a
        # field that starts with a star counts as not restricted, also `*/2`.
        star = month_part.starts_with_star or week_part.starts_with_star
        joined = "and" if star else "or"
    rule = DayRule(joined=joined)
    if joined != "week":
        rule = _with_month_days(rule, month_part)
    if joined != "month":
        rule = _with_weekdays(rule, week_part)
    return rule


def _with_month_days(rule: DayRule, part: _Part) -> DayRule:
    days = 0
    from_last: list[int] = []
    weekday_from_last: list[int] = []
    nearest: list[int] = []
    for item in part.items():
        if found := _FROM_LAST.fullmatch(item):
            offset = int(found["offset"] or 0)
            if offset > MAX_L_OFFSET:
                raise part.wrong(f"L-{offset} is before every month; use up to {MAX_L_OFFSET}")
            (weekday_from_last if found["weekday"] else from_last).append(offset)
        elif found := _NEAREST.fullmatch(item):
            nearest.append(part.number(found["day"]))
        else:
            days |= part.mask_of(item)
    return DayRule(
        days=days,
        from_last=tuple(sorted(set(from_last))),
        weekday_from_last=tuple(sorted(set(weekday_from_last))),
        nearest=tuple(sorted(set(nearest))),
        joined=rule.joined,
    )


def _with_weekdays(rule: DayRule, part: _Part) -> DayRule:
    shift = 1 if part.quartz else 0

    def weekday(text: str) -> int:
        return (part.number(text) - shift) % 7

    weekdays = last = 0
    nth: set[tuple[int, int]] = set()
    for item in part.items():
        if item == "L" and part.quartz:
            weekdays |= 1 << 6  # Quartz: the last day of the week, Saturday
        elif found := _LAST_WEEKDAY.fullmatch(item):
            last |= 1 << weekday(found["day"])
        elif found := _NTH.fullmatch(item):
            if found["nth"] not in {"1", "2", "3", "4", "5"}:
                raise part.wrong(f"in {item} the number after '#' is 1 to 5")
            nth.add((weekday(found["day"]), int(found["nth"])))
        else:
            for number in part.numbers_of(item):
                weekdays |= 1 << (number - shift) % 7
    return DayRule(
        days=rule.days,
        from_last=rule.from_last,
        weekday_from_last=rule.weekday_from_last,
        nearest=rule.nearest,
        weekdays=weekdays,
        nth=tuple(sorted(nth)),
        last=last,
        joined=rule.joined,
    )


def _years(part: _Part | None) -> frozenset[int] | None:
    if part is None or part.text == "*":
        return None
    return frozenset(number for item in part.items() for number in part.numbers_of(item))
