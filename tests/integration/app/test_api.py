"""The promise to callers: every answer, every refusal, as the API says."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event

from app.edge.bodies import MAX_DEPTH
from app.lifecycle.states import ExecutionStatus
from app.plumbing.database import Database
from oncue.protocol import WorkerState
from tests.integration.app.rig import (
    TOKEN,
    Door,
    body_of,
    change,
    claimed,
    door,
    ending,
    new_term,
    outcome_of,
    running_job,
    settled,
)
from tests.support.engines import Engine, migrated
from tests.support.wait import until_async

KIB = 1024
PROBLEM = "application/problem+json"


URL = "http://127.0.0.1:9/hook"
HEADERS = "/callbackHeaders"
HEADER = f"{HEADERS}/X-A"


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    """An API over each engine."""
    async with door(migrated_engine) as opened:
        yield opened


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a slow machine be no part that does not answer."""
    monkeypatch.setattr("app.health.CHECK_SECONDS", 30.0)


@pytest.fixture
async def one_api(sqlite_engine: Engine) -> AsyncIterator[Door]:
    """An API over one engine, for what does not depend on it."""
    async with door(migrated(sqlite_engine)) as opened:
        yield opened


@contextmanager
def counted(database: Database) -> Iterator[list[str]]:
    """Collect the statements that the database gets."""
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        statements.append(statement)

    engines = {database._writers.sync_engine, database._readers.sync_engine}
    for engine in engines:
        event.listen(engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", note)


async def statements_of_a_submission(api: Door) -> list[str]:
    """Return the fewest that one needs: what others have at that time may be counted too."""
    asked = []
    for _ in range(4):
        with counted(api.database) as statements:
            assert (await api.submit()).status_code == 202
        asked.append(statements)
    return min(asked, key=len)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/openapi/jobs/1", 404, "job_not_found"),
        ("GET", "/openapi/jobs/1/executions", 404, "job_not_found"),
        ("GET", "/openapi/jobs/0", 422, "validation_failed"),
        ("GET", "/openapi/jobs/x", 422, "validation_failed"),
        ("GET", "/openapi/jobs/9223372036854775807", 404, "job_not_found"),
        ("GET", "/openapi/jobs/9223372036854775808", 422, "validation_failed"),
        ("GET", f"/openapi/jobs/{'9' * 5000}", 422, "validation_failed"),
        ("GET", "/openapi/jobs/1?wait=-1", 422, "validation_failed"),
        ("GET", "/openapi/jobs/1?wait=nan", 422, "validation_failed"),
        ("GET", "/openapi/jobs/1?wait=inf", 422, "validation_failed"),
        ("GET", "/openapi/jobs/1?wait=301", 422, "validation_failed"),
        ("GET", "/openapi/workers?limit=0", 422, "validation_failed"),
        ("GET", "/openapi/workers?limit=201", 422, "validation_failed"),
        ("GET", "/openapi/workers?cursor=x", 422, "validation_failed"),
        ("GET", "/openapi/handlers?cursor=%00", 422, "validation_failed"),
        ("DELETE", "/openapi/jobs/1", 405, "method_not_allowed"),
        ("PUT", "/openapi/jobs", 405, "method_not_allowed"),
        ("GET", "/internal/heartbeat", 405, "method_not_allowed"),
        ("POST", "/internal/heartbeat", 401, "unauthorized"),
        ("POST", "/internal/reports", 401, "unauthorized"),
    ],
)
async def test_every_error_is_a_problem_with_a_stable_code(
    one_api: Door, method: str, path: str, status: int, code: str
) -> None:
    answer = await one_api.client.request(method, path)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.headers["content-type"] == PROBLEM
    assert answer.json()["status"] == status
    if status == 405:
        assert answer.headers["allow"]
    if status == 422:
        assert all(one["pointer"].startswith("/") for one in answer.json()["errors"])
        assert answer.json()["errors"]


@pytest.mark.parametrize(
    ("path", "sent", "pointer"),
    [
        ("/openapi/jobs", {"runAt": "2030-01-31T09:00:00Z", "delayMs": 1}, ""),
        ("/openapi/jobs", {"params": "x" * 66_000}, "/params"),
        ("/openapi/jobs/batch", {"jobs": []}, "/jobs"),
        ("/openapi/bulk", {"action": "retry", "filter": {}}, "/filter"),
        ("/openapi/bulk", {"action": "retry", "filter": {"status": "WAITING"}}, "/filter/status"),
        ("/openapi/bulk", {"action": "retry", "filter": "x"}, "/filter"),
        ("/openapi/jobs", {"callbackUrl": URL, "callbackHeaders": {"X-A": ""}}, HEADER),
        ("/openapi/jobs", {"callbackUrl": URL, "callbackHeaders": {"X-A": 5}}, HEADER),
        ("/openapi/jobs", {"callbackHeaders": {"X-A": {"secret": ""}}}, f"{HEADER}/secret"),
        (
            "/openapi/jobs",
            {"callbackUrl": URL, "callbackHeaders": {"Host": "x"}},
            f"{HEADERS}/Host",
        ),
        ("/openapi/jobs", {"labels": {"a b": "x"}}, "/labels/a b"),
        ("/openapi/jobs", {"labels": {"path": 1}}, "/labels/path"),
        ("/openapi/jobs", {"query": 1}, "/query"),
        ("/openapi/jobs", {"cronExpr": "0 9 * * *", "endAt": "2020-01-01T00:00:00Z"}, ""),
    ],
)
async def test_a_422_points_at_what_is_wrong_and_an_empty_pointer_is_the_whole_body(
    one_api: Door, path: str, sent: dict[str, Any], pointer: str
) -> None:
    body = {**body_of(), **sent} if path == "/openapi/jobs" else sent
    answer = await one_api.client.post(path, json=body)
    assert answer.status_code == 422
    assert [one["pointer"] for one in answer.json()["errors"]] == [pointer]


@pytest.mark.parametrize(
    ("sent", "detail"),
    [
        ({"labels": []}, "must be an object"),
        ({"labels": {f"n{at}": "x" for at in range(17)}}, "must have at most 16"),
        ({"callbackUrl": URL, "callbackEvents": []}, "must have at least 1"),
        ({"callbackUrl": URL, "callbackHeaders": {"X-A": {"secrt": "x"}}}, "is required"),
    ],
)
async def test_a_422_says_what_is_wrong_in_the_words_of_json(
    one_api: Door, sent: dict[str, Any], detail: str
) -> None:
    answer = await one_api.submit(**sent)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["detail"] == detail


async def test_a_422_of_a_job_that_is_no_schedule_has_errors_too(one_api: Door) -> None:
    job_id = await one_api.submitted()
    asked = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-02T00:00:00Z"}
    answer = await one_api.client.post(f"/openapi/jobs/{job_id}/backfill", json=asked)
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "")


async def test_the_detail_of_a_422_counts_the_faults_that_it_does_not_name(one_api: Door) -> None:
    answer = await one_api.client.post("/openapi/jobs", json={"jobName": "n", "prams": 1})
    assert answer.json()["detail"] == "clientRequestId: is required and 2 more: see errors"
    assert len(answer.json()["errors"]) == 3


async def test_a_body_that_is_nested_too_deep_is_told_the_limit(one_api: Door) -> None:
    def nested(depth: int) -> bytes:
        params = b"[" * depth + b"]" * depth
        return json.dumps(body_of()).encode()[:-1] + b', "params": ' + params + b"}"

    headers = {"Content-Type": "application/json"}
    taken = await one_api.client.post("/openapi/jobs", content=nested(MAX_DEPTH), headers=headers)
    assert taken.status_code == 202
    refused = await one_api.client.post(
        "/openapi/jobs", content=nested(MAX_DEPTH + 1), headers=headers
    )
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_json")
    assert f"nested more than {MAX_DEPTH} deep" in refused.json()["detail"]


async def test_a_slash_too_many_is_not_redirected_to_where_the_host_header_says(
    one_api: Door,
) -> None:
    # Behind a proxy that ends TLS the redirect would lead to http://, and a key with it.
    for path in ("/openapi/jobs/", "/openapi/jobs/1/", "/healthz/"):
        answer = await one_api.client.get(path, headers={"Host": "elsewhere"})
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
        assert "without the slash at its end" in answer.json()["detail"]
        assert "location" not in answer.headers
    assert "slash" not in (await one_api.client.get("/nothing")).json()["detail"]


async def test_probes_may_use_head_and_a_browser_finds_the_documentation(one_api: Door) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await one_api.client.head(path)).status_code == 200
    root = await one_api.client.get("/")
    assert (root.status_code, root.headers["location"]) == (307, "docs")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("OPTIONS", "/openapi/jobs", "GET, POST"),
        ("DELETE", "/openapi/jobs/1", "GET, PATCH"),
        ("PATCH", "/openapi/jobs/batch", "POST"),
        ("GET", "/openapi/jobs/batch", "POST"),
        ("PUT", "/openapi/jobs/1/cancel", "POST"),
        ("POST", "/openapi.json", "GET, HEAD"),
    ],
)
async def test_a_method_that_an_address_does_not_take_is_told_all_that_it_takes(
    one_api: Door, method: str, path: str, allowed: str
) -> None:
    answer = await one_api.client.request(method, path)
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
    assert set(answer.headers["allow"].split(", ")) == set(allowed.split(", "))


LONG = "x" * 129
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"unknown": 1}, "unknown"),
    ({"client_request_id": "a"}, "client_request_id"),
    ({"clientRequestId": ""}, "clientRequestId"),
    ({"clientRequestId": 7}, "clientRequestId"),
    ({"clientRequestId": LONG}, "clientRequestId"),
    ({"clientRequestId": "a\nb"}, "clientRequestId"),
    ({"clientRequestId": "\x7f"}, "clientRequestId"),
    ({"jobName": LONG}, "jobName"),
    ({"jobName": "\x00"}, "jobName"),
    ({"jobHandler": LONG}, "jobHandler"),
    ({"jobHandler": None}, "jobHandler"),
    ({"jobHandler": " echo"}, "jobHandler"),
    ({"priority": 10}, "priority"),
    ({"priority": -1}, "priority"),
    ({"priority": "5"}, "priority"),
    ({"priority": True}, "priority"),
    ({"priority": 5.5}, "priority"),
    ({"delayMs": -1}, "delayMs"),
    ({"delayMs": "1000"}, "delayMs"),
    ({"delayMs": 10**30}, "delayMs"),
    ({"timeoutMs": 0}, "timeoutMs"),
    ({"maxRetry": -1}, "maxRetry"),
    ({"maxRetry": 1001}, "maxRetry"),
    ({"maxRetry": True}, "maxRetry"),
    ({"retryIntervalSeconds": -0.1}, "retryIntervalSeconds"),
    ({"retryIntervalSeconds": "60"}, "retryIntervalSeconds"),
    ({"retryIntervalSeconds": True}, "retryIntervalSeconds"),
    ({"retryBackoff": "linear"}, "retryBackoff"),
    ({"runAt": "tomorrow"}, "runAt"),
    ({"runAt": "2030-01-01T00:00:00"}, "runAt"),
    ({"runAt": "1969-01-01T00:00:00Z"}, "runAt"),
    ({"runAt": "0001-01-01T00:00:00+14:00"}, "runAt"),
    ({"runAt": "9999-12-31T23:59:59-14:00"}, "runAt"),
    ({"runAt": 1893456000}, "runAt"),
    ({"runAt": "1893456000"}, "runAt"),
    ({"runAt": "2030-01-01"}, "runAt"),
    ({"callbackUrl": "ftp://example.com"}, "callbackUrl"),
    ({"callbackUrl": "http://"}, "callbackUrl"),
    ({"callbackUrl": "/hook"}, "callbackUrl"),
    ({"callbackUrl": "http://user:secret@example.com/"}, "callbackUrl"),
    ({"callbackUrl": "http://example.com/a b"}, "callbackUrl"),
    ({"callbackUrl": "http://example.com/\n"}, "callbackUrl"),
    ({"callbackUrl": "http://example.com:99999/"}, "callbackUrl"),
    ({"callbackUrl": "http://[::1/"}, "callbackUrl"),
    ({"callbackUrl": "http://example.com/" + "x" * 2048}, "callbackUrl"),
    ({"labels": {"a b": "x"}}, "labels"),
    ({"labels": {"a": 1}}, "labels"),
    ({"labels": {"a": LONG}}, "labels"),
    ({"labels": {str(number): "" for number in range(17)}}, "labels"),
    ({"labels": {f"worker.{number}": "x" * 128 for number in range(3)}}, "labels"),
    ({"labels": []}, "labels"),
]


@pytest.mark.parametrize(("fields", "name"), WRONG, ids=[json.dumps(w)[:40] for w, _ in WRONG])
async def test_a_wrong_value_is_refused_by_the_name_of_its_field(
    one_api: Door, fields: dict[str, Any], name: str
) -> None:
    answer = await one_api.client.post("/openapi/jobs", json=body_of(**fields))
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed"), answer.text
    assert answer.headers["content-type"] == PROBLEM
    assert answer.json()["detail"].startswith(name)


async def test_run_at_and_delay_exclude_each_other(one_api: Door) -> None:
    answer = await one_api.submit(runAt="2030-01-01T00:00:00Z", delayMs=1)
    assert (answer.status_code, "not both" in answer.text) == (422, True)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'"x"', 400),
        (b"\xff", 400),
        (b'{"params": NaN}', 400),
        (b'{"params": Infinity}', 400),
        (b'{"params": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
    ],
)
async def test_what_is_no_json_object_is_refused(one_api: Door, raw: bytes, status: int) -> None:
    answer = await one_api.client.post(
        "/openapi/jobs", content=raw, headers={"content-type": "application/json"}
    )
    assert (answer.status_code, answer.headers["content-type"]) == (status, PROBLEM), answer.text


@pytest.mark.parametrize("number", [b"1e999", b"-1e400", b"1e" + b"9" * 50])
async def test_a_number_that_would_become_infinite_is_refused(one_api: Door, number: bytes) -> None:
    raw = json.dumps(body_of(params="here")).encode().replace(b'"here"', number)
    answer = await one_api.client.post(
        "/openapi/jobs", content=raw, headers={"content-type": "application/json"}
    )
    assert answer.status_code in (400, 422), answer.text


@pytest.mark.parametrize(
    "value",
    [
        123456789012345678901234567890,
        -(2**63) - 1,
        10**200,
        0.1,
        1e308,
        5e-324,
        [1, 1.0, True, None, ""],
        {"": {"\u0000": "\u0000", "😀": "日本"}},
        '\u2028\u2029"\\/</script>',
        "100% %s %(x)s :name ? $1 {0}",
    ],
)
async def test_params_come_back_exactly(api: Door, value: Any) -> None:
    answer = await api.submit(params=value)
    assert answer.status_code == 202, answer.text
    assert answer.json()["params"] == value
    job = await api.client.get(answer.headers["location"])
    assert job.json()["params"] == value
    assert json.dumps(job.json()["params"]) == json.dumps(value)


async def test_params_may_be_64_kib_and_not_a_byte_more(api: Door) -> None:
    fits = "é" * (32 * KIB - 1)
    assert (await api.submit("fits", params=fits)).status_code == 202
    assert (await api.submit("fits", params=fits)).json()["params"] == fits
    answer = await api.submit(params=fits + "x")
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_256_kib_is_refused(one_api: Door, chunked: bool) -> None:
    raw = json.dumps(body_of(params="x" * 256 * KIB)).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(raw), 16 * KIB):
            yield raw[start : start + 16 * KIB]

    answer = await one_api.client.post(
        "/openapi/jobs",
        content=pieces() if chunked else raw,
        headers={"content-type": "application/json"},
    )
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
    assert answer.headers["content-type"] == PROBLEM


@pytest.mark.parametrize(
    ("media_type", "status"),
    [
        ("application/json", 202),
        ("application/json; charset=utf-8", 202),
        ("Application/JSON", 202),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
async def test_a_body_must_be_json_by_its_type(one_api: Door, media_type: str, status: int) -> None:
    answer = await one_api.client.post(
        "/openapi/jobs",
        content=json.dumps(body_of()),
        headers={"content-type": media_type},
    )
    assert answer.status_code == status


async def test_names_of_128_characters_are_kept_whole(api: Door) -> None:
    name = "é" * 128
    answer = await api.submit(name, jobName=name, jobHandler=name)
    assert answer.status_code == 202
    job = (await api.client.get(answer.headers["location"])).json()
    assert (job["clientRequestId"], job["jobName"], job["jobHandler"]) == (name, name, name)


async def test_an_accepted_job_is_answered_with_its_place_and_when_to_look(api: Door) -> None:
    await api.beat()
    answer = await api.submit("r", delayMs=60_000)
    job = answer.json()
    assert answer.status_code == 202
    assert answer.headers["location"] == f"/openapi/jobs/{job['jobId']}"
    assert answer.headers["etag"] == '"0"'
    assert int(answer.headers["retry-after"]) >= 1
    assert (job["status"], job["attempt"], job["maxRetry"]) == ("WAITING", 0, 3)
    assert (job["executions"], job["warnings"], job["finishedAt"]) == ([], [], None)
    seen = await api.client.get(answer.headers["location"])
    assert seen.json() == job


async def test_the_answer_to_a_submission_is_what_a_look_shows(api: Door) -> None:
    sent = body_of(
        params={"a": [1, None, "\u00e9"]},
        priority=7,
        maxRetry=1,
        retryIntervalSeconds=1.5,
        retryBackoff="exponential",
        timeoutMs=1234,
        delayMs=86_400_000,
        callbackUrl="https://example.com/hook",
        callbackEvents=["failed", "started"],
        expiresAt="2100-01-01T00:00:00Z",
        labels={"order": "7"},
    )
    for body in (sent, body_of(cronExpr="0 3 * * *"), body_of()):
        answer = await api.client.post("/openapi/jobs", json=body)
        assert answer.status_code == 202, answer.text
        told = answer.json()
        seen = (await api.client.get(f"/openapi/jobs/{told['jobId']}")).json()
        assert told | {"warnings": []} == seen | {"warnings": []}


async def test_an_ended_job_does_not_ask_to_come_again(api: Door) -> None:
    run = await running_job(api.database)
    await api.report(outcome_of(run, 1))
    answer = await api.client.get(f"/openapi/jobs/{run.job_id}")
    assert answer.json()["status"] == "SUCCEEDED"
    assert "retry-after" not in answer.headers
    assert answer.headers["etag"]


async def test_a_handler_that_nobody_offers_is_accepted_with_a_warning(api: Door) -> None:
    answer = await api.submit(jobHandler="nobody")
    assert answer.status_code == 202
    (warning,) = answer.json()["warnings"]
    assert warning["code"] == "no_live_worker"
    await api.beat("some", handlers=["nobody"])
    assert (await api.submit(jobHandler="nobody")).json()["warnings"] == []
    await api.beat("some", handlers=["nobody"], state=WorkerState.DRAINING)
    assert len((await api.submit(jobHandler="nobody")).json()["warnings"]) == 1


async def test_a_long_poll_returns_as_soon_as_the_job_ends_here_or_elsewhere(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as api, door(migrated_engine) as other:
        for reporter in (api, other):
            run = await running_job(api.database)
            waiting = asyncio.create_task(
                api.client.get(f"/openapi/jobs/{run.job_id}?wait=20", timeout=25)
            )
            await until_async(lambda: api.parts.waiters.count == 1)
            started = time.monotonic()
            await reporter.report(outcome_of(run, 1))
            answer = await waiting
            assert answer.json()["status"] == "SUCCEEDED"
            assert time.monotonic() - started < 15


async def test_a_long_poll_returns_though_every_signal_was_lost(api: Door) -> None:
    run = await running_job(api.database)
    waiting = asyncio.create_task(api.client.get(f"/openapi/jobs/{run.job_id}?wait=20", timeout=25))
    await until_async(lambda: api.parts.waiters.count == 1)
    await settled(api.database, ending(run, ExecutionStatus.SUCCEEDED, result="1"))
    assert (await waiting).json()["status"] == "SUCCEEDED"


async def test_a_long_poll_that_ends_in_vain_shows_the_job_as_it_is(api: Door) -> None:
    job_id = await api.submitted()
    answer = await api.client.get(f"/openapi/jobs/{job_id}?wait=0.2")
    assert (answer.status_code, answer.json()["status"]) == (200, "WAITING")
    assert api.parts.waiters.count == 0


async def test_many_long_polls_ask_the_database_together(api: Door) -> None:
    ids = [await api.submitted() for _ in range(50)]
    with counted(api.database) as statements:
        waiting = [
            asyncio.create_task(api.client.get(f"/openapi/jobs/{job_id}?wait=30", timeout=60))
            for job_id in ids
        ]
        own = "FROM job_info WHERE id = "
        await until_async(lambda: sum(own in one for one in statements) >= 50, what="their looks")
        statements.clear()
        await until_async(
            lambda: sum("job_info WHERE id IN" in one for one in statements) >= 2,
            what="two looks at all of them",
        )
        about_jobs = [one for one in statements if "job_info" in one]
    assert len(about_jobs) <= 3
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_pages_of_executions_show_each_once_newest_first(api: Door) -> None:
    database = api.database
    run = await running_job(database, max_retry=20)
    seen = [run.execution_id]
    for _ in range(6):
        await settled(database, ending(run, ExecutionStatus.FAILED, retry_after_ms=0))
        (run,) = await claimed(database, [run.job_id], term=await new_term(database))
        seen.append(run.execution_id)
    pages: list[list[str]] = []
    cursor: str | None = ""
    while cursor is not None:
        page = (
            await api.client.get(f"/openapi/jobs/{run.job_id}/executions?limit=3{cursor}")
        ).json()
        pages.append([one["executionId"] for one in page["items"]])
        cursor = f"&cursor={page['nextCursor']}" if page["nextCursor"] else None
    assert [len(page) for page in pages] == [3, 3, 1]
    assert [one for page in pages for one in page] == seen[::-1]
    job = (await api.client.get(f"/openapi/jobs/{run.job_id}")).json()
    assert [one["executionId"] for one in job["executions"]] == seen[:1:-1]
    assert [one["attempt"] for one in job["executions"]] == [7, 6, 5, 4, 3]


async def test_pages_of_workers_and_handlers_show_each_once(api: Door) -> None:
    for number in range(5):
        await api.beat(f"w{number}", handlers=["all", f"own{number}"])
    found: list[dict[str, Any]] = []
    cursor: str | None
    for path, key, expected in (
        ("/openapi/workers", "workerId", {f"w{number}#boot" for number in range(5)}),
        ("/openapi/handlers", "name", {"all", *(f"own{number}" for number in range(5))}),
    ):
        found, cursor = [], ""
        while cursor is not None:
            page = (await api.client.get(f"{path}?limit=2{cursor}")).json()
            found += page["items"]
            cursor = f"&cursor={page['nextCursor']}" if page["nextCursor"] else None
        assert sorted(one[key] for one in found) == sorted(expected)
    shared = [one for one in found if one["name"] == "all"]
    assert [one["workers"] for one in shared] == [5]


async def test_no_page_of_workers_and_handlers_leaves_one_out_while_others_come_and_die(
    api: Door,
) -> None:
    for number in range(1, 6):
        await api.beat(f"w{number}", handlers=[f"h{number}"])
    for path, key, name in (
        ("/openapi/workers", "workerId", "w{}#boot"),
        ("/openapi/handlers", "name", "h{}"),
    ):
        first = (await api.client.get(f"{path}?limit=2")).json()
        assert [one[key] for one in first["items"]] == [name.format(1), name.format(2)]
        # One comes before what was read, and one of those that were read dies.
        await api.beat("w0", handlers=["h0"])
        await change(api.database, "UPDATE worker_node SET state = 'DOWN' WHERE id = 'w1#boot'")
        api.parts.fleet._expire()
        rest = (await api.client.get(f"{path}?cursor={first['nextCursor']}")).json()
        assert [one[key] for one in rest["items"]] == [name.format(n) for n in (3, 4, 5)]
        await change(api.database, "UPDATE worker_node SET state = 'UP' WHERE id = 'w1#boot'")
        await change(api.database, "DELETE FROM worker_node WHERE id = 'w0#boot'")
        api.parts.fleet._expire()


@pytest.mark.parametrize("letter", ["h", "\u0436", "\u65e5", "\U0001f600"])
async def test_pages_go_on_behind_the_longest_name(api: Door, letter: str) -> None:
    names = [f"{number}{letter * 127}" for number in range(3)]
    await api.beat("w" * 63, handlers=names)
    await api.beat("x" * 63, handlers=["other"])
    for path, key, count in (("handlers", "name", 4), ("workers", "workerId", 2)):
        found, cursor = [], None
        while True:
            params = {"limit": 1} | ({} if cursor is None else {"cursor": cursor})
            answer = await api.client.get(f"/openapi/{path}", params=params)
            assert answer.status_code == 200, answer.text
            found += [one[key] for one in answer.json()["items"]]
            cursor = answer.json()["nextCursor"]
            if cursor is None:
                break
        assert len(set(found)) == len(found) == count


async def test_a_silent_worker_is_listed_but_its_handlers_are_not(api: Door) -> None:
    await api.beat("silent", handlers=["lonely"])
    await change(api.database, "UPDATE worker_node SET last_heartbeat = last_heartbeat - 20000")
    api.parts.fleet._expire()
    assert (await api.client.get("/openapi/handlers")).json()["items"] == []
    (worker,) = (await api.client.get("/openapi/workers")).json()["items"]
    assert worker["workerId"] == "silent#boot"
    needed = {"workerId", "state", "handlers", "capacity", "active", "queued"}
    assert needed <= worker.keys()


async def test_without_a_valid_key_nothing_is_told_and_nothing_taken(
    sqlite_engine: Engine,
) -> None:
    async with door(migrated(sqlite_engine), api_keys="one:key-of-one") as api:
        for path in ("/openapi/jobs/1", "/openapi/workers", "/openapi/handlers"):
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": f"Bearer {TOKEN}"},
            ):
                answer = await api.client.get(path, headers=headers)
                assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
                assert answer.headers["www-authenticate"].startswith("Bearer")
        assert (await api.submit()).status_code == 401
        good = {"Authorization": "Bearer key-of-one"}
        answer = await api.client.post("/openapi/jobs", json=body_of(), headers=good)
        assert answer.status_code == 202
        for path in ("/healthz", "/readyz"):
            assert (await api.client.get(path)).status_code == 200
        stranger = await api.client.post("/internal/reports", content=b"{}", headers=good)
        assert stranger.status_code == 401


async def test_readiness_names_the_part_that_is_missing(
    sqlite_engine: Engine,
) -> None:
    engine = migrated(sqlite_engine)
    async with door(engine, redis_url="unix:///nowhere/redis.sock") as api:
        answer = await api.client.get("/readyz")
        assert answer.status_code == 503
        parts = answer.json()["parts"]
        assert parts["redis"] != "ok"
        assert parts["database"] == "ok"
        # The door itself needs no Redis.
        assert (await api.submit()).status_code == 202


async def test_a_redis_that_takes_no_writes_is_missing(migrated_engine: Engine) -> None:
    """It answers, but it is full: no worker would be granted a lease."""
    async with door(migrated_engine) as api:
        redis = migrated_engine.redis
        assert redis.command("CONFIG SET maxmemory 1") == b"+OK"
        try:
            answer = await api.client.get("/readyz")
            assert (answer.status_code, answer.json()["parts"]["database"]) == (503, "ok")
            gone = 'oncue_part_up{part="redis"} 0.0'
            await until_async(lambda: _shows(api, gone), what="the metric to show it")
        finally:
            redis.command("CONFIG SET maxmemory 0")
        assert (await api.client.get("/readyz")).status_code == 200


async def _shows(api: Door, line: str) -> bool:
    return line in (await api.client.get("/metrics")).text


async def test_readiness_tells_that_the_row_which_fences_dispatch_is_missing(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as api:
        await change(api.database, "DELETE FROM dispatch_term")
        answer = await api.client.get("/readyz")
        assert answer.status_code == 503
        assert "nothing will be dispatched" in answer.json()["parts"]["database"]


async def test_a_request_id_is_returned_and_a_bad_one_replaced(one_api: Door) -> None:
    given = await one_api.client.get("/healthz", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    bad = await one_api.client.get("/healthz", headers={"x-request-id": "a b\t"})
    assert bad.headers["x-request-id"] not in ("", "a b\t")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"workerId": 1, "load": {"seq": 1, "active": 0}}',
        b'{"workerId": "w", "load": {"seq": 1, "active": 0}, "outcomes": {}}',
        b'{"workerId": "w", "load": {"seq": 1, "active": 0}, "stopped": null}',
        b"[" * 10000,
    ],
)
async def test_an_envelope_of_reports_that_cannot_be_read_is_refused(
    one_api: Door, raw: bytes
) -> None:
    answer = await one_api.client.post(
        "/internal/reports", content=raw, headers={"Authorization": f"Bearer {TOKEN}"}
    )
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed")
