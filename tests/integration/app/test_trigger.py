"""Trigger: a job that waits runs now, once, however often and whenever it is asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from app.lifecycle.moves.guard import Asked, Changed, NotPossible
from app.lifecycle.moves.trigger import OtherParams, trigger_job
from app.lifecycle.states import ExecutionStatus, JobKind, JobStatus
from app.lifecycle.token import new_token
from app.plumbing.database import Database
from tests.integration.app.rig import (
    Door,
    change,
    claimed,
    door,
    ending,
    insert,
    new_term,
    opened,
    rows_of,
    running_job,
    settled,
    value_of,
)
from tests.support.engines import Engine, migrated
from tests.support.processes import Platform
from tests.support.wait import until

_S = JobStatus


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


async def trigger(
    api: Door, job_id: int, body: Any = None, if_match: str | None = None
) -> httpx.Response:
    return await api.client.post(
        f"/openapi/jobs/{job_id}/trigger",
        content=None if body is None else json.dumps(body),
        headers={} if if_match is None else {"If-Match": if_match},
    )


async def row(database: Database, job_id: int) -> dict[str, Any]:
    (found,) = await rows_of(database, "SELECT * FROM job_info WHERE id = :id", id=job_id)
    return found


async def test_a_job_that_is_due_later_is_due_now_and_dispatch_is_told(api: Door) -> None:
    woken: list[Any] = []
    api.parts.ground.bus.subscribe("wake", woken.extend)
    job_id = await api.submitted(delayMs=3_600_000, params={"a": 1}, priority=3)
    before = await row(api.database, job_id)
    woken.clear()
    answer = await trigger(api, job_id)
    assert (answer.status_code, answer.json()["status"]) == (200, "WAITING"), answer.text
    assert (answer.json()["revision"], answer.headers["etag"]) == (1, '"1"')
    after = await row(api.database, job_id)
    changed = {name for name in after if after[name] != before[name]} - {"updated_at"}
    assert changed == {"next_trigger_time", "version", "revision", "claim_token"}
    assert after["next_trigger_time"] <= await api.database.now()
    assert woken == [[after["queue_id"], 3, after["next_trigger_time"]]]
    (run,) = await claimed(api.database, [job_id], term=await new_term(api.database))
    assert (run.trigger_ts, run.params) == (after["next_trigger_time"], '{"a":1}')


async def test_a_job_in_its_retry_wait_makes_its_next_attempt_now(api: Door) -> None:
    run = await running_job(api.database, max_retry=1)
    await settled(api.database, ending(run, ExecutionStatus.FAILED, retry_after_ms=3_600_000))
    assert (await trigger(api, run.job_id)).status_code == 200
    (second,) = await claimed(api.database, [run.job_id], term=await new_term(api.database))
    assert (second.attempt, second.trigger_ts > run.trigger_ts) == (2, True)


@pytest.mark.parametrize("params", [{"b": 2}, None, "x" * 5000, [], 0])
async def test_other_params_replace_those_of_the_job(api: Door, params: Any) -> None:
    for old in ({"a": 1}, "y" * 3000):
        job_id = await api.submitted(delayMs=3_600_000, params=old)
        assert (await trigger(api, job_id, {"params": params})).json()["params"] == params
        (run,) = await claimed(api.database, [job_id], term=await new_term(api.database))
        assert (None if run.params is None else json.loads(run.params)) == params
        left = await value_of(
            api.database, "SELECT COUNT(*) FROM job_payload WHERE job_id = :id", id=job_id
        )
        assert left == (params == "x" * 5000)


@pytest.mark.parametrize("body", [None, {}, {"params": {"a": "x" * 2000}}, {"params": [1]}])
async def test_a_repeat_changes_nothing(api: Door, body: Any) -> None:
    job_id = await api.submitted(delayMs=3_600_000, params={"a": 1})
    first = await trigger(api, job_id, body)
    before = await row(api.database, job_id)
    again = await trigger(api, job_id, body)
    assert (again.status_code, again.json()) == (200, first.json())
    assert await row(api.database, job_id) == before


async def test_a_job_that_was_due_keeps_its_place_when_its_params_change(api: Door) -> None:
    job_id = await api.submitted()
    before = await row(api.database, job_id)
    assert (await trigger(api, job_id)).json()["revision"] == 0
    assert (await trigger(api, job_id, {"params": 1})).json()["revision"] == 1
    after = await row(api.database, job_id)
    assert after["next_trigger_time"] == before["next_trigger_time"]
    assert after["params"] == "1"


async def test_if_match_is_honoured_when_it_is_sent(api: Door) -> None:
    answer = await api.submit(delayMs=3_600_000)
    job_id, etag = answer.json()["jobId"], answer.headers["etag"]
    refused = await trigger(api, job_id, if_match='"7"')
    assert (refused.status_code, refused.json()["code"]) == (412, "precondition_failed")
    assert (await trigger(api, job_id, if_match=etag)).status_code == 200
    assert (await trigger(api, job_id, if_match=etag)).status_code == 412
    assert (await trigger(api, job_id, if_match="*")).status_code == 200


@pytest.mark.parametrize(
    ("kind", "status", "words", "possible"),
    [
        (JobKind.TASK, _S.RUNNING, "has begun already", ["cancel"]),
        (JobKind.TASK, _S.SUCCEEDED, "submit a new job", []),
        (JobKind.TASK, _S.FAILED, "retry begins them anew", ["retry"]),
        (JobKind.TASK, _S.CANCELLED, "retry opens it again", ["retry"]),
        (JobKind.TASK, _S.PAUSED, "Resume it first", ["cancel", "resume", "change"]),
        (JobKind.TASK, _S.BLOCKED, "waits for other jobs", ["cancel"]),
        (JobKind.SCHEDULE, _S.SUCCEEDED, "submit a new job", []),
        (JobKind.SCHEDULE, _S.CANCELLED, "trigger is not possible, nothing is.", []),
        (JobKind.GROUP, _S.RUNNING, "has begun already", []),
    ],
)
async def test_where_it_is_not_possible_the_answer_says_what_is(
    one_api: Door, kind: JobKind, status: JobStatus, words: str, possible: list[str]
) -> None:
    job_id = await one_api.submitted(delayMs=3_600_000)
    await change(
        one_api.database,
        "UPDATE job_info SET kind = :kind, status = :status WHERE id = :id",
        kind=int(kind),
        status=int(status),
        id=job_id,
    )
    answer = await trigger(one_api, job_id, {"params": 1})
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (409, "verb_not_possible")
    assert (problem["jobStatus"], problem["possible"]) == (status.name, possible)
    assert words in problem["detail"]
    assert ("retry" in problem["detail"]) == ("retry" in possible)


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b'{"unknown": 1}', 422, "validation_failed"),
        (b"[]", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (json.dumps({"params": "x" * 65_536}).encode(), 422, "validation_failed"),
    ],
)
async def test_a_wrong_body_is_refused_and_changes_nothing(
    one_api: Door, content: bytes, status: int, code: str
) -> None:
    job_id = await one_api.submitted(delayMs=3_600_000)
    answer = await one_api.client.post(f"/openapi/jobs/{job_id}/trigger", content=content)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert (await row(one_api.database, job_id))["revision"] == 0


async def test_a_trigger_and_a_claim_at_once_run_a_job_once(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as one, opened(migrated_engine) as other:
        jobs, term = await insert(one, 20, params="1"), await new_term(one)
        results: list[Any] = await asyncio.gather(
            *(
                pair
                for job_id in jobs
                for pair in (
                    claimed(one, [job_id], term=term),
                    other.write(
                        lambda connection, job_id=job_id: trigger_job(  # type: ignore[misc]
                            connection,
                            other,
                            Asked(job_id, 0, new_token()),
                            OtherParams("2"),
                            revisions=None,
                        )
                    ),
                )
            )
        )
        for job_id, runs, answer in zip(jobs, results[::2], results[1::2], strict=True):
            job = await row(one, job_id)
            assert isinstance(answer, Changed | NotPossible)
            if isinstance(answer, Changed):
                assert (job["params"], [run.params for run in runs]) in (
                    ("2", []),
                    ("2", ["2"]),
                )
            else:
                assert [run.params for run in runs] == ["1"]
            assert job["status"] == (_S.RUNNING if runs else _S.WAITING)
        assert await value_of(one, "SELECT COUNT(*) FROM job_log") == sum(
            len(runs) for runs in results[::2]
        )


def test_a_job_of_tomorrow_is_run_now_and_once(platform: Platform) -> None:
    job_id = platform.submit("record", {"ms": 1}, delayMs=86_400_000)
    path = f"/openapi/jobs/{job_id}/trigger"
    answers = [platform.http.post(path, json={"params": {"ms": 300}}) for _ in range(3)]
    assert answers[0].status_code == 200
    # The later ones found it due, running or done: none of them may run it again.
    assert {answer.status_code for answer in answers} <= {200, 409}
    job = platform.ended(job_id)
    assert (job["status"], job["attempt"], job["params"]) == ("SUCCEEDED", 1, {"ms": 300})
    late = platform.http.post(path)
    assert (late.status_code, late.json()["jobStatus"]) == (409, "SUCCEEDED")
    until(lambda: len(platform.record(job_id)) == 2, what="the run to be noted")
    assert [line.event for line in platform.record(job_id)] == ["start", "returned"]
