"""Backfills, and what retention takes of a schedule."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from app.fleet.settler import Settler
from app.jobs import backfill
from app.jobs.retention import Retention
from app.lifecycle.moves.backfill import MOST_OPEN
from app.lifecycle.moves.fire import find_schedule
from app.lifecycle.moves.follow import Claimable
from app.lifecycle.states import ExecutionStatus, JobStatus
from app.plumbing.bus import FIRE, Signal
from app.plumbing.database import Database
from app.plumbing.times import rfc3339
from app.schedules import spawn
from app.schedules.backfill import step_backfill
from tests.integration.app.rig import (
    Door,
    change,
    claimed,
    door,
    ending,
    new_term,
    rows_of,
    value_of,
)
from tests.integration.app.schedule_rig import (
    HOUR,
    children,
    end_child,
    fired,
    schedule_of,
    skips,
)
from tests.support.engines import Engine


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    async with door(migrated_engine) as opened:
        yield opened


async def backfilled(api: Door, schedule: int, first: int, last: int, **fields: Any) -> Any:
    return await api.client.post(
        f"/openapi/jobs/{schedule}/backfill",
        json={"from": rfc3339(first), "to": rfc3339(last), **fields},
    )


async def test_a_backfill_runs_what_has_no_job_some_at_a_time(api: Door) -> None:
    made = await schedule_of(api, overlapPolicy="allow")
    await fired(api, back_ms=10 * HOUR, schedule=made)
    (child,) = await children(api.database, made)
    last = child["nominal_time"]
    first = last - 9 * HOUR
    dry = await backfilled(api, made, first, last, dryRun=True)
    assert dry.status_code == 200, dry.text
    assert (dry.json()["total"], dry.json()["existing"], dry.json()["status"]) == (10, 1, "DRY_RUN")
    assert dry.json()["nominalTimes"] == [rfc3339(first + n * HOUR) for n in range(9)]
    assert await value_of(api.database, "SELECT COUNT(*) FROM schedule_backfill") == 0

    answer = await backfilled(api, made, first, last, maxConcurrent=4)
    assert answer.status_code == 202, answer.text
    assert answer.json()["status"] == "OPEN"
    for _ in range(3):
        await api.parts.spawner.fill()
    born = await children(api.database, made)
    assert len(born) == 1 + 4
    ended = 0
    while ended < 9:
        for one in await children(api.database, made):
            if one["status"] == JobStatus.WAITING and one["id"] != child["id"]:
                await end_child(api.database, one["id"])
                ended += 1
        await api.parts.spawner.fill()
        going = await value_of(
            api.database, "SELECT COUNT(*) FROM schedule_live WHERE backfill_id > 0"
        )
        assert going <= 4
    listed = (await api.client.get(f"/openapi/jobs/{made}/backfills")).json()["items"]
    assert [(one["status"], one["spawned"]) for one in listed] == [("DONE", 9)]
    times = [one["nominal_time"] for one in await children(api.database, made)]
    assert len(times) == len(set(times)) == 10
    # A second one finds nothing left to do.
    again = await backfilled(api, made, first, last)
    assert again.json()["existing"] == 10
    await api.parts.spawner.fill()
    assert len(await children(api.database, made)) == 10


async def test_a_backfill_that_waits_is_woken_by_the_ends_of_its_own_runs_alone(
    api: Door,
) -> None:
    woken: list[Signal] = []
    api.parts.ground.bus.subscribe(FIRE, woken.append)
    settler = Settler(api.parts.ground)
    for overlap in ("allow", "skip"):
        made = await schedule_of(api, overlapPolicy=overlap)
        await fired(api, back_ms=3 * HOUR, schedule=made)
        (child,) = await children(api.database, made)
        start = child["nominal_time"] - 2 * HOUR
        assert (await backfilled(api, made, start, start + HOUR)).status_code == 202
        await api.parts.spawner.fill()
        own = (await children(api.database, made))[0]["id"]
        assert own != child["id"]
        woken.clear()
        for job_id, wakes in ((await api.submitted(), 0), (child["id"], 0), (own, 1)):
            (run,) = await claimed(api.database, [job_id], term=await new_term(api.database))
            await settler.settle(ending(run, ExecutionStatus.SUCCEEDED))
            assert len(woken) == wakes


async def test_a_backfill_that_waits_costs_no_write(
    api: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped: list[int] = []

    async def noted(database: Database, backfill_id: int) -> Sequence[Claimable]:
        stepped.append(backfill_id)
        return await step_backfill(database, backfill_id)

    monkeypatch.setattr(spawn, "step_backfill", noted)
    made = await schedule_of(api, overlapPolicy="allow")
    await fired(api, back_ms=4 * HOUR, schedule=made)
    (child,) = await children(api.database, made)
    start = child["nominal_time"] - 3 * HOUR
    assert (await backfilled(api, made, start, start + 2 * HOUR)).status_code == 202
    for _ in range(3):
        await api.parts.spawner.fill()
    assert len(stepped) == 1
    await end_child(api.database, (await children(api.database, made))[0]["id"])
    for _ in range(3):
        await api.parts.spawner.fill()
    assert len(stepped) == 2
    # What there is no room for ends with its schedule all the same.
    await api.client.post(f"/openapi/jobs/{made}/cancel")
    await api.parts.spawner.fill()
    (row,) = (await api.client.get(f"/openapi/jobs/{made}/backfills")).json()["items"]
    assert row["status"] == "STOPPED"


async def test_what_cannot_be_backfilled_is_refused(api: Door) -> None:
    made = await schedule_of(api)
    delay = await schedule_of(api, intervalMs=HOUR, intervalMode="fixedDelay")
    task = await api.submitted()
    now = int(await value_of(api.database, f"SELECT {api.database.now_ms}"))
    assert (await backfilled(api, delay, now - HOUR, now)).status_code == 422
    assert (await backfilled(api, task, now - HOUR, now)).status_code == 422
    assert (await backfilled(api, 4711, now - HOUR, now)).status_code == 404
    assert (await backfilled(api, made, now, now - HOUR)).status_code == 422
    assert (await backfilled(api, made, now - HOUR, now, maxConcurrent=0)).status_code == 422
    every = await schedule_of(api, cronExpr="* * * * *")
    assert (await backfilled(api, every, now - 1001 * 60_000, now)).status_code == 422
    await api.client.post(f"/openapi/jobs/{made}/cancel")
    assert (await backfilled(api, made, now - HOUR, now)).status_code == 409


async def test_the_times_of_an_open_backfill_are_not_changed_under_it(api: Door) -> None:
    made = await schedule_of(api, overlapPolicy="allow")
    await fired(api, back_ms=10 * HOUR, schedule=made)
    (child,) = await children(api.database, made)
    last = child["nominal_time"]
    assert (await backfilled(api, made, last - 2 * HOUR, last)).status_code == 202
    path, headers = f"/openapi/jobs/{made}", {"If-Match": "*"}
    refused = await api.client.patch(path, json={"intervalMs": 2 * HOUR}, headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (409, "verb_not_possible")
    assert "backfills" in refused.json()["detail"]
    other = await api.client.patch(path, json={"priority": 1}, headers=headers)
    assert other.status_code == 200, other.text
    for _ in range(3):
        await api.parts.spawner.fill()
        for one in await children(api.database, made):
            if one["status"] == JobStatus.WAITING and one["id"] != child["id"]:
                await end_child(api.database, one["id"])
    await api.parts.spawner.fill()
    allowed = await api.client.patch(path, json={"intervalMs": 2 * HOUR}, headers=headers)
    assert allowed.status_code == 200, allowed.text


async def test_a_backfill_counts_the_times_that_it_will_walk_also_beside_a_patch(
    api: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await schedule_of(api, cronExpr="0 * * * *", overlapPolicy="allow")
    await fired(api, back_ms=24 * HOUR, schedule=made)
    (child,) = await children(api.database, made)
    last = child["nominal_time"]

    async def before_a_patch(*given: Any, **named: Any) -> Any:
        """Read the schedule as it is just before each minute becomes a time of it."""
        found = await find_schedule(*given, **named)
        answer = await api.client.patch(
            f"/openapi/jobs/{made}", json={"cronExpr": "* * * * *"}, headers={"If-Match": "*"}
        )
        assert answer.status_code == 200, answer.text
        return found

    monkeypatch.setattr(backfill, "find_schedule", before_a_patch)
    refused = await backfilled(api, made, last - 20 * HOUR, last)
    assert (refused.status_code, refused.json()["code"]) == (422, "validation_failed")
    assert "1201 fires" in refused.text
    assert await value_of(api.database, "SELECT COUNT(*) FROM schedule_backfill") == 0


@pytest.mark.parametrize("dry_run", [False, True])
async def test_times_that_are_still_the_schedules_own_are_not_backfilled(
    api: Door, dry_run: bool
) -> None:
    made = await schedule_of(api)
    now = int(await value_of(api.database, f"SELECT {api.database.now_ms}"))
    refused = await backfilled(api, made, now + 2 * HOUR, now + 4 * HOUR, dryRun=dry_run)
    assert refused.status_code == 422, refused.text
    assert [one["pointer"] for one in refused.json()["errors"]] == ["/from"]
    assert "decidedUntil" in refused.text
    # The part that is decided is.
    taken = await backfilled(api, made, now - 2 * HOUR, now + 4 * HOUR, dryRun=dry_run)
    assert taken.status_code == (200 if dry_run else 202), taken.text
    assert taken.json()["to"] < rfc3339(now + HOUR)


async def test_the_times_of_an_interval_begin_where_it_does(api: Door) -> None:
    now = int(await value_of(api.database, f"SELECT {api.database.now_ms}"))
    start = now - now % HOUR - 5 * HOUR
    made = await schedule_of(api, intervalMs=HOUR, startAt=rfc3339(start))
    seen = await backfilled(api, made, start - 3 * HOUR, now, dryRun=True)
    assert seen.json()["nominalTimes"][0] == rfc3339(start)
    for change_, total in (({"intervalMs": 2 * HOUR}, 3), ({"startAt": None}, 0)):
        answer = await api.client.patch(
            f"/openapi/jobs/{made}", json=change_, headers={"If-Match": "*"}
        )
        assert answer.status_code == 200, answer.text
        seen = await backfilled(api, made, start - 3 * HOUR, now, dryRun=True)
        assert seen.json()["total"] == total


async def test_a_cancelled_schedule_stops_its_backfill(api: Door) -> None:
    made = await schedule_of(api, cronExpr="* * * * *", overlapPolicy="allow")
    now = int(await value_of(api.database, f"SELECT {api.database.now_ms}"))
    await backfilled(api, made, now - HOUR, now, maxConcurrent=2)
    await api.parts.spawner.fill()
    await api.client.post(f"/openapi/jobs/{made}/cancel?children=true")
    await api.parts.spawner.fill()
    states = [one["status"] for one in await children(api.database, made)]
    assert states == [JobStatus.CANCELLED] * 2
    (row,) = (await api.client.get(f"/openapi/jobs/{made}/backfills")).json()["items"]
    assert (row["status"], row["spawned"]) == ("STOPPED", 2)


async def test_a_backfill_that_cannot_be_planned_holds_up_no_other(api: Door) -> None:
    made = [await schedule_of(api, cronExpr="0 * * * *", overlapPolicy="allow") for _ in range(2)]
    for schedule in made:
        await fired(api, back_ms=3 * HOUR, schedule=schedule)
        (child,) = await children(api.database, schedule)
        start = child["nominal_time"] - 2 * HOUR
        assert (await backfilled(api, schedule, start, start)).status_code == 202
    zone = "UPDATE job_info SET timezone = 'Mars/One' WHERE id = :id"
    await change(api.database, zone, id=made[0])
    await api.parts.spawner.fill()
    assert [len(await children(api.database, schedule)) for schedule in made] == [1, 2]


async def test_no_number_of_backfills_that_wait_keeps_another_from_its_turn(api: Door) -> None:
    made = await schedule_of(api, overlapPolicy="allow")
    await fired(api, back_ms=3 * HOUR, schedule=made)
    (child,) = await children(api.database, made)
    start = child["nominal_time"] - 2 * HOUR
    for number in range(MOST_OPEN):
        await change(
            api.database,
            "INSERT INTO schedule_backfill (schedule_id, token, status, cursor_time, from_time, "
            "to_time, max_concurrent, spawned, created_at) "
            "VALUES (:schedule, :token, 0, 1, 1, 2, 0, 0, 1)",
            schedule=made,
            token=f"full-{number}",
        )
    assert (await backfilled(api, made, start, start)).status_code == 202
    for _ in range(2):
        await api.parts.spawner.fill()
    assert len(await children(api.database, made)) == 2


async def test_retention_takes_the_children_and_the_ledger_of_a_live_schedule(api: Door) -> None:
    made = await schedule_of(api, misfirePolicy="once")
    await fired(api, back_ms=10 * HOUR, schedule=made)
    (child,) = await children(api.database, made)
    await end_child(api.database, child["id"])
    assert len(await skips(api.database, made)) == 1
    retention = Retention(api.parts.ground, api.parts.lock)
    later = int(await value_of(api.database, f"SELECT {api.database.now_ms}")) + 31 * 24 * HOUR
    assert await retention.prune_ledger(later - 40 * 24 * HOUR) == 0
    assert await retention.prune_ledger(later) == 1
    assert await retention.run_pass(later) == 1
    assert await rows_of(api.database, "SELECT id FROM job_info") == [{"id": made}]
    # The schedule itself leaves once it has ended, with all that belongs to it.
    await fired(api, back_ms=10 * HOUR, schedule=made)
    await api.client.post(f"/openapi/jobs/{made}/cancel?children=true")
    await change(api.database, "UPDATE job_info SET created_at = 1")
    assert await retention.run_pass(later) == 2
    for table in ("job_info", "schedule_skip", "schedule_live", "schedule_backfill"):
        assert await value_of(api.database, f"SELECT COUNT(*) FROM {table}") == 0
    assert await new_term(api.database) > 0
