"""How the tests look at an expression: text in, text out."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from app.schedules.cron import CronTimes, DstFold, DstGap, parse_cron
from app.schedules.zone import local_text, zone_clock

Dialect = Literal["unix", "quartz"] | None


def times_of(
    expression: str,
    zone: str = "UTC",
    dialect: Dialect = None,
    *,
    dst_gap: DstGap = "shift",
    dst_fold: DstFold = "first",
) -> CronTimes:
    """The fires of an expression in a zone."""
    cron = parse_cron(expression, dialect)
    return CronTimes(cron, zone_clock(zone), dst_gap=dst_gap, dst_fold=dst_fold)


def epoch_ms(text: str) -> int:
    """An instant in epoch milliseconds, from RFC 3339 text."""
    return int(datetime.fromisoformat(text).timestamp() * 1000)


def local(zone: str, instant_ms: int) -> str:
    """An instant as the zone's clock shows it."""
    return local_text(zone_clock(zone), instant_ms // 1000)


def next_of(times: CronTimes, zone: str, after: str, count: int = 3) -> list[str]:
    """The next fires, as the zone's clock shows them."""
    found: list[str] = []
    at: int | None = epoch_ms(after)
    while at is not None and len(found) < count:
        at = times.next_after(at)
        if at is not None:
            found.append(local(zone, at))
    return found


def previous_of(times: CronTimes, zone: str, before: str, count: int = 3) -> list[str]:
    """The fires before an instant, latest first, as the zone's clock shows them."""
    found: list[str] = []
    at: int | None = epoch_ms(before)
    while at is not None and len(found) < count:
        at = times.previous_before(at)
        if at is not None:
            found.append(local(zone, at))
    return found
