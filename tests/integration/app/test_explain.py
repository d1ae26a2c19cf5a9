"""Explain: every reason is brought about, and told by a dispatcher that does not dispatch."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from sqlalchemy import event

from app.dispatch.lock import DispatchLock
from app.dispatch.standing import Standing
from app.fleet.roster import Roster
from app.ground import Ground, lay_ground
from app.jobs.reason_codes import ReasonCode
from app.lifecycle.evidence import COUNTED_AHEAD
from app.lifecycle.moves.assign import note_running
from app.lifecycle.moves.claim import Claimed
from app.lifecycle.moves.expire import expire_jobs
from app.lifecycle.nodes import read_nodes
from app.lifecycle.states import ExecutionStatus, JobKind, JobStatus
from app.plumbing.database import Database
from app.plumbing.times import rfc3339
from app.schedules.decide import spread_ms_of
from oncue.protocol import Load, WorkerState, run_key, run_mark
from tests.integration.app.rig import (
    WORKER,
    Door,
    change,
    claimed,
    door,
    ending,
    fill,
    insert,
    new_jobs,
    new_term,
    outcome_of,
    rows_of,
    running_job,
    settings_of,
    settled,
    value_of,
)
from tests.integration.app.schedule_rig import (
    children,
    end_child,
    fired,
    moved_back,
    schedule_of,
)
from tests.support.engines import Engine, migrated
from tests.support.explained import codes_of, explained, explains
from tests.support.ports import free_port
from tests.support.wait import until_async

URL = "http://127.0.0.1:9/hook"
HOUR_MS = 3_600_000
_C = ReasonCode


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    """An API over each engine whose process does not dispatch."""
    async with door(migrated_engine) as opened:
        yield opened


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a slow machine be no Redis that does not answer."""
    monkeypatch.setattr("app.dispatch.standing.READ_SECONDS", 30.0)


@dataclass(frozen=True)
class Holder:
    """Another dispatcher, which holds the lock and knows the workers."""

    ground: Ground
    roster: Roster
    standing: Standing

    async def look(self, *trusted: str) -> None:
        """Read the workers anew, believe that some answer, and note what is known."""
        self.roster.refresh(await self.ground.database.read(read_nodes))
        for worker_id in trusted:
            self.roster.trust(worker_id)
        await self.standing.write()


@asynccontextmanager
async def other_dispatcher(
    engine: Engine, *, skew_ms: float = 0, dispatches: bool = True, holds: bool = True
) -> AsyncIterator[Holder]:
    """Run the part of a dispatcher that holds the lock and says how it sees the workers."""
    settings = settings_of(engine, no_dispatch=not dispatches, lock_seconds=60)
    ground = lay_ground(settings, internal_token="")
    lock, roster = DispatchLock(ground), Roster(ground.clock.now_ms)
    standing = Standing(ground, lock, roster)
    try:
        await ground.clock.measure()
        ground.clock.skew_ms = skew_ms
        if holds:
            lock.start()
            await until_async(lambda: lock.term, what="the lock")
        await standing.write()
        yield Holder(ground, roster, standing)
    finally:
        await standing.stop()
        await lock.stop()
        await ground.close()


@pytest.fixture
async def holder(migrated_engine: Engine, api: Door) -> AsyncIterator[Holder]:
    """The dispatcher that holds the lock, while `api` answers."""
    async with other_dispatcher(migrated_engine) as found:
        yield found


def reason(found: dict[str, Any], code: ReasonCode) -> dict[str, Any]:
    (one,) = [one for one in found["reasons"] if one["code"] == code]
    return dict(one)


async def age_beat(database: Database, milliseconds: int, worker_id: str = WORKER) -> None:
    await change(
        database,
        "UPDATE worker_node SET last_heartbeat = last_heartbeat - :age WHERE id = :id",
        age=milliseconds,
        id=worker_id,
    )


async def put(database: Database, job_id: int, kind: JobKind, status: JobStatus) -> None:
    await change(
        database,
        "UPDATE job_info SET kind = :kind, status = :status WHERE id = :id",
        kind=int(kind),
        status=int(status),
        id=job_id,
    )


@explains(_C.NOT_DUE)
async def test_a_job_of_later_says_until_when(api: Door) -> None:
    job_id = await api.submitted(delayMs=HOUR_MS)
    found = await explained(api.client, job_id)
    assert (found["jobId"], found["status"], found["attempts"]) == (job_id, "WAITING", [])
    assert codes_of(found) == [_C.NOT_DUE]
    details = reason(found, _C.NOT_DUE)["details"]
    job = (await api.client.get(f"/openapi/jobs/{job_id}")).json()
    assert details["dueAt"] == job["nextTriggerTime"]
    assert HOUR_MS - 60_000 < details["inMs"] <= HOUR_MS
    assert found["nextActions"] == ["cancel", "pause", "trigger", "change"]


@explains(_C.EXPIRES)
async def test_a_job_that_can_expire_says_when_and_an_expired_one_why_it_ended(api: Door) -> None:
    job_id = await api.submitted(delayMs=HOUR_MS, expiresAt="2199-01-01T00:00:00Z")
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.NOT_DUE, _C.EXPIRES]
    details = reason(found, _C.EXPIRES)["details"]
    assert details["expiresAt"] == "2199-01-01T00:00:00.000Z"
    await change(api.database, "UPDATE job_info SET expires_at = 1")
    await change(api.database, "UPDATE job_expiry SET look_at = 1")
    ended = await api.database.write(
        lambda connection: expire_jobs(connection, api.database, limit=10)
    )
    assert ended.job_ids == [job_id]
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.ENDED_FAILED]
    told = reason(found, _C.ENDED_FAILED)
    assert told["details"]["errorCode"] == "expired"
    assert told["details"]["retryDecision"] == "expired"
    assert told["message"] == (
        "It failed: No attempt had begun by expiresAt. Nothing begins after that."
    )


@explains(_C.RETRY_WAIT)
async def test_a_retry_says_which_attempt_failed_with_what(api: Door) -> None:
    run = await running_job(api.database, max_retry=2)
    failed = ending(
        run,
        ExecutionStatus.FAILED,
        error_code="handler_error",
        error_message="ValueError: no stock",
        retry_after_ms=HOUR_MS,
    )
    await settled(api.database, failed)
    found = await explained(api.client, run.job_id)
    assert codes_of(found) == [_C.RETRY_WAIT]
    told = reason(found, _C.RETRY_WAIT)
    assert told["message"].startswith("Attempt 1 of 3 failed: ValueError: no stock. The next one")
    assert told["details"]["executionId"] == run.execution_id
    assert told["details"]["errorCode"] == "handler_error"
    (attempt,) = found["attempts"]
    assert told["since"] == attempt["finishedAt"]
    assert attempt["error"] == {"code": "handler_error", "message": "ValueError: no stock"}
    assert "ValueError: no stock (handler_error). The next is due at" in attempt["story"]


@explains(_C.PAUSED)
async def test_a_paused_job_says_since_when(api: Door) -> None:
    job_id = await api.submitted()
    paused = (await api.client.post(f"/openapi/jobs/{job_id}/pause")).json()
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.PAUSED]
    assert reason(found, _C.PAUSED)["since"] == paused["updatedAt"]
    assert found["nextActions"] == ["cancel", "resume", "change"]


@explains(_C.BLOCKED)
async def test_a_blocked_job_names_its_parent(api: Door) -> None:
    parent, child = await api.submitted(), await api.submitted()
    await put(api.database, child, JobKind.TASK, JobStatus.BLOCKED)
    assert reason(await explained(api.client, child), _C.BLOCKED)["details"] == {}
    await change(
        api.database, "UPDATE job_info SET parent_id = :p WHERE id = :c", p=parent, c=child
    )
    details = reason(await explained(api.client, child), _C.BLOCKED)["details"]
    assert details == {"parentId": parent, "parentStatus": "WAITING"}


@explains(_C.CONCURRENCY_LIMIT)
async def test_a_job_that_waits_for_its_key_names_those_that_hold_it(api: Door) -> None:
    key = {"concurrencyKey": "customer-7", "concurrencyLimit": 2}
    ids = [await api.submitted(**key) for _ in range(3)]
    await claimed(api.database, ids, term=await new_term(api.database))
    found = await explained(api.client, ids[2])
    assert codes_of(found) == [_C.CONCURRENCY_LIMIT]
    assert reason(found, _C.CONCURRENCY_LIMIT)["details"] == {
        **key,
        "holders": ids[:2],
        "more": False,
    }
    assert "the concurrencyKey 'customer-7' at most 2 run at once" in found["summary"]
    assert found["nextActions"] == ["cancel"]


@explains(_C.RATE_LIMIT)
async def test_a_job_that_was_put_off_by_its_rate_says_until_when(api: Door) -> None:
    key = {"rateKey": "mail", "ratePerSecond": 0.01}
    ids = [await api.submitted(**key) for _ in range(2)]
    await claimed(api.database, ids, term=await new_term(api.database))
    found = await explained(api.client, ids[1])
    assert codes_of(found) == [_C.RATE_LIMIT]
    details = reason(found, _C.RATE_LIMIT)["details"]
    assert details["rateKey"] == "mail"
    assert "Runs with the rateKey 'mail' begin 0.01 a second" in found["summary"]
    assert 90_000 < details["inMs"] <= 100_000


@explains(_C.TENANT_AT_LIMIT)
async def test_a_job_of_a_tenant_with_all_its_runs_says_so(api: Door) -> None:
    limits = {"runningJobs": 1, "mayBorrow": False}
    answer = await api.client.patch("/openapi/tenants/0", json={"limits": limits})
    assert answer.status_code == 200, answer.text
    first, second = await api.submitted(), await api.submitted()
    assert _C.TENANT_AT_LIMIT not in codes_of(await explained(api.client, second))
    await claimed(api.database, [first], term=await new_term(api.database))
    found = await explained(api.client, second)
    assert reason(found, _C.TENANT_AT_LIMIT)["details"] == {**limits, "running": 1}


@explains(_C.FIRES_LATER)
async def test_a_schedule_says_when_it_fires(api: Door) -> None:
    job_id = await schedule_of(api)
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.FIRES_LATER]
    told = reason(found, _C.FIRES_LATER)
    assert told["details"]["nextFireAt"] in told["message"]


@explains(_C.FIRES_AFTER_RUN, _C.RUNS_GO_ON)
async def test_a_fixed_delay_says_which_run_it_waits_for(api: Door) -> None:
    job_id = await schedule_of(api, intervalMs=HOUR_MS, intervalMode="fixedDelay")
    await fired(api, back_ms=HOUR_MS, schedule=job_id)
    (child,) = await children(api.database, job_id)
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.FIRES_AFTER_RUN, _C.RUNS_GO_ON]
    assert found["summary"] == "It makes the next job 1 h after the end of its last one."
    assert reason(found, _C.RUNS_GO_ON)["details"]["children"] == [child["id"]]
    await end_child(api.database, child["id"])
    assert codes_of(await explained(api.client, job_id)) == [_C.FIRES_LATER]


@explains(_C.NO_FIRE_LEFT)
async def test_a_fixed_delay_whose_next_time_is_after_its_end_makes_no_more_jobs(api: Door) -> None:
    job_id = await schedule_of(api, intervalMs=HOUR_MS, intervalMode="fixedDelay")
    await change(
        api.database,
        "UPDATE job_info SET end_at = next_trigger_time - 1 WHERE id = :id",
        id=job_id,
    )
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.NO_FIRE_LEFT]
    told = reason(found, _C.NO_FIRE_LEFT)
    assert told["details"]["endAt"] in told["message"]
    shown = (await api.client.get(f"/openapi/jobs/{job_id}")).json()
    assert shown["nextTriggerTime"] is None


@explains(_C.LAST_FIRE_OVERLAPPED)
async def test_a_schedule_says_that_its_last_fire_met_a_run(api: Door) -> None:
    job_id = await schedule_of(api)
    for _ in range(3):
        await fired(api, back_ms=HOUR_MS, schedule=job_id)
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.FIRES_LATER, _C.LAST_FIRE_OVERLAPPED, _C.RUNS_GO_ON]
    told = reason(found, _C.LAST_FIRE_OVERLAPPED)
    assert (told["details"]["reason"], told["details"]["count"]) == ("overlap", 2)
    assert told["message"].endswith("did not run: another run of it went on.")
    (child,) = await children(api.database, job_id)
    await end_child(api.database, child["id"])
    await fired(api, back_ms=HOUR_MS, schedule=job_id)
    assert codes_of(await explained(api.client, job_id)) == [_C.FIRES_LATER, _C.RUNS_GO_ON]


@explains(_C.LAST_FIRE_MISSED)
async def test_a_schedule_says_that_its_last_fires_were_missed(api: Door) -> None:
    job_id = await schedule_of(api, misfirePolicy="skip")
    await fired(api, back_ms=3 * HOUR_MS + 60_000, schedule=job_id)
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.FIRES_LATER, _C.LAST_FIRE_MISSED]
    told = reason(found, _C.LAST_FIRE_MISSED)
    assert (told["details"]["reason"], told["details"]["count"]) == ("misfire_skip", 3)
    assert "Its last 3 fires (" in told["message"]


@explains(_C.LAST_FIRE_PAUSED, _C.PAUSED)
async def test_a_schedule_says_that_its_last_fires_fell_into_a_pause(api: Door) -> None:
    job_id = await schedule_of(api)
    await api.client.post(f"/openapi/jobs/{job_id}/pause")
    assert codes_of(await explained(api.client, job_id)) == [_C.PAUSED]
    await moved_back(api.database, job_id, 2 * HOUR_MS)
    await api.client.post(f"/openapi/jobs/{job_id}/resume")
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.FIRES_LATER, _C.LAST_FIRE_PAUSED]


@explains(_C.FIRED_LATE)
async def test_a_fire_that_came_late_says_by_how_much_and_why_it_still_ran(api: Door) -> None:
    job_id = await schedule_of(api, misfirePolicy="once", overlapPolicy="allow")
    await fired(api, back_ms=3 * HOUR_MS + HOUR_MS // 2, schedule=job_id)
    (child,) = await children(api.database, job_id)
    found = await explained(api.client, child["id"])
    assert codes_of(found)[-1] == _C.FIRED_LATE
    told = reason(found, _C.FIRED_LATE)
    late = child["created_at"] - child["nominal_time"]
    assert late >= HOUR_MS // 2
    assert told["details"]["lateMs"] == late
    assert told["details"]["misfirePolicy"] == "once"
    assert told["details"]["dueAt"] in told["message"]
    assert "the latest runs" in told["message"]
    # It stays so when it has ended.
    await end_child(api.database, child["id"])
    assert codes_of(await explained(api.client, child["id"])) == [
        _C.ENDED_SUCCEEDED,
        _C.FIRED_LATE,
    ]


async def test_what_was_on_time_or_asked_for_was_not_fired_late(api: Door) -> None:
    job_id = await schedule_of(api, jitterMs=HOUR_MS, overlapPolicy="allow")
    await fired(api, back_ms=3 * HOUR_MS, schedule=job_id)
    (child,) = await children(api.database, job_id)
    row = await rows_of(api.database, "SELECT * FROM job_info WHERE id = :id", id=job_id)
    due = child["nominal_time"] + spread_ms_of(row[0])
    for late, codes in ((900, set()), (1100, {_C.FIRED_LATE})):
        await change(
            api.database,
            "UPDATE job_info SET created_at = :at WHERE id = :id",
            at=due + late,
            id=child["id"],
        )
        assert set(codes_of(await explained(api.client, child["id"]))) & {_C.FIRED_LATE} == codes
    manual = (await api.client.post(f"/openapi/jobs/{job_id}/trigger")).json()["jobId"]
    await change(
        api.database,
        "UPDATE job_info SET nominal_time = nominal_time - :by WHERE id = :id",
        by=HOUR_MS,
        id=manual,
    )
    assert _C.FIRED_LATE not in codes_of(await explained(api.client, manual))
    shown = (await api.client.get(f"/openapi/jobs/{job_id}")).json()["schedule"]["decidedUntil"]
    times = {"from": rfc3339(child["nominal_time"] - HOUR_MS), "to": shown}
    asked = await api.client.post(f"/openapi/jobs/{job_id}/backfill", json=times)
    assert asked.status_code == 202, asked.text
    await api.parts.spawner.fill()
    (filled,) = [
        one
        for one in await children(api.database, job_id)
        if one["id"] not in (child["id"], manual)
    ]
    assert _C.FIRED_LATE not in codes_of(await explained(api.client, filled["id"]))
    # That an own one lies in the range too changes nothing for it.
    assert _C.FIRED_LATE in codes_of(await explained(api.client, child["id"]))


@explains(_C.CANNOT_BE_PLANNED)
async def test_a_schedule_whose_zone_is_gone_says_so(api: Door) -> None:
    job_id = await schedule_of(api, cronExpr="0 9 * * *", timezone="Europe/Berlin")
    await change(
        api.database, "UPDATE job_info SET timezone = 'Mars/One' WHERE id = :id", id=job_id
    )
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.CANNOT_BE_PLANNED]
    assert "'Mars/One'" in found["summary"]


@explains(_C.NO_FIRE_LEFT, _C.RUNS_GO_ON)
async def test_a_schedule_that_has_ended_says_why(api: Door) -> None:
    counted = await schedule_of(api, maxFires=1)
    await fired(api, back_ms=HOUR_MS, schedule=counted)
    found = await explained(api.client, counted)
    assert codes_of(found) == [_C.NO_FIRE_LEFT, _C.RUNS_GO_ON]
    assert found["summary"] == "The schedule has ended: it has made the 1 jobs of its maxFires."
    ended = await schedule_of(api)
    await change(
        api.database,
        "UPDATE job_info SET end_at = next_trigger_time - :back WHERE id = :id",
        id=ended,
        back=HOUR_MS,
    )
    await fired(api, back_ms=2 * HOUR_MS, schedule=ended)
    assert "until its endAt" in (await explained(api.client, ended))["summary"]
    cancelled = await schedule_of(api)
    await api.client.post(f"/openapi/jobs/{cancelled}/cancel")
    assert codes_of(await explained(api.client, cancelled)) == [_C.ENDED_CANCELLED]


@explains(_C.WAITS_FOR_CHILDREN)
async def test_a_group_waits_for_its_children(api: Door) -> None:
    job_id = await api.submitted()
    await put(api.database, job_id, JobKind.GROUP, JobStatus.RUNNING)
    found = await explained(api.client, job_id)
    assert (codes_of(found), found["nextActions"]) == ([_C.WAITS_FOR_CHILDREN], [])


@explains(_C.STOPPING_EXECUTION, _C.RETRY_WAIT)
async def test_a_thread_that_goes_on_keeps_the_next_attempt_back(api: Door, holder: Holder) -> None:
    run = await running_job(api.database)
    await api.beat()
    timed_out = ending(run, ExecutionStatus.TIMED_OUT, stopping=True, retry_after_ms=HOUR_MS)
    await settled(api.database, timed_out)
    found = await explained(api.client, run.job_id)
    assert codes_of(found) == [_C.RETRY_WAIT, _C.STOPPING_EXECUTION]
    await api.client.post(f"/openapi/jobs/{run.job_id}/trigger")
    found = await explained(api.client, run.job_id)
    assert codes_of(found) == [_C.STOPPING_EXECUTION]
    told = reason(found, _C.STOPPING_EXECUTION)
    assert told["details"] == {"executionId": run.execution_id, "workerId": WORKER}
    assert told["since"] == found["attempts"][0]["finishedAt"]
    await age_beat(api.database, 60_000)
    assert "silent for 1 min" in (await explained(api.client, run.job_id))["summary"]


@explains(_C.CANCELLING, _C.ENDED_CANCELLED, _C.STOPPING_EXECUTION)
async def test_a_cancel_that_the_worker_has_not_answered_is_told(api: Door) -> None:
    run = await running_job(api.database)
    await api.client.post(f"/openapi/jobs/{run.job_id}/cancel")
    found = await explained(api.client, run.job_id)
    assert codes_of(found) == [_C.ENDED_CANCELLED, _C.CANCELLING]
    assert reason(found, _C.CANCELLING)["details"]["workerId"] == WORKER
    assert found["nextActions"] == ["retry"]
    assert found["attempts"][0]["story"] == "Attempt 1 was cancelled on w."
    await api.client.post(f"/openapi/jobs/{run.job_id}/retry")
    found = await explained(api.client, run.job_id)
    assert codes_of(found) == [_C.STOPPING_EXECUTION]
    assert found["attempts"][0]["story"].endswith("A caller opened the job again.")


@explains(_C.REDIS_AWAY)
async def test_a_dispatcher_without_redis_says_so(migrated_engine: Engine) -> None:
    nobody = replace(migrated_engine, redis_url=f"redis://127.0.0.1:{free_port()}/0")
    async with door(nobody) as api:
        job_id = await api.submitted()
        await api.beat()
        found = await explained(api.client, job_id)
        assert codes_of(found) == [_C.REDIS_AWAY]
        run = await running_job(api.database)
        assert codes_of(await explained(api.client, run.job_id)) == [_C.CLAIMED_NOT_SENT]


@explains(_C.DISPATCHER_WITHOUT_LOCK)
async def test_dispatchers_that_all_serve_the_api_only_are_named(
    migrated_engine: Engine, api: Door
) -> None:
    job_id = await api.submitted()
    await api.beat()
    async with other_dispatcher(migrated_engine, dispatches=False, holds=False):
        found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.DISPATCHER_WITHOUT_LOCK]
    told = reason(found, _C.DISPATCHER_WITHOUT_LOCK)
    assert "--no-dispatch" in told["message"]
    assert {one["dispatches"] for one in told["details"]["dispatchers"]} == {False}
    async with other_dispatcher(migrated_engine, holds=False):
        assert "changes hands" in (await explained(api.client, job_id))["summary"]


@explains(_C.CLOCK_SKEW, _C.DISPATCHER_WITHOUT_LOCK)
async def test_a_clock_that_is_off_is_told_of_whoever_dispatches_or_would(
    migrated_engine: Engine, api: Door
) -> None:
    job_id = await api.submitted()
    await api.beat()
    async with other_dispatcher(migrated_engine, skew_ms=-7000, holds=False):
        found = await explained(api.client, job_id)
        assert codes_of(found) == [_C.DISPATCHER_WITHOUT_LOCK, _C.CLOCK_SKEW]
        assert "more than 5 s off" in found["summary"]
        told = reason(found, _C.CLOCK_SKEW)
        assert "7.0 s behind the database's, so it does not dispatch" in told["message"]
        assert (told["details"]["skewMs"], told["details"]["refuses"]) == (-7000, True)
    async with other_dispatcher(migrated_engine, skew_ms=1500):
        told = reason(await explained(api.client, job_id), _C.CLOCK_SKEW)
        assert (told["details"]["skewMs"], told["details"]["refuses"]) == (1500, False)


@explains(_C.NO_LIVE_WORKER)
async def test_a_handler_that_nobody_offers_is_told_with_what_is_on_offer(
    api: Door, holder: Holder
) -> None:
    job_id = await api.submitted(jobHandler="send")
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.NO_LIVE_WORKER]
    assert reason(found, _C.NO_LIVE_WORKER)["details"]["offered"] == []
    await api.beat(handlers=("echo", "sleep"))
    await api.beat("gone", handlers=("send",))
    await change(api.database, "UPDATE worker_node SET state = 'DOWN' WHERE id = 'gone#boot'")
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.NO_LIVE_WORKER]
    told = reason(found, _C.NO_LIVE_WORKER)
    assert told["details"]["offered"] == ["echo", "sleep"]
    (down,) = told["details"]["down"]
    assert (down["workerId"], down["lastHeartbeat"]) == ("gone#boot", told["since"])


@explains(_C.NO_WORKER_MATCHES_LABELS)
async def test_labels_that_no_worker_has_are_told(api: Door, holder: Holder) -> None:
    job_id = await api.submitted(labels={"worker.region": "us, east=1%", "team": "a"})
    await api.beat(labels={"region": "eu"})
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.NO_WORKER_MATCHES_LABELS]
    details = reason(found, _C.NO_WORKER_MATCHES_LABELS)["details"]
    assert details["required"] == {"region": "us, east=1%"}
    assert details["workers"] == [{"workerId": WORKER, "labels": {"region": "eu"}}]


@explains(_C.WORKERS_DRAINING)
async def test_workers_that_are_about_to_stop_are_told(api: Door, holder: Holder) -> None:
    job_id = await api.submitted()
    await api.beat(state=WorkerState.DRAINING)
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.WORKERS_DRAINING]
    assert reason(found, _C.WORKERS_DRAINING)["details"]["workers"] == [WORKER]
    # The holder was told so by a /run, which its next beat has still to say.
    await api.beat()
    holder.roster.mark_draining(WORKER)
    await holder.look(WORKER)
    holder.roster.mark_draining(WORKER)
    await holder.look(WORKER)
    assert codes_of(await explained(api.client, job_id)) == [_C.WORKERS_DRAINING]


@explains(_C.WORKER_UNREACHABLE)
async def test_workers_that_do_not_answer_are_told_by_what_the_holder_knows(
    api: Door, holder: Holder
) -> None:
    job_id = await api.submitted()
    await api.beat()
    await holder.look()  # nobody has answered it yet
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.WORKER_UNREACHABLE]
    (worker,) = reason(found, _C.WORKER_UNREACHABLE)["details"]["workers"]
    assert (worker["workerId"], worker["url"], worker["beats"]) == (
        WORKER,
        "http://127.0.0.1:9",
        True,
    )
    await holder.look(WORKER)
    await age_beat(api.database, 20_000)
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.WORKER_UNREACHABLE]
    assert reason(found, _C.WORKER_UNREACHABLE)["details"]["workers"][0]["beats"] is False


@explains(_C.ALL_FULL)
async def test_full_workers_are_told_with_the_jobs_that_come_first(
    api: Door, holder: Holder
) -> None:
    first, job_id, later = await insert(api.database, 3)
    await insert(api.database, 2, delay_ms=HOUR_MS)
    await api.beat(capacity=2, load=Load(seq=1, active=2))
    await holder.look(WORKER)
    for one, ahead in ((first, 0), (job_id, 1), (later, 2)):
        found = await explained(api.client, one)
        assert codes_of(found) == [_C.ALL_FULL]
        assert reason(found, _C.ALL_FULL)["details"] == {
            "workers": [{"workerId": WORKER, "active": 2, "capacity": 2}],
            "more": 0,
            "ahead": ahead,
            "atLeast": False,
        }
    # Between beats the holder knows better.
    holder.roster.observe(WORKER, Load(seq=2, active=1))
    await holder.standing.write()
    assert codes_of(await explained(api.client, later)) == [_C.ABOUT_TO_START]


@explains(_C.HIGHER_PRIORITY_FIRST, _C.ALL_FULL)
async def test_jobs_of_a_higher_priority_are_counted(api: Door, holder: Holder) -> None:
    await insert(api.database, 2, priority=9)
    await insert(api.database, 1, priority=6)
    await insert(api.database, 1, priority=4)
    job_id = await api.submitted(priority=5)
    await insert(api.database, 1, priority=9, delay_ms=HOUR_MS)
    await api.beat(capacity=1, load=Load(seq=1, active=1))
    await holder.look(WORKER)
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.ALL_FULL, _C.HIGHER_PRIORITY_FIRST]
    assert reason(found, _C.HIGHER_PRIORITY_FIRST)["details"] == {
        "ahead": 3,
        "atLeast": False,
        "priority": 5,
    }
    await api.beat(capacity=2, load=Load(seq=2, active=1))
    await holder.look(WORKER)
    assert codes_of(await explained(api.client, job_id)) == [_C.HIGHER_PRIORITY_FIRST]


@explains(_C.ABOUT_TO_START)
async def test_a_due_job_with_a_free_worker_is_about_to_start(api: Door, holder: Holder) -> None:
    job_id = await api.submitted()
    await api.beat()
    await holder.look(WORKER)
    found = await explained(api.client, job_id)
    assert codes_of(found) == [_C.ABOUT_TO_START]
    assert reason(found, _C.ABOUT_TO_START)["details"]["dueForMs"] >= 0


@explains(_C.CLAIMED_NOT_SENT, _C.SENT_NOT_ANSWERED)
async def test_a_claimed_job_says_whether_its_worker_answers(api: Door, holder: Holder) -> None:
    run = await running_job(api.database)
    await api.beat()
    await holder.look(WORKER)
    found = await explained(api.client, run.job_id)
    assert codes_of(found) == [_C.CLAIMED_NOT_SENT]
    assert reason(found, _C.CLAIMED_NOT_SENT)["since"] == found["attempts"][0]["claimedAt"]
    holder.roster.doubt(WORKER)
    await holder.standing.write()
    found = await explained(api.client, run.job_id)
    assert codes_of(found) == [_C.SENT_NOT_ANSWERED, _C.WORKER_UNREACHABLE]
    assert reason(found, _C.SENT_NOT_ANSWERED)["details"]["executionId"] == run.execution_id


async def noted(api: Door, run: Claimed) -> None:
    now = await api.database.now()
    await api.database.write(
        lambda connection: note_running(connection, api.database, [(run.execution_id, now)])
    )


async def listed_by_a_beat(api: Door, run: Claimed) -> None:
    await api.beat(held=[{"jobId": run.job_id, "executionId": run.execution_id}])


async def leased(api: Door, run: Claimed) -> None:
    ground = api.parts.ground
    key = run_key(ground.settings.redis_prefix, run.job_id, run.trigger_ts)
    await ground.redis.set(key, run_mark("boot", run.execution_id), px=15_000)


@pytest.mark.parametrize("take", [noted, listed_by_a_beat, leased])
@explains(_C.RUNNING)
async def test_a_run_is_known_by_its_row_its_beat_or_its_lease(
    api: Door, holder: Holder, take: Any
) -> None:
    run = await running_job(api.database, timeout_ms=5000)
    await api.beat()
    await holder.look(WORKER)
    await take(api, run)
    found = await explained(api.client, run.job_id)
    assert codes_of(found) == [_C.RUNNING]
    details = reason(found, _C.RUNNING)["details"]
    assert (details["workerId"], details["executionId"]) == (WORKER, run.execution_id)
    assert (details["timeoutMs"], details["hasEnded"]) == (5000, False)
    assert 0 <= details["lastBeatAgeMs"] < 15_000
    assert (details["leaseMs"] is not None) == (take is leased)
    assert found["nextActions"] == ["cancel"]


@explains(_C.RUNNING)
async def test_a_run_tells_how_far_it_is(api: Door) -> None:
    run = await running_job(api.database)
    await api.beat()
    await noted(api, run)
    await change(
        api.database, "UPDATE job_log SET progress = 0.4, progress_text = 'half.', progress_at = 1"
    )
    told = reason(await explained(api.client, run.job_id), _C.RUNNING)
    assert "It is 40% done (half)." in told["message"]
    assert told["details"]["progress"] == 0.4


@explains(_C.RUNNING)
async def test_an_outcome_under_the_lease_is_on_its_way(api: Door, holder: Holder) -> None:
    run = await running_job(api.database)
    await api.beat()
    await holder.look(WORKER)
    ground = api.parts.ground
    key = run_key(ground.settings.redis_prefix, run.job_id, run.trigger_ts)
    await ground.redis.set(key, f"{run_mark('boot', run.execution_id)}{{}}", px=60_000)
    found = await explained(api.client, run.job_id)
    assert reason(found, _C.RUNNING)["details"]["hasEnded"] is True
    # One of another execution of the attempt says nothing of this one.
    await ground.redis.set(key, run_mark("boot", "another"), px=60_000)
    assert codes_of(await explained(api.client, run.job_id)) == [_C.CLAIMED_NOT_SENT]


@explains(_C.RUNNING, _C.WORKER_UNREACHABLE)
async def test_a_run_whose_worker_is_silent_says_what_must_be_proven(
    api: Door, holder: Holder
) -> None:
    run = await running_job(api.database)
    await listed_by_a_beat(api, run)
    await age_beat(api.database, 60_000)
    found = await explained(api.client, run.job_id)
    assert codes_of(found) == [_C.RUNNING, _C.WORKER_UNREACHABLE]
    assert "has not beaten for 1 min" in reason(found, _C.WORKER_UNREACHABLE)["message"]
    await change(api.database, "UPDATE worker_node SET state = 'DOWN'")
    found = await explained(api.client, run.job_id)
    assert "was declared dead" in reason(found, _C.WORKER_UNREACHABLE)["message"]
    await change(api.database, "DELETE FROM worker_node")
    found = await explained(api.client, run.job_id)
    assert "is not known any more" in reason(found, _C.WORKER_UNREACHABLE)["message"]


@explains(
    _C.ENDED_SUCCEEDED,
    _C.CALLBACK_OWED,
    _C.CALLBACK_DELIVERED,
    _C.CALLBACK_GIVEN_UP,
    _C.CALLBACK_REFUSED,
)
async def test_an_end_says_what_became_of_its_callback(api: Door) -> None:
    run = await running_job(api.database, callback_url=URL)
    started = run.claimed_at
    await settled(
        api.database,
        ending(run, ExecutionStatus.SUCCEEDED, started_at=started, finished_at=started),
    )
    found = await explained(api.client, run.job_id)
    assert codes_of(found) == [_C.ENDED_SUCCEEDED, _C.CALLBACK_OWED]
    assert found["attempts"][0]["story"] == "Attempt 1 ran on w for 0 s and succeeded."
    assert found["nextActions"] == []
    told = reason(found, _C.CALLBACK_OWED)
    assert told["details"]["workerId"] == WORKER
    await change(
        api.database,
        "UPDATE callback_delivery SET owner_worker_id = NULL, last_error = 'refused', tries = 3",
    )
    told = reason(await explained(api.client, run.job_id), _C.CALLBACK_OWED)
    assert told["details"]["nextTryAt"] in told["message"]
    assert (told["details"]["tries"], told["details"]["lastError"]) == (3, "refused")
    assert "No live worker delivers callbacks" in told["message"]
    # A worker lives, but has no secret to sign with; then one that has.
    for delivers, words in (
        (False, "none of the 1 that live does"),
        (True, "Its callback is tried next at"),
    ):
        await api.beat(delivers=delivers)
        told = reason(await explained(api.client, run.job_id), _C.CALLBACK_OWED)
        assert words in told["message"]
        assert told["details"]["deliveringWorkers"] == int(delivers)
        assert ("No live worker" in told["message"]) is not delivers
    # What should have been tried long ago is not said to be tried at a time that is over.
    for owner in (None, "lost#boot"):
        await change(
            api.database,
            "UPDATE callback_delivery SET next_try_at = 1700000000000, owner_worker_id = :owner",
            owner=owner,
        )
        told = reason(await explained(api.client, run.job_id), _C.CALLBACK_OWED)
        assert "has been due since 2023-11-14T22:13:20.000Z" in told["message"]
    for status, code in (
        (1, _C.CALLBACK_DELIVERED),
        (2, _C.CALLBACK_GIVEN_UP),
        (3, _C.CALLBACK_REFUSED),
    ):
        await change(
            api.database,
            "UPDATE callback_delivery SET status = :status, ended_at = 1700000000000",
            status=status,
        )
        told = reason(await explained(api.client, run.job_id), code)
        assert told["since"] == "2023-11-14T22:13:20.000Z"


@pytest.mark.parametrize(
    ("max_retry", "end", "decision", "words"),
    [
        (0, {"error_code": "handler_error"}, "budget_used_up", "The one attempt it had is used"),
        (5, {"retryable": False, "error_code": "enough"}, "not_retryable", "no retry will help"),
        (
            5,
            {"retryable": False, "error_code": "result_too_large"},
            "not_retryable",
            "cannot be stored",
        ),
    ],
)
@explains(_C.ENDED_FAILED)
async def test_a_failure_says_why_it_was_not_tried_again(
    api: Door, max_retry: int, end: dict[str, Any], decision: str, words: str
) -> None:
    run = await running_job(api.database, max_retry=max_retry)
    failed = ending(run, ExecutionStatus.FAILED, error_message="boom", **end)
    await settled(api.database, failed)
    found = await explained(api.client, run.job_id)
    assert codes_of(found) == [_C.ENDED_FAILED]
    told = reason(found, _C.ENDED_FAILED)
    assert told["details"]["retryDecision"] == decision
    assert told["details"]["errorCode"] == end["error_code"]
    assert told["message"].startswith("It failed: boom. ")
    assert words in told["message"]
    assert words in found["attempts"][0]["story"]
    assert found["nextActions"] == ["retry"]


@explains(_C.ENDED_FAILED)
async def test_the_story_of_every_attempt_is_told(api: Door) -> None:
    database = api.database
    (job_id,) = await insert(database, max_retry=1)

    async def next_run() -> Claimed:
        (run,) = await claimed(database, [job_id], term=await new_term(database))
        return run

    refused = f"refused by {WORKER}: full"
    first = await next_run()
    await settled(database, ending(first, ExecutionStatus.RETURNED, reason=refused))
    again = await next_run()
    await settled(database, ending(again, ExecutionStatus.RETURNED))
    lost = await next_run()
    proof = "worker dead: no beat for 17 s, probe failed, leases gone"
    await settled(
        database,
        ending(
            lost,
            ExecutionStatus.LOST,
            error_code="worker_lost",
            error_message="The worker died while it ran this.",
            reason=proof,
            retry_after_ms=0,
        ),
    )
    await settled(database, ending(lost, ExecutionStatus.SUCCEEDED, result="1"))
    last = await next_run()
    await settled(
        database,
        ending(
            last,
            ExecutionStatus.TIMED_OUT,
            error_code="timeout",
            error_message="It ran for more than 5 s.",
            started_at=last.claimed_at,
            finished_at=last.claimed_at,
        ),
    )
    found = await explained(api.client, job_id)
    stories = [one["story"] for one in found["attempts"]]
    assert [one["attempt"] for one in found["attempts"]] == [2, 1, 1, 1]
    assert [one["executionId"] for one in found["attempts"]] == [
        run.execution_id for run in (last, lost, again, first)
    ]
    assert stories[0] == (
        "Attempt 2 ran on w for 0 s, until its timeout: It ran for more than 5 s (timeout). "
        "It was not tried again. All its 2 attempts are used up."
    )
    assert stories[1].startswith(
        f"Attempt 1 was lost with w ({proof}). A late report (SUCCEEDED) of it changed nothing. "
        "The next was given to w "
    )
    assert stories[2].startswith("w gave attempt 1 back; that does not count. The next was given")
    assert stories[3].startswith("w refused attempt 1 (full); that does not count. The next was")


async def test_a_long_history_is_cut_and_says_so(api: Door) -> None:
    (job_id,) = await insert(api.database, max_retry=30, retry_interval_ms=0)
    for _ in range(22):
        (run,) = await claimed(api.database, [job_id], term=await new_term(api.database))
        await settled(api.database, ending(run, ExecutionStatus.FAILED))
    found = await explained(api.client, job_id)
    assert (len(found["attempts"]), found["moreAttempts"]) == (20, True)
    assert found["attempts"][0]["attempt"] == 22


async def test_a_job_of_another_tenant_is_not_there(api: Door) -> None:
    job_id = await api.submitted()
    await change(api.database, "UPDATE job_info SET tenant_id = 1")
    for missing in (job_id, 4711):
        answer = await api.client.get(f"/openapi/jobs/{missing}/explain")
        assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found")


async def test_a_child_of_an_ended_group_offers_no_retry(api: Door) -> None:
    parent, child = await api.submitted(), await api.submitted()
    await put(api.database, parent, JobKind.GROUP, JobStatus.FAILED)
    await put(api.database, child, JobKind.TASK, JobStatus.FAILED)
    assert (await explained(api.client, child))["nextActions"] == ["retry"]
    await change(
        api.database, "UPDATE job_info SET parent_id = :p WHERE id = :c", p=parent, c=child
    )
    assert (await explained(api.client, child))["nextActions"] == []


async def test_the_notes_of_silent_dispatchers_are_forgotten(
    migrated_engine: Engine, api: Door
) -> None:
    async with other_dispatcher(migrated_engine, holds=False) as other:
        redis, prefix = other.ground.redis, other.ground.settings.redis_prefix
        key = f"{prefix}:dispatch:processes"
        old = {"name": "old:1", "dispatches": True, "term": None, "skewMs": 0, "at": 1}
        await redis.hset(key, mapping={"dead": json.dumps(old), "strange": "[]"})
        job_id = await api.submitted()
        named = (await explained(api.client, job_id))["reasons"][0]["details"]["dispatchers"]
        assert "old:1" not in [one["name"] for one in named]
        await other.standing.write()
        left = await redis.hkeys(key)
        assert not {"dead", "strange"} & set(left)
        assert other.standing._lock.token in left
    assert other.standing._lock.token not in await api.parts.ground.redis.hkeys(key)


@contextmanager
def reads_of(database: Database) -> Iterator[list[tuple[str, Any]]]:
    """Collect every statement that the database gets for reading, with its values."""
    found: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, values: Any, *_rest: Any) -> None:
        if statement.startswith("SELECT"):
            found.append((statement, values))

    engine = database._readers.sync_engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(engine, "before_cursor_execute", note)


def own_statements(found: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Leave out what the dispatcher's own loops ask meanwhile."""
    return [
        (statement, values)
        for statement, values in found
        if any(table in statement for table in ("job_", "worker_node", "callback_"))
    ]


async def prepared(database: Database, *, count: int) -> list[int]:
    """Make many due jobs, half of them due at one moment; return some of the queue's."""
    (job,) = await new_jobs(database, 1)
    await fill(database, count, status=0, queue_id=job.queue_id, priority=5)
    await fill(database, count // 4, status=0, queue_id=job.queue_id, priority=9)
    middle = 1_700_000_000_000 + count // 2
    await change(
        database,
        f"UPDATE job_info SET next_trigger_time = {middle} WHERE next_trigger_time > {middle}",
    )
    ids = [
        await value_of(database, f"SELECT {which}(id) FROM job_info WHERE priority = 5 AND {where}")
        for which, where in (
            ("MIN", "1 = 1"),
            ("MIN", f"next_trigger_time = {middle}"),
            ("MAX", "1 = 1"),
        )
    ]
    return [*ids, *(await insert(database, 1))]


async def test_mariadb_reads_few_rows_among_many_due_ones(mariadb_engine: Engine) -> None:
    async with door(migrated(mariadb_engine)) as api:
        database = api.database
        jobs = await prepared(database, count=100_000)
        await api.beat(capacity=1, load=Load(seq=1, active=1))
        for job_id in jobs:
            with reads_of(database) as seen:
                found = await explained(api.client, job_id)
            full = reason(found, _C.ALL_FULL)["details"]
            assert full["atLeast"] is True
            assert full["ahead"] >= COUNTED_AHEAD
            statements = own_statements(seen)
            assert len(statements) <= 6
            examined = 0.0
            for statement, values in statements:

                async def analyse(
                    connection: Any, one: str = statement, given: Any = values
                ) -> Any:
                    asked = await connection.exec_driver_sql(f"ANALYZE FORMAT=JSON {one}", given)
                    return asked.scalar_one()

                plan = json.loads(await database.read(analyse))
                for table in tables_in(plan):
                    if table["table_name"] == "worker_node" or "<" in table["table_name"]:
                        continue
                    assert table["access_type"] != "ALL", (statement, table)
                    examined += (table.get("r_rows") or 0) * (table.get("r_loops") or 1)
            assert examined <= 11 * (COUNTED_AHEAD + 1) + 50, examined


def tables_in(plan: Any) -> list[dict[str, Any]]:
    """Return every table access in a JSON plan."""
    if isinstance(plan, dict):
        own = [plan["table"]] if isinstance(plan.get("table"), dict) else []
        own = [one for one in own if "access_type" in one]
        return own + [one for part in plan.values() for one in tables_in(part)]
    if isinstance(plan, list):
        return [one for part in plan for one in tables_in(part)]
    return []


async def test_sqlite_searches_by_a_key_for_every_read(sqlite_engine: Engine) -> None:
    async with door(migrated(sqlite_engine)) as api:
        database = api.database
        jobs = await prepared(database, count=20_000)
        for number in range(300):
            await new_jobs(database, 0, job_handler=f"handler {number}")
        await change(database, "ANALYZE")
        await api.beat(capacity=1, load=Load(seq=1, active=1))
        for job_id in jobs:
            with reads_of(database) as seen:
                await explained(api.client, job_id)
            statements = own_statements(seen)
            assert 1 < len(statements) <= 6
            for statement, values in statements:

                async def plan_of(
                    connection: Any, one: str = statement, given: Any = values
                ) -> Any:
                    rows = await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {one}", given)
                    return [row.detail for row in rows]

                plan = await database.read(plan_of)
                scans = [step for step in plan if step.startswith("SCAN ")]
                # dispatch_term has one row.
                allowed = ("SCAN worker_node", "SCAN t ", "SCAN counted", "SCAN (subquery")
                assert not [one for one in scans if not one.startswith(allowed)], (statement, plan)


@pytest.mark.parametrize("status", JobStatus)
@pytest.mark.parametrize("kind", JobKind)
async def test_whatever_state_a_row_has_there_is_an_explanation(
    sqlite_engine: Engine, kind: JobKind, status: JobStatus
) -> None:
    async with door(migrated(sqlite_engine)) as api:
        job_id = await api.submitted()
        await put(api.database, job_id, kind, status)
        found = await explained(api.client, job_id)
        assert found["reasons"]
        assert found["summary"].endswith(".")


@pytest.mark.parametrize(
    ("status", "code"),
    [("returned", "worker_shutdown"), ("returned", "worker_cut_off"), ("timed_out", "timeout")],
)
async def test_the_history_keeps_why_a_worker_ended_a_run_that_its_handler_did_not_end(
    api: Door, status: str, code: str
) -> None:
    run = await running_job(api.database)
    message = "so it was " + "x" * 300
    error = {"code": code, "message": message}
    await api.report(outcome_of(run, status=status, error=error))
    (attempt,) = (await explained(api.client, run.job_id))["attempts"]
    assert attempt["reason"] == f"{code}: {message}"[:255]
    assert f"({code})" in attempt["story"]
