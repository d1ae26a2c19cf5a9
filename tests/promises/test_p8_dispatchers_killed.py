"""P8: no fire of a schedule is lost or doubled while dispatchers die.

`ONCUE_TEST_P8_SECONDS` and `ONCUE_TEST_P8_SCHEDULES` make it longer and wider (`make test-p8`).
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from app.schedules.misfire import PUNCTUAL_MS
from tests.integration.app.rig import opened, rows_of
from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform
from tests.support.wait import until, until_async

SECONDS = float(os.environ.get("ONCUE_TEST_P8_SECONDS", "15"))
SCHEDULES = int(os.environ.get("ONCUE_TEST_P8_SCHEDULES", "50"))
EVERY_MS = 1000


def submitted(platform: Platform) -> list[int]:
    """Schedules of every policy of overlap, each second, by cron and by interval."""
    policies = ("allow", "skip", "queue")

    def one(number: int) -> int:
        timing: dict[str, Any] = (
            {"cronExpr": "* * * * * *"} if number % 2 else {"intervalMs": EVERY_MS}
        )
        return platform.submit(
            "one_ms",
            overlapPolicy=policies[number % 3],
            misfirePolicy="all",
            misfireCap=1000,
            maxRetry=50,
            retryIntervalSeconds=1,
            **timing,
        )

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, range(SCHEDULES)))


async def fires_of(database: Any, ids: list[int]) -> dict[int, list[int]]:
    """Every nominal time on record of each schedule, as a child or in the ledger."""
    found: dict[int, list[int]] = defaultdict(list)
    for row in await rows_of(
        database, "SELECT parent_id, nominal_time FROM job_info WHERE parent_id IS NOT NULL"
    ):
        found[row["parent_id"]].append(row["nominal_time"])
    for row in await rows_of(database, "SELECT * FROM schedule_skip"):
        times = range(row["from_time"], row["to_time"] + 1, EVERY_MS)
        assert len(times) == row["count"], row
        found[row["schedule_id"]] += times
    return {schedule: sorted(found[schedule]) for schedule in ids}


async def late_children(database: Any) -> list[dict[str, Any]]:
    """Children that were made clearly after their times, some of them if they are many."""
    return await rows_of(
        database,
        "SELECT id, nominal_time, created_at FROM job_info WHERE parent_id IS NOT NULL "
        f"AND created_at > nominal_time + {PUNCTUAL_MS} ORDER BY id LIMIT 100",
    )


@pytest.mark.timeout(400 + 8 * SECONDS)
async def test_each_fire_is_on_record_once_when_dispatchers_are_killed_at_random(
    engine: Engine, new_platform: NewPlatform
) -> None:
    dice = random.Random(8)
    platform = new_platform(engine, dispatchers=3, environment={"ONCUE_LOCK_SECONDS": "2"}).start(
        workers=1
    )
    ids = submitted(platform)
    kills = max(2, round(SECONDS / 8))
    async with opened(engine) as database:
        began = int((await rows_of(database, f"SELECT {database.now_ms} AS now"))[0]["now"])

        async def passed(fraction: float) -> bool:
            (row,) = await rows_of(database, f"SELECT {database.now_ms} AS now")
            return bool(row["now"] >= began + fraction * SECONDS * 1000)

        for kill in range(kills):
            after = (kill + dice.uniform(0.4, 1)) / (kills + 1)
            await until_async(
                lambda after=after: passed(after),  # type: ignore[misc]
                SECONDS + 60,
                what="the time to kill",
            )
            # The first one is asked by this test; whoever holds the lock, two are killed in turn.
            number = 2 + kill % 2
            platform.services[f"dispatcher-{number}"].kill()
            platform.services[f"dispatcher-{number}"].start(wait=False)
        await until_async(lambda: passed(1), SECONDS + 60, what="the end of the time")
        for schedule in ids:
            answer = platform.http.post(f"/openapi/jobs/{schedule}/cancel")
            assert answer.is_success, answer.text
        rows = await rows_of(
            database, "SELECT id, trigger_ts, created_at FROM job_info WHERE kind = 1"
        )
        on_record = await fires_of(database, ids)
        for row in rows:
            times = on_record[row["id"]]
            assert times, "it has fired"
            assert times[-1] == row["trigger_ts"]
            # Each second once, from the first fire after the submission to the last decided.
            assert times == list(range(times[0], times[-1] + 1, EVERY_MS))
            assert times[0] <= row["created_at"] + 2 * EVERY_MS
            assert times[-1] >= began + SECONDS * 1000 - 20_000

        for late in await late_children(database):
            found = platform.get(f"/openapi/jobs/{late['id']}/explain")["reasons"]
            (told,) = [one for one in found if one["code"] == "fired_late"]
            assert told["details"]["lateMs"] == late["created_at"] - late["nominal_time"]

        def all_ended() -> bool:
            counts = platform.get("/openapi/jobs?status=WAITING&limit=1")["items"]
            running = platform.get("/openapi/jobs?status=RUNNING&limit=1")["items"]
            blocked = platform.get("/openapi/jobs?status=BLOCKED&limit=1")["items"]
            return not counts and not running and not blocked

        until(all_ended, 120 + 4 * SECONDS, what="every run to end")
        states = await rows_of(
            database, "SELECT DISTINCT status FROM job_info WHERE parent_id IS NOT NULL"
        )
        assert [row["status"] for row in states] == [2]
        assert await rows_of(database, "SELECT * FROM schedule_live") == []
