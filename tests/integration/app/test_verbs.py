"""Verbs: every state has an answer for each, and none of them can undo what another has done."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from app.lifecycle.moves.cancel import cancel_job
from app.lifecycle.moves.ending import Settled
from app.lifecycle.moves.guard import Asked, Changed, NotPossible
from app.lifecycle.moves.release import release_stopped
from app.lifecycle.moves.reopen import reopen_job
from app.lifecycle.moves.revise import NewValues, revise_job
from app.lifecycle.moves.trigger import OtherParams, trigger_job
from app.lifecycle.states import (
    VERBS,
    ExecutionStatus,
    JobKind,
    JobStatus,
    possible_verbs,
    verb_target,
)
from app.lifecycle.token import new_token
from app.plumbing.database import Database
from tests.integration.app.rig import (
    WORKER,
    Door,
    change,
    claimed,
    door,
    ending,
    insert,
    new_term,
    opened,
    outcome_of,
    rows_of,
    running_job,
    settled,
    value_of,
)
from tests.support.engines import Engine, migrated

URL = "http://127.0.0.1:9/hook"
_S = JobStatus
TASK_STATES = [_S.WAITING, _S.RUNNING, _S.SUCCEEDED, _S.FAILED, _S.PAUSED, _S.CANCELLED, _S.BLOCKED]
SCHEDULE_STATES = [_S.SCHEDULED, _S.PAUSED, _S.CANCELLED, _S.SUCCEEDED]
GROUP_STATES = [_S.RUNNING, _S.SUCCEEDED, _S.FAILED, _S.CANCELLED]
CELLS = [
    (kind, status, verb)
    for kind, states in (
        (JobKind.TASK, TASK_STATES),
        (JobKind.SCHEDULE, SCHEDULE_STATES),
        (JobKind.GROUP, GROUP_STATES),
    )
    for status in states
    for verb in VERBS
]


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    """An API over each engine."""
    async with door(migrated_engine) as opened:
        yield opened


@pytest.fixture
async def one_api(sqlite_engine: Engine) -> AsyncIterator[Door]:
    """An API over one engine, for what does not depend on it."""
    async with door(migrated(sqlite_engine)) as opened:
        yield opened


async def ask(api: Door, job_id: int, verb: str) -> httpx.Response:
    """Ask for a verb as a caller does."""
    if verb == "change":
        return await patch(api, job_id, {"priority": 7}, "*")
    return await api.client.post(f"/openapi/jobs/{job_id}/{verb}")


async def patch(api: Door, job_id: int, body: Any, if_match: str | None = None) -> httpx.Response:
    headers = {} if if_match is None else {"If-Match": if_match}
    return await api.client.patch(f"/openapi/jobs/{job_id}", json=body, headers=headers)


async def look(api: Door, job_id: int) -> dict[str, Any]:
    found: dict[str, Any] = (await api.client.get(f"/openapi/jobs/{job_id}")).json()
    return found


async def row(database: Database, job_id: int) -> dict[str, Any]:
    (found,) = await rows_of(database, "SELECT * FROM job_info WHERE id = :id", id=job_id)
    return found


async def log_of(database: Database, execution_id: str) -> dict[str, Any]:
    (found,) = await rows_of(
        database, "SELECT * FROM job_log WHERE execution_id = :id", id=execution_id
    )
    return found


async def callbacks(database: Database) -> list[dict[str, Any]]:
    return await rows_of(database, "SELECT * FROM callback_delivery ORDER BY id")


async def put(database: Database, kind: JobKind, status: JobStatus) -> int:
    """Make a job that is in a state."""
    (job_id,) = await insert(database, 1, delay_ms=60_000)
    ended = status in (_S.SUCCEEDED, _S.FAILED, _S.CANCELLED)
    await change(
        database,
        "UPDATE job_info SET kind = :kind, status = :status, finished_at = :ended WHERE id = :id",
        kind=int(kind),
        status=int(status),
        ended=1 if ended else None,
        id=job_id,
    )
    if kind is JobKind.SCHEDULE:
        await change(
            database,
            "UPDATE job_info SET child_queue_id = queue_id, trigger_ts = created_at, "
            "interval_ms = 60000, interval_mode = 'fixedRate', anchor_at = next_trigger_time, "
            "misfire_policy = 'once', overlap_policy = 'skip' WHERE id = :id",
            id=job_id,
        )
        await change(database, "UPDATE job_info SET queue_id = 0 WHERE id = :id", id=job_id)
    return job_id


@pytest.mark.parametrize(
    ("kind", "status", "verb"), CELLS, ids=[f"{k.name}-{s.name}-{v}" for k, s, v in CELLS]
)
async def test_every_state_has_an_answer_for_every_verb(
    one_api: Door, kind: JobKind, status: JobStatus, verb: str
) -> None:
    database = one_api.database
    job_id = await put(database, kind, status)
    before = await row(database, job_id)
    answer = await ask(one_api, job_id, verb)
    after = await row(database, job_id)
    target = verb_target(verb, kind, status)
    if kind is JobKind.SCHEDULE and verb == "trigger" and target is not None:
        assert (answer.status_code, after) == (200, before)
        assert answer.json()["parentId"] == job_id
    elif target is not None:
        assert answer.status_code == 200, answer.text
        assert (answer.json()["status"], after["status"]) == (target.name, target)
        assert after["version"] == before["version"] + 1
        assert answer.headers["etag"] == f'"{before["revision"] + 1}"'
    elif verb == "cancel" and status is _S.CANCELLED:
        assert (answer.status_code, after) == (200, before)
    else:
        assert (answer.status_code, answer.json()["code"]) == (409, "verb_not_possible")
        assert answer.json()["jobStatus"] == status.name
        assert answer.json()["possible"] == list(possible_verbs(kind, status))
        assert after == before


def test_the_verbs_of_a_task_are_those_of_the_contract() -> None:
    assert {status.name: possible_verbs(JobKind.TASK, status) for status in TASK_STATES} == {
        "WAITING": ("cancel", "pause", "trigger", "change"),
        "RUNNING": ("cancel",),
        "SUCCEEDED": (),
        "FAILED": ("retry",),
        "PAUSED": ("cancel", "resume", "change"),
        "CANCELLED": ("retry",),
        "BLOCKED": ("cancel",),
    }


@pytest.mark.parametrize("verb", VERBS)
async def test_a_verb_for_a_job_that_is_not_there_is_404(one_api: Door, verb: str) -> None:
    answer = await ask(one_api, 4711, verb)
    assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found")


async def test_a_cancelled_job_has_ended_and_owes_its_callback(api: Door) -> None:
    job_id = await api.submitted(callbackUrl=URL, clientRequestId="c")
    answer = await ask(api, job_id, "cancel")
    job = answer.json()
    assert (job["status"], job["error"]["code"]) == ("CANCELLED", "cancelled")
    assert job["finishedAt"]
    assert "retry-after" not in answer.headers
    assert await look(api, job_id) == job
    (owed,) = await callbacks(api.database)
    body = json.loads(owed["body"])
    assert (owed["event_type"], owed["status"], owed["owner_worker_id"]) == (
        "job.cancelled",
        0,
        None,
    )
    assert (
        body["data"] | {"status": "CANCELLED", "jobId": job_id, "error": job["error"]}
        == (body["data"])
    )
    assert body["data"]["triggerTime"] > "2020"
    assert (await ask(api, job_id, "cancel")).json() == job
    assert len(await callbacks(api.database)) == 1
    # The same request is still the same job.
    again = await api.submit("c", callbackUrl=URL)
    assert (again.status_code, again.json()["jobId"]) == (200, job_id)


async def test_a_run_whose_job_was_cancelled_is_over_for_the_job_at_once(api: Door) -> None:
    database = api.database
    run = await running_job(database, callback_url=URL)
    waiting = asyncio.create_task(api.client.get(f"/openapi/jobs/{run.job_id}?wait=20"))
    job = (await ask(api, run.job_id, "cancel")).json()
    assert (job["status"], job["executions"][0]["status"]) == ("CANCELLED", "CANCELLED")
    assert (await waiting).json()["status"] == "CANCELLED"
    assert [one["execution_id"] for one in await callbacks(database)] == [run.execution_id]
    # What the worker says later changes nothing but that the run is over.
    assert await value_of(database, "SELECT COUNT(*) FROM stopping_execution") == 1
    before = await row(database, run.job_id)
    acknowledged = await api.report(outcome_of(run, "late"))
    assert acknowledged["acknowledged"] == [run.execution_id]
    assert acknowledged["deliveries"] == []
    after = await row(database, run.job_id)
    moved = {"version", "stopping_execution_id"}
    assert {k: v for k, v in after.items() if k not in moved} == {
        k: v for k, v in before.items() if k not in moved
    }
    assert (await log_of(database, run.execution_id))["stale_status"] == "SUCCEEDED"
    assert await value_of(database, "SELECT COUNT(*) FROM stopping_execution") == 0
    assert len(await callbacks(database)) == 1


async def test_a_beat_tells_the_worker_that_a_cancelled_run_is_not_wanted(api: Door) -> None:
    run = await running_job(api.database)
    held = [{"jobId": run.job_id, "executionId": run.execution_id}]
    assert (await api.beat(held=held)).json()["unwanted"] == []
    await ask(api, run.job_id, "cancel")
    assert (await api.beat(held=held)).json()["unwanted"] == [run.execution_id]


async def test_a_retry_of_a_cancelled_job_waits_until_its_run_is_over(api: Door) -> None:
    database = api.database
    run = await running_job(database)
    await ask(api, run.job_id, "cancel")
    assert (await ask(api, run.job_id, "retry")).json()["status"] == "WAITING"
    assert await claimed(database, [run.job_id], term=await new_term(database)) == []
    # A thread that cannot be stopped: its end is reported twice, first as `stopping`.
    stopping = outcome_of(run, status="cancelled", stopping=True)
    await api.report(stopping)
    assert await claimed(database, [run.job_id], term=await new_term(database)) == []
    await api.report(stopped=[run.execution_id])
    (second,) = await claimed(database, [run.job_id], term=await new_term(database))
    assert (second.attempt, second.trigger_ts > run.trigger_ts) == (1, True)
    (late,) = await settled(database, ending(run, ExecutionStatus.SUCCEEDED, result="1"))
    assert late.kind is Settled.STALE
    assert (await look(api, run.job_id))["status"] == "RUNNING"


async def test_a_late_end_of_a_cancelled_run_lets_the_retried_job_be_claimed(api: Door) -> None:
    database = api.database
    woken: list[Any] = []
    api.parts.ground.bus.subscribe("wake", woken.extend)
    run = await running_job(database, priority=3)
    await ask(api, run.job_id, "cancel")
    await ask(api, run.job_id, "retry")
    woken.clear()
    await api.report(outcome_of(run, status="cancelled"))
    assert [(one[0], one[1]) for one in woken] == [(run.queue_id, 3)]
    assert len(await claimed(database, [run.job_id], term=await new_term(database))) == 1


async def test_what_a_dispatcher_says_of_a_cancelled_run_does_not_prove_that_it_is_over(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as api:
        database = api.database
        run = await running_job(database)
        await ask(api, run.job_id, "cancel")
        await settled(database, ending(run, ExecutionStatus.RETURNED, in_term=1))
        assert await value_of(database, "SELECT COUNT(*) FROM stopping_execution") == 1


async def test_a_retried_job_has_all_its_attempts_again(api: Door) -> None:
    database = api.database
    run = await running_job(database, max_retry=0, callback_url=URL)
    failed = ending(run, ExecutionStatus.FAILED, error_code="e", error_message="m")
    await settled(database, failed)
    job = (await ask(api, run.job_id, "retry")).json()
    assert (job["status"], job["attempt"], job["error"], job["finishedAt"]) == (
        "WAITING",
        0,
        None,
        None,
    )
    assert [one["status"] for one in job["executions"]] == ["FAILED"]
    (second,) = await claimed(database, [run.job_id], term=await new_term(database))
    assert (second.attempt, second.trigger_ts > run.trigger_ts) == (1, True)
    # Nothing of the first run counts any more.
    (late,) = await settled(database, ending(run, ExecutionStatus.SUCCEEDED, result="1"))
    assert late.kind is Settled.STALE
    await settled(database, ending(second, ExecutionStatus.SUCCEEDED, result='"now"'))
    job = await look(api, run.job_id)
    assert (job["status"], job["result"], job["error"]) == ("SUCCEEDED", "now", None)
    first, last = await callbacks(database)
    assert (first["event_type"], last["event_type"]) == ("job.failed", "job.succeeded")
    assert first["delivery_id"] != last["delivery_id"]


async def test_a_child_of_an_ended_group_is_not_retried(api: Door) -> None:
    database = api.database
    parent = await put(database, JobKind.GROUP, _S.FAILED)
    child = await put(database, JobKind.TASK, _S.FAILED)
    await change(database, "UPDATE job_info SET parent_id = :p WHERE id = :c", p=parent, c=child)
    answer = await ask(api, child, "retry")
    assert (answer.status_code, answer.json()["possible"]) == (409, [])
    await change(
        database, f"UPDATE job_info SET status = {int(_S.RUNNING)} WHERE id = :p", p=parent
    )
    assert (await ask(api, child, "retry")).status_code == 200


async def test_a_paused_job_is_not_claimed_and_a_resumed_one_wakes_dispatch(api: Door) -> None:
    database = api.database
    woken: list[Any] = []
    api.parts.ground.bus.subscribe("wake", woken.extend)
    job_id = await api.submitted()
    paused = (await ask(api, job_id, "pause")).json()
    assert (paused["status"], paused["revision"]) == ("PAUSED", 1)
    assert await claimed(database, [job_id], term=await new_term(database)) == []
    woken.clear()
    assert (await ask(api, job_id, "resume")).json()["status"] == "WAITING"
    found = await row(database, job_id)
    assert woken == [[found["queue_id"], found["priority"], found["next_trigger_time"]]]
    assert len(await claimed(database, [job_id], term=await new_term(database))) == 1


async def test_a_patch_needs_the_revision_that_the_job_has(api: Door) -> None:
    answer = await api.submit(delayMs=60_000)
    job_id, etag = answer.json()["jobId"], answer.headers["etag"]
    refused = await patch(api, job_id, {"priority": 1})
    assert (refused.status_code, refused.json()["code"]) == (428, "precondition_required")
    for stale in ('"7"', "0", 'W/"0"', "nonsense", ""):
        refused = await patch(api, job_id, {"priority": 1}, stale)
        assert (refused.status_code, refused.json()["code"]) == (412, "precondition_failed")
        assert f"has the ETag {etag} now" in refused.json()["detail"]  # not 0, which was sent
    done = await patch(api, job_id, {"priority": 1}, etag)
    assert (done.status_code, done.json()["priority"], done.headers["etag"]) == (200, 1, '"1"')
    assert (await patch(api, job_id, {"priority": 2}, etag)).status_code == 412
    assert (await patch(api, job_id, {"priority": 2}, '"9", "1"')).status_code == 200


async def test_a_patch_changes_what_is_sent_and_nothing_else(api: Door) -> None:
    database = api.database
    woken: list[Any] = []
    api.parts.ground.bus.subscribe("wake", woken.extend)
    job_id = await api.submitted(delayMs=60_000, params=[1], timeoutMs=5, callbackUrl=URL)
    before = await row(database, job_id)
    shown = await look(api, job_id)
    assert (shown["retryIntervalSeconds"], shown["retryBackoff"]) == (60, "fixed")
    assert (shown["timeoutMs"], shown["callbackUrl"]) == (5, URL)
    woken.clear()
    body = {
        "runAt": "2030-01-01T00:00:00Z",
        "priority": 9,
        "params": {"big": "x" * 3000},
        "maxRetry": 0,
        "retryIntervalSeconds": 1.5,
        "retryBackoff": "exponential",
        "timeoutMs": None,
        "callbackUrl": None,
    }
    job = (await patch(api, job_id, body, "*")).json()
    assert job["nextTriggerTime"] == "2030-01-01T00:00:00.000Z"
    told = {name: job[name] for name in body if name != "runAt"}
    assert told == {name: value for name, value in body.items() if name != "runAt"}
    after = await row(database, job_id)
    changed = {name for name in after if after[name] != before[name]} - {"updated_at"}
    assert changed == {
        "next_trigger_time",
        "priority",
        "params",
        "params_in_payload",
        "max_retry",
        "retry_interval_ms",
        "retry_backoff",
        "timeout_ms",
        "callback_url",
        "version",
        "revision",
        "claim_token",
    }
    assert after["retry_interval_ms"] == 1500
    assert woken == [[after["queue_id"], 9, after["next_trigger_time"]]]
    for params in (2, None, "y" * 5000, "z" * 6000):
        assert (await patch(api, job_id, {"params": params}, "*")).json()["params"] == params
        assert (await look(api, job_id))["params"] == params
    await patch(api, job_id, {"delayMs": 0}, "*")
    (run,) = await claimed(database, [job_id], term=await new_term(database))
    assert run.params == json.dumps("z" * 6000)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({}, "the body"),
        ({"unknown": 1}, "unknown"),
        ({"jobName": "x"}, "jobName"),
        ({"runAt": None}, "runAt"),
        ({"runAt": "tomorrow"}, "runAt"),
        ({"delayMs": None}, "delayMs"),
        ({"delayMs": -1}, "delayMs"),
        ({"runAt": "2030-01-01T00:00:00Z", "delayMs": 1}, "the body"),
        ({"priority": None}, "priority"),
        ({"priority": 10}, "priority"),
        ({"maxRetry": None}, "maxRetry"),
        ({"retryBackoff": "linear"}, "retryBackoff"),
        ({"timeoutMs": 0}, "timeoutMs"),
        ({"callbackUrl": "ftp://x"}, "callbackUrl"),
        ({"params": "x" * 65_536}, "params"),
    ],
)
async def test_a_wrong_patch_is_refused_by_the_name_of_its_field(
    one_api: Door, body: dict[str, Any], name: str
) -> None:
    job_id = await one_api.submitted(delayMs=60_000)
    answer = await patch(one_api, job_id, body, "*")
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed"), answer.text
    assert answer.json()["detail"].startswith(name)
    assert (await look(one_api, job_id))["revision"] == 0


async def test_max_retry_cannot_be_less_than_the_attempts_that_have_begun(api: Door) -> None:
    run = await running_job(api.database, max_retry=5)
    await settled(api.database, ending(run, ExecutionStatus.FAILED, retry_after_ms=60_000))
    assert (await patch(api, run.job_id, {"maxRetry": 0}, "*")).status_code == 422
    assert (await patch(api, run.job_id, {"maxRetry": 1}, "*")).status_code == 200


async def verb_of(database: Database, job_id: int, work: Any, **more: Any) -> Any:
    """Run a verb's move in its own transaction."""
    asked = Asked(job_id, 0, new_token())
    return await database.write(lambda connection: work(connection, database, asked, **more))


async def test_a_cancel_and_a_claim_at_once_have_one_winner(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as one, opened(migrated_engine) as other:
        jobs, term = await insert(one, 20), await new_term(one)
        results = await asyncio.gather(
            *(
                pair
                for job_id in jobs
                for pair in (
                    claimed(one, [job_id], term=term),
                    verb_of(other, job_id, cancel_job),
                )
            )
        )
        for job_id, runs, answer in zip(jobs, results[::2], results[1::2], strict=True):
            assert isinstance(answer, Changed)
            job = await row(one, job_id)
            assert job["status"] == _S.CANCELLED
            # Claimed first: its run was ended with it. Cancelled first: it was never claimed.
            assert (answer.stopped is not None) == bool(runs)
            assert job["stopping_execution_id"] == (runs[0].execution_id if runs else None)
        assert await value_of(one, "SELECT COUNT(*) FROM job_log WHERE status < 2") == 0


async def test_a_cancel_and_a_settle_at_once_end_a_job_once(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as one, opened(migrated_engine) as other:
        runs = [await running_job(one, callback_url=URL) for _ in range(12)]
        results = await asyncio.gather(
            *(
                pair
                for run in runs
                for pair in (
                    settled(one, ending(run, ExecutionStatus.SUCCEEDED, result="1")),
                    verb_of(other, run.job_id, cancel_job),
                )
            )
        )
        for run, settlements, answer in zip(runs, results[::2], results[1::2], strict=True):
            job, log = await row(one, run.job_id), await log_of(one, run.execution_id)
            won = settlements[0].kind is Settled.ENDED
            assert won == isinstance(answer, NotPossible)
            assert job["status"] == (_S.SUCCEEDED if won else _S.CANCELLED)
            assert ExecutionStatus(log["status"]).name == JobStatus(job["status"]).name
            assert job["stopping_execution_id"] is None
        assert len(await callbacks(one)) == len(runs)
        assert await value_of(one, "SELECT COUNT(*) FROM stopping_execution") == 0


async def test_a_patch_and_a_claim_at_once_have_one_winner(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as one, opened(migrated_engine) as other:
        jobs, term = await insert(one, 20, params="1"), await new_term(one)
        values = NewValues({"priority": 9}, new_params=True, params="2")
        results = await asyncio.gather(
            *(
                pair
                for job_id in jobs
                for pair in (
                    claimed(one, [job_id], term=term),
                    verb_of(other, job_id, revise_job, values=values, revisions=frozenset({0})),
                )
            )
        )
        for job_id, runs, answer in zip(jobs, results[::2], results[1::2], strict=True):
            job = await row(one, job_id)
            if isinstance(answer, Changed):
                assert (job["params"], job["priority"], job["revision"]) == ("2", 9, 1)
                assert [run.params for run in runs] in ([], ["2"])
            else:
                assert isinstance(answer, NotPossible)
                assert [run.params for run in runs] == ["1"]
            assert job["status"] == (_S.RUNNING if runs else _S.WAITING)


@pytest.mark.parametrize("work", [cancel_job, reopen_job, revise_job, trigger_job])
async def test_a_verb_repeated_after_an_unknown_commit_is_done_once(
    migrated_engine: Engine, work: Any
) -> None:
    async with opened(migrated_engine) as database:
        (job_id,) = await insert(database, 1, callback_url=URL, delay_ms=60_000)
        if work is reopen_job:
            await verb_of(database, job_id, cancel_job)
        asked = Asked(job_id, 0, new_token())
        more: dict[str, Any] = {}
        if work is revise_job:
            more = {"values": NewValues({"priority": 1}), "revisions": frozenset({0})}
        if work is trigger_job:
            more = {"other": OtherParams("1"), "revisions": frozenset({0})}
        answers = [
            await database.write(lambda connection: work(connection, database, asked, **more))
            for _ in range(2)
        ]
        assert [answer.repeated for answer in answers] == [False, True]
        assert len(await callbacks(database)) == (work in (cancel_job, reopen_job))


async def test_a_run_that_is_over_is_released_though_its_job_has_left(
    migrated_engine: Engine,
) -> None:
    async with opened(migrated_engine) as database:
        run = await running_job(database)
        await verb_of(database, run.job_id, cancel_job)
        await change(database, "DELETE FROM job_info")
        released = await database.write(
            lambda connection: release_stopped(connection, [run.execution_id])
        )
        assert released == []
        assert await value_of(database, "SELECT COUNT(*) FROM stopping_execution") == 0
        assert run.worker_id == WORKER
