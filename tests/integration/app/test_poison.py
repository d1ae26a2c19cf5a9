"""One row that cannot be stored fails alone, among submissions and among reports."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import DBAPIError

from app.lifecycle.moves.submit import NewJob
from app.lifecycle.states import ExecutionStatus
from app.migrate import migrate
from app.plumbing.json_text import Unencodable
from oncue.protocol import MAX_RESULT_BYTES
from tests.integration.app.rig import (
    body_of,
    claimed,
    door,
    ending,
    insert,
    new_jobs,
    new_term,
    opened,
    outcome_of,
    running_job,
    settled,
    value_of,
)
from tests.support.engines import Engine

POISON: dict[str, dict[str, Any]] = {
    "lone surrogate in params": {"params": '"\ud800"'},
    "lone surrogate in the name": {"job_name": "\ud800"},
    "name too long for its column": {"job_name": "x" * 129},
    "request id too long for its column": {"client_request_id": "x" * 129},
    "status out of range": {"priority": None},
    "long params with a surrogate": {"params": "\udfff" * 2000},
}


@pytest.mark.parametrize("poison", POISON)
async def test_a_poisonous_row_among_64_fails_alone_and_63_are_stored(
    migrated_engine: Engine, poison: str
) -> None:
    async with door(migrated_engine) as api:
        jobs: list[NewJob] = await new_jobs(api.database, 64)
        jobs[37] = replace(jobs[37], **POISON[poison])
        commits = api.parts.submitter._commits
        results = await asyncio.gather(*(commits.add(job) for job in jobs), return_exceptions=True)
        failed = [number for number, one in enumerate(results) if isinstance(one, Exception)]
        assert failed == [37]
        assert isinstance(results[37], (Unencodable, UnicodeEncodeError, DBAPIError))
        assert await value_of(api.database, "SELECT COUNT(*) FROM job_info") == 63


@pytest.mark.parametrize(
    "raw",
    [
        b'{"clientRequestId":"\\ud800","jobName":"n","jobHandler":"echo"}',
        b'{"clientRequestId":"a","jobName":"n","jobHandler":"echo","params":"\\ud800"}',
        b'{"clientRequestId":"a","jobName":"n","jobHandler":"echo","params":{"\\udfff":1}}',
        b'{"clientRequestId":"a\\u0000","jobName":"n","jobHandler":"echo"}',
        b'{"clientRequestId":"a","jobName":"\\u0000","jobHandler":"echo"}',
        b'{"clientRequestId":"a","jobName":"n","jobHandler":"' + b"x" * 129 + b'"}',
        b'{"clientRequestId":"a","jobName":"n","jobHandler":"echo","params":"\xed\xa0\x80"}',
        b"\xff\xfe",
    ],
)
async def test_a_poisonous_request_among_63_good_ones_is_refused_alone(
    migrated_engine: Engine, raw: bytes
) -> None:
    async with door(migrated_engine) as api:
        json_body = {"content-type": "application/json"}
        answers = await asyncio.gather(
            api.client.post("/openapi/jobs", content=raw, headers=json_body),
            *(api.client.post("/openapi/jobs", json=body_of()) for _ in range(63)),
        )
        assert answers[0].status_code in (400, 422), answers[0].text
        assert answers[0].headers["content-type"] == "application/problem+json"
        assert {answer.status_code for answer in answers[1:]} == {202}
        assert await value_of(api.database, "SELECT COUNT(*) FROM job_info") == 63


@pytest.mark.parametrize(
    "bad",
    [
        {"result": "\ud800"},
        {"result": {"\udfff": [1]}},
        {"result": float("nan")},
        {"status": "exploded"},
        {"error": {"code": "x" * 65, "message": ""}, "status": "failed"},
        {"startedAt": "yesterday"},
    ],
)
async def test_one_unstorable_report_among_good_ones_is_acknowledged_and_fails_its_job_alone(
    migrated_engine: Engine, bad: dict[str, Any]
) -> None:
    async with door(migrated_engine) as api:
        ids = await insert(api.database, 20)
        runs = await claimed(api.database, ids, term=await new_term(api.database))
        reports = [outcome_of(run, {"n": run.job_id}) for run in runs]
        reports[7] = outcome_of(runs[7], **{"result": None, **bad})
        answer = await api.report(*reports)
        assert sorted(answer["acknowledged"]) == sorted(run.execution_id for run in runs)
        for run in runs:
            job = (await api.client.get(f"/openapi/jobs/{run.job_id}")).json()
            if run is runs[7]:
                assert (job["status"], job["error"]["code"]) == ("FAILED", "result_unstorable")
            else:
                assert (job["status"], job["result"]) == ("SUCCEEDED", {"n": run.job_id})


async def test_deep_results_and_large_integers_are_kept_as_they_are(
    migrated_engine: Engine,
) -> None:
    deep: Any = 10**40
    for _ in range(300):
        deep = [deep]
    results = [10**40, -(2**70), deep, 0.1]
    async with door(migrated_engine) as api:
        runs = [await running_job(api.database) for _ in results]
        # Beside the deep one, and without it: they are read by two parsers.
        await api.report(*[outcome_of(runs[place], results[place]) for place in (0, 3)])
        await api.report(*[outcome_of(runs[place], results[place]) for place in (1, 2)])
        jobs = [(await api.client.get(f"/openapi/jobs/{run.job_id}")).json() for run in runs]
    assert [job["result"] for job in jobs] == results


async def test_a_result_of_64_kib_is_kept_whole_and_a_longer_one_fails_its_job(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as api:
        fits, long = await running_job(api.database), await running_job(api.database)
        whole = "é" * ((MAX_RESULT_BYTES - 2) // 2)
        await api.report(outcome_of(fits, whole), outcome_of(long, whole + "x"))
        jobs = [
            (await api.client.get(f"/openapi/jobs/{run.job_id}")).json() for run in (fits, long)
        ]
        assert (jobs[0]["status"], jobs[0]["result"]) == ("SUCCEEDED", whole)
        assert (jobs[1]["status"], jobs[1]["result"]) == ("FAILED", None)
        assert jobs[1]["error"]["code"] == "result_too_large"


async def test_reports_without_ids_or_of_strangers_block_nobody(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as api:
        run = await running_job(api.database)
        answer = await api.report(
            {"executionId": 7, "jobId": "x"},
            {**outcome_of(run), "executionId": "e" * 65},
            {**outcome_of(run), "executionId": "unknown", "jobId": 2**62},
            outcome_of(run, "ok"),
        )
        assert run.execution_id in answer["acknowledged"]


_texts = st.text(st.characters(codec="utf-8"), max_size=30)
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.lists(st.tuples(_values, _texts, st.booleans()), min_size=1, max_size=6))
async def test_results_and_errors_of_any_text_come_back_exactly(
    migrated_engine: Engine, cases: list[tuple[Any, str, bool]]
) -> None:
    async with door(migrated_engine) as api:
        runs = [await running_job(api.database, max_retry=0) for _ in cases]
        await api.report(
            *(
                outcome_of(run, value)
                if good
                else outcome_of(run, status="failed", error={"code": "c", "message": message})
                for run, (value, message, good) in zip(runs, cases, strict=True)
            )
        )
        for run, (value, message, good) in zip(runs, cases, strict=True):
            job = (await api.client.get(f"/openapi/jobs/{run.job_id}")).json()
            if good:
                assert (job["status"], job["result"], job["error"]) == ("SUCCEEDED", value, None)
            else:
                shown = message.replace("\0", "\ufffd")
                assert (job["status"], job["error"]) == ("FAILED", {"code": "c", "message": shown})


async def test_a_database_whose_default_is_latin1_keeps_every_character(
    mariadb_engine: Engine,
) -> None:
    name = mariadb_engine.database_url.rsplit("/", 1)[1]
    mariadb_engine.servers.mariadb.execute(f"ALTER DATABASE {name} CHARACTER SET latin1")
    migrate(mariadb_engine.database_url)
    async with opened(mariadb_engine) as database:
        run = await running_job(database, max_retry=0)
        await settled(
            database,
            ending(run, ExecutionStatus.FAILED, error_code="c", error_message="日本 😀 é"),
        )
        stored = await value_of(database, "SELECT error_message FROM job_info")
        assert stored == "日本 😀 é"
