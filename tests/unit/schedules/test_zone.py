"""The clock changes of zones, against the zones themselves."""

from __future__ import annotations

import os
import random
from typing import Final
from zoneinfo import ZoneInfo, available_timezones

import pytest

from app.schedules.zone import BLOCK, MARGIN, UnknownZone, ZoneClock, zone_clock

DAY: Final = 86_400
END: Final = 7_258_118_400
EVERY_ZONE: Final = os.environ.get("ONCUE_CRON_SAMPLES") is not None
ZONES: Final = ("Africa/Casablanca", "America/Noronha", "Asia/Gaza", "Australia/Lord_Howe", "UTC")


@pytest.mark.timeout(3600)
def test_no_clock_change_is_overlooked() -> None:
    names = sorted(available_timezones() - {"localtime", "Factory"}) if EVERY_ZONE else ZONES
    for name in names:
        clock = ZoneClock(ZoneInfo(name))
        for instant in range(0, 80 * 365 * DAY, DAY // 2):
            stretch = clock.stretch(instant)
            assert stretch.offset == clock.offset_at(instant), (name, instant)


def test_a_stretch_holds_its_instant_and_ends_where_the_clock_changes() -> None:
    dice = random.Random(1)
    for name in ZONES:
        clock = zone_clock(name)
        for instant in [dice.randrange(END) for _ in range(200)] + [BLOCK * 90, BLOCK * 90 - 1]:
            stretch = clock.stretch(instant)
            assert stretch.start <= stretch.floor <= instant < stretch.stop <= stretch.end
            assert stretch.offset == clock.offset_at(instant)
            assert stretch.offset_before == clock.offset_at(stretch.start - 1) or (
                instant - stretch.start >= MARGIN
            )
            assert stretch.offset_after == clock.offset_at(stretch.end) or (
                stretch.end - instant >= MARGIN
            )


def test_the_next_change_is_found() -> None:
    change = zone_clock("America/New_York").next_change(1_772_900_000)
    assert change is not None
    assert (change.start, change.offset_before, change.offset) == (1_772_953_200, -18000, -14400)
    assert zone_clock("Asia/Kathmandu").next_change(1_772_900_000) is None


@pytest.mark.parametrize(
    "name",
    [
        *("", "Mars/Olympus", "America", "../etc/passwd", "/etc/localtime", "right/UTC", "."),
        *("posix/UTC", "localtime", "Europe/Berlin\n", "Europe/Berlin\0", "x" * 5000, "Europe/Mün"),
    ],
)
def test_what_is_no_zone_is_refused(name: str) -> None:
    with pytest.raises(UnknownZone, match="IANA"):
        zone_clock(name)
