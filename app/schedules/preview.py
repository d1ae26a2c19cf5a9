"""A look ahead: when an expression fires next, and what it means. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Final, Literal

from app.schedules.cron import (
    FIRST_INSTANT,
    LAST_INSTANT,
    ClockChange,
    Cron,
    CronTimes,
    DstFold,
    DstGap,
    parse_cron,
)
from app.schedules.grammar import Dialect
from app.schedules.sentence import sentence
from app.schedules.zone import ZoneClock, local_text, zone_clock

DEFAULT_COUNT: Final = 5
MAX_COUNT: Final = 100
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Fire:
    """One fire: as the zone's clock shows it, as an instant, and what a clock change does to it."""

    local: str
    utc: datetime
    clock_change: ClockChange | None


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a zone's clock: the instant, and what the clock would show and does show then.

    `fires` are those around it: the last one before that instant, and the first two from it on.
    """

    utc: datetime
    before: str
    after: str
    kind: Literal["gap", "fold"]
    fires: tuple[Fire, ...]


@dataclass(frozen=True, slots=True)
class Preview:
    """An expression looked at in a zone from one moment on."""

    cron: Cron
    zone: str
    dst_gap: DstGap
    dst_fold: DstFold
    after: datetime
    description: str
    fires: tuple[Fire, ...]
    next_change: Change | None


def preview(
    expression: str,
    *,
    after: datetime,
    dialect: Dialect | None = None,
    zone: str = "UTC",
    count: int = DEFAULT_COUNT,
    dst_gap: DstGap = "shift",
    dst_fold: DstFold = "first",
) -> Preview:
    """Return the next fires strictly after a moment: fewer than `count` when there are no more.

    Raises:
        CronError: the expression is refused.
        UnknownZone: there is no such time zone.
    """
    clock = zone_clock(zone)
    cron = parse_cron(expression, dialect)
    times = CronTimes(cron, clock, dst_gap=dst_gap, dst_fold=dst_fold)
    fires: list[Fire] = []
    at: int | None = _epoch_ms(after)
    while at is not None and len(fires) < count:
        at = times.next_after(at)
        if at is not None:
            fires.append(_fire(times, clock, at))
    return Preview(
        cron=cron,
        zone=zone,
        dst_gap=dst_gap,
        dst_fold=dst_fold,
        after=after,
        description=sentence(cron.fields),
        fires=tuple(fires),
        next_change=_next_change(times, clock, _epoch_ms(after) // 1000),
    )


def _fire(times: CronTimes, clock: ZoneClock, at_ms: int) -> Fire:
    return Fire(local_text(clock, at_ms // 1000), _moment(at_ms), times.clock_change(at_ms))


def _around(times: CronTimes, at_ms: int) -> list[int]:
    found = [times.previous_before(at_ms), times.next_after(at_ms - 1)]
    if found[1] is not None:
        found.append(times.next_after(found[1]))
    return [one for one in found if one is not None]


def _next_change(times: CronTimes, clock: ZoneClock, after: int) -> Change | None:
    stretch = clock.next_change(after) if FIRST_INSTANT <= after < LAST_INSTANT else None
    if stretch is None:
        return None
    before = timezone(timedelta(seconds=stretch.offset_before))
    at = _moment(stretch.start * 1000)
    return Change(
        utc=at,
        before=at.astimezone(before).isoformat(),
        after=local_text(clock, stretch.start),
        kind="gap" if stretch.offset > stretch.offset_before else "fold",
        fires=tuple(_fire(times, clock, one) for one in _around(times, stretch.start * 1000)),
    )


def _epoch_ms(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def _moment(epoch_ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=epoch_ms)
