"""The `http` handler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from oncue.protocol import Outcome, OutcomeStatus
from tests.integration.worker.conftest import OpenWorker
from tests.integration.worker.rig import FakeDispatcher
from tests.support.wait import until_async
from tests.unit.worker.runs import make_request, make_run


@pytest.fixture
async def site() -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        kind = request.match_info["kind"]
        headers = {"busy": {"Retry-After": "7"}, "hasty": {"Retry-After": "0"}}.get(kind, {})
        if kind.isdigit():
            return web.Response(status=int(kind), headers={"Retry-After": "7"})
        return {
            "json": web.json_response({"got": await request.text(), "method": request.method}),
            "surrogate": web.Response(body=b'"\\ud800"', content_type="application/json"),
            "big": web.Response(body=b'{"a":"' + b"\x01" * 200_000),
            "teapot": web.Response(status=418, text="short and stout"),
            "busy": web.Response(status=503, headers=headers),
            "hasty": web.Response(status=503, headers=headers),
            "away": web.Response(status=302, headers={"Location": "http://127.0.0.1:9/"}),
            "full": web.Response(body=b"a" * 60_000, headers={"ETag": '"' + "x" * 6000 + '"'}),
            "key": web.Response(text=request.headers.get("idempotency-key", "")),
        }[kind]

    app = web.Application()
    app.router.add_route("*", "/{kind}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
def call(open_worker: OpenWorker, dispatcher: FakeDispatcher, site: str) -> Any:
    async def run(path: str, allowed: str = "127.0.0.0/8", **params: Any) -> Outcome:
        request = make_run("http", {"url": path if "://" in path else site + path, **params})
        async with open_worker(egress_allow=allowed) as parts:
            await parts.intake.take(make_request(request))
            return await until_async(lambda: dispatcher.outcome(request.execution_id))

    return run


async def test_an_answer_is_the_result(call: Any) -> None:
    outcome = await call("/json", method="post", body={"n": 1})
    assert outcome.status is OutcomeStatus.SUCCEEDED
    assert outcome.result["status"] == 200
    assert outcome.result["body"] == {"got": '{"n": 1}', "method": "POST"}
    assert outcome.result["headers"]["content-type"].startswith("application/json")


async def test_a_task_has_one_idempotency_key(call: Any) -> None:
    outcome = await call("/key")
    assert outcome.result["body"] == str(outcome.job_id)


@pytest.mark.parametrize("path", ["/surrogate", "/big", "/full"])
async def test_any_answer_makes_a_storable_result(call: Any, path: str) -> None:
    outcome = await call(path)
    assert outcome.status is OutcomeStatus.SUCCEEDED
    assert len(json.dumps(outcome.result, ensure_ascii=False).encode()) <= 64 * 1024


async def test_a_header_that_is_no_utf_8_is_told_as_far_as_it_goes(call: Any) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 201 Created\r\nLocation: /caf\xe9\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        outcome = await call(f"http://127.0.0.1:{port}/orders", method="POST")
    assert outcome.status is OutcomeStatus.SUCCEEDED
    assert outcome.result["headers"]["location"] == "/caf\ufffd"


@pytest.mark.parametrize("name", ["transfer-encoding ", "", "host: x", "x y", "x\u00e9"])
async def test_a_name_that_is_no_name_of_a_header_is_refused(call: Any, name: str) -> None:
    outcome = await call("/json", headers={name: "1"})
    assert (outcome.error.code, outcome.retryable) == ("invalid_params", False)


async def test_an_unexpected_status_fails_the_attempt(call: Any) -> None:
    outcome = await call("/teapot")
    assert (outcome.status, outcome.retryable) == (OutcomeStatus.FAILED, True)
    assert outcome.error.message == "UnexpectedStatus: the URL answered 418"


@pytest.mark.parametrize("expected", [418, [200, 418]])
async def test_an_expected_status_succeeds(call: Any, expected: Any) -> None:
    assert (await call("/teapot", expectStatus=expected)).status is OutcomeStatus.SUCCEEDED


async def test_a_redirect_is_not_followed(call: Any) -> None:
    outcome = await call("/away", expectStatus=302)
    assert outcome.result["headers"]["location"] == "http://127.0.0.1:9/"


@pytest.mark.parametrize("path", ["/busy", "/408", "/413", "/425", "/429", "/500", "/502", "/504"])
async def test_retry_after_is_honoured_whatever_unexpected_status_has_it(
    call: Any, path: str
) -> None:
    outcome = await call(path)
    assert (outcome.error.code, outcome.retry_after_ms) == ("retry_requested", 7000)


async def test_a_retry_after_of_nothing_leaves_the_jobs_own_interval(call: Any) -> None:
    outcome = await call("/hasty")
    assert outcome.status is OutcomeStatus.FAILED
    assert outcome.retryable
    assert outcome.retry_after_ms is None


async def test_an_inner_address_is_refused_for_good(call: Any) -> None:
    outcome = await call("/json", allowed="")
    assert (outcome.error.code, outcome.retryable) == ("egress_refused", False)


@pytest.mark.parametrize(
    "params",
    [
        {"method": "TRACE"},
        {"headers": {"Host": "inner"}},
        {"headers": {"x": "a\r\nb: c"}},
        {"headers": {"ü": "x"}},
        {"colour": "red"},
        {"expectStatus": "any"},
    ],
)
async def test_bad_params_fail_for_good(call: Any, params: dict[str, Any]) -> None:
    outcome = await call("/json", **params)
    assert (outcome.error.code, outcome.retryable) == ("invalid_params", False)


@pytest.mark.parametrize(
    ("networks", "status"),
    [
        (None, OutcomeStatus.SUCCEEDED),
        (["127.0.0.0/8"], OutcomeStatus.SUCCEEDED),
        (["127.0.0.1/32", "10.0.0.0/8"], OutcomeStatus.SUCCEEDED),
        (["10.0.0.0/8"], OutcomeStatus.FAILED),
        ([], OutcomeStatus.FAILED),
    ],
)
async def test_the_networks_of_a_run_narrow_those_of_the_worker(
    open_worker: OpenWorker,
    dispatcher: FakeDispatcher,
    site: str,
    networks: list[str] | None,
    status: OutcomeStatus,
) -> None:
    run = make_run("http", {"url": site + "/key"}, egress_allow=networks)
    async with open_worker(egress_allow="127.0.0.0/8") as parts:
        await parts.intake.take(make_request(run))
        outcome = await until_async(lambda: dispatcher.outcome(run.execution_id))
    assert outcome.status is status
    if status is OutcomeStatus.FAILED:
        assert outcome.error is not None
        assert outcome.error.code == "egress_refused"


async def test_the_networks_of_a_run_never_widen_those_of_the_worker(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, site: str
) -> None:
    run = make_run("http", {"url": site + "/key"}, egress_allow=["0.0.0.0/0"])
    async with open_worker(egress_allow="10.0.0.0/8") as parts:
        await parts.intake.take(make_request(run))
        outcome = await until_async(lambda: dispatcher.outcome(run.execution_id))
    assert outcome.error is not None
    assert outcome.error.code == "egress_refused"
