"""Random expressions against a look at every minute, and against two libraries.

ONCUE_CRON_SAMPLES sets how many are drawn: 10000 looked at minute by minute take some minutes.
"""

from __future__ import annotations

import os
import random
from datetime import UTC, datetime
from typing import Final
from zoneinfo import ZoneInfo

import pytest
from croniter import croniter
from cronsim import CronSim

from app.schedules.cron import CronTimes, parse_cron
from app.schedules.grammar import CronError
from app.schedules.zone import zone_clock
from tests.unit.schedules.brute_force import fires
from tests.unit.schedules.expressions import Sample, draw_sample

SAMPLES: Final = int(os.environ.get("ONCUE_CRON_SAMPLES", "0"))
DAY: Final = 86_400
# Half-hour changes, changes at and before midnight, skipped days, negative summer time, Ramadan,
# changes of three hours, a day that came twice
ZONES: Final = (
    *("America/New_York", "Europe/London", "Australia/Lord_Howe", "Africa/Cairo", "Pacific/Apia"),
    *("Europe/Dublin", "Asia/Beirut", "America/Scoresbysund", "America/Nuuk", "America/Havana"),
    *("Africa/Casablanca", "Antarctica/Casey", "Antarctica/Troll", "Asia/Gaza", "Asia/Tehran"),
    *("America/Sao_Paulo", "Asia/Kathmandu", "Pacific/Kwajalein", "America/Asuncion"),
)
LIBRARY_ZONES: Final = ("UTC", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu")


def drawn(dice: random.Random) -> Sample:
    """Draw until an expression can match at all; which cannot is told by the table's tests."""
    while True:
        sample = draw_sample(dice)
        try:
            cron = parse_cron(sample.expression, sample.dialect)
        except CronError as error:
            if "no day from" not in str(error):
                raise
            continue
        assert cron.real_time == sample.real_time, sample.expression
        return sample


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_next_previous_and_count_agree_with_a_look_at_every_minute(seed: int) -> None:
    dice = random.Random(seed if not SAMPLES else random.SystemRandom().random())
    for _ in range((SAMPLES or 320) // 4):
        sample, zone = drawn(dice), dice.choice(ZONES)
        gap, fold = dice.choice(("shift", "skip")), dice.choice(("first", "both", "second"))
        clock = zone_clock(zone)
        times = CronTimes(
            parse_cron(sample.expression, sample.dialect),
            clock,
            dst_gap=gap,  # type: ignore[arg-type]
            dst_fold=fold,  # type: ignore[arg-type]
        )
        near = dice.randrange(2_500_000_000)
        if dice.random() < 0.9 and (change := clock.next_change(near, 4000 * DAY)):
            near = change.start
        span = 6 * 3600 if sample.every_second else 3 * DAY
        start = (near - dice.randint(0, span)) // 60 * 60
        end = start + span
        truth = fires(sample, ZoneInfo(zone), start, end, dst_gap=gap, dst_fold=fold)
        told = (sample.expression, sample.dialect, zone, start, gap, fold)
        assert forward(times, start, end) == truth, told
        assert backward(times, start, end) == truth[::-1], told
        assert times.count(start * 1000 - 1, end * 1000 - 1) == len(truth), told


@pytest.mark.timeout(3600)
def test_the_next_fires_agree_with_croniter_and_cronsim_outside_clock_changes() -> None:
    dice = random.Random(1)
    compared = 0
    while compared < (SAMPLES or 10_000):
        sample = drawn(dice)
        if sample.for_cronsim is None and sample.for_croniter is None:
            continue
        start = dice.randrange(4_000_000_000)
        zone, own = outside_changes(sample, dice.choice(LIBRARY_ZONES), start)
        moment = datetime.fromtimestamp(start, UTC).astimezone(ZoneInfo(zone))
        told = (sample.expression, zone, start)
        if sample.for_croniter is not None:
            iterator = croniter(
                sample.for_croniter,
                moment,
                implement_cron_bug=True,  # the star rule of crontab(5)
                max_years_between_matches=300,
            )
            assert [int(iterator.get_next(float)) for _ in own] == own, told
            compared += 1
        if sample.for_cronsim is not None:
            simulator = CronSim(sample.for_cronsim, moment)
            assert [int(next(simulator).timestamp()) for _ in own] == own, told
            compared += 1


def outside_changes(sample: Sample, zone: str, start: int) -> tuple[str, list[int]]:
    """The next three fires in a zone, or in UTC where a clock change is near them."""
    for choice in (zone, "UTC"):
        clock = zone_clock(choice)
        times = CronTimes(parse_cron(sample.expression, sample.dialect), clock)
        found: list[int] = []
        at = times.next_after(start * 1000)
        while at is not None and len(found) < 3:
            found.append(at // 1000)
            at = times.next_after(at)
        last = found[-1] if found else start
        if clock.next_change(start - 2 * DAY, last - start + 4 * DAY) is None:
            return choice, found
    raise AssertionError("UTC has no clock changes")


def forward(times: CronTimes, start: int, end: int) -> list[int]:
    found: list[int] = []
    at = times.next_after(start * 1000 - 1)
    while at is not None and at < end * 1000:
        assert not found or at // 1000 > found[-1]
        found.append(at // 1000)
        at = times.next_after(at)
    return found


def backward(times: CronTimes, start: int, end: int) -> list[int]:
    found: list[int] = []
    at = times.previous_before(end * 1000)
    while at is not None and at >= start * 1000:
        found.append(at // 1000)
        at = times.previous_before(at)
    return found
