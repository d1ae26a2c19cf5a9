"""Expressions with right answers, put down by hand or checked by hand, one by one."""

from __future__ import annotations

import pytest

from app.schedules.cron import parse_cron
from app.schedules.grammar import CronError
from tests.unit.schedules.looking import Dialect, epoch_ms, local, next_of, previous_of, times_of

# dialect, expression, zone, after; then the fires, of which there are fewer than three only
# where there are no more
TABLE = """
unix | */7 * * * * | UTC | 2026-01-01T00:50:00+00:00
    2026-01-01T00:56:00+00:00
    2026-01-01T01:00:00+00:00
    2026-01-01T01:07:00+00:00
unix | 0 0 * * * | UTC | 2026-01-01T00:00:00+00:00
    2026-01-02T00:00:00+00:00
    2026-01-03T00:00:00+00:00
    2026-01-04T00:00:00+00:00
unix | 0 0 31 * * | UTC | 2026-01-31T00:00:00+00:00
    2026-03-31T00:00:00+00:00
    2026-05-31T00:00:00+00:00
    2026-07-31T00:00:00+00:00
unix | 0 0 29 2 * | UTC | 2026-03-01T00:00:00+00:00
    2028-02-29T00:00:00+00:00
    2032-02-29T00:00:00+00:00
    2036-02-29T00:00:00+00:00
unix | 0 0 13 * 5 | UTC | 2026-02-05T00:00:00+00:00
    2026-02-06T00:00:00+00:00
    2026-02-13T00:00:00+00:00
    2026-02-20T00:00:00+00:00
unix | 0 0 */2 * 1 | UTC | 2026-01-01T00:00:00+00:00
    2026-01-05T00:00:00+00:00
    2026-01-19T00:00:00+00:00
    2026-02-09T00:00:00+00:00
unix | 0 0 * * 7 | UTC | 2026-01-01T00:00:00+00:00
    2026-01-04T00:00:00+00:00
    2026-01-11T00:00:00+00:00
    2026-01-18T00:00:00+00:00
unix | 0 0 L * * | UTC | 2028-01-31T00:00:00+00:00
    2028-02-29T00:00:00+00:00
    2028-03-31T00:00:00+00:00
    2028-04-30T00:00:00+00:00
unix | 30 2 * * * | America/New_York | 2026-03-07T12:00:00-05:00
    2026-03-08T03:00:00-04:00
    2026-03-09T02:30:00-04:00
    2026-03-10T02:30:00-04:00
unix | 30 */2 * * * | America/New_York | 2026-03-08T00:45:00-05:00
    2026-03-08T04:30:00-04:00
    2026-03-08T06:30:00-04:00
    2026-03-08T08:30:00-04:00
unix | 30 1 * * * | America/New_York | 2026-10-31T12:00:00-04:00
    2026-11-01T01:30:00-04:00
    2026-11-02T01:30:00-05:00
    2026-11-03T01:30:00-05:00
unix | */30 * * * * | America/New_York | 2026-11-01T01:15:00-04:00
    2026-11-01T01:30:00-04:00
    2026-11-01T01:00:00-05:00
    2026-11-01T01:30:00-05:00
unix | 30 1 * * * | Europe/London | 2026-03-28T12:00:00+00:00
    2026-03-29T02:00:00+01:00
    2026-03-30T01:30:00+01:00
    2026-03-31T01:30:00+01:00
unix | 15 2 * * * | Australia/Lord_Howe | 2026-10-03T12:00:00+10:30
    2026-10-04T02:30:00+11:00
    2026-10-05T02:15:00+11:00
    2026-10-06T02:15:00+11:00
quartz | 0/20 * * * * ? | UTC | 2026-01-01T00:00:30+00:00
    2026-01-01T00:00:40+00:00
    2026-01-01T00:01:00+00:00
    2026-01-01T00:01:20+00:00
quartz | 0 0 0 ? * 1 | UTC | 2026-01-01T00:00:00+00:00
    2026-01-04T00:00:00+00:00
    2026-01-11T00:00:00+00:00
    2026-01-18T00:00:00+00:00
quartz | 0 0 0 ? * 6#3 | UTC | 2026-01-01T00:00:00+00:00
    2026-01-16T00:00:00+00:00
    2026-02-20T00:00:00+00:00
    2026-03-20T00:00:00+00:00
quartz | 0 0 0 L-3 * ? | UTC | 2026-01-01T00:00:00+00:00
    2026-01-28T00:00:00+00:00
    2026-02-25T00:00:00+00:00
    2026-03-28T00:00:00+00:00
quartz | 0 0 0 1W * ? | UTC | 2026-07-02T00:00:00+00:00
    2026-08-03T00:00:00+00:00
    2026-09-01T00:00:00+00:00
    2026-10-01T00:00:00+00:00
quartz | 0 0 0 ? * FRI-MON | UTC | 2026-01-01T00:00:00+00:00
    2026-01-02T00:00:00+00:00
    2026-01-03T00:00:00+00:00
    2026-01-04T00:00:00+00:00
unix | 7-7 * * * * | UTC | 2026-01-01T00:00:00+00:00
    2026-01-01T00:07:00+00:00
    2026-01-01T01:07:00+00:00
    2026-01-01T02:07:00+00:00
quartz | 0 30 2 * * ? | America/New_York | 2026-03-07T12:00:00-05:00
    2026-03-08T03:00:00-04:00
    2026-03-09T02:30:00-04:00
    2026-03-10T02:30:00-04:00
unix | 0,30 2 * * * | America/New_York | 2026-03-07T12:00:00-05:00
    2026-03-08T03:00:00-04:00
    2026-03-09T02:00:00-04:00
    2026-03-09T02:30:00-04:00
unix | 0 2-4 * * * | America/New_York | 2026-03-07T12:00:00-05:00
    2026-03-08T03:00:00-04:00
    2026-03-08T04:00:00-04:00
    2026-03-09T02:00:00-04:00
unix | */30 2 * * * | America/New_York | 2026-03-07T12:00:00-05:00
    2026-03-09T02:00:00-04:00
    2026-03-09T02:30:00-04:00
    2026-03-10T02:00:00-04:00
unix | 0-59 1 * * * | America/New_York | 2026-11-01T01:58:00-04:00
    2026-11-01T01:59:00-04:00
    2026-11-02T01:00:00-05:00
    2026-11-02T01:01:00-05:00
unix | @hourly | America/New_York | 2026-11-01T00:30:00-04:00
    2026-11-01T01:00:00-04:00
    2026-11-01T01:00:00-05:00
    2026-11-01T02:00:00-05:00
unix | 45 1 * * * | Australia/Lord_Howe | 2026-04-04T12:00:00+11:00
    2026-04-05T01:45:00+11:00
    2026-04-06T01:45:00+10:30
    2026-04-07T01:45:00+10:30
unix | */15 * * * * | Australia/Lord_Howe | 2026-04-05T01:40:00+11:00
    2026-04-05T01:45:00+11:00
    2026-04-05T01:30:00+10:30
    2026-04-05T01:45:00+10:30
unix | 30 0 * * * | Africa/Cairo | 2026-04-23T12:00:00+02:00
    2026-04-24T01:00:00+03:00
    2026-04-25T00:30:00+03:00
    2026-04-26T00:30:00+03:00
unix | 0 0 * * * | Africa/Cairo | 2026-04-23T12:00:00+02:00
    2026-04-24T01:00:00+03:00
    2026-04-25T00:00:00+03:00
    2026-04-26T00:00:00+03:00
unix | 30 23 * * * | Africa/Cairo | 2026-10-29T12:00:00+03:00
    2026-10-29T23:30:00+03:00
    2026-10-30T23:30:00+02:00
    2026-10-31T23:30:00+02:00
unix | 0 0 * * * | Asia/Beirut | 2026-03-28T12:00:00+02:00
    2026-03-29T01:00:00+03:00
    2026-03-30T00:00:00+03:00
    2026-03-31T00:00:00+03:00
unix | 0 0 * * * | America/Havana | 2026-03-07T12:00:00-05:00
    2026-03-08T01:00:00-04:00
    2026-03-09T00:00:00-04:00
    2026-03-10T00:00:00-04:00
unix | 0 12 * * * | Pacific/Apia | 2011-12-28T13:00:00-10:00
    2011-12-29T12:00:00-10:00
    2011-12-31T12:00:00+14:00
    2012-01-01T12:00:00+14:00
unix | 0 0 30 12 * | Pacific/Apia | 2011-01-01T00:00:00-10:00
    2012-12-30T00:00:00+14:00
    2013-12-30T00:00:00+14:00
    2014-12-30T00:00:00+14:00
unix | */20 23 * * * | Pacific/Apia | 2011-12-29T23:20:00-10:00
    2011-12-29T23:40:00-10:00
    2011-12-31T23:00:00+14:00
    2011-12-31T23:20:00+14:00
unix | 30 1 * * * | Europe/Dublin | 2026-03-28T12:00:00+00:00
    2026-03-29T02:00:00+01:00
    2026-03-30T01:30:00+01:00
    2026-03-31T01:30:00+01:00
unix | 30 1 * * * | Europe/Dublin | 2026-10-24T12:00:00+01:00
    2026-10-25T01:30:00+01:00
    2026-10-26T01:30:00+00:00
    2026-10-27T01:30:00+00:00
unix | 30 3 18 10 * | Antarctica/Casey | 2009-01-01T00:00:00+08:00
    2010-10-18T03:30:00+08:00
    2011-10-18T03:30:00+08:00
    2012-10-18T03:30:00+08:00
unix | 30 23 29 3 * | America/Scoresbysund | 2025-01-01T00:00:00-02:00
    2025-03-30T00:00:00-01:00
    2026-03-29T23:30:00-01:00
    2027-03-29T23:30:00-01:00
unix | 15 30 2 * * * | Europe/Berlin | 2026-03-28T12:00:00+01:00
    2026-03-29T03:00:00+02:00
    2026-03-30T02:30:15+02:00
    2026-03-31T02:30:15+02:00
unix | 30 2 * * * | Africa/Casablanca | 2026-02-13T12:00:00+01:00
    2026-02-14T02:30:00+01:00
    2026-02-15T02:30:00+01:00
    2026-02-16T02:30:00+00:00
unix | 0 0 29 2 * | UTC | 2096-03-01T00:00:00+00:00
    2104-02-29T00:00:00+00:00
    2108-02-29T00:00:00+00:00
    2112-02-29T00:00:00+00:00
unix | 0 0 1 1 * | UTC | 2197-06-01T00:00:00+00:00
    2198-01-01T00:00:00+00:00
    2199-01-01T00:00:00+00:00
unix | 0 9 * * 1-5 | Asia/Kathmandu | 2026-01-02T09:00:00+05:45
    2026-01-05T09:00:00+05:45
    2026-01-06T09:00:00+05:45
    2026-01-07T09:00:00+05:45
unix | 5/20 4 1,15 * WED | UTC | 2026-01-01T00:00:00+00:00
    2026-01-01T04:05:00+00:00
    2026-01-01T04:25:00+00:00
    2026-01-01T04:45:00+00:00
unix | 0 0 LW * * | UTC | 2026-01-01T00:00:00+00:00
    2026-01-30T00:00:00+00:00
    2026-02-27T00:00:00+00:00
    2026-03-31T00:00:00+00:00
unix | 0 0 * * 5#5 | UTC | 2026-01-01T00:00:00+00:00
    2026-01-30T00:00:00+00:00
    2026-05-29T00:00:00+00:00
    2026-07-31T00:00:00+00:00
unix | 0 0 * * 7L | UTC | 2026-01-01T00:00:00+00:00
    2026-01-25T00:00:00+00:00
    2026-02-22T00:00:00+00:00
    2026-03-29T00:00:00+00:00
quartz | 0 0 0 31W * ? | UTC | 2026-01-01T00:00:00+00:00
    2026-01-30T00:00:00+00:00
    2026-03-31T00:00:00+00:00
    2026-05-29T00:00:00+00:00
quartz | 0 0 0 LW * ? | UTC | 2026-01-01T00:00:00+00:00
    2026-01-30T00:00:00+00:00
    2026-02-27T00:00:00+00:00
    2026-03-31T00:00:00+00:00
quartz | 0 0 0 L-1W * ? | UTC | 2026-01-01T00:00:00+00:00
    2026-01-30T00:00:00+00:00
    2026-02-27T00:00:00+00:00
    2026-03-30T00:00:00+00:00
quartz | 0 0 0 ? * 2#5 | UTC | 2026-01-01T00:00:00+00:00
    2026-03-30T00:00:00+00:00
    2026-06-29T00:00:00+00:00
    2026-08-31T00:00:00+00:00
quartz | 0 0 0 ? * 6L | UTC | 2026-01-01T00:00:00+00:00
    2026-01-30T00:00:00+00:00
    2026-02-27T00:00:00+00:00
    2026-03-27T00:00:00+00:00
quartz | 0 0 0 ? * L | UTC | 2026-01-01T00:00:00+00:00
    2026-01-03T00:00:00+00:00
    2026-01-10T00:00:00+00:00
    2026-01-17T00:00:00+00:00
quartz | 0 0 22-2/2 * * ? | UTC | 2026-01-01T00:00:00+00:00
    2026-01-01T02:00:00+00:00
    2026-01-01T22:00:00+00:00
    2026-01-02T00:00:00+00:00
quartz | 0 0 0 30-2 * ? | UTC | 2026-01-10T00:00:00+00:00
    2026-01-30T00:00:00+00:00
    2026-01-31T00:00:00+00:00
    2026-02-01T00:00:00+00:00
quartz | 0 0 0 1 NOV-FEB ? | UTC | 2026-01-10T00:00:00+00:00
    2026-02-01T00:00:00+00:00
    2026-11-01T00:00:00+00:00
    2026-12-01T00:00:00+00:00
quartz | 0 0 12 1 1 ? 2026,2028 | UTC | 2026-01-10T00:00:00+00:00
    2028-01-01T12:00:00+00:00
quartz | 0 0 0 L-30 * ? | UTC | 2026-01-10T00:00:00+00:00
    2026-03-01T00:00:00+00:00
    2026-05-01T00:00:00+00:00
    2026-07-01T00:00:00+00:00
quartz | 0 30 1 * * ? | America/New_York | 2026-10-31T12:00:00-04:00
    2026-11-01T01:30:00-04:00
    2026-11-02T01:30:00-05:00
    2026-11-03T01:30:00-05:00
quartz | 0 30 0/2 * * ? | America/New_York | 2026-03-08T00:45:00-05:00
    2026-03-08T04:30:00-04:00
    2026-03-08T06:30:00-04:00
    2026-03-08T08:30:00-04:00
quartz | 0 0/30 * * * ? | America/New_York | 2026-11-01T01:15:00-04:00
    2026-11-01T01:30:00-04:00
    2026-11-01T01:00:00-05:00
    2026-11-01T01:30:00-05:00
"""


def rows() -> list[tuple[str, str, str, str, list[str]]]:
    found: list[tuple[str, str, str, str, list[str]]] = []
    for line in TABLE.strip().splitlines():
        if line.startswith(" "):
            found[-1][4].append(line.strip())
        else:
            dialect, expression, zone, after = line.split(" | ")
            found.append((dialect, expression, zone, after, []))
    return found


@pytest.mark.parametrize(
    ("dialect", "expression", "zone", "after", "fires"),
    rows(),
    ids=[f"{row[1]} {row[2]}" for row in rows()],
)
def test_the_next_fires_are_right(
    dialect: Dialect, expression: str, zone: str, after: str, fires: list[str]
) -> None:
    times = times_of(expression, zone, dialect)
    assert next_of(times, zone, after, 3) == fires
    last = epoch_ms(fires[-1])
    assert previous_of(times, zone, local(zone, last + 1000), len(fires)) == fires[::-1]
    assert times.count(epoch_ms(after), last) == len(fires)


@pytest.mark.parametrize(
    ("dialect", "expression", "field", "position"),
    [
        ("unix", "0 0 30 2 *", "day of month", 3),
        ("unix", "0 0 31 2,4,6,9,11 *", "day of month", 3),
        ("unix", "0 22-2 * * *", "hour", 2),
        ("unix", "*/0 * * * *", "minute", 1),
        ("quartz", "0 0 0 1 * MON", "day of week", 6),
        ("quartz", "0 0 0 ? * ?", "day of week", 6),
        ("quartz", "0 0 0 31 4 ?", "day of month", 4),
        ("quartz", "0 0 0 29 2 ? 2026-2027", "day of month", 4),
        ("unix", "60 * * * *", "minute", 1),
        ("unix", "* 24 * * *", "hour", 2),
        ("unix", "0 0 0 * *", "day of month", 3),
        ("unix", "0 0 * 13 *", "month", 4),
        ("unix", "0 0 * * 8", "day of week", 5),
        ("unix", "0 0 * * FRI-SUN", "day of week", 5),
        ("unix", "0 0 * * L", "day of week", 5),
        ("unix", "0 0 ? * 1", "day of month", 3),
        ("unix", "1,,2 * * * *", "minute", 1),
        ("unix", "1-2-3 * * * *", "minute", 1),
        ("unix", "/5 * * * *", "minute", 1),
        ("unix", "5/ * * * *", "minute", 1),
        ("unix", "-5 * * * *", "minute", 1),
        ("unix", "*5 * * * *", "minute", 1),
        ("unix", "** * * * *", "minute", 1),
        ("unix", "1.5 * * * *", "minute", 1),
        ("unix", "0 0 * JANUARY *", "month", 4),
        ("unix", "0 0 * * MON#6", "day of week", 5),
        ("unix", "0 0 1-5W * *", "day of month", 3),
        ("unix", "0 0 W * *", "day of month", 3),
        ("unix", "0 0 L-31 * *", "day of month", 3),
        ("unix", "99999999999999999999 * * * *", "minute", 1),
        ("unix", "*/99999999999999999999 * * * *", "minute", 1),
        ("quartz", "0 0 0 ? * 0", "day of week", 6),
        ("quartz", "0 0 0 ? * 8", "day of week", 6),
        ("quartz", "0 0 0 ? * 6#0", "day of week", 6),
        ("quartz", "0 ? 0 * * ?", "minute", 2),
        ("quartz", "0/60 * * * * ?", "second", 1),
        ("quartz", "0 0 0/24 * * ?", "hour", 3),
        ("quartz", "0 0 0 32W * ?", "day of month", 4),
        ("quartz", "0 0 0 * * ? 1969", "year", 7),
        ("quartz", "0 0 0 * * ? 2200", "year", 7),
        ("quartz", "0 0 0 * * ? 2030-2026", "year", 7),
        ("quartz", "0 0 0 * * ? ?", "year", 7),
    ],
)
def test_an_error_points_at_the_field(
    dialect: Dialect, expression: str, field: str, position: int
) -> None:
    with pytest.raises(CronError) as refused:
        parse_cron(expression, dialect)
    assert (refused.value.field, refused.value.position) == (field, position)
    assert str(refused.value).startswith(f"{field} (field {position}): ")


@pytest.mark.parametrize(
    ("dialect", "expression", "why"),
    [
        (None, "", "empty"),
        (None, "   ", "empty"),
        (None, "* * * *", "5, 6 or 7 fields, not 4"),
        ("unix", "* * * * * * *", "5 or 6 fields in the unix dialect, not 7"),
        ("quartz", "* * * * *", "6 or 7 fields in the quartz dialect, not 5"),
        (None, "*/5 * * * " + "1," * 60 + "1", "at most 128 characters"),
        (None, "\u0665 * * * *", "ASCII"),
        (None, "@reboot", "no time"),
        (None, "@every 5m", "interval"),
        (None, "@fortnightly", "@daily"),
        ("quartz", "@daily", "unix"),
    ],
)
def test_an_error_says_what_to_change(dialect: Dialect, expression: str, why: str) -> None:
    with pytest.raises(CronError, match=why) as refused:
        parse_cron(expression, dialect)
    assert refused.value.field is None


@pytest.mark.parametrize(
    ("expression", "dialect"),
    [
        ("0 0 * * 1", "unix"),
        ("0 0 L * *", "unix"),
        ("0 0 0 * * 1", "unix"),
        ("0 0 0 1 JUL WED", "unix"),
        ("0 0 0 ? * 1", "quartz"),
        ("0 0 0 1 1 ? 2030", "quartz"),
        ("@daily", "unix"),
        ("  0\t0  * * 1 \n", "unix"),
    ],
)
def test_the_form_tells_the_dialect(expression: str, dialect: str) -> None:
    assert parse_cron(expression).dialect == dialect


@pytest.mark.parametrize(
    "marked", ["0 0 0 L * *", "0 0 0 15W * *", "0 0 0 * * 6#3", "0 0 0 * * FRIL"]
)
def test_six_fields_with_a_mark_of_quartz_alone_are_quartz(marked: str) -> None:
    # Weekdays count differently in the two: to guess would be to run on the wrong day.
    with pytest.raises(CronError, match="exactly one"):
        parse_cron(marked)
    assert parse_cron(marked, "unix").dialect == "unix"


def test_the_macros_are_what_crontab_says() -> None:
    for macro, expression in (
        ("@yearly", "0 0 1 1 *"),
        ("@annually", "0 0 1 1 *"),
        ("@monthly", "0 0 1 * *"),
        ("@weekly", "0 0 * * 0"),
        ("@daily", "0 0 * * *"),
        ("@MIDNIGHT", "0 0 * * *"),
        ("@hourly", "0 * * * *"),
    ):
        assert parse_cron(macro).fields == parse_cron(expression).fields


def test_a_time_that_the_clock_skips_can_be_skipped() -> None:
    times = times_of("30 2 * * *", "America/New_York", dst_gap="skip")
    after = "2026-03-07T12:00:00-05:00"
    assert next_of(times, "America/New_York", after, 1) == ["2026-03-09T02:30:00-04:00"]


def test_a_time_that_the_clock_repeats_can_fire_in_either_pass_or_in_both() -> None:
    zone, after = "America/New_York", "2026-10-31T12:00:00-04:00"
    first, second = "2026-11-01T01:30:00-04:00", "2026-11-01T01:30:00-05:00"
    day_after = "2026-11-02T01:30:00-05:00"
    for fold, fires in (
        ("first", [first, day_after]),
        ("second", [second, day_after]),
        ("both", [first, second, day_after]),
    ):
        times = times_of("30 1 * * *", zone, dst_fold=fold)  # type: ignore[arg-type]
        assert next_of(times, zone, after, len(fires)) == fires
        assert previous_of(times, zone, "2026-11-02T02:00:00-05:00", len(fires)) == fires[::-1]
        assert times.count(epoch_ms(after), epoch_ms(day_after)) == len(fires)


def test_neither_choice_changes_an_expression_that_follows_real_time() -> None:
    zone = "America/New_York"
    usual = times_of("*/30 * * * *", zone)
    other = times_of("*/30 * * * *", zone, dst_gap="skip", dst_fold="second")
    for after in ("2026-11-01T00:45:00-04:00", "2026-03-08T01:15:00-05:00"):
        assert next_of(usual, zone, after, 8) == next_of(other, zone, after, 8)


def test_an_offset_of_odd_seconds_is_kept() -> None:
    # Monrovia was 44 minutes and 30 seconds behind UTC until 1972.
    zone = "Africa/Monrovia"
    assert next_of(times_of("0 12 * * *", zone), zone, "1971-06-01T00:00:00+00:00", 1) == [
        "1971-06-01T12:00:00-00:44:30"
    ]


def test_a_fire_knows_what_the_clock_does_to_it() -> None:
    zone = "America/New_York"
    fixed = times_of("30 1,2 * * *", zone, dst_fold="both")
    told = {
        moment: fixed.clock_change(epoch_ms(moment))
        for moment in (
            "2026-03-08T03:00:00-04:00",
            "2026-03-09T02:30:00-04:00",
            "2026-11-01T01:30:00-04:00",
            "2026-11-01T01:30:00-05:00",
            "2026-11-01T02:30:00-05:00",
        )
    }
    assert list(told.values()) == ["shifted", None, "first_pass", "second_pass", None]
