"""The clients over httpx's mock transport: what both of them send, and what they return."""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import subprocess
import sys
from dataclasses import fields
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

import oncue
from oncue import (
    AsyncClient,
    BulkOperation,
    BulkTimeout,
    Client,
    Conflict,
    Job,
    JobFailed,
    NewJob,
    Retries,
    Unavailable,
    WaitTimeout,
)
from oncue.submission import JobOptions

AT_ONCE = Retries(first_pause=0.0)
JOB = {"jobId": 7, "jobName": "n", "jobHandler": "echo", "status": "WAITING", "later": "field"}


OPERATION = {"operationId": "op/1", "action": "cancel", "status": "RUNNING", "later": "field"}


OF_A_JOB = ("run_at", "expires_at", "start_at", "end_at")


class Server:
    """Answers from a script, the last answer for ever, and keeps the requests."""

    def __init__(self, *answers: httpx.Response | type[httpx.RequestError]) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, httpx.Response):
            return httpx.Response(  # a fresh one: a response may be read by one client alone
                answer.status_code, headers=answer.headers, content=answer.content
            )
        raise answer("broken", request=request)

    def client(self, **options: Any) -> Client:
        return Client(
            transport=httpx.MockTransport(self),
            retries=AT_ONCE,
            **{"base_url": "http://x", **options},
        )

    def async_client(self, **options: Any) -> AsyncClient:
        return AsyncClient(
            transport=httpx.MockTransport(self),
            retries=AT_ONCE,
            **{"base_url": "http://x", **options},
        )


def ok(document: Any) -> httpx.Response:
    return httpx.Response(200, json=document)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONCUE_URL", raising=False)
    monkeypatch.delenv("ONCUE_API_KEY", raising=False)


def test_both_clients_have_the_same_methods_and_arguments() -> None:
    for name, method in inspect.getmembers(Client, inspect.isfunction):
        if name.startswith("_") or name == "close":
            continue
        twin = inspect.signature(getattr(AsyncClient, name))
        assert list(twin.parameters.values()) == list(
            inspect.signature(method).parameters.values()
        ), name


def test_the_options_of_submit_are_the_fields_of_a_new_job() -> None:
    own = {field.name for field in fields(NewJob)} - {"handler", "params"}
    assert own == set(JobOptions.__annotations__)


def test_submit_sends_all_it_is_told_by_the_names_of_the_api() -> None:
    server = Server(httpx.Response(202, json=JOB))
    with server.client(api_key="secret") as client:
        job = client.submit(
            "send",
            {"order": 1},
            name="send it",
            request_id="order-1",
            run_at=datetime(2030, 1, 31, 9, tzinfo=timezone(timedelta(hours=1))),
            priority=9,
            timeout=1.5,
            max_retry=0,
            retry_interval=timedelta(minutes=1),
            retry_backoff="exponential",
            callback_url="http://me/hook",
            labels={"team": "a"},
        )
    (request,) = server.requests
    assert (request.method, str(request.url)) == ("POST", "http://x/openapi/jobs")
    assert request.headers["Authorization"] == "Bearer secret"
    assert request.headers["Content-Type"] == "application/json"
    assert json.loads(request.content) == {
        "clientRequestId": "order-1",
        "jobName": "send it",
        "jobHandler": "send",
        "params": {"order": 1},
        "runAt": "2030-01-31T08:00:00.000Z",
        "priority": 9,
        "timeoutMs": 1500,
        "maxRetry": 0,
        "retryIntervalSeconds": 60.0,
        "retryBackoff": "exponential",
        "callbackUrl": "http://me/hook",
        "labels": {"team": "a"},
    }
    assert (job.job_id, job.status, job.ended) == (7, "WAITING", False)


def test_submit_leaves_out_what_it_is_not_told() -> None:
    server = Server(httpx.Response(202, json=JOB))
    with server.client() as client:
        client.submit("send", delay=5)
        client.submit("send", delay=timedelta(seconds=5))
    for request in server.requests:
        body = json.loads(request.content)
        assert len(body.pop("clientRequestId")) == 32
        assert body == {"jobName": "send", "jobHandler": "send", "delayMs": 5000}
        assert "Authorization" not in request.headers
    assert server.requests[0].content != server.requests[1].content  # two requests are two jobs


async def test_both_clients_repeat_a_submission_under_one_request_id() -> None:
    script: tuple[Any, ...] = (
        httpx.ConnectError,
        httpx.ReadError,
        httpx.Response(503),
        httpx.Response(202, json=JOB),
    )
    server, async_server = Server(*script), Server(*script)
    with server.client() as client:
        client.submit("send")
    async with async_server.async_client() as async_client:
        await async_client.submit("send")
    for one in (server, async_server):
        assert len(one.requests) == 4
        assert len({request.content for request in one.requests}) == 1


async def test_an_async_submission_can_be_cancelled_between_tries() -> None:
    server = Server(httpx.ConnectError)
    async with AsyncClient(
        "http://x",
        transport=httpx.MockTransport(server),
        retries=Retries(first_pause=60, longest_pause=60, seconds=600),
    ) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.submit("send")
    assert len(server.requests) == 1


async def test_a_schedule_is_cancelled_with_or_without_what_it_has_made() -> None:
    server = Server(ok({**JOB, "status": "CANCELLED"}))
    with server.client() as client:
        client.cancel(7)
        client.cancel(7, children=True)
    async with server.async_client() as client_of_a_loop:
        await client_of_a_loop.cancel(7, children=True)
    asked = [(sent.url.path, dict(sent.url.params)) for sent in server.requests]
    path = "/openapi/jobs/7/cancel"
    assert asked == [(path, {}), (path, {"children": "true"}), (path, {"children": "true"})]


def test_a_filter_that_does_not_exist_is_refused_at_once() -> None:
    with Server(ok({})).client() as client:
        with pytest.raises(TypeError, match="no filter 'state'"):
            client.list(state="WAITING")  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="time zone"):
            client.list(created_from=datetime(2030, 1, 1))  # noqa: DTZ001 - the point


@pytest.mark.parametrize(
    ("changes", "kind", "why"),
    [
        ({}, ValueError, "at least one"),
        ({"run_at": datetime(2030, 1, 1)}, ValueError, "time zone"),  # noqa: DTZ001 - the point
        ({"run_at": datetime(2030, 1, 1, tzinfo=UTC), "delay": 1}, ValueError, "not both"),
        ({"params": float("nan")}, ValueError, "JSON compliant"),
        ({"name": "x"}, TypeError, "changes no 'name'"),
    ],
)
def test_a_change_that_cannot_be_is_refused_at_once(
    changes: dict[str, Any], kind: type[Exception], why: str
) -> None:
    server = Server(ok(JOB))
    with server.client() as client, pytest.raises(kind, match=why):
        client.revise(7, revision=0, **changes)
    assert not server.requests


@pytest.mark.parametrize(
    ("moment", "kind", "why"),
    [
        (datetime(2030, 1, 1), ValueError, "needs a time zone"),  # noqa: DTZ001 - the point
        ("2030-01-01T00:00:00Z", TypeError, "is a datetime with a time zone, not '2030"),
    ],
)
def test_a_moment_without_a_zone_is_not_guessed_to_be_of_this_machine(
    moment: Any, kind: type[Exception], why: str
) -> None:
    server = Server(ok({}))
    aware = datetime(2030, 1, 1, tzinfo=UTC)
    with server.client() as client:
        for ask in (
            *(lambda name=name: client.submit("echo", **{name: moment}) for name in OF_A_JOB),
            lambda: client.revise(7, revision=0, run_at=moment),
            lambda: client.revise(7, revision=0, expires_at=moment),
            lambda: client.backfill(7, moment, aware),
            lambda: client.backfill(7, aware, moment),
            lambda: client.create_key("k", expires_at=moment),
            lambda: client.audit(since=moment),
            lambda: client.audit(until=moment),
        ):
            with pytest.raises(kind, match=why):
                ask()  # type: ignore[no-untyped-call]
    assert not server.requests


def test_a_long_poll_gets_its_time_on_top_of_the_timeout() -> None:
    server = Server(ok({**JOB, "status": "SUCCEEDED"}))
    with server.client(timeout=3) as client:
        client.get(7)
        client.wait(7, timeout=9)
    plain, long = (request.extensions["timeout"]["read"] for request in server.requests)
    assert plain == 3
    assert 8 < long <= 12  # what is left of the nine seconds, and the timeout


def test_a_checked_wait_raises_for_a_failed_job() -> None:
    failed = {**JOB, "status": "FAILED", "error": {"code": "timeout", "message": "too slow"}}
    with Server(ok(failed)).client() as client:
        assert client.wait(7).status == "FAILED"
        with pytest.raises(JobFailed, match="too slow"):
            client.wait(7, check=True)


def test_address_and_key_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(ok(JOB))
    monkeypatch.setenv("ONCUE_URL", "https://jobs.example/base/")
    monkeypatch.setenv("ONCUE_API_KEY", "from-environment")
    with server.client(base_url=None) as client:
        client.get(7)
    with server.client(api_key="given") as client:
        client.get(7)
    with server.client(api_key="") as client:
        client.get(7)
    first, second, third = server.requests
    assert str(first.url) == "https://jobs.example/base/openapi/jobs/7"
    assert first.headers["Authorization"] == "Bearer from-environment"
    assert second.headers["Authorization"] == "Bearer given"
    assert "Authorization" not in third.headers


@pytest.mark.parametrize("url", ["jobs.example", "ftp://x", "http://", "http://x:port", "http://["])
def test_an_address_that_is_no_url_is_refused_when_the_client_is_made(url: str) -> None:
    with pytest.raises(ValueError, match="http or https URL"):
        Client(url)


def test_a_key_that_cannot_be_sent_is_refused_without_being_shown() -> None:
    with pytest.raises(ValueError, match="printable ASCII") as refused:
        Client(api_key="se\ncret")
    assert "cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"run_at": datetime(2030, 1, 1)}, "time zone"),  # noqa: DTZ001 - the point
        ({"run_at": datetime(2030, 1, 1, tzinfo=UTC), "delay": 1}, "not both"),
        ({"request_id": ""}, "must not be empty"),
        ({"delay": float("inf")}, "finite"),
        ({"params": float("nan")}, "JSON compliant"),
    ],
)
def test_what_cannot_be_submitted_is_refused_before_anything_is_sent(
    options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        NewJob("echo", **options).body()


def test_results_are_frozen_and_go_back_to_the_wire() -> None:
    job = Job.model_validate({**JOB, "createdAt": "2030-01-01T00:00:00.000Z"})
    with pytest.raises(ValidationError):
        job.status = "FAILED"  # type: ignore[misc]
    wire = job.model_dump(mode="json", by_alias=True)
    assert (wire["jobId"], wire["createdAt"]) == (7, "2030-01-01T00:00:00.000Z")


A_JOB = Job.model_validate(JOB)


@pytest.mark.parametrize(
    "error",
    [
        Conflict("request_conflict", 409, "differs", {"fields": ["params"]}),
        JobFailed(A_JOB),
        WaitTimeout(A_JOB, 5),
        BulkTimeout(BulkOperation.model_validate(OPERATION), 5),
        Unavailable("gone", request_id="mine"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_pass_between_processes(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    assert again.__dict__ == error.__dict__


def loaded_by(statement: str) -> set[str]:
    told = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    )
    return set(told.stdout.split())


def test_a_handler_module_does_not_load_the_client() -> None:
    assert not {"httpx", "pydantic", "asyncio"} & loaded_by("from oncue import handler")


def test_the_client_loads_nothing_of_the_server() -> None:
    loaded = loaded_by("from oncue import Client; Client()")
    assert not {"fastapi", "sqlalchemy", "redis", "aiohttp", "typer", "app", "worker"} & loaded


def test_every_public_name_is_there() -> None:
    for name in oncue.__all__:
        assert getattr(oncue, name) is not None
    assert set(dir(oncue)) == set(oncue.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = oncue.nothing


def test_a_bulk_action_sends_its_filter_and_keeps_its_request_id() -> None:
    server = Server(httpx.Response(503), httpx.Response(202, json=OPERATION))
    with server.client() as client:
        operation = client.bulk(
            "retry",
            rate=50,
            status="FAILED",
            label=("team", "a=b"),
            finished_from=datetime(2030, 1, 31, 9, tzinfo=timezone(timedelta(hours=1))),
        )
    assert (operation.operation_id, operation.ended) == ("op/1", False)
    first, second = (json.loads(request.content) for request in server.requests)
    assert first == second
    assert first.pop("clientRequestId")
    assert first == {
        "action": "retry",
        "ratePerSecond": 50,
        "filter": {
            "status": "FAILED",
            "label": "team=a=b",
            "finishedFrom": "2030-01-31T08:00:00.000Z",
        },
    }


def test_a_count_is_a_dry_run() -> None:
    counted = {"dryRun": True, "action": "cancel", "matched": 7, "matchedIsMinimum": True}
    server = Server(ok(counted))
    with server.client() as client:
        count = client.bulk_count("cancel", handler="x")
    assert (count.matched, count.matched_is_minimum) == (7, True)
    (request,) = server.requests
    expected = {"action": "cancel", "filter": {"handler": "x"}, "dryRun": True}
    assert json.loads(request.content) == expected


async def test_a_bulk_operation_is_looked_at_and_called_off_under_its_own_address() -> None:
    server = Server(ok(OPERATION))
    async with server.async_client() as client:
        operation = await client.bulk_operation("op/1")
        await client.cancel_bulk(operation)
    assert [(one.method, one.url.raw_path.decode()) for one in server.requests] == [
        ("GET", "/openapi/bulk/op%2F1"),
        ("POST", "/openapi/bulk/op%2F1/cancel"),
    ]


def test_a_wait_for_a_bulk_operation_tells_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncue._talk.BULK_LOOK_SECONDS", 0.0)
    server = Server(
        ok(OPERATION | {"examined": 3}), ok(OPERATION | {"examined": 9, "status": "SUCCEEDED"})
    )
    seen: list[int] = []
    with server.client() as client:
        ended = client.wait_bulk("op/1", progress=lambda one: seen.append(one.examined))
        assert (ended.status, seen) == ("SUCCEEDED", [3, 9])
    with Server(ok(OPERATION)).client() as client, pytest.raises(BulkTimeout) as timed_out:
        client.wait_bulk("op/1", timeout=0)
    assert timed_out.value.operation.status == "RUNNING"


def test_a_filter_that_is_none_of_a_bulk_action_is_refused_before_anything_is_sent() -> None:
    server = Server(ok(OPERATION))
    with server.client() as client:
        with pytest.raises(TypeError, match="moon"):
            client.bulk("cancel", moon="full")  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="time zone"):
            client.bulk("cancel", created_from=datetime(2030, 1, 1))  # noqa: DTZ001 - the point
    assert server.requests == []


PREVIEW = {
    "expr": "@daily",
    "dialect": "unix",
    "timezone": "UTC",
    "description": "At 00:00, every day.",
    "after": "2026-01-01T00:00:00.000Z",
    "items": [{"local": "2026-01-02T00:00:00+00:00", "utc": "2026-01-02T00:00:00.000Z"}],
    "nextClockChange": None,
}


def test_a_cron_preview_sends_only_what_was_given() -> None:
    server = Server(httpx.Response(200, json=PREVIEW))
    with server.client() as client:
        seen = client.cron_preview("@daily")
        client.cron_preview(
            "0 0 0 * * ?",
            dialect="quartz",
            after=datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))),
            count=1,
            dst_fold="both",
        )
        with pytest.raises(ValueError, match="after needs a time zone"):
            client.cron_preview("@daily", after=datetime(2026, 1, 1))  # noqa: DTZ001 - the point
    assert seen.items[0].utc == datetime(2026, 1, 2, tzinfo=UTC)
    assert [(sent.method, sent.url.path, dict(sent.url.params)) for sent in server.requests] == [
        ("GET", "/openapi/cron/preview", {"expr": "@daily"}),
        (
            "GET",
            "/openapi/cron/preview",
            {
                "expr": "0 0 0 * * ?",
                "dialect": "quartz",
                "after": "2026-01-01T00:00:00.000Z",
                "count": "1",
                "dstFold": "both",
            },
        ),
    ]


@pytest.mark.parametrize("wrong", ["7", None, 7.5])
def test_what_is_neither_a_job_nor_its_id_is_told_so(wrong: Any) -> None:
    with (
        Client(transport=httpx.MockTransport(Server())) as client,
        pytest.raises(TypeError, match="a Job or its id is needed, not"),
    ):
        client.get(wrong)
