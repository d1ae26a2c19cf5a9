"""Schedules as callers meet them: submitted, shown, fired, ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.jobs.digest import request_digest
from app.lifecycle.moves.fire import Fenced, fire
from app.lifecycle.moves.mend import MOST
from app.lifecycle.moves.tell_start import tell_starts
from app.lifecycle.states import ExecutionStatus, JobStatus
from app.plumbing.sealed import draw_key
from app.plumbing.times import rfc3339
from app.schedules import spawn
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
from tests.integration.app.schedule_rig import (
    HOUR,
    children,
    end_child,
    fired,
    job,
    moved_back,
    schedule_of,
    skips,
)
from tests.support.engines import Engine
from tests.support.wait import until_async


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    async with door(migrated_engine) as opened:
        yield opened


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
