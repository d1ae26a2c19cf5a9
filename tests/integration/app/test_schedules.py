"""Schedules as callers meet them: submitted, shown, fired, paused, changed, triggered, ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from app.jobs.digest import request_digest
from app.jobs.schedule_verbs import ManualFire, Outcome, ScheduleVerbs
from app.lifecycle.moves.backfill import NewBackfill, insert_backfill
from app.lifecycle.moves.fire import Fenced, fire, lock_due
from app.lifecycle.moves.guard import Asked, lock_job
from app.lifecycle.moves.mend import MOST
from app.lifecycle.moves.tell_start import tell_starts
from app.lifecycle.states import ExecutionStatus, JobStatus
from app.lifecycle.token import new_token
from app.plumbing.bus import ENDED, WAKE, Signal
from app.plumbing.database import Database
from app.plumbing.sealed import draw_key
from app.plumbing.times import rfc3339
from app.schedules import spawn
from app.schedules.decide import DEFAULT_SPACING_MS, spread_ms_of
from app.schedules.spawn import fire_locked
from tests.integration.app.rig import (
    Door,
    body_of,
    change,
    claimed,
    door,
    ending,
    new_term,
    rows_of,
    settled,
    value_of,
)
from tests.support.engines import Engine
from tests.support.wait import until_async

HOUR = 3_600_000


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    async with door(migrated_engine) as opened:
        yield opened


async def schedule_of(api: Door, **fields: Any) -> int:
    """Submit a schedule; hourly unless told otherwise."""
    given = (
        fields
        if "cronExpr" in fields or "intervalMs" in fields
        else {
            "intervalMs": HOUR,
            **fields,
        }
    )
    return await api.submitted(**given)


async def fired(api: Door, *, back_ms: int | None = None, schedule: int | None = None) -> int:
    """Fire what is due as the holder of the lock would; first move a schedule back in time."""
    if back_ms is not None:
        await moved_back(api.database, schedule or 0, back_ms)
    term = await new_term(api.database)
    found = 0
    while count := await api.parts.spawner.fire_due(term):
        found += count
    return found


async def moved_back(database: Database, schedule: int, by_ms: int) -> None:
    """Let so much time have passed since a schedule was last looked at."""
    await change(
        database,
        "UPDATE job_info SET trigger_ts = trigger_ts - :by, anchor_at = anchor_at - :by, "
        "next_trigger_time = next_trigger_time - :by, start_at = start_at - :by, "
        "skip_from = skip_from - :by WHERE id = :id",
        by=by_ms,
        id=schedule,
    )
    # Each moves to where the one before it has left: MySQL looks at every row by itself.
    in_order = "" if database.is_sqlite else " ORDER BY nominal_time"
    await change(
        database,
        f"UPDATE job_info SET nominal_time = nominal_time - :by WHERE parent_id = :id{in_order}",
        by=by_ms,
        id=schedule,
    )
    await change(
        database,
        "UPDATE schedule_skip SET from_time = from_time - :by, to_time = to_time - :by "
        "WHERE schedule_id = :id",
        by=by_ms,
        id=schedule,
    )


async def children(database: Database, schedule: int) -> list[dict[str, Any]]:
    return await rows_of(
        database,
        "SELECT * FROM job_info WHERE parent_id = :id ORDER BY nominal_time, child_key",
        id=schedule,
    )


async def skips(database: Database, schedule: int) -> list[dict[str, Any]]:
    return await rows_of(
        database,
        "SELECT * FROM schedule_skip WHERE schedule_id = :id ORDER BY from_time",
        id=schedule,
    )


async def end_child(database: Database, child: int, **fields: Any) -> None:
    term = await new_term(database)
    (run,) = await claimed(database, [child], term=term)
    await settled(database, ending(run, ExecutionStatus.SUCCEEDED, **fields))


async def job(api: Door, job_id: int) -> dict[str, Any]:
    answer = await api.client.get(f"/openapi/jobs/{job_id}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_run_and_its_callbacks_carry_the_time_that_they_stand_for(api: Door) -> None:
    """Whatever they tell, and also when a caller has cancelled the job."""
    schedule = await schedule_of(
        api,
        callbackUrl="https://93.184.216.34/x",
        callbackEvents=["started", "retrying", "succeeded", "cancelled", "failed"],
        overlapPolicy="allow",
        misfirePolicy="all",
        misfireSpacingMs=0,
    )
    await fired(api, back_ms=3 * HOUR, schedule=schedule)
    made = await children(api.database, schedule)
    runs = await claimed(
        api.database, [one["id"] for one in made], term=await new_term(api.database)
    )
    assert [run.nominal_time for run in runs] == [one["nominal_time"] for one in made]
    await api.database.write(
        lambda connection: tell_starts(
            connection, api.database, {runs[0].job_id: runs[0].execution_id}
        )
    )
    await settled(
        api.database,
        ending(runs[0], ExecutionStatus.SUCCEEDED),
        ending(runs[1], ExecutionStatus.FAILED, error_code="e"),
    )
    assert (await api.client.post(f"/openapi/jobs/{made[2]['id']}/cancel")).status_code == 200
    rows = await rows_of(api.database, "SELECT job_id, body FROM callback_delivery ORDER BY id")
    told = [(row["job_id"], json.loads(row["body"])) for row in rows]
    assert sorted(body["type"] for _, body in told) == [
        *("job.cancelled", "job.retrying", "job.started", "job.succeeded")
    ]
    nominal = {one["id"]: rfc3339(one["nominal_time"]) for one in made}
    assert all(body["data"]["nominalTime"] == nominal[job_id] for job_id, body in told)


MINUTE = 60_000


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


async def test_a_schedule_may_be_sent_with_every_field_that_it_can_have(
    migrated_engine: Engine,
) -> None:
    fields: dict[str, Any] = {
        "clientRequestId": "with-everything",
        "params": {"a": 1},
        "callbackUrl": "https://93.184.216.34/x",
        "callbackEvents": ["succeeded"],
        "callbackHeaders": {"x-key": {"secret": "y"}},
        "cronExpr": "0 9 * * *",
        "cronDialect": "unix",
        "timezone": "Europe/Berlin",
        "dstGap": "shift",
        "dstFold": "first",
        "startAt": "2035-01-01T00:00:00Z",
        "endAt": "2036-01-01T00:00:00Z",
        "maxFires": 10,
        "jitterMs": 1000,
        "misfirePolicy": "all",
        "misfireCap": 10,
        "misfireSpacingMs": 1000,
        "catchUpWindowMs": HOUR,
        "overlapPolicy": "queue",
        "priority": 5,
        "timeoutMs": 1000,
        "maxRetry": 3,
        "retryIntervalSeconds": 60,
        "retryBackoff": "fixed",
        "concurrencyKey": "k",
        "concurrencyLimit": 1,
        "rateKey": "r",
        "ratePerSecond": 1.0,
        "labels": {"a": "b"},
        "secretParams": True,
        "secretResult": True,
    }
    async with door(migrated_engine, secret_keys=draw_key()) as api:
        schedule = await api.submitted(**fields)
        again = await api.submit(**fields)
        assert (again.status_code, again.json()["jobId"]) == (200, schedule)


async def test_a_schedule_fires_at_its_time_and_its_child_inherits(api: Door) -> None:
    made = await schedule_of(
        api,
        cronExpr="0 9 * * MON-FRI",
        timezone="Asia/Tokyo",  # where no week is shorter than another
        params={"x": "y" * 3000},
        labels={"team": "a"},
        priority=7,
        maxRetry=2,
        timeoutMs=5000,
        callbackUrl="http://203.0.113.9/hook",
    )
    shown = await job(api, made)
    assert shown["status"] == "SCHEDULED"
    assert shown["nextTriggerTime"] is not None
    assert shown["schedule"]["cronDialect"] == "unix"
    assert shown["schedule"]["misfirePolicy"] == "once"
    assert shown["schedule"]["overlapPolicy"] == "skip"
    assert await fired(api) == 0
    await fired(api, back_ms=7 * 24 * HOUR, schedule=made)
    (child,) = await children(api.database, made)
    assert child["status"] == JobStatus.WAITING
    assert (child["priority"], child["max_retry"], child["timeout_ms"]) == (7, 2, 5000)
    assert child["queue_id"] > 0
    document = await job(api, child["id"])
    assert document["params"] == {"x": "y" * 3000}
    assert document["parentId"] == made
    assert document["nominalTime"] is not None
    labelled = (await api.client.get("/openapi/jobs?label=team=a")).json()["items"]
    assert {one["jobId"] for one in labelled} == {made, child["id"]}
    listed = (await api.client.get(f"/openapi/jobs/{made}/children")).json()["items"]
    assert [one["nominalTime"] for one in listed] == [document["nominalTime"]]
    passed = (await api.client.get(f"/openapi/jobs/{made}/skips")).json()["items"]
    assert [one["reason"] for one in passed] == ["misfire_once"]
    assert sum(one["count"] for one in passed) == 4


@pytest.mark.parametrize(
    ("fields", "code", "pointer"),
    [
        ({"cronExpr": "* * * * *", "runAt": "2030-01-01T00:00:00Z"}, "validation_failed", None),
        ({"cronExpr": "* * * * *", "intervalMs": 1000}, "validation_failed", None),
        ({"cronExpr": "61 * * * *"}, "cron_invalid", "/cronExpr"),
        ({"cronExpr": "0 0 31 2 *"}, "cron_invalid", "/cronExpr"),
        ({"cronExpr": "* * * * *", "timezone": "Mars/One"}, "validation_failed", "/timezone"),
        ({"cronExpr": "* * * * *", "intervalMode": "fixedRate"}, "validation_failed",
         "/intervalMode"),
        ({"cronExpr": "* * * * *", "expiresAt": "2030-01-01T00:00:00Z"}, "validation_failed",
         "/expiresAt"),
        ({"intervalMs": 99}, "validation_failed", "/intervalMs"),
        ({"intervalMs": 1000, "timezone": "UTC"}, "validation_failed", "/timezone"),
        ({"intervalMs": 1000, "dstGap": "skip"}, "validation_failed", "/dstGap"),
        ({"intervalMs": 1000, "intervalMode": "fixedDelay", "overlapPolicy": "skip"},
         "validation_failed", "/overlapPolicy"),
        ({"intervalMs": 1000, "misfireCap": 3}, "validation_failed", "/misfireCap"),
        ({"intervalMs": 1000, "misfirePolicy": "skip", "catchUpWindowMs": 3},
         "validation_failed", "/catchUpWindowMs"),
        ({"intervalMs": 1000, "startAt": "2030-01-02T00:00:00Z", "endAt": "2030-01-01T00:00:00Z"},
         "validation_failed", "/endAt"),
        ({"intervalMs": 1000, "endAt": "2020-01-01T00:00:00Z"}, "schedule_never_fires", None),
        ({"maxFires": 3}, "validation_failed", "/maxFires"),
        ({"overlapPolicy": "skip"}, "validation_failed", "/overlapPolicy"),
    ],
)  # fmt: skip
async def test_fields_that_do_not_go_together_are_refused(
    api: Door, fields: dict[str, Any], code: str, pointer: str | None
) -> None:
    answer = await api.submit(**fields)
    assert answer.status_code == 422, answer.text
    assert answer.json()["code"] == code
    if pointer is not None:
        assert answer.json()["errors"][0]["pointer"] == pointer
    assert await value_of(api.database, "SELECT COUNT(*) FROM job_info") == 0


async def test_a_repeat_is_the_same_schedule_also_after_its_end(api: Door) -> None:
    body = body_of("r", intervalMs=1000, endAt="2100-01-01T00:00:00Z")
    first = await api.client.post("/openapi/jobs", json=body)
    assert first.status_code == 202
    again = await api.client.post("/openapi/jobs", json=body)
    assert again.status_code == 200
    assert again.json()["jobId"] == first.json()["jobId"]
    other = await api.client.post("/openapi/jobs", json=body | {"intervalMs": 2000})
    assert other.status_code == 409
    assert other.json()["fields"] == ["intervalMs"]
    batch = await api.client.post("/openapi/jobs/batch", json={"jobs": [body, body_of("t")]})
    assert [one["httpStatus"] for one in batch.json()["items"]] == [200, 202]
    # A rule for new schedules does not refuse a repeat.
    late = body_of("late", intervalMs=1000, endAt="2020-01-01T00:00:00Z")
    await change(
        api.database,
        "UPDATE job_info SET client_request_id = 'late', request_digest = :digest "
        "WHERE client_request_id = 'r'",
        digest=request_digest(late),
    )
    assert (await api.client.post("/openapi/jobs", json=late)).status_code == 200


async def test_nothing_fires_twice_whoever_tries(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as one, door(migrated_engine) as other:
        made = [await schedule_of(one, overlapPolicy="allow") for _ in range(30)]
        for schedule in made:
            await moved_back(one.database, schedule, HOUR)
        term = await new_term(one.database)
        await asyncio.gather(
            *(door_.parts.spawner.fire_due(term) for door_ in (one, other, one, other))
        )
        for schedule in made:
            assert len(await children(one.database, schedule)) == 1


async def test_a_holder_whose_term_is_over_fires_nothing(api: Door) -> None:
    made = await schedule_of(api)
    await moved_back(api.database, made, HOUR)
    old = await new_term(api.database)
    await new_term(api.database)
    with pytest.raises(Fenced):
        await api.parts.spawner.fire_due(old)
    assert await children(api.database, made) == []
    assert await value_of(api.database, "SELECT version FROM job_info WHERE id = :id", id=made) == 0


async def test_a_fixed_delay_counts_from_the_end_of_the_run(api: Door) -> None:
    made = await schedule_of(api, intervalMs=HOUR, intervalMode="fixedDelay")
    await fired(api, back_ms=HOUR, schedule=made)
    (child,) = await children(api.database, made)
    assert (await job(api, made))["nextTriggerTime"] is None
    await end_child(api.database, child["id"])
    finished, due = (
        await value_of(
            api.database, "SELECT finished_at FROM job_info WHERE id = :id", id=child["id"]
        ),
        await value_of(
            api.database, "SELECT next_trigger_time FROM job_info WHERE id = :id", id=made
        ),
    )
    assert due == finished + HOUR
    await fired(api, back_ms=HOUR, schedule=made)
    first, second = await children(api.database, made)
    await api.client.post(f"/openapi/jobs/{second['id']}/cancel")
    assert (await job(api, made))["nextTriggerTime"] is not None
    assert first["id"] != second["id"]


async def test_a_fixed_delay_waits_for_a_run_that_goes_on_after_its_end(api: Door) -> None:
    made = await schedule_of(api, intervalMs=HOUR, intervalMode="fixedDelay", maxRetry=0)
    await fired(api, back_ms=HOUR, schedule=made)
    (child,) = await children(api.database, made)
    term = await new_term(api.database)
    (run,) = await claimed(api.database, [child["id"]], term=term)
    await settled(api.database, ending(run, ExecutionStatus.TIMED_OUT, stopping=True))
    for _ in range(2):
        assert (await job(api, made))["nextTriggerTime"] is None
        await api.parts.spawner.mend()
    told = (await api.client.get(f"/openapi/jobs/{made}/explain")).json()["reasons"]
    assert [one["details"]["children"] for one in told if "children" in one["details"]] == [
        [child["id"]],
        [child["id"]],
    ]
    await settled(api.database, ending(run, ExecutionStatus.TIMED_OUT))
    (child,) = await children(api.database, made)
    due = await value_of(
        api.database, "SELECT next_trigger_time FROM job_info WHERE id = :id", id=made
    )
    assert due == child["finished_at"] + HOUR


async def test_a_delay_whose_end_was_not_followed_up_is_mended(api: Door) -> None:
    made = await schedule_of(api, intervalMs=HOUR, intervalMode="fixedDelay")
    await fired(api, back_ms=HOUR, schedule=made)
    (child,) = await children(api.database, made)
    await change(
        api.database,
        "UPDATE job_info SET status = 3, finished_at = 77 WHERE id = :id",
        id=child["id"],
    )
    await api.parts.spawner.mend()
    due = await value_of(
        api.database, "SELECT next_trigger_time FROM job_info WHERE id = :id", id=made
    )
    assert due == 77 + HOUR


async def test_what_waits_is_mended_however_many_schedules_have_something_that_waits(
    api: Door,
) -> None:
    made = 2 * MOST
    await change(
        api.database,
        "UPDATE job_info SET id = :new WHERE id = :id",
        new=made,
        id=await schedule_of(api, overlapPolicy="queue"),
    )
    for _ in range(2):
        await fired(api, back_ms=HOUR, schedule=made)
    (first, second) = await children(api.database, made)
    assert second["status"] == JobStatus.BLOCKED
    # What waits of all these waits with reason: for the very run of the first.
    for number in range(MOST):
        await change(
            api.database,
            "INSERT INTO schedule_live (schedule_id, child_id, waits, backfill_id) "
            "VALUES (:schedule, :going, 0, 0), (:schedule, :waiting, 1, 0)",
            schedule=number + 1,
            going=made,
            waiting=second["id"],
        )
    await change(
        api.database,
        "UPDATE job_info SET status = 3, finished_at = 77 WHERE id = :id",
        id=first["id"],
    )
    for _ in range(2):
        await api.parts.spawner.mend()
    assert (await children(api.database, made))[1]["status"] == JobStatus.WAITING


async def test_max_fires_and_end_at_end_a_schedule(api: Door) -> None:
    made = await schedule_of(
        api,
        overlapPolicy="allow",
        misfirePolicy="all",
        maxFires=2,
        callbackUrl="http://203.0.113.9/hook",
    )
    waiting = asyncio.create_task(api.client.get(f"/openapi/jobs/{made}?wait=25"))
    await until_async(lambda: api.parts.waiters.count == 1, what="the long poll")
    await fired(api, back_ms=5 * HOUR, schedule=made)
    async with asyncio.timeout(20):
        assert (await waiting).json()["status"] == "SUCCEEDED"
    assert len(await children(api.database, made)) == 2
    shown = await job(api, made)
    assert (shown["status"], shown["nextTriggerTime"]) == ("SUCCEEDED", None)
    assert shown["finishedAt"] is not None
    assert shown["schedule"]["fires"] == 2
    assert await value_of(api.database, "SELECT COUNT(*) FROM callback_delivery") == 0
    ending_one = await schedule_of(api, overlapPolicy="allow")
    await change(
        api.database,
        "UPDATE job_info SET end_at = next_trigger_time - :back WHERE id = :id",
        id=ending_one,
        back=HOUR,
    )
    await fired(api, back_ms=2 * HOUR, schedule=ending_one)
    assert (await job(api, ending_one))["status"] == "SUCCEEDED"


async def test_skip_passes_over_while_a_run_goes_on(api: Door) -> None:
    made = await schedule_of(api)
    for _ in range(4):
        await fired(api, back_ms=HOUR, schedule=made)
    (child,) = await children(api.database, made)
    (row,) = await skips(api.database, made)
    assert (row["count"], row["reason"]) == (3, "overlap")
    assert row["to_time"] - row["from_time"] == 2 * HOUR
    await end_child(api.database, child["id"])
    await fired(api, back_ms=HOUR, schedule=made)
    assert len(await children(api.database, made)) == 2


async def test_queue_lets_one_wait_until_the_run_has_ended(api: Door) -> None:
    made = await schedule_of(api, overlapPolicy="queue")
    for _ in range(4):
        await fired(api, back_ms=HOUR, schedule=made)
    first, second = await children(api.database, made)
    assert (first["status"], second["status"]) == (JobStatus.WAITING, JobStatus.BLOCKED)
    (row,) = await skips(api.database, made)
    assert (row["count"], row["reason"]) == (2, "overlap")
    await end_child(api.database, first["id"])
    assert [one["status"] for one in await children(api.database, made)] == [
        JobStatus.SUCCEEDED,
        JobStatus.WAITING,
    ]


async def test_what_waits_is_freed_when_an_end_was_not_followed_up(api: Door) -> None:
    made = await schedule_of(api, overlapPolicy="queue")
    for _ in range(2):
        await fired(api, back_ms=HOUR, schedule=made)
    first, second = await children(api.database, made)
    await change(
        api.database,
        "UPDATE job_info SET status = 2, finished_at = 1 WHERE id = :id",
        id=first["id"],
    )
    await api.parts.spawner.mend()
    assert (await children(api.database, made))[1]["status"] == JobStatus.WAITING
    assert second["status"] == JobStatus.BLOCKED


async def test_replace_cancels_the_run_and_waits_until_it_has_stopped(api: Door) -> None:
    made = await schedule_of(api, overlapPolicy="replace", callbackUrl="http://203.0.113.9/hook")
    await fired(api, back_ms=HOUR, schedule=made)
    (first,) = await children(api.database, made)
    term = await new_term(api.database)
    (run,) = await claimed(api.database, [first["id"]], term=term)
    await fired(api, back_ms=HOUR, schedule=made)
    first, second = await children(api.database, made)
    assert (first["status"], second["status"]) == (JobStatus.CANCELLED, JobStatus.BLOCKED)
    assert "took its place" in first["error_message"]
    assert await value_of(api.database, "SELECT COUNT(*) FROM callback_delivery") == 1
    # Its worker says that the run is over.
    await settled(api.database, ending(run, ExecutionStatus.CANCELLED))
    assert (await children(api.database, made))[1]["status"] == JobStatus.WAITING
    # One that has not begun is replaced at once.
    await fired(api, back_ms=HOUR, schedule=made)
    assert [one["status"] for one in await children(api.database, made)] == [
        JobStatus.CANCELLED,
        JobStatus.CANCELLED,
        JobStatus.WAITING,
    ]


async def test_replace_waits_for_a_timed_out_run_of_a_job_that_would_try_again(api: Door) -> None:
    made = await schedule_of(api, overlapPolicy="replace", maxRetry=3)
    await fired(api, back_ms=HOUR, schedule=made)
    (first,) = await children(api.database, made)
    term = await new_term(api.database)
    (run,) = await claimed(api.database, [first["id"]], term=term)
    # Its thread goes on, its job waits for the next attempt.
    await settled(api.database, ending(run, ExecutionStatus.TIMED_OUT, stopping=True))
    await fired(api, back_ms=HOUR, schedule=made)
    statuses = [one["status"] for one in await children(api.database, made)]
    assert statuses == [JobStatus.CANCELLED, JobStatus.BLOCKED]
    await settled(api.database, ending(run, ExecutionStatus.TIMED_OUT))
    assert (await children(api.database, made))[1]["status"] == JobStatus.WAITING


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


async def patch(api: Door, job_id: int, **fields: Any) -> Any:
    shown = await job(api, job_id)
    return await api.client.patch(
        f"/openapi/jobs/{job_id}", json=fields, headers={"If-Match": f'"{shown["revision"]}"'}
    )


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


async def test_a_retried_child_counts_as_a_run_that_goes_on(api: Door) -> None:
    made = await schedule_of(api)
    await fired(api, back_ms=HOUR, schedule=made)
    (child,) = await children(api.database, made)
    await api.client.post(f"/openapi/jobs/{child['id']}/cancel")
    await api.client.post(f"/openapi/jobs/{child['id']}/retry")
    await fired(api, back_ms=HOUR, schedule=made)
    assert len(await children(api.database, made)) == 1


async def test_schedules_are_listed_by_their_handler(api: Door) -> None:
    made = await schedule_of(api)
    listed = (await api.client.get("/openapi/jobs?handler=echo")).json()["items"]
    assert [one["jobId"] for one in listed] == [made]
    assert listed[0]["schedule"]["intervalMs"] == HOUR
    assert (await api.client.get("/openapi/jobs?status=SCHEDULED")).json()["items"] == listed


async def test_a_schedule_that_cannot_be_planned_stops_no_other(api: Door) -> None:
    broken = await schedule_of(api, cronExpr="* * * * *")
    sound = await schedule_of(api)
    await moved_back(api.database, broken, HOUR)
    await moved_back(api.database, sound, HOUR)
    await change(
        api.database, "UPDATE job_info SET timezone = 'Mars/One' WHERE id = :id", id=broken
    )
    cursor = await value_of(
        api.database, "SELECT trigger_ts FROM job_info WHERE id = :id", id=broken
    )
    await fired(api)
    assert len(await children(api.database, sound)) == 1
    # Nothing is lost: once the zone is there again, it goes on from where it was.
    assert (await job(api, broken))["status"] == "SCHEDULED"
    await change(
        api.database,
        "UPDATE job_info SET timezone = 'UTC', next_trigger_time = 1 WHERE id = :id",
        id=broken,
    )
    assert cursor == await value_of(
        api.database, "SELECT trigger_ts FROM job_info WHERE id = :id", id=broken
    )
    await fired(api)
    assert sum(one["count"] for one in await skips(api.database, broken)) in {59, 60}


async def test_a_schedule_whose_fire_fails_stops_no_other(
    api: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [await schedule_of(api) for _ in range(5)]
    for one in made:
        await moved_back(api.database, one, HOUR)
    broken = made[2]

    async def failing(connection: Any, database: Any, fires: Any, **given: Any) -> Any:
        if any(one.schedule["id"] == broken for one in fires):
            raise ValueError("it cannot be written")
        return await fire(connection, database, fires, **given)

    with monkeypatch.context() as patched:
        patched.setattr(spawn, "fire", failing)
        await fired(api)
    for one in made:
        assert len(await children(api.database, one)) == (one != broken)
    # Nothing is lost: it is looked at again, from where it was.
    await change(
        api.database, "UPDATE job_info SET next_trigger_time = 1 WHERE id = :id", id=broken
    )
    await fired(api)
    assert len(await children(api.database, broken)) == 1


async def test_an_overdue_schedule_shows_in_the_metrics(api: Door) -> None:
    made = await schedule_of(api)
    assert "oncue_schedule_overdue_seconds 0.0" in (await api.client.get("/metrics")).text
    await moved_back(api.database, made, 2 * HOUR)
    told = (await api.client.get("/metrics")).text
    (line,) = [one for one in told.splitlines() if one.startswith("oncue_schedule_overdue_")]
    assert 3600 <= float(line.split()[1]) < 7200


async def test_what_all_schedules_catch_up_on_is_spread_over_transactions(api: Door) -> None:
    made = [
        await schedule_of(
            api, intervalMs=1000, overlapPolicy="allow", misfirePolicy="all", misfireCap=1000
        )
        for _ in range(4)
    ]
    for schedule in made:
        await moved_back(api.database, schedule, HOUR)
    term = await new_term(api.database)
    assert await api.parts.spawner.fire_due(term) == 4
    assert await value_of(api.database, "SELECT COUNT(*) FROM job_info WHERE kind = 0") < 2100
    await api.parts.spawner.fire_due(term)
    for schedule in made:
        assert 1000 <= len(await children(api.database, schedule)) <= 1020


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


MINUTE = 60_000


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
