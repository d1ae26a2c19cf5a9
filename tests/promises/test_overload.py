"""At overload the door refuses early, in order and cheaply; what it accepted is never refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.types import Message, Receive, Scope, Send

from app.edge import admission
from app.edge.pressure import FIRST_RATE
from tests.integration.app.rig import Door, body_of, door, opened, rows_of, value_of
from tests.support.engines import Engine
from tests.support.wait import until_async

WAIT_MS, FREE = 50, 5
MOST = FREE + round(FIRST_RATE * WAIT_MS / 1000)


@asynccontextmanager
async def standing_still(engine: Engine) -> AsyncIterator[None]:
    """Let no row of `job_info` be written meanwhile, as a database does that has come to a halt."""
    held, go_on = asyncio.Event(), asyncio.Event()
    async with opened(engine) as other:

        async def hold(connection: AsyncConnection) -> None:
            # In SQLite the transaction alone keeps all others from writing.
            if not other.is_sqlite:
                await connection.execute(text("LOCK TABLES job_info WRITE"))
            held.set()
            await go_on.wait()
            if not other.is_sqlite:
                await connection.execute(text("UNLOCK TABLES"))

        holding = asyncio.create_task(other.write(hold))
        await held.wait()
        try:
            yield
        finally:
            go_on.set()
            await holding


@pytest.fixture
async def narrow(migrated_engine: Engine) -> AsyncIterator[Door]:
    """A door that lets hardly anything wait."""
    async with door(
        migrated_engine, submit_batch=FREE, submit_wait_ms=WAIT_MS, submit_mib=1
    ) as api:
        await api.submitted(clientRequestId="before")
        yield api


async def first_refusal(
    api: Door, under_way: dict[str, asyncio.Task[httpx.Response]]
) -> httpx.Response:
    """Submit one after the other, without waiting for answers, until one is refused."""

    async def one_more() -> httpx.Response | None:
        request_id = f"flood-{len(under_way)}"
        under_way[request_id] = asyncio.create_task(api.submit(request_id))
        return next(
            (one.result() for one in under_way.values() if one.done() and one.result().is_error),
            None,
        )

    return await until_async(one_more, 30, what="a refusal")


async def test_while_the_database_stands_still_the_door_refuses_and_what_it_took_is_stored_once(
    migrated_engine: Engine, narrow: Door
) -> None:
    pressure = narrow.parts.admission.pressure
    under_way: dict[str, asyncio.Task[httpx.Response]] = {}
    async with standing_still(migrated_engine):
        refusal = await first_refusal(narrow, under_way)
        assert refusal.status_code == 503
        assert refusal.json()["code"] == "overloaded"
        assert 1 <= int(refusal.headers["Retry-After"]) <= 30
        assert refusal.headers["X-Request-Id"]
        # From here on nothing more comes in, however much is offered.
        waiting = pressure.units
        assert FREE <= waiting <= MOST
        flood = await asyncio.gather(*(narrow.submit(f"late-{n}") for n in range(200)))
        assert {one.status_code for one in flood} == {503}
        batch = {"jobs": [body_of(f"batch-{n}") for n in range(10)]}
        refused = await narrow.client.post("/openapi/jobs/batch", json=batch)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert pressure.units == waiting
        assert narrow.parts.submitter.backlog <= waiting
    answers = {name: await task for name, task in under_way.items()}
    accepted = {name: one.json()["jobId"] for name, one in answers.items() if one.is_success}
    assert len(accepted) == waiting
    assert {one.status_code for one in answers.values()} == {202, 503}
    stored = await rows_of(narrow.database, "SELECT id, client_request_id FROM job_info")
    named = {row["client_request_id"]: row["id"] for row in stored}
    assert named.pop("before")
    assert (named, len(stored)) == (accepted, waiting + 1)
    assert (pressure.units, pressure.bytes) == (0, 0)
    # Whoever was refused comes back under the same id, and is let in.
    late = await narrow.submit("late-0")
    assert late.status_code == 202
    metrics = (await narrow.client.get("/metrics")).text
    assert 'oncue_requests_refused_total{reason="wait"}' in metrics


async def test_bodies_in_memory_are_bounded(migrated_engine: Engine, narrow: Door) -> None:
    pressure = narrow.parts.admission.pressure
    jobs = [body_of(f"big-{n}", params="x" * 60_000) for n in range(12)]
    async with standing_still(migrated_engine):
        first = asyncio.create_task(narrow.client.post("/openapi/jobs/batch", json={"jobs": jobs}))
        await until_async(lambda: pressure.bytes > 600_000, what="the first batch to be let in")
        second = await narrow.client.post("/openapi/jobs/batch", json={"jobs": jobs})
        assert (second.status_code, second.json()["code"]) == (503, "overloaded")
        small = asyncio.create_task(narrow.submit("small", params="x" * 1000))
        await until_async(lambda: pressure.requests == 2, what="what still fits to be let in")
    assert (await small).status_code == 202
    assert [one["httpStatus"] for one in (await first).json()["items"]] == [202] * 12
    assert await value_of(narrow.database, "SELECT COUNT(*) FROM job_info") == 14


async def test_a_refusal_does_not_wait_for_the_body(migrated_engine: Engine, narrow: Door) -> None:
    under_way: dict[str, asyncio.Task[httpx.Response]] = {}
    sent: list[Message] = []

    async def never() -> Message:
        raise AssertionError("the body was asked for")

    async def send(message: Message) -> None:
        sent.append(message)

    async with standing_still(migrated_engine):
        await first_refusal(narrow, under_way)
        for path in ("/openapi/jobs", "/openapi/jobs/batch"):
            scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": []}
            await narrow.app(scope, never, send)
    assert [one["status"] for one in sent if one["type"] == "http.response.start"] == [503, 503]
    body = json.loads(sent[1]["body"])
    assert (body["status"], body["code"]) == (503, "overloaded")
    await asyncio.gather(*under_way.values())


def slow_body(
    path: str, declared: int, messages: asyncio.Queue[Message], sent: list[Message]
) -> tuple[Scope, Receive, Send]:
    """What a server calls the application with, whose body comes as it is put into the queue."""

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(declared).encode()),
    ]
    given = {"query_string": b"", "client": ("127.0.0.1", 1), "headers": headers}
    return {"type": "http", "method": "POST", "path": path, **given}, messages.get, send


class Upload:
    """A submission whose body comes in pieces."""

    def __init__(self, door: Door, path: str, body: bytes) -> None:
        self._pressure = door.parts.admission.pressure
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._sent: list[Message] = []
        self._left = body
        self.asking = asyncio.create_task(
            door.app(*slow_body(path, len(body), self._messages, self._sent))
        )

    async def come(self, size: int) -> None:
        """Let so many bytes come, and wait until they are taken or refused."""
        held = self._pressure.bytes + size
        piece, self._left = self._left[:size], self._left[size:]
        more = bool(self._left)
        self._messages.put_nowait({"type": "http.request", "body": piece, "more_body": more})
        await until_async(
            lambda: self._pressure.bytes >= held or self.asking.done(), what="a piece to be taken"
        )

    async def answer(self) -> tuple[int, dict[str, Any]]:
        """Let what is left come, and return what is answered."""
        if not self.asking.done():
            self._messages.put_nowait({"type": "http.request", "body": self._left})
        await self.asking
        return self._sent[0]["status"], json.loads(self._sent[1]["body"])


async def test_bodies_that_do_not_come_keep_nobody_out(
    migrated_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than a pause of this machine between two looks.
    monkeypatch.setattr(admission, "ARRIVAL_SECONDS", 3.0)
    async with door(migrated_engine, submit_mib=1) as api:
        sent: list[Message] = []
        heads = [("/openapi/jobs", 100)] * 300 + [("/openapi/jobs/batch", 1024 * 1024)] * 8
        waiting = [
            asyncio.create_task(api.app(*slow_body(path, size, asyncio.Queue(), sent)))
            for path, size in heads
        ]
        pressure = api.parts.admission.pressure
        await until_async(lambda: pressure.expected_requests, what="heads to be let in")
        # For a moment they count, and some are refused by it; then they keep nobody out.
        await until_async(lambda: not pressure.expected_requests, what="them to count no more")
        refused = len([one for one in waiting if one.done()])
        assert (await api.submit("beside")).status_code == 202
        answer = await api.client.post("/openapi/jobs/batch", json={"jobs": [body_of("batch")]})
        assert [one["httpStatus"] for one in answer.json()["items"]] == [202]
        assert len([one for one in waiting if one.done()]) == refused < len(waiting) - 100
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
        assert (pressure.expected_requests, pressure.expected_units) == (0, 0)
        assert (pressure.requests, pressure.units, pressure.bytes) == (0, 0, 0)


async def test_single_submissions_are_let_in_beside_a_batch_of_a_mebibyte(
    migrated_engine: Engine,
) -> None:
    jobs = [body_of(f"batch-{n}", params="x" * 1900) for n in range(480)]
    async with door(migrated_engine) as api:
        await api.submitted()
        batch = asyncio.create_task(api.client.post("/openapi/jobs/batch", json={"jobs": jobs}))
        pressure = api.parts.admission.pressure
        await until_async(lambda: pressure.units, what="the batch to be let in")
        while not batch.done():
            assert (await api.submit()).status_code == 202
        assert [one["httpStatus"] for one in (await batch).json()["items"]] == [202] * 480
        assert (pressure.requests, pressure.units, pressure.bytes) == (0, 0, 0)


async def test_a_body_that_comes_late_is_looked_at_once_more(
    migrated_engine: Engine, narrow: Door
) -> None:
    under_way: dict[str, asyncio.Task[httpx.Response]] = {}
    pressure = narrow.parts.admission.pressure
    body = json.dumps({"jobs": [body_of(f"late-{n}") for n in range(10)]}).encode()
    async with standing_still(migrated_engine):
        late = Upload(narrow, "/openapi/jobs/batch", body)
        await late.come(len(body) - 1)
        await until_async(lambda: not pressure.expected_requests, what="its head to count no more")
        assert (pressure.requests, pressure.units) == (0, 0)
        await first_refusal(narrow, under_way)
        status, told = await late.answer()
    assert (status, told["code"]) == (503, "overloaded")
    await asyncio.gather(*under_way.values())
    assert (pressure.requests, pressure.units, pressure.bytes) == (0, 0, 0)


async def test_bodies_that_grow_together_are_bounded_and_one_of_them_comes_to_its_end(
    migrated_engine: Engine, narrow: Door
) -> None:
    pressure = narrow.parts.admission.pressure
    bodies = [
        json.dumps({"jobs": [body_of(f"{name}-{n}", params="x" * 60_000) for n in range(12)]})
        for name in ("first", "second")
    ]
    uploads = [Upload(narrow, "/openapi/jobs/batch", body.encode()) for body in bodies]
    for _ in range(10):
        for one in uploads:
            await one.come(60_000)
    # Their heads were let in, and together they are more than the MiB that may be held.
    assert 600_000 <= pressure.bytes <= 1024 * 1024
    answers = [await one.answer() for one in uploads]
    refused, stored = sorted(answers, key=lambda answer: -answer[0])
    assert (refused[0], refused[1]["code"]) == (503, "overloaded")
    assert [one["httpStatus"] for one in stored[1]["items"]] == [202] * 12
    assert (pressure.requests, pressure.units, pressure.bytes) == (0, 0, 0)


async def test_workers_are_served_while_callers_are_refused(migrated_engine: Engine) -> None:
    async with door(migrated_engine, most_requests=1) as api:
        job_id = await api.submitted()
        poll = asyncio.create_task(api.client.get(f"/openapi/jobs/{job_id}?wait=60"))
        await until_async(lambda: api.parts.waiters.count, what="the long poll")
        refused = await api.client.get("/openapi/jobs")
        assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
        assert int(refused.headers["Retry-After"]) >= 1
        assert (await api.beat()).status_code == 200
        assert (await api.client.get("/healthz")).status_code == 200
        api.parts.waiters.close()
        assert (await poll).status_code == 200
        assert (await api.client.get("/openapi/jobs")).status_code == 200
