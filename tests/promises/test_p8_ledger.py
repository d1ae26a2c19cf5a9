"""P8: every nominal time of a schedule is a child or in the ledger, once, as its policies say."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.moves.fire import read_plan_row
from app.lifecycle.states import JobStatus
from app.lifecycle.token import new_token
from app.plumbing.database import Database
from app.schedules.decide import DEFAULT_SPACING_MS, decide, first_fire, times_of
from app.schedules.spawn import fire_locked
from app.schedules.zone import zone_clock
from tests.integration.app.rig import Door, change, door, new_term, rows_of, value_of
from tests.integration.app.schedule_rig import children, moved_back, skips
from tests.support.engines import Engine, migrated

MINUTE = 60_000
EVERY = 10 * MINUTE
MISSED = 18
"""Fires that a 3-hour outage of a schedule each 10 minutes misses."""

FREE = {
    # misfire, overlap -> how many children, of which wait; skipped by reason
    ("skip", "skip"): (0, 0, {"misfire_skip": 18}),
    ("skip", "queue"): (0, 0, {"misfire_skip": 18}),
    ("skip", "allow"): (0, 0, {"misfire_skip": 18}),
    ("skip", "replace"): (0, 0, {"misfire_skip": 18}),
    ("once", "skip"): (1, 0, {"misfire_once": 17}),
    ("once", "queue"): (1, 0, {"misfire_once": 17}),
    ("once", "allow"): (1, 0, {"misfire_once": 17}),
    ("once", "replace"): (1, 0, {"misfire_once": 17}),
    ("all", "skip"): (5, 4, {"over_cap": 13}),
    ("all", "queue"): (5, 4, {"over_cap": 13}),
    ("all", "allow"): (5, 0, {"over_cap": 13}),
    ("all", "replace"): (5, 4, {"over_cap": 13}),
}
BUSY = {
    # The same while a run that began before the outage goes on; it counts as a child.
    ("skip", "skip"): (1, 0, {"misfire_skip": 18}),
    ("skip", "queue"): (1, 0, {"misfire_skip": 18}),
    ("skip", "allow"): (1, 0, {"misfire_skip": 18}),
    ("skip", "replace"): (1, 0, {"misfire_skip": 18}),
    ("once", "skip"): (1, 0, {"misfire_once": 17, "overlap": 1}),
    ("once", "queue"): (2, 1, {"misfire_once": 17}),
    ("once", "allow"): (2, 0, {"misfire_once": 17}),
    ("once", "replace"): (2, 0, {"misfire_once": 17}),
    ("all", "skip"): (1, 0, {"over_cap": 13, "overlap": 5}),
    ("all", "queue"): (6, 5, {"over_cap": 13}),
    ("all", "allow"): (6, 0, {"over_cap": 13}),
    ("all", "replace"): (6, 4, {"over_cap": 13}),
}
CASES = [(busy, *pair) for busy in (False, True) for pair in FREE]


@pytest.mark.parametrize(("busy", "misfire", "overlap"), CASES)
async def test_a_three_hour_outage_ends_as_the_policies_say(
    migrated_engine: Engine, busy: bool, misfire: str, overlap: str
) -> None:
    async with door(migrated_engine) as api:
        extra = {"misfireCap": 5, "misfireSpacingMs": 1000} if misfire == "all" else {}
        made = await api.submitted(
            intervalMs=EVERY, misfirePolicy=misfire, overlapPolicy=overlap, **extra
        )
        term = await new_term(api.database)
        if busy:
            await moved_back(api.database, made, EVERY)
            await api.parts.spawner.fire_due(term)
        before = len(await children(api.database, made))
        assert before == int(busy)
        await moved_back(api.database, made, MISSED * EVERY + MINUTE)
        began = int(await value_of(api.database, f"SELECT {api.database.now_ms}"))
        await api.parts.spawner.fire_due(term)

        born = await children(api.database, made)
        total, waiting, passed = (BUSY if busy else FREE)[misfire, overlap]
        assert len(born) == total
        states = [one["status"] for one in born]
        assert states.count(JobStatus.BLOCKED) == waiting
        assert states.count(JobStatus.CANCELLED) == int(busy and overlap == "replace" and total > 1)
        ledger = await skips(api.database, made)
        assert {one["reason"]: one["count"] for one in ledger} == passed
        # Each fire of the outage once.
        on_record = [one["nominal_time"] for one in born] + [
            time for one in ledger for time in range(one["from_time"], one["to_time"] + 1, EVERY)
        ]
        row = await schedule_row(api, made)
        assert sorted(on_record) == list(
            range(row["trigger_ts"] - (MISSED + before - 1) * EVERY, row["trigger_ts"] + 1, EVERY)
        )
        late = [one["next_trigger_time"] for one in born[before:]]
        assert all(began <= due <= began + 10_000 + 1000 * n for n, due in enumerate(late))
        if misfire == "all":
            assert [second - first for first, second in itertools.pairwise(late)] == [1000] * (
                len(late) - 1
            )
        assert await api.parts.spawner.fire_due(term) == 0


FAST = {
    # misfire, overlap -> how many children of an 18 s outage of a schedule each second, of which
    # wait; skipped by reason. The last fire is due now.
    ("skip", "skip"): (1, 0, {"misfire_skip": 17}),
    ("skip", "queue"): (1, 0, {"misfire_skip": 17}),
    ("skip", "allow"): (1, 0, {"misfire_skip": 17}),
    ("skip", "replace"): (1, 0, {"misfire_skip": 17}),
    ("once", "skip"): (1, 0, {"misfire_once": 17}),
    ("once", "queue"): (1, 0, {"misfire_once": 17}),
    ("once", "allow"): (1, 0, {"misfire_once": 17}),
    ("once", "replace"): (1, 0, {"misfire_once": 17}),
    ("all", "skip"): (4, 3, {"over_cap": 14}),
    ("all", "queue"): (4, 3, {"over_cap": 14}),
    ("all", "allow"): (4, 0, {"over_cap": 14}),
    ("all", "replace"): (4, 3, {"over_cap": 14}),
}


@pytest.mark.parametrize("cron", [False, True], ids=["interval", "cron"])
@pytest.mark.parametrize(("misfire", "overlap"), FAST)
async def test_a_short_outage_of_a_fast_schedule_ends_as_the_policies_say(
    migrated_engine: Engine, misfire: str, overlap: str, cron: bool
) -> None:
    async with door(migrated_engine) as api:
        made, first = await each_second(
            api,
            cron=cron,
            misfirePolicy=misfire,
            overlapPolicy=overlap,
            **({"misfireCap": 3} if misfire == "all" else {}),
        )
        last = first + 17_000
        now = last + 300
        await fired_at(api.database, made, now)
        born = await children(api.database, made)
        total, waiting, passed = FAST[misfire, overlap]
        assert [one["nominal_time"] for one in born] == list(
            range(last - (total - 1) * 1000, last + 1, 1000)
        )
        assert [one["status"] for one in born].count(JobStatus.BLOCKED) == waiting
        ledger = await skips(api.database, made)
        assert {one["reason"]: one["count"] for one in ledger} == passed
        assert (ledger[0]["from_time"], ledger[-1]["to_time"]) == (first, last - total * 1000)
        if misfire == "all":
            apart = [now + number * DEFAULT_SPACING_MS for number in range(total - 1)]
            assert [one["next_trigger_time"] for one in born] == [*apart, last]
        assert (await schedule_row(api, made))["trigger_ts"] == last


@pytest.mark.parametrize("misfire", ["skip", "once", "all"])
async def test_a_change_of_the_dispatcher_loses_no_fire_of_a_fast_schedule(
    migrated_engine: Engine, misfire: str
) -> None:
    async with door(migrated_engine) as api:
        made, first = await each_second(api, misfirePolicy=misfire, overlapPolicy="allow")
        await fired_at(api.database, made, first + 3300)
        born = await children(api.database, made)
        assert [one["nominal_time"] - first for one in born] == [0, 1000, 2000, 3000]
        assert [one["next_trigger_time"] - first for one in born] == [0, 1000, 2000, 3000]
        assert await skips(api.database, made) == []


async def test_no_fire_older_than_a_short_window_runs(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as api:
        fields: dict[str, Any] = {"misfirePolicy": "all", "overlapPolicy": "allow"}
        for away in (3, 18):
            made, first = await each_second(api, catchUpWindowMs=2000, **fields)
            await fired_at(api.database, made, first + away * 1000 + 300)
            born = await children(api.database, made)
            assert [one["nominal_time"] - first for one in born] == [
                away * 1000 - 1000,
                away * 1000,
            ]
            assert [(one["reason"], one["count"]) for one in await skips(api.database, made)] == [
                ("outside_window", away - 1)
            ]


async def each_second(api: Door, *, cron: bool = False, **fields: Any) -> tuple[int, int]:
    """Submit a schedule each second of which no fire is decided; return it and its first fire."""
    timing = {"cronExpr": "* * * * * *"} if cron else {"intervalMs": 1000}
    made = await api.submitted(**timing, **fields)
    row = await schedule_row(api, made)
    return made, int(row["next_trigger_time"])


async def schedule_row(api: Door, schedule: int) -> dict[str, Any]:
    (row,) = await rows_of(api.database, "SELECT * FROM job_info WHERE id = :id", id=schedule)
    return row


async def test_nothing_older_than_the_window_is_made_up_for(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as api:
        made = await api.submitted(
            intervalMs=EVERY,
            misfirePolicy="all",
            overlapPolicy="allow",
            catchUpWindowMs=3 * EVERY + 2 * MINUTE,
        )
        await moved_back(api.database, made, MISSED * EVERY + MINUTE)
        await api.parts.spawner.fire_due(await new_term(api.database))
        assert len(await children(api.database, made)) == 4
        assert [(one["reason"], one["count"]) for one in await skips(api.database, made)] == [
            ("outside_window", MISSED - 4)
        ]


CHANGES = {
    # Both clock changes of a year, as the zone's clock shows them, in UTC.
    "America/New_York": (1772953200, 1793512800),
    "Europe/London": (1774746000, 1792890000),
    "Australia/Lord_Howe": (1775314800, 1791041400),
    "Africa/Cairo": (1776981600, 1793307600),
    "Pacific/Apia": (1301752800, 1325239200),
}
SECONDS = 3600


@dataclass
class Ledger:
    """What a walk through virtual time has put on record."""

    runs: list[int] = field(default_factory=list)
    passed: list[tuple[int, int, int]] = field(default_factory=list)

    def times(self) -> list[int]:
        spans = [range(first, last + 1, 1000) for first, last, _ in self.passed]
        assert [len(span) for span in spans] == [count for _, _, count in self.passed]
        return sorted([*self.runs, *itertools.chain.from_iterable(spans)])


@pytest.mark.parametrize("zone", CHANGES)
@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("misfire", ["all", "once", "skip"])
def test_each_second_through_a_clock_change_is_decided_once(
    zone: str, which: int, misfire: str
) -> None:
    middle = CHANGES[zone][which] * 1000
    clock = zone_clock(zone)
    assert clock.offset_at(middle // 1000 - 1) != clock.offset_at(middle // 1000)
    start = middle - SECONDS * 500
    dice = random.Random(which)
    row: dict[str, Any] = dict.fromkeys(
        ("interval_mode", "interval_ms", "start_at", "end_at", "jitter_ms", "max_fires")
    ) | {
        "cron_expr": "* * * * * *",
        "cron_dialect": "unix",
        "timezone": zone,
        "dst_gap": "shift",
        "dst_fold": "first",
        "misfire_policy": misfire,
        "misfire_cap": 1000,
        "misfire_spacing_ms": None,
        "catch_up_ms": None,
        "overlap_policy": "allow",
        "tenant_id": 0,
        "client_request_id": zone,
        "fires": 0,
        "trigger_ts": start,
        "skip_from": None,
        "skip_reason": None,
    }
    ledger = Ledger()
    now, end = start, start + SECONDS * 1000
    while now < end:
        # Mostly on time; now and then nobody looks for up to a minute.
        away = dice.choice([1, 1, 1, 1, 1, 2, 15, 60]) * 1000
        now = min(end, now + away)
        made = decide(row, now_ms=now + dice.randrange(1000), grace_ms=10_000, going=0, waiting=0)
        ledger.runs += [one.nominal_ms for one in made.runs]
        for entry in made.ledger:
            if ledger.passed and ledger.passed[-1][0] == entry.from_ms:
                first, _, count = ledger.passed[-1]
                ledger.passed[-1] = (first, entry.to_ms, count + entry.count)
            else:
                ledger.passed.append((entry.from_ms, entry.to_ms, entry.count))
        row |= {
            "trigger_ts": made.cursor_ms,
            "skip_from": None if made.last is None else made.last.from_ms,
            "skip_reason": None if made.last is None else made.last.reason,
        }
    assert ledger.times() == list(range(start + 1000, end + 1, 1000))
    if misfire == "all":
        assert not ledger.passed


@pytest.mark.parametrize("zone", CHANGES)
async def test_the_rows_of_an_hour_through_a_clock_change_are_each_second_once(
    sqlite_engine: Engine, zone: str
) -> None:
    """The same with the moves and the database: time goes on in steps of up to a minute."""
    dice = random.Random(zone)
    async with door(migrated(sqlite_engine)) as api:
        for middle in CHANGES[zone]:
            start = middle * 1000 - SECONDS * 500
            made = await api.submitted(
                cronExpr="* * * * * *", timezone=zone, overlapPolicy="allow", misfirePolicy="all"
            )
            await change(
                api.database,
                "UPDATE job_info SET trigger_ts = :start, next_trigger_time = :start + 1000 "
                "WHERE id = :id",
                start=start,
                id=made,
            )
            now, end = start, start + SECONDS * 1000
            while now < end:
                now = min(end, now + dice.choice([1, 2, 5, 60]) * 1000)
                await fired_at(api.database, made, now)
            found = [one["nominal_time"] for one in await children(api.database, made)]
            assert found == list(range(start + 1000, end + 1, 1000))
            assert await skips(api.database, made) == []


async def fired_at(database: Database, schedule: int, now: int) -> None:
    """Fire one schedule as if it were then."""

    async def write(connection: AsyncConnection) -> None:
        row = await read_plan_row(connection, database, schedule)
        await fire_locked(
            connection,
            database,
            [cast(RowMapping, {**row, "now_ms": now})],
            grace_ms=10_000,
            token=new_token(),
            term=None,
        )

    await database.write(write)


def test_the_first_fire_is_after_now_and_keeps_to_start_and_end() -> None:
    base: Mapping[str, Any] = {
        "interval_mode": "fixedRate",
        "interval_ms": 1000,
        "anchor_at": 5000,
        "cron_expr": None,
        "start_at": 5000,
        "end_at": None,
        "jitter_ms": None,
        "tenant_id": 0,
        "client_request_id": "x",
    }
    assert first_fire(base, after_ms=0) == 5000
    assert first_fire(base, after_ms=5000) == 6000
    assert first_fire({**base, "end_at": 5500}, after_ms=5000) is None
    delay = {**base, "interval_mode": "fixedDelay"}
    assert times_of(delay) is None
    assert first_fire(delay, after_ms=0) == 5000
    assert first_fire(delay, after_ms=7000) == 8000
