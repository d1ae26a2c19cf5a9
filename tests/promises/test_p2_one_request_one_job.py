"""P2: one clientRequestId is one job: the same body gets the same job, another one is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.lifecycle.states import ExecutionStatus
from tests.integration.app.rig import body_of, claimed, door, ending, new_term, settled, value_of
from tests.support.engines import Engine, migrated

FULL: dict[str, Any] = {
    "params": {"a": [1, {"b": None}]},
    "delayMs": 60_000,
    "callbackUrl": "https://example.com/hook",
    "priority": 7,
    "timeoutMs": 1000,
    "maxRetry": 2,
    "retryIntervalSeconds": 1.5,
    "retryBackoff": "exponential",
    "labels": {"team": "a"},
}


async def test_a_second_body_under_the_same_request_id_is_refused_and_names_the_fields(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as api:
        job_id = await api.submitted(request_id="r-1", params={"n": 1}, priority=3)
        answer = await api.submit("r-1", params={"n": 2}, priority=3, maxRetry=1)
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (409, "request_conflict")
        assert answer.headers["content-type"] == "application/problem+json"
        assert (problem["jobId"], problem["fields"]) == (job_id, ["maxRetry", "params"])
        assert await value_of(api.database, "SELECT COUNT(*) FROM job_info") == 1


@pytest.mark.parametrize("field", [*FULL, "jobName", "jobHandler"])
async def test_every_field_that_differs_is_named(sqlite_engine: Engine, field: str) -> None:
    others = {
        "params": {"a": [1, {"b": 1}]},
        "delayMs": 60_001,
        "callbackUrl": "https://example.com/other",
        "priority": 8,
        "timeoutMs": 1001,
        "maxRetry": 3,
        "retryIntervalSeconds": 1.25,
        "retryBackoff": "fixed",
        "labels": {"team": "b"},
        "jobName": "other",
        "jobHandler": "other",
    }
    async with door(migrated(sqlite_engine)) as api:
        await api.submitted(request_id="r", **FULL)
        answer = await api.submit("r", **{**FULL, field: others[field]})
        assert (answer.status_code, answer.json()["fields"]) == (409, [field])


async def test_32_first_submissions_at_once_are_one_job_and_all_answers_name_it(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as one, door(migrated_engine) as other:
        body = body_of("same", params={"n": 1})
        answers = await asyncio.gather(
            *(
                (one, other)[number % 2].client.post("/openapi/jobs", json=body)
                for number in range(32)
            )
        )
        assert {answer.json()["jobId"] for answer in answers} == {answers[0].json()["jobId"]}
        assert sorted(answer.status_code for answer in answers) == [200] * 31 + [202]
        assert await value_of(one.database, "SELECT COUNT(*) FROM job_info") == 1


async def test_many_requests_at_once_with_many_repeats_are_one_job_each(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as one, door(migrated_engine) as other:
        answers = await asyncio.gather(
            *(
                (one, other)[number % 2].submit(f"r-{number % 40}", params={"n": number % 40})
                for number in range(200)
            )
        )
        assert [answer.status_code for answer in answers].count(202) == 40
        ids: dict[Any, set[int]] = {}
        for number, answer in enumerate(answers):
            ids.setdefault(number % 40, set()).add(answer.json()["jobId"])
        assert all(len(own) == 1 for own in ids.values())
        assert len(set.union(*ids.values())) == 40


async def test_a_field_sent_as_null_equals_one_that_is_not_sent(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as api:
        job_id = await api.submitted(request_id="r")
        answer = await api.submit(
            "r", params=None, runAt=None, delayMs=None, callbackUrl=None, timeoutMs=None
        )
        assert (answer.status_code, answer.json()["jobId"]) == (200, job_id)


async def test_the_order_of_keys_makes_no_other_request(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as api:
        await api.submitted(request_id="r", params={"a": 1, "b": {"c": 1, "d": 2}})
        answer = await api.submit("r", params={"b": {"d": 2, "c": 1}, "a": 1})
        assert answer.status_code == 200


async def test_a_repeat_is_answered_after_its_run_at_has_passed_and_its_job_has_ended(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as api:
        database = api.database
        # A time that has passed already is a time that has passed when the repeat comes.
        moment = {"runAt": "2020-01-01T00:00:00.000Z"}
        job_id = await api.submitted(request_id="r", params={"n": 1}, **moment)
        assert (await api.submit("r", params={"n": 1}, **moment)).status_code == 200
        (run,) = await claimed(database, [job_id], term=await new_term(database))
        await settled(database, ending(run, ExecutionStatus.SUCCEEDED, result='{"done":true}'))
        answer = await api.submit("r", params={"n": 1}, **moment)
        assert answer.status_code == 200
        job = answer.json()
        assert (job["jobId"], job["status"], job["result"]) == (
            job_id,
            "SUCCEEDED",
            {"done": True},
        )


@pytest.mark.parametrize(
    "pair",
    [
        ("a", "A"),
        ("é", "e"),
        ("ß", "ss"),
        ("x", "x "),
        ("x", " x"),
        ("x", "x\u3000"),
        ("x", "x\u200b"),
        ("\u00e9", "e\u0301"),
    ],
)
async def test_request_ids_that_merely_look_alike_are_different_requests(
    migrated_engine: Engine, pair: tuple[str, str]
) -> None:
    async with door(migrated_engine) as api:
        first, second = [await api.submit(one) for one in pair]
        assert first.status_code == 202
        # Either another job, or refused with a reason: never a fault, never the same job.
        assert second.status_code in (202, 422), second.text
        if second.status_code == 202:
            assert second.json()["jobId"] != first.json()["jobId"]
