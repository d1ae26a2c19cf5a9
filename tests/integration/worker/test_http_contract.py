"""The worker's HTTP interface: who may call it, what it refuses and how it says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from oncue.protocol import MAX_INTERNAL_BODY_BYTES, Answer, RejectReason, RunResponse
from tests.integration.worker.conftest import OpenWorker
from tests.integration.worker.rig import FakeDispatcher
from tests.support.redis import PrivateValkey
from tests.support.release import Release
from tests.support.wait import until_async
from tests.unit.worker.runs import make_request, make_run, to_json
from worker.main import create_app
from worker.settings import WorkerSettings

Open = Callable[..., Any]


@pytest.fixture
def client(settings: Callable[..., WorkerSettings]) -> Open:
    @asynccontextmanager
    async def opened(**changes: Any) -> AsyncIterator[httpx.AsyncClient]:
        app = create_app(settings(**changes))
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://worker") as found:
                yield found

    return opened


def code_of(answer: httpx.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json"
    fields = answer.json()
    assert {"type", "title", "status", "code", "detail"} <= set(fields)
    assert fields["status"] == answer.status_code
    return str(fields["code"])


async def test_every_token_of_the_list_opens_and_nothing_else_does(client: Open) -> None:
    body = to_json(make_request())
    async with client(internal_token="new-token,old-token") as worker:
        for path in ("/run", "/cancel", "/deliver", "/drain"):
            for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "new-token"}):
                answer = await worker.post(path, json=body, headers=header)
                assert (answer.status_code, code_of(answer)) == (401, "unauthorized")
        for token in ("new-token", "old-token"):
            header = {"authorization": f"Bearer {token}"}
            assert (await worker.post("/run", json=body, headers=header)).status_code == 200
        for path in ("/healthz", "/readyz", "/metrics", "/docs", "/openapi.json"):
            assert (await worker.get(path)).status_code in (200, 503)


async def test_the_first_token_is_sent_to_dispatchers(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    async with open_worker(internal_token="first,second") as parts:
        assert parts.beats._sender._headers["authorization"] == "Bearer first"


async def test_refusals_are_problems_with_a_code(client: Open) -> None:
    async with client() as worker:
        await worker.post("/run", json=to_json(make_request(term=5)))
        found = {
            code_of(answer)
            for answer in (
                await worker.get("/nowhere"),
                await worker.get("/run"),
                await worker.post("/run", json={"term": 1}),
                await worker.post("/run", content=b"{", headers={"content-type": "text/plain"}),
                await worker.post("/run", json=to_json(make_request(term=4))),
            )
        }
    assert found == {"not_found", "method_not_allowed", "invalid_request", "stale_term"}


async def test_a_slash_too_many_is_not_redirected(client: Open) -> None:
    async with client() as worker:
        assert code_of(await worker.get("/healthz/")) == "not_found"


async def test_a_run_that_cannot_be_read_is_rejected_alone_and_for_good(client: Open) -> None:
    first, bad, last = make_run("echo"), make_run("echo"), make_run("echo")
    body = to_json(make_request(first, bad, last))
    body["runs"][1]["attempt"] = "first"
    async with client() as worker:
        answer = await worker.post("/run", json=body)
        late = await worker.post("/run", json=to_json(make_request(bad)))
    found = RunResponse.model_validate_json(answer.content).answers
    assert [one.execution_id for one in found] == [run.execution_id for run in (first, bad, last)]
    assert [one.answer for one in found] == [Answer.ACCEPTED, Answer.REJECTED, Answer.ACCEPTED]
    assert found[1].reason is RejectReason.INVALID
    [repeated] = RunResponse.model_validate_json(late.content).answers
    assert (repeated.answer, repeated.reason) == (Answer.REJECTED, RejectReason.INVALID)


def test_a_worker_of_the_last_release_reads_what_is_sent_now(tmp_path: Path) -> None:
    """A field that it does not know, as `nominalTime`, is none of its business."""
    release = Release(tmp_path)
    run = make_run("echo", nominal_time=1)
    read = (
        "import sys; from oncue.protocol import RunRequest as R; "
        "print(R.model_validate_json(sys.stdin.read()).runs[0].job_id)"
    )
    done = subprocess.run(
        [sys.executable, "-c", read],
        input=json.dumps(to_json(make_request(run))),
        env={**os.environ, **release.environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == run.job_id


async def test_an_unreadable_copy_of_a_held_run_is_a_duplicate(client: Open) -> None:
    run = make_run("w_wait", {"seconds": 60})
    async with client() as worker:
        await worker.post("/run", json=to_json(make_request(run)))
        body = {"term": 1, "runs": [{"executionId": run.execution_id}]}
        answer = await worker.post("/run", json=body)
    [found] = RunResponse.model_validate_json(answer.content).answers
    assert (found.answer, found.owner_execution_id) == (Answer.DUPLICATE, run.execution_id)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"runs": []}',
        b'{"term": 1}',
        b'{"term": 1, "runs": [{"jobId": 1}]}',
        b'{"term": 1, "runs": [{"executionId": 7}]}',
        b'{"term": 1, "runs": [null]}',
        b'{"term": 1, "runs": [' + b",".join([b'{"executionId": "x"}'] * 501) + b"]}",
    ],
)
async def test_a_body_whose_runs_cannot_be_told_apart_is_refused_whole(
    client: Open, body: bytes
) -> None:
    async with client() as worker:
        answer = await worker.post("/run", content=body)
    assert (answer.status_code, code_of(answer)) == (422, "invalid_request")


@pytest.mark.parametrize("path", ["/run", "/cancel", "/deliver"])
async def test_a_term_too_large_to_be_beaten_on_is_refused(client: Open, path: str) -> None:
    body = {"runs": [], "executionIds": [], "reason": "cancelled", "deliveries": []}
    async with client() as worker:
        refused = await worker.post(path, json={**body, "term": 2**63})
        taken = await worker.post(path, json={**body, "term": 2**63 - 1})
    assert (refused.status_code, code_of(refused)) == (422, "invalid_request")
    assert taken.status_code == 200


async def test_a_body_that_is_no_text_is_refused(client: Open) -> None:
    async with client() as worker:
        answer = await worker.post(
            "/run", content=b"\x80", headers={"Content-Type": "application/json"}
        )
    assert (answer.status_code, code_of(answer)) == (400, "bad_request")


async def test_a_body_over_the_limit_is_refused_declared_or_not(client: Open) -> None:
    async def stream() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b"x" * 1024 * 1024

    async with client() as worker:
        declared = await worker.post("/run", content=b"x" * (MAX_INTERNAL_BODY_BYTES + 1))
        streamed = await worker.post("/run", content=stream())
    assert code_of(declared) == code_of(streamed) == "body_too_large"


async def test_no_lease_is_a_503_that_says_when_to_come_back(
    client: Open, valkey: PrivateValkey
) -> None:
    async with client() as worker:
        valkey.kill()
        answer = await worker.post("/run", json=to_json(make_request(make_run("echo"))))
    assert (answer.status_code, code_of(answer)) == (503, "lease_unavailable")
    assert answer.headers["retry-after"] == "1"


async def test_readiness_names_what_is_missing(
    client: Open, dispatcher: FakeDispatcher, valkey: PrivateValkey
) -> None:
    async with client() as worker:

        async def is_ready() -> bool:
            return bool((await worker.get("/readyz")).status_code == 200)

        await until_async(is_ready)
        valkey.kill()
        answer = await worker.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["missing"] == ["redis"]
    dispatcher.silent = True
    async with client(builtin_handlers=False) as worker:
        assert "dispatcher" in (await worker.get("/readyz")).json()["missing"]


async def test_a_worker_that_drains_is_not_ready_and_lives(client: Open) -> None:
    async with client() as worker:

        async def is_ready() -> bool:
            return bool((await worker.get("/readyz")).status_code == 200)

        await until_async(is_ready)
        await worker.post("/drain")
        answer = await worker.get("/readyz")
        assert (await worker.get("/healthz")).status_code == 200
    assert answer.status_code == 503
    told = answer.json()
    assert (told["ready"], told["draining"], told["missing"]) == (False, True, [])


async def test_health_is_the_boot_id_of_the_beats(client: Open, dispatcher: FakeDispatcher) -> None:
    async with client() as worker:
        await until_async(lambda: dispatcher.beats)
        health = (await worker.get("/healthz")).json()
    assert health["bootId"] == dispatcher.beats[0].boot_id
    assert health["workerId"] == dispatcher.beats[0].worker_id


async def test_metrics_count_runs_by_handler_and_status(
    client: Open, dispatcher: FakeDispatcher
) -> None:
    run = make_run("echo")
    async with client() as worker:
        await worker.post("/run", json=to_json(make_request(run)))
        await until_async(lambda: dispatcher.outcome(run.execution_id))
        text = (await worker.get("/metrics")).text
    assert 'oncue_worker_runs_total{handler="echo",status="succeeded"} 1.0' in text
    for name in ("active", "queued", "capacity", "reports_unacknowledged"):
        assert f"oncue_worker_{name} " in text


async def test_the_docs_page_needs_nothing_from_elsewhere(client: Open) -> None:
    async with client() as worker:
        page = (await worker.get("/docs")).text
        assert "https://" not in page
        script = page.split('<script src="')[1].split('"')[0]
        assert (await worker.get(script)).status_code == 200


SHORT, LONG = "application/json", "application/json; charset=utf-8"
"""What a dispatcher says of its body, and what goes through the framework's layers."""


def bodies_of_runs() -> dict[str, bytes]:
    """Requests to `/run`, right and wrong, as bytes."""
    plain = to_json(make_request(make_run("echo", {"n": 1})))
    broken = {**plain, "runs": [{**plain["runs"][0], "attempt": "first"}, {"executionId": 7}]}
    text = json.dumps(to_json(make_request(make_run("echo", "PARAMS"))))
    return {
        "plain": json.dumps(plain).encode(),
        "empty": b'{"term": 1, "runs": []}',
        "a run that cannot be read": json.dumps(broken).encode(),
        "no term": b'{"runs": []}',
        "no JSON": b"{",
        "no object": b"[]",
        "nothing": b"",
        "no UTF-8": b'{"term": 1, "runs": [], "x": "\xff"}',
        "an old term": b'{"term": 0, "runs": []}',
        "for another": b'{"term": 1, "workerId": "other#1", "runs": []}',
        "from long ago": b'{"term": 1, "sentAt": 1, "runs": []}',
        "too many": json.dumps({**plain, "runs": plain["runs"] * 2000}).encode(),
        "too long": b'{"term": 1, "runs": [], "x": "' + b"x" * MAX_INTERNAL_BODY_BYTES + b'"}',
        **{
            f"params {params}": text.replace('"PARAMS"', params).encode()
            for params in ("10000000000000000000000000001", "1e400", "NaN", '"\\ud800"', "0.1")
        },
    }


@pytest.mark.parametrize("name", bodies_of_runs())
async def test_the_short_way_answers_and_runs_as_the_framework_does(
    client: Open, name: str
) -> None:
    body, found = bodies_of_runs()[name], []
    for way in (SHORT, LONG):
        async with client(redis_prefix=f"by-{len(way)}") as worker:
            await worker.post("/run", json=to_json(make_request(term=1)))
            answer = await worker.post("/run", content=body, headers={"content-type": way})
            said = answer.json()
            for changing in ("workerId", "load"):
                said.pop(changing, None)
            if answer.status_code in (421, 503):
                # They tell the worker's id, and how old a request is.
                said.pop("detail")
            del answer.headers["content-length"]
            results = []
            if answer.status_code == 200:
                results = [await outcome_of(worker, body, way, one) for one in said["answers"]]
            found.append((answer.status_code, said, results, dict(answer.headers)))
    # A NaN is not like itself.
    assert repr(found[0]) == repr(found[1])


async def outcome_of(worker: httpx.AsyncClient, body: bytes, way: str, said: Any) -> Any:
    """Return what a run that was accepted has ended with, as a second send of it is told."""
    if said["answer"] != "accepted":
        return None
    outcomes: list[Any] = []

    async def ended() -> bool:
        again = await worker.post("/run", content=body, headers={"content-type": way})
        outcomes[:] = [one.get("outcome") for one in again.json()["answers"]]
        return any(outcomes)

    await until_async(ended, 10, what="a run to end")
    return [one and (one["status"], one.get("result"), one.get("error")) for one in outcomes]
