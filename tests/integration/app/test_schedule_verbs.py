"""What is asked of a schedule that is there: pause, resume, PATCH, trigger, cancel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from app.jobs.schedule_verbs import ManualFire, Outcome, ScheduleVerbs
from app.lifecycle.moves.backfill import NewBackfill, insert_backfill
from app.lifecycle.moves.fire import lock_due
from app.lifecycle.moves.guard import Asked, lock_job
from app.lifecycle.states import JobStatus
from app.lifecycle.token import new_token
from app.plumbing.bus import ENDED, WAKE, Signal
from app.plumbing.times import rfc3339
from app.schedules.decide import DEFAULT_SPACING_MS, spread_ms_of
from app.schedules.spawn import fire_locked
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
    patch,
    schedule_of,
    skips,
)
from tests.support.engines import Engine


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    async with door(migrated_engine) as opened:
        yield opened


async def test_pause_puts_on_record_what_is_missed(api: Door) -> None:
    made = await schedule_of(api)
    assert (await api.client.post(f"/openapi/jobs/{made}/pause")).json()["status"] == "PAUSED"
    await moved_back(api.database, made, 5 * HOUR)
    assert await fired(api) == 0
    answer = await api.client.post(f"/openapi/jobs/{made}/resume")
    assert answer.json()["status"] == "SCHEDULED", answer.text
    (row,) = await skips(api.database, made)
    assert (row["count"], row["reason"]) == (5, "paused")
    assert await fired(api) == 0
    await api.client.post(f"/openapi/jobs/{made}/pause")
    await moved_back(api.database, made, 3 * HOUR)
    again = await api.client.post(f"/openapi/jobs/{made}/resume", json={"missed": "catchUp"})
    assert again.status_code == 200
    await fired(api)
    assert len(await children(api.database, made)) == 1
    assert [one["reason"] for one in await skips(api.database, made)] == ["paused", "misfire_once"]
    task = await api.submitted()
    await api.client.post(f"/openapi/jobs/{task}/pause")
    refused = await api.client.post(f"/openapi/jobs/{task}/resume", json={"missed": "skip"})
    assert refused.status_code == 422
    resumed = await api.client.post(f"/openapi/jobs/{task}/resume", json={})
    assert (resumed.status_code, resumed.json()["status"]) == (200, "WAITING")


async def test_patch_finds_the_next_fire_anew_and_loses_none_before(api: Door) -> None:
    made = await schedule_of(api, overlapPolicy="allow", misfirePolicy="all")
    await moved_back(api.database, made, 2 * HOUR)
    answer = await patch(api, made, intervalMs=10 * HOUR, priority=9, params={"n": 1})
    assert answer.status_code == 200, answer.text
    assert answer.json()["schedule"]["intervalMs"] == 10 * HOUR
    before = await children(api.database, made)
    assert len(before) == 2
    assert await fired(api) == 0
    due = await value_of(
        api.database,
        f"SELECT next_trigger_time - {api.database.now_ms} FROM job_info WHERE id = :id",
        id=made,
    )
    assert 9 * HOUR < due <= 10 * HOUR
    await fired(api, back_ms=10 * HOUR, schedule=made)
    last = (await children(api.database, made))[-1]
    assert (last["priority"], last["params"]) == (9, '{"n":1}')
    for fields, code in (
        ({"cronExpr": "* * * * *"}, 422),
        ({"runAt": "2030-01-01T00:00:00Z"}, 422),
        ({"intervalMs": 5}, 422),
        ({"endAt": "2020-01-01T00:00:00Z"}, 422),
        ({"misfirePolicy": "once", "misfireCap": 2}, 422),
        ({"misfirePolicy": "once"}, 200),
        ({"maxFires": 1}, 200),
    ):
        answer = await patch(api, made, **fields)
        assert answer.status_code == code, (fields, answer.text)
    await fired(api)
    assert (await job(api, made))["status"] == "SUCCEEDED"
    task = await api.submitted()
    refused = await patch(api, task, overlapPolicy="skip")
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["pointer"] == "/overlapPolicy"


async def test_patch_of_a_paused_schedule_puts_the_past_on_record(api: Door) -> None:
    minute = (datetime.now(UTC).minute + 30) % 60
    made = await schedule_of(api, cronExpr=f"{minute} * * * *")
    await api.client.post(f"/openapi/jobs/{made}/pause")
    await moved_back(api.database, made, 3 * HOUR)
    answer = await patch(api, made, cronExpr="0 0 0 ? * MON", timezone="Asia/Tokyo")
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "PAUSED"
    assert answer.json()["schedule"]["cronDialect"] == "quartz"
    assert [(one["count"], one["reason"]) for one in await skips(api.database, made)] == [
        (3, "paused")
    ]


@pytest.mark.parametrize("paused", [False, True])
async def test_patch_decides_the_fires_that_jitter_puts_off(api: Door, paused: bool) -> None:
    """A fire whose nominal time is over, and whose due time is not, is not forgotten."""
    made = await schedule_of(api, jitterMs=24 * HOUR, overlapPolicy="allow", misfirePolicy="all")
    row = (await rows_of(api.database, "SELECT * FROM job_info WHERE id = :id", id=made))[0]
    missed = 1 + spread_ms_of(row) // (2 * HOUR)
    if paused:
        await api.client.post(f"/openapi/jobs/{made}/pause")
    await moved_back(api.database, made, missed * HOUR)
    answer = await patch(api, made, jitterMs=0)
    assert answer.status_code == 200, answer.text
    ran = len(await children(api.database, made))
    passed = sum(one["count"] for one in await skips(api.database, made))
    assert (ran, passed) == ((0, missed) if paused else (missed, 0))


@pytest.mark.parametrize("policy", ["skip", "once", "all"])
async def test_patch_takes_no_fire_for_missed_that_is_not_due_yet(api: Door, policy: str) -> None:
    made = await schedule_of(
        api,
        clientRequestId="spread",
        jitterMs=24 * HOUR,
        overlapPolicy="allow",
        misfirePolicy=policy,
    )
    row = (await rows_of(api.database, "SELECT * FROM job_info WHERE id = :id", id=made))[0]
    spread = spread_ms_of(row)
    put_off = spread // (2 * HOUR)
    assert put_off > 2
    await moved_back(api.database, made, put_off * HOUR)
    answer = await patch(api, made, jitterMs=0)
    assert answer.status_code == 200, answer.text
    assert await skips(api.database, made) == []
    runs = await children(api.database, made)
    assert len(runs) == put_off
    assert [one["next_trigger_time"] - one["nominal_time"] for one in runs] == [spread] * put_off


@pytest.mark.parametrize("overlap", ["skip", "queue", "replace"])
@pytest.mark.parametrize("busy", [False, True])
async def test_patch_neither_replaces_nor_skips_for_a_fire_that_is_not_due_yet(
    api: Door, overlap: str, busy: bool
) -> None:
    made = await schedule_of(
        api, clientRequestId="spread", jitterMs=24 * HOUR, overlapPolicy=overlap
    )
    row = (await rows_of(api.database, "SELECT * FROM job_info WHERE id = :id", id=made))[0]
    spread = spread_ms_of(row)
    put_off = spread // (2 * HOUR)
    assert put_off > 2
    if busy:
        run = (await api.client.post(f"/openapi/jobs/{made}/trigger")).json()["jobId"]
        assert await claimed(api.database, [run], term=await new_term(api.database))
    await moved_back(api.database, made, put_off * HOUR)
    assert await fired(api) == 0
    answer = await patch(api, made, endAt="2100-01-01T00:00:00Z")
    assert answer.status_code == 200, answer.text
    assert await skips(api.database, made) == []
    runs = await children(api.database, made)
    going = [one["status"] for one in runs if one["child_key"]]
    assert going == [JobStatus.RUNNING] * busy
    born = [one for one in runs if not one["child_key"]]
    assert [one["next_trigger_time"] - one["nominal_time"] for one in born] == [spread] * put_off
    first = JobStatus.BLOCKED if busy else JobStatus.WAITING
    assert [one["status"] for one in born] == [first] + [JobStatus.BLOCKED] * (put_off - 1)


async def test_patch_decides_what_is_due_of_a_schedule_that_could_not_be_planned(api: Door) -> None:
    # Half an hour away: a fire of a few seconds ago would be late, and not missed.
    minute = (datetime.now(UTC).minute + 30) % 60
    made = await schedule_of(api, cronExpr=f"{minute} * * * *", misfirePolicy="skip")
    zone = "UPDATE job_info SET timezone = :zone WHERE id = :id"
    await moved_back(api.database, made, 3 * HOUR)
    await change(api.database, zone, zone="Mars/One", id=made)
    await fired(api)
    # The dispatcher that has the PATCH knows the zone.
    await change(api.database, zone, zone="UTC", id=made)
    assert (await patch(api, made, cronExpr="0 0 * * *")).status_code == 200
    assert [(one["count"], one["reason"]) for one in await skips(api.database, made)] == [
        (3, "misfire_skip")
    ]


async def test_trigger_makes_a_run_now_once_for_each_request_id(api: Door) -> None:
    made = await schedule_of(api, params={"a": 1}, labels={"k": "v"})
    path = f"/openapi/jobs/{made}/trigger"
    first = await api.client.post(path, json={"params": {"b": "z" * 2000}, "clientRequestId": "x"})
    assert first.status_code == 200, first.text
    child = first.json()
    assert (child["parentId"], child["clientRequestId"]) == (made, "x")
    assert child["params"] == {"b": "z" * 2000}
    again = await api.client.post(path, json={"params": {"b": "z" * 2000}, "clientRequestId": "x"})
    assert again.json()["jobId"] == child["jobId"]
    other = await api.client.post(path, json={"params": {"b": 3}, "clientRequestId": "x"})
    assert other.status_code == 409
    plain = await api.client.post(path)
    assert plain.json()["params"] == {"a": 1}
    assert plain.json()["jobId"] != child["jobId"]
    keys = {one["child_key"] for one in await children(api.database, made)}
    assert "manual:x" in keys
    # A fire finds that a run goes on.
    await fired(api, back_ms=HOUR, schedule=made)
    assert len(await children(api.database, made)) == 2
    assert [one["reason"] for one in await skips(api.database, made)] == ["overlap"]
    task = await api.submitted()
    refused = await api.client.post(f"/openapi/jobs/{task}/trigger", json={"clientRequestId": "y"})
    assert refused.status_code == 422


async def test_a_repeated_trigger_is_its_run_whatever_became_of_the_schedule(api: Door) -> None:
    made = await schedule_of(api)
    path = f"/openapi/jobs/{made}/trigger"
    first = await api.client.post(path, json={"clientRequestId": "x"}, headers={"If-Match": '"0"'})
    assert first.status_code == 200, first.text
    changed = await api.client.patch(
        f"/openapi/jobs/{made}", json={"priority": 9}, headers={"If-Match": "*"}
    )
    assert changed.status_code == 200, changed.text
    for _ in range(2):
        again = await api.client.post(
            path, json={"clientRequestId": "x"}, headers={"If-Match": '"0"'}
        )
        assert (again.status_code, again.json()["jobId"]) == (200, first.json()["jobId"])
        other = await api.client.post(path, json={}, headers={"If-Match": '"0"'})
        assert other.status_code in (409, 412)
        await api.client.post(f"/openapi/jobs/{made}/cancel")
    assert len(await children(api.database, made)) == 1


async def test_children_whose_keys_are_no_plain_text_are_found_page_by_page(api: Door) -> None:
    made = await schedule_of(api, overlapPolicy="allow")
    ids = ["a\u00a0b", "\u3000", "\U0001f469\u200d\U0001f4bb", "plain"]
    for one in ids:
        answer = await api.client.post(
            f"/openapi/jobs/{made}/trigger", json={"clientRequestId": one}
        )
        assert answer.status_code == 200, answer.text
    found: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        answer = await api.client.get(
            f"/openapi/jobs/{made}/children", params={"limit": 1, **cursor}
        )
        assert answer.status_code == 200, answer.text
        found += [one["clientRequestId"] for one in answer.json()["items"]]
        if answer.json()["nextCursor"] is None:
            break
        cursor = {"cursor": answer.json()["nextCursor"]}
    assert sorted(found) == sorted(ids)


async def test_a_fixed_delay_whose_start_is_put_off_waits_for_it(api: Door) -> None:
    made = await schedule_of(api, intervalMs=HOUR, intervalMode="fixedDelay")
    await fired(api, back_ms=HOUR, schedule=made)
    (child,) = await children(api.database, made)
    now = await value_of(api.database, f"SELECT {api.database.now_ms}")
    start = now + 50 * HOUR
    answer = await api.client.patch(
        f"/openapi/jobs/{made}", json={"startAt": rfc3339(start)}, headers={"If-Match": "*"}
    )
    assert answer.status_code == 200, answer.text
    await end_child(api.database, child["id"])
    await change(
        api.database, "UPDATE job_info SET next_trigger_time = :now WHERE id = :id", now=1, id=made
    )
    await fired(api)
    assert len(await children(api.database, made)) == 1
    assert (await job(api, made))["nextTriggerTime"] == rfc3339(start)


async def test_patch_tells_of_the_last_fire_that_it_comes_too_late_for(api: Door) -> None:
    made = await schedule_of(api, maxFires=1)
    await moved_back(api.database, made, HOUR)
    told: list[Signal] = []
    for topic in (WAKE, ENDED):
        api.parts.ground.bus.subscribe(topic, told.append)
    refused = await patch(api, made, endAt="2100-01-01T00:00:00Z")
    assert (refused.status_code, refused.json()["jobStatus"]) == (409, "SUCCEEDED")
    (child,) = await children(api.database, made)
    wake = [child["queue_id"], child["priority"], child["next_trigger_time"]]
    assert told == [[wake], [[made, ""]]]


async def next_of(api: Door, schedule: int) -> Any:
    return await value_of(
        api.database, "SELECT next_trigger_time FROM job_info WHERE id = :id", id=schedule
    )


async def test_patch_of_a_fixed_delay_leaves_its_next_time_unless_it_is_told(api: Door) -> None:
    made = await schedule_of(api, intervalMs=HOUR, intervalMode="fixedDelay")
    await moved_back(api.database, made, HOUR // 2)
    due = await next_of(api, made)
    answer = await patch(api, made, endAt="2100-01-01T00:00:00Z")
    assert answer.status_code == 200, answer.text
    assert await next_of(api, made) == due
    refused = await patch(api, made, endAt=rfc3339(due - 1))
    assert refused.json()["code"] == "schedule_never_fires"
    assert (await patch(api, made, intervalMs=2 * HOUR)).status_code == 200
    assert await next_of(api, made) > due + HOUR


@pytest.mark.parametrize("change_", [{"endAt": "2100-01-01T00:00:00Z"}, {"intervalMs": 2 * HOUR}])
async def test_patch_of_a_fixed_delay_runs_what_was_due(api: Door, change_: dict[str, Any]) -> None:
    made = await schedule_of(api, intervalMs=HOUR, intervalMode="fixedDelay")
    await moved_back(api.database, made, HOUR + HOUR // 2)
    answer = await patch(api, made, **change_)
    assert answer.status_code == 200, answer.text
    (child,) = await children(api.database, made)
    assert await next_of(api, made) is None
    await end_child(api.database, child["id"])
    finished = (await children(api.database, made))[0]["finished_at"]
    assert await next_of(api, made) == finished + change_.get("intervalMs", HOUR)


@pytest.mark.parametrize("change_", [{"endAt": "2100-01-01T00:00:00Z"}, {"intervalMs": 2 * HOUR}])
async def test_patch_of_a_paused_fixed_delay_leaves_what_is_due_to_its_resume(
    api: Door, change_: dict[str, Any]
) -> None:
    made = await schedule_of(api, intervalMs=HOUR, intervalMode="fixedDelay")
    await moved_back(api.database, made, HOUR + HOUR // 2)
    await api.client.post(f"/openapi/jobs/{made}/pause")
    assert (await patch(api, made, **change_)).status_code == 200
    assert await children(api.database, made) == []
    resumed = await api.client.post(f"/openapi/jobs/{made}/resume", json={"missed": "catchUp"})
    assert resumed.status_code == 200, resumed.text
    assert len(await children(api.database, made)) == 1
    assert await fired(api) == 0


async def test_what_waits_runs_once_its_schedule_lets_runs_overlap(api: Door) -> None:
    made = await schedule_of(api, overlapPolicy="queue")
    for _ in range(2):
        await fired(api, back_ms=HOUR, schedule=made)
    assert [one["status"] for one in await children(api.database, made)] == [
        JobStatus.WAITING,
        JobStatus.BLOCKED,
    ]
    answer = await api.client.patch(
        f"/openapi/jobs/{made}", json={"overlapPolicy": "allow"}, headers={"If-Match": "*"}
    )
    assert answer.status_code == 200, answer.text
    assert {one["status"] for one in await children(api.database, made)} == {JobStatus.WAITING}


async def test_cancel_leaves_the_children_unless_told(api: Door) -> None:
    for flag in (False, True):
        made = await schedule_of(api, overlapPolicy="allow", callbackUrl="http://203.0.113.9/h")
        await fired(api, back_ms=HOUR, schedule=made)
        await fired(api, back_ms=HOUR, schedule=made)
        path = f"/openapi/jobs/{made}/cancel" + ("?children=true" if flag else "")
        answer = await api.client.post(path)
        assert answer.json()["status"] == "CANCELLED"
        states = {one["status"] for one in await children(api.database, made)}
        assert states == {JobStatus.CANCELLED if flag else JobStatus.WAITING}
        assert await fired(api, back_ms=HOUR, schedule=made) == 0
    assert await value_of(api.database, "SELECT COUNT(*) FROM callback_delivery") == 2


@pytest.mark.parametrize("paused", [False, True])
async def test_a_schedule_whose_zone_is_gone_is_cured_by_a_patch(api: Door, paused: bool) -> None:
    made = await schedule_of(api, cronExpr="0 * * * *")
    if paused:
        await api.client.post(f"/openapi/jobs/{made}/pause")
    await moved_back(api.database, made, 2 * HOUR)
    await change(api.database, "UPDATE job_info SET timezone = 'Mars/One' WHERE id = :id", id=made)
    if paused:
        refused = await api.client.post(f"/openapi/jobs/{made}/resume")
        assert refused.json()["errors"][0]["pointer"] == "/timezone"
    answer = await patch(api, made, timezone="Europe/Paris")
    assert answer.status_code == 200, answer.text
    assert answer.json()["schedule"]["timezone"] == "Europe/Paris"
    if paused:
        assert (await api.client.post(f"/openapi/jobs/{made}/resume")).status_code == 200
    await fired(api, back_ms=HOUR, schedule=made)
    assert len(await children(api.database, made)) == 1


async def test_what_is_repeated_after_an_unknown_commit_is_done_once(api: Door) -> None:
    """`Database.write` runs its work again when a commit's answer was lost."""
    database = api.database
    made = await schedule_of(api, misfirePolicy="once")
    await moved_back(database, made, 5 * HOUR)
    term, token = await new_term(database), new_token()

    async def fire(connection: AsyncConnection) -> int:
        rows = await lock_due(connection, database, [made])
        if rows:
            await fire_locked(connection, database, rows, grace_ms=1, token=token, term=term)
        return len(rows)

    assert [await database.write(fire) for _ in range(2)] == [1, 0]
    assert len(await children(database, made)) == 1
    assert [one["count"] for one in await skips(database, made)] == [4]

    verbs = ScheduleVerbs(api.parts.ground)
    now = int(await value_of(database, f"SELECT {database.now_ms}"))
    for request_id in (None, "lost"):
        manual = ManualFire(f"manual:{request_id}", now, new_token(), request_id, "{}", True, "1")
        told = []
        for _ in range(2):
            outcome = Outcome()

            async def trigger(
                connection: AsyncConnection,
                manual: ManualFire = manual,
                outcome: Outcome = outcome,
            ) -> None:
                asked = Asked(made, 0, new_token())
                job = await lock_job(connection, database, asked, "trigger")
                assert isinstance(job, RowMapping)
                await verbs.trigger(connection, job, asked, manual, outcome)

            await database.write(trigger)
            told.append((outcome.child_id, outcome.is_new))
        assert told[0] == told[1]
        assert told[0][1]
    assert len(await children(database, made)) == 3
    new = NewBackfill(made, new_token(), 1, 2, 1)
    first, again = [
        await database.write(lambda connection: insert_backfill(connection, database, new))
        for _ in range(2)
    ]
    assert first["id"] == again["id"]


@pytest.mark.parametrize("overlap", ["allow", "skip"])
@pytest.mark.parametrize(
    ("policy", "runs", "passed"),
    [
        ("skip", 0, {"misfire_skip": 3}),
        ("once", 1, {"misfire_once": 2}),
        ("all", 2, {"over_cap": 1}),
    ],
)
async def test_what_a_pause_missed_is_made_up_for_by_the_policy_however_short_it_was(
    migrated_engine: Engine, policy: str, overlap: str, runs: int, passed: dict[str, int]
) -> None:
    """The pause is shorter than what is late without being missed after an outage."""
    async with door(migrated_engine, misfire_grace_seconds=300) as api:
        cap = {"misfireCap": 2} if policy == "all" else {}
        made = await schedule_of(
            api, intervalMs=MINUTE, misfirePolicy=policy, overlapPolicy=overlap, **cap
        )
        await api.client.post(f"/openapi/jobs/{made}/pause")
        await moved_back(api.database, made, 3 * MINUTE + MINUTE // 2)
        told: list[Signal] = []
        api.parts.ground.bus.subscribe(WAKE, told.append)
        resumed = await api.client.post(f"/openapi/jobs/{made}/resume", json={"missed": "catchUp"})
        assert (resumed.status_code, resumed.json()["status"]) == (200, "SCHEDULED")
        born = await children(api.database, made)
        assert len(born) == runs
        assert bool(told) == bool(runs)
        row = (await rows_of(api.database, "SELECT * FROM job_info WHERE id = :id", id=made))[0]
        if runs:
            assert born[-1]["nominal_time"] == row["trigger_ts"], "the latest runs"
        due = [one["next_trigger_time"] for one in born]
        assert due == [due[0] + number * DEFAULT_SPACING_MS for number in range(runs)]
        ledger = await skips(api.database, made)
        assert {one["reason"]: one["count"] for one in ledger} == passed
        assert row["next_trigger_time"] == row["trigger_ts"] + MINUTE


async def test_a_pause_that_missed_the_last_fires_of_a_schedule_ends_it(api: Door) -> None:
    made = await schedule_of(api, maxFires=1)
    await api.client.post(f"/openapi/jobs/{made}/pause")
    await moved_back(api.database, made, HOUR)
    told: list[Signal] = []
    api.parts.ground.bus.subscribe(ENDED, told.append)
    resumed = await api.client.post(f"/openapi/jobs/{made}/resume", json={"missed": "catchUp"})
    assert (resumed.status_code, resumed.json()["status"]) == (200, "SUCCEEDED")
    assert told == [[[made, ""]]]
    assert len(await children(api.database, made)) == 1


@pytest.mark.parametrize("jitter", [0, 24 * HOUR])
@pytest.mark.parametrize("paused", [False, True])
async def test_cancel_puts_on_record_what_nobody_has_decided(
    api: Door, paused: bool, jitter: int
) -> None:
    made = await schedule_of(api, jitterMs=jitter)
    if paused:
        await api.client.post(f"/openapi/jobs/{made}/pause")
    await moved_back(api.database, made, 3 * HOUR)
    await api.client.post(f"/openapi/jobs/{made}/cancel")
    answer = await api.client.post(f"/openapi/jobs/{made}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (200, "CANCELLED")
    (row,) = (await api.client.get(f"/openapi/jobs/{made}/skips")).json()["items"]
    assert (row["count"], row["reason"]) == (3, "paused" if paused else "cancelled")
    assert row["to"] == answer.json()["schedule"]["decidedUntil"]
    assert await children(api.database, made) == []


async def test_cancel_leaves_no_record_of_what_is_no_fire(api: Door) -> None:
    idle = await schedule_of(api)
    delay = await schedule_of(api, intervalMs=HOUR, intervalMode="fixedDelay")
    ended = await schedule_of(api, intervalMs=HOUR, intervalMode="fixedDelay")
    late = await schedule_of(api, intervalMs=HOUR, intervalMode="fixedDelay")
    counted = await schedule_of(api, maxFires=1)
    gone = await schedule_of(api, cronExpr="0 * * * *")
    for made in (ended, late, counted, gone):
        await moved_back(api.database, made, 2 * HOUR)
    await change(
        api.database,
        "UPDATE job_info SET end_at = next_trigger_time - 1 WHERE id = :id",
        id=ended,
    )
    await change(api.database, "UPDATE job_info SET fires = 1 WHERE id = :id", id=counted)
    await change(api.database, "UPDATE job_info SET timezone = 'Mars/One' WHERE id = :id", id=gone)
    for made in (idle, delay, ended, counted, gone, late):
        answer = await api.client.post(f"/openapi/jobs/{made}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, "CANCELLED"), answer.text
        wanted = [(1, "cancelled")] if made == late else []
        assert [(one["count"], one["reason"]) for one in await skips(api.database, made)] == wanted
