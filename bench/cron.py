"""How long a look at a cron expression takes: `python -m bench.cron`, microseconds each."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Final
from zoneinfo import ZoneInfo

from app.schedules.cron import CronTimes, parse_cron
from app.schedules.grammar import CronError
from app.schedules.zone import ZoneClock, zone_clock

NEW_YEAR_MS: Final = 1_767_225_600_000
YEAR_MS: Final = 365 * 86_400_000
LOOKS: Final = 2000
CASES: Final = (
    ("30 2 * * *", "America/New_York"),
    ("*/7 * * * *", "UTC"),
    ("0 9 * * MON-FRI", "Europe/London"),
    ("* * * * * *", "Australia/Lord_Howe"),
    ("0 0 0 LW * ?", "Africa/Cairo"),
    ("0 0 29 2 *", "America/New_York"),
    ("0 0 0 1 1 ? 2199", "America/New_York"),
)


def main() -> None:
    """Print a table."""
    print(f"{'expression':<20}{'zone':<22}{'next':>8}{'previous':>10}{'a year':>10}")
    for expression, zone in CASES:
        times = CronTimes(parse_cron(expression), zone_clock(zone))
        walk(times.next_after, NEW_YEAR_MS)  # the zone is known from here on
        ahead = walk(times.next_after, NEW_YEAR_MS)
        back = walk(times.previous_before, NEW_YEAR_MS)
        counted = each(functools.partial(times.count, NEW_YEAR_MS, NEW_YEAR_MS + YEAR_MS))
        print(f"{expression:<20}{zone:<22}{ahead:>8.1f}{back:>10.1f}{counted:>10.1f}")
    print(f"read an expression: {each(lambda: parse_cron.__wrapped__('30 2 * * 1-5')):.0f}")
    print(f"prove that 0 0 31 2 * never fires: {each(refuse):.0f}")
    print(f"half a year of a new zone: {each(probe, 20):.0f}")


def walk(step: Callable[[int], int | None], start: int) -> float:
    """Microseconds a step, from fire to fire, from the start again at the end."""
    at, began = start, time.perf_counter()
    for _ in range(LOOKS):
        at = step(at) or start
    return (time.perf_counter() - began) / LOOKS * 1e6


def each(look: Callable[[], object], looks: int = 200) -> float:
    """Microseconds a call."""
    began = time.perf_counter()
    for _ in range(looks):
        look()
    return (time.perf_counter() - began) / looks * 1e6


def refuse() -> None:
    """Ask for a day that never comes."""
    try:
        parse_cron("0 0 31 2 *")
    except CronError:
        return
    raise AssertionError("31 February")


def probe() -> None:
    """Find the clock changes around a moment."""
    ZoneClock(ZoneInfo("Europe/Berlin")).stretch(NEW_YEAR_MS // 1000)


if __name__ == "__main__":
    main()
