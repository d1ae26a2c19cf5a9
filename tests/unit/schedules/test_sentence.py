"""What the sentences say."""

from __future__ import annotations

import pytest

from app.schedules.cron import parse_cron
from app.schedules.sentence import sentence
from tests.unit.schedules.looking import Dialect

LAST_WEEKDAY = "the last weekday (Monday to Friday) of the month"


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("30 2 * * *", "At 02:30, every day."),
        ("@weekly", "At 00:00, on Sunday."),
        ("@hourly", "At minute 0 of every hour."),
        ("* * * * *", "Every minute."),
        ("* * * * * *", "Every second."),
        ("*/15 * * * *", "Every 15 minutes."),
        ("*/7 * * * *", "At every 7th minute from 0 to 56 of every hour."),
        ("*/90 * * * *", "At minute 0 of every hour."),
        ("0-29 * * * *", "At minutes 0 to 29 of every hour."),
        ("30 */2 * * *", "Every 2 hours from 00:30 to 22:30, every day."),
        ("0 9-17 * * 1-5", "Every hour from 09:00 to 17:00, on Monday to Friday."),
        ("*/15 9-17 * * *", "Every 15 minutes from 09:00 to 17:45, every day."),
        ("*/15 */2 * * *", "Every 15 minutes of every 2nd hour from 0 to 22, every day."),
        ("30 0-5,7,9-23 * * *", "At minute 30 of hours 0 to 5, 7 and 9 to 23, every day."),
        ("1-5,10,20-25 * * * *", "At minutes 1 to 5, 10 and 20 to 25 of every hour."),
        ("*/20 * 9-17 * * *", "Every 20 seconds from 09:00:00 to 17:59:40, every day."),
        ("15 30 * * * *", "At second 15 of minute 30 of every hour."),
        ("* 30 2 * * *", "Every second of minute 30 of hour 2, every day."),
        ("30 * 2 * * *", "At second 30 of every minute of hour 2, every day."),
        ("0 0 31 * *", "At 00:00, on day 31 of the month."),
        ("0 0 29 2 *", "At 00:00, on day 29 of the month, in February."),
        ("0 0 * */3 2-6", "At 00:00, on Tuesday to Saturday, in January, April, July and October."),
        ("0 0 13 * 5", "At 00:00, on day 13 of the month or on Friday (either is enough)."),
        ("0 0 1-31 * 5", "At 00:00, every day."),
        (
            "0 0 */2 * 1,3",
            "At 00:00, on every 2nd day from 1 to 31 of the month if that day is Monday or "
            "Wednesday.",
        ),
        ("0 0 L * *", "At 00:00, on the last day of the month."),
        ("0 0 * * 7", "At 00:00, on Sunday."),
        ("0 0 * * 5-7", "At 00:00, on Friday to Sunday."),
        ("0 0 0 ? * 1", "At 00:00, on Sunday."),
        ("0 0 0 ? * FRI-MON", "At 00:00, on Monday and Friday to Sunday."),
        ("0 0 0 ? * 6#3", "At 00:00, on the third Friday of the month."),
        ("0 0 0 ? * 6L", "At 00:00, on the last Friday of the month."),
        ("0 0 0 ? * L", "At 00:00, on Saturday."),
        ("0 0 0 LW * ?", f"At 00:00, on {LAST_WEEKDAY}."),
        ("0 0 0 L-3 * ?", "At 00:00, on the day 3 days before the last day of the month."),
        (
            "0 0 0 15W * ?",
            "At 00:00, on the weekday (Monday to Friday) nearest to day 15 of the month.",
        ),
        ("0 0 22-2 * * ?", "At 00:00, 01:00, 02:00, 22:00 and 23:00, every day."),
        ("15 10 0 * * ?", "At 00:10:15, every day."),
        (
            "0 0 12 1,L NOV-FEB ? 2026-2028",
            "At 12:00, on day 1 of the month and the last day of the month, in January, February, "
            "November and December, in 2026 to 2028.",
        ),
        ("0 0 12 * * ? 2026/10", "At 12:00, every day, in every 10th year from 2026 to 2196."),
    ],
)
def test_a_sentence_says_what_happens(expression: str, told: str) -> None:
    assert sentence(parse_cron(expression).fields) == told


def test_one_text_means_different_days_in_the_two_dialects() -> None:
    said = {}
    dialects: tuple[Dialect, ...] = ("unix", "quartz")
    for dialect in dialects:
        day = "*" if dialect == "unix" else "?"
        said[dialect] = sentence(parse_cron(f"0 0 9 {day} * 2", dialect).fields)
    assert said == {"unix": "At 09:00, on Tuesday.", "quartz": "At 09:00, on Monday."}
