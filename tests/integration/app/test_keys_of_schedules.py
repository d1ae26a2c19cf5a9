"""Keys on schedules, which their fires carry, and keys that a PATCH changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.lifecycle.states import ExecutionStatus, JobStatus
from tests.integration.app.rig import Door, claimed, door, ending, new_term, rows_of, settled
from tests.integration.app.schedule_rig import HOUR, children, fired, job, patch, schedule_of
from tests.integration.app.test_api import counted
from tests.integration.app.test_keys_of_jobs import claim_waiting, in_status, slots
from tests.support.engines import Engine

KEYS: dict[str, Any] = {
    "concurrencyKey": "k",
    "concurrencyLimit": 1,
    "rateKey": "r",
    "ratePerSecond": 100,
}
ONE = {"concurrencyKey": "k", "concurrencyLimit": 1}


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    async with door(migrated_engine) as opened:
        yield opened


async def test_each_fire_of_a_schedule_carries_its_keys(api: Door) -> None:
    made = await schedule_of(api, **KEYS)
    shown = await job(api, made)
    assert {name: shown[name] for name in KEYS} == KEYS
    await fired(api, back_ms=HOUR, schedule=made)
    manual = (await api.client.post(f"/openapi/jobs/{made}/trigger")).json()["jobId"]
    runs = await children(api.database, made)
    assert manual in [one["id"] for one in runs]
    assert len(runs) == 2
    for one in runs:
        child = await job(api, one["id"])
        assert {name: child[name] for name in KEYS} == KEYS


async def test_a_fire_costs_the_same_with_keys(api: Door) -> None:
    # What goes on in the background would be counted too.
    for one in (api.parts.pulse, api.parts.clock_loop, api.parts.limits):
        await one.stop()
    costs = []
    for keys in ({}, KEYS):
        made = await schedule_of(api, **keys)
        await fired(api, back_ms=HOUR, schedule=made)
        with counted(api.database) as statements:
            await fired(api, back_ms=HOUR, schedule=made)
        costs.append(len(statements))
    assert costs[0] == costs[1]


async def test_fires_of_two_schedules_with_one_key_run_one_after_the_other(api: Door) -> None:
    one, two = await schedule_of(api, **ONE), await schedule_of(api, **ONE)
    for made in (one, two):
        await fired(api, back_ms=HOUR, schedule=made)
    term = await new_term(api.database)
    (run,) = await claim_waiting(api.database, term)
    (blocked,) = await in_status(api.database, JobStatus.BLOCKED)
    answer = (await api.client.get(f"/openapi/jobs/{blocked}/explain")).json()
    assert answer["reasons"][0]["code"] == "concurrency_limit"
    assert answer["reasons"][0]["details"]["holders"] == [run.job_id]
    await settled(api.database, ending(run, ExecutionStatus.SUCCEEDED))
    assert await in_status(api.database, JobStatus.WAITING) == [blocked]


async def test_a_fire_that_its_key_blocks_goes_on_and_the_next_one_waits_for_it(api: Door) -> None:
    term = await new_term(api.database)
    await api.submitted(**ONE)
    (holder,) = await claim_waiting(api.database, term)
    made = await schedule_of(api, **ONE, overlapPolicy="queue")
    await fired(api, back_ms=HOUR, schedule=made)
    assert await claim_waiting(api.database, await new_term(api.database)) == []
    await fired(api, back_ms=HOUR, schedule=made)
    first, second = [one["id"] for one in await children(api.database, made)]
    assert await in_status(api.database, JobStatus.BLOCKED) == [first, second]
    # The first waits for its key, the second for the first.
    assert (await slots(api.database))[1] == [first]
    codes = []
    for one in (first, second):
        answer = (await api.client.get(f"/openapi/jobs/{one}/explain")).json()
        codes.append(answer["reasons"][0]["code"])
    assert codes == ["concurrency_limit", "blocked"]
    await settled(api.database, ending(holder, ExecutionStatus.SUCCEEDED))
    assert await in_status(api.database, JobStatus.WAITING) == [first]
    (run,) = await claim_waiting(api.database, await new_term(api.database))
    await settled(api.database, ending(run, ExecutionStatus.SUCCEEDED))
    assert await in_status(api.database, JobStatus.WAITING) == [second]
    (run,) = await claim_waiting(api.database, await new_term(api.database))
    await settled(api.database, ending(run, ExecutionStatus.SUCCEEDED))
    assert await rows_of(api.database, "SELECT * FROM concurrency_slot") == []


async def test_a_patch_changes_the_keys_of_later_fires(api: Door) -> None:
    made = await schedule_of(api, **KEYS)
    await fired(api, back_ms=HOUR, schedule=made)
    await patch(api, made, concurrencyKey="other", concurrencyLimit=7, rateKey=None)
    await fired(api, back_ms=HOUR, schedule=made)
    (child,) = await children(api.database, made)
    assert child["concurrency_key"] == "k"
    term = await new_term(api.database)
    (run,) = await claimed(api.database, [child["id"]], term=term)
    await settled(api.database, ending(run, ExecutionStatus.SUCCEEDED))
    await fired(api, back_ms=HOUR, schedule=made)
    newest = (await children(api.database, made))[-1]
    names = ("concurrency_key", "concurrency_limit", "rate_key", "rate_per_second")
    assert [newest[name] for name in names] == ["other", 7, None, None]
    told = (await api.client.get("/openapi/audit")).json()["items"][0]
    assert told["before"] == {
        "concurrencyKey": "k",
        "concurrencyLimit": 1,
        "rateKey": "r",
        "ratePerSecond": 100.0,
    }
    assert told["after"]["concurrencyKey"] == "other"
    assert told["after"]["rateKey"] is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrencyKey": "k"},
        {"concurrencyLimit": 2},
        {"concurrencyKey": None, "concurrencyLimit": 2},
        {"rateKey": "k", "ratePerSecond": None},
        {"ratePerSecond": 1},
    ],
)
async def test_half_a_key_is_refused_by_a_patch(api: Door, wrong: dict[str, Any]) -> None:
    made = await api.submitted(delayMs=60_000, **KEYS)
    answer = await api.client.patch(f"/openapi/jobs/{made}", json=wrong, headers={"If-Match": "*"})
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed")


async def test_a_job_that_leaves_a_key_which_had_let_it_go_lets_the_next_begin(api: Door) -> None:
    term = await new_term(api.database)
    first, second, third = [await api.submitted(**ONE) for _ in range(3)]
    (run,) = await claim_waiting(api.database, term)
    assert run.job_id == first
    await settled(api.database, ending(run, ExecutionStatus.SUCCEEDED))
    assert await in_status(api.database, JobStatus.WAITING) == [second]
    changed = (await patch(api, second, concurrencyKey=None)).json()
    assert changed["concurrencyKey"] is None
    assert changed["concurrencyLimit"] is None
    assert await in_status(api.database, JobStatus.WAITING) == [second, third]
    assert len(await claim_waiting(api.database, term)) == 2


async def test_a_job_with_another_rate_key_asks_that_one_for_its_time(api: Door) -> None:
    rate = {"rateKey": "r", "ratePerSecond": 0.1}
    term = await new_term(api.database)
    _, second = [await api.submitted(**rate) for _ in range(2)]
    assert len(await claim_waiting(api.database, term)) == 1
    due = (await job(api, second))["nextTriggerTime"]
    changed = (await patch(api, second, rateKey="r2", ratePerSecond=0.1)).json()
    assert changed["nextTriggerTime"] == due
    await patch(api, second, delayMs=0)
    (run,) = await claim_waiting(api.database, term)
    assert run.job_id == second
    rows = await rows_of(api.database, "SELECT name FROM limit_key ORDER BY name")
    assert [row["name"] for row in rows] == ["r", "r2"]
