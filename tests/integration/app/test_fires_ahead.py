"""Fires that are decided a moment before their time, and those that are left for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.lifecycle.moves.fire import Fenced
from app.lifecycle.states import JobStatus
from app.plumbing.bus import WAKE, Signal
from app.plumbing.times import rfc3339
from tests.integration.app.rig import (
    Door,
    change,
    claimed,
    door,
    new_term,
    rows_of,
    value_of,
)
from tests.integration.app.schedule_rig import (
    HOUR,
    MINUTE,
    children,
    end_child,
    fired,
    job,
    moved_back,
    schedule_of,
    skips,
)
from tests.support.engines import Engine


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    async with door(migrated_engine) as opened:
        yield opened


async def fired_ahead(api: Door) -> int:
    """Fire as the loop does, a minute ahead: a slow machine has the time that a test needs."""
    return await api.parts.spawner.fire_due(await new_term(api.database), ahead_ms=MINUTE)


async def due_in(api: Door, schedule: int, ms: int) -> int:
    """Let a schedule be due in so many milliseconds from now, and return when."""
    row = (
        await rows_of(
            api.database,
            f"SELECT next_trigger_time - {api.database.now_ms} AS left_ms FROM job_info "
            "WHERE id = :id",
            id=schedule,
        )
    )[0]
    await moved_back(api.database, schedule, int(row["left_ms"]) - ms)
    return int(
        await value_of(
            api.database, f"SELECT next_trigger_time FROM job_info WHERE id = {schedule}"
        )
    )


@pytest.mark.parametrize("policy", ["allow", "skip", "queue", "replace"])
async def test_a_fire_that_meets_nothing_is_a_job_before_its_time_and_begins_at_it(
    api: Door, policy: str
) -> None:
    schedule = await schedule_of(api, overlapPolicy=policy)
    at = await due_in(api, schedule, 30_000)
    woken: list[Signal] = []
    api.parts.ground.bus.subscribe(WAKE, woken.append)
    assert await fired_ahead(api) == 1
    (child,) = await children(api.database, schedule)
    assert (child["nominal_time"], child["next_trigger_time"]) == (at, at)
    assert child["created_at"] < at
    assert child["status"] == JobStatus.WAITING
    assert [one[2] for signal in woken for one in signal] == [at]
    assert await claimed(api.database, [child["id"]], term=await new_term(api.database)) == []
    (row,) = await rows_of(
        api.database,
        "SELECT trigger_ts, next_trigger_time, fires FROM job_info WHERE id = :id",
        id=schedule,
    )
    assert row == {"trigger_ts": at, "next_trigger_time": at + HOUR, "fires": 1}
    assert await fired_ahead(api) == 0
    # At its time nothing is left to decide.
    await moved_back(api.database, schedule, 30_000)
    assert await fired_ahead(api) == 0
    assert len(await children(api.database, schedule)) == 1
    assert await skips(api.database, schedule) == []


@pytest.mark.parametrize("policy", ["skip", "queue", "replace"])
async def test_a_fire_that_would_meet_a_run_is_decided_at_its_time(api: Door, policy: str) -> None:
    schedule = await schedule_of(api, overlapPolicy=policy)
    await fired(api, back_ms=HOUR, schedule=schedule)
    (before,) = await children(api.database, schedule)
    await due_in(api, schedule, 30_000)
    rule = "SELECT version, trigger_ts, next_trigger_time FROM job_info WHERE id = :id"
    told = await rows_of(api.database, rule, id=schedule)
    assert await fired_ahead(api) == 1
    # It was left, and is not looked at again before its time.
    assert await fired_ahead(api) == 0
    assert await rows_of(api.database, rule, id=schedule) == told
    await end_child(api.database, before["id"])
    await moved_back(api.database, schedule, 30_000)
    assert await fired_ahead(api) == 1
    late = (await children(api.database, schedule))[-1]
    assert (late["status"], late["id"] == before["id"]) == (JobStatus.WAITING, False)
    assert await skips(api.database, schedule) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"intervalMode": "fixedDelay"},
        {"overlapPolicy": "allow", "maxFires": 1},
        {"overlapPolicy": "allow", "endAt": "end"},
    ],
)
async def test_a_fixed_delay_and_the_last_fire_are_left_for_their_time(
    api: Door, fields: dict[str, Any]
) -> None:
    """No schedule is SUCCEEDED before its last fire."""
    if "endAt" in fields:
        now = int(await value_of(api.database, f"SELECT {api.database.now_ms}"))
        fields = {**fields, "endAt": rfc3339(now + HOUR + MINUTE)}
    schedule = await schedule_of(api, **fields)
    await due_in(api, schedule, 30_000)
    if "endAt" in fields:
        await change(
            api.database,
            "UPDATE job_info SET end_at = next_trigger_time WHERE id = :id",
            id=schedule,
        )
    assert await fired_ahead(api) == 1
    assert await children(api.database, schedule) == []
    assert (await job(api, schedule))["status"] == "SCHEDULED"


async def test_what_is_asked_after_a_fire_was_decided_leaves_each_time_once_on_record(
    api: Door,
) -> None:
    schedule = await schedule_of(api, overlapPolicy="allow")
    at = await due_in(api, schedule, 30_000)
    await fired_ahead(api)
    path = f"/openapi/jobs/{schedule}"
    assert (await api.client.post(f"{path}/pause")).status_code == 200
    assert (await api.client.post(f"{path}/resume", json={"missed": "skip"})).status_code == 200
    assert (await api.client.post(f"{path}/trigger")).status_code in {200, 201, 202}
    shown = await job(api, schedule)
    assert shown["nextTriggerTime"] == rfc3339(at + HOUR)
    answer = await api.client.patch(
        path, json={"intervalMs": 2 * HOUR}, headers={"If-Match": f'"{shown["revision"]}"'}
    )
    assert answer.status_code == 200, answer.text
    # The interval begins behind what is decided: the same time cannot come twice.
    assert answer.json()["nextTriggerTime"] == rfc3339(at + 2 * HOUR)
    own = [one for one in await children(api.database, schedule) if one["child_key"] == ""]
    assert [(one["nominal_time"], one["next_trigger_time"]) for one in own] == [(at, at)]
    assert await skips(api.database, schedule) == []
    assert (await api.client.post(f"{path}/cancel")).status_code == 200
    assert (await children(api.database, schedule))[-1]["status"] == JobStatus.WAITING


async def test_only_the_holder_of_the_lock_fires_ahead(api: Door) -> None:
    schedule = await schedule_of(api, overlapPolicy="allow")
    await due_in(api, schedule, 30_000)
    old = await new_term(api.database)
    await new_term(api.database)
    with pytest.raises(Fenced):
        await api.parts.spawner.fire_due(old, ahead_ms=MINUTE)
    assert await children(api.database, schedule) == []
