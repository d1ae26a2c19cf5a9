"""Streams over real connections: every line once, whatever is cut, and jobs to their end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn

from app.lifecycle.states import ExecutionStatus
from app.main import Parts, create_app, stop_dispatching
from tests.integration.app.rig import (
    Door,
    change,
    claimed,
    door,
    ending,
    insert,
    new_term,
    outcome_of,
    running_job,
    settings_of,
    value_of,
)
from tests.integration.app.test_run_logs import NOW, line, part, ship
from tests.support.engines import Engine, migrated
from tests.support.ports import free_port
from tests.support.wait import until_async


class _Server(uvicorn.Server):
    """Leaves the signals to the test's own process."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._serve())
        await until_async(lambda: self.started, 30)
        yield
        self.should_exit = True
        await task


@asynccontextmanager
async def served(engine: Engine, **changes: Any) -> AsyncIterator[Door]:
    """A dispatcher behind a real socket, in this process: its answers can be read as they come."""
    app = create_app(settings_of(engine, **changes))
    port = free_port()
    server = _Server(
        uvicorn.Config(app, port=port, log_config=None, ws="none", timeout_graceful_shutdown=1)
    )
    async with (
        server.running(),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        parts: Parts = app.state.parts
        yield Door(parts, client, app)


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    """An API over each engine."""
    async with served(migrated_engine) as opened:
        yield opened


@pytest.fixture
async def one_api(sqlite_engine: Engine) -> AsyncIterator[Door]:
    """An API over one engine, for what does not depend on it."""
    async with served(migrated(sqlite_engine)) as opened:
        yield opened


class Reader:
    """Reads one stream of events in the background, as it comes."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.events: list[tuple[str, str, Any]] = []
        self.comments = 0
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        fields: dict[str, str] = {}
        async for text in self.response.aiter_lines():
            if text.startswith(":"):
                self.comments += 1
            elif text:
                name, _, value = text.partition(": ")
                fields[name] = value
            elif fields:
                self.events.append((fields["id"], fields["event"], json.loads(fields["data"])))
                fields = {}

    @property
    def seqs(self) -> list[int]:
        return [data["seq"] for _, name, data in self.events if name == "line"]

    @property
    def names(self) -> list[str]:
        return [name for _, name, _ in self.events]


@asynccontextmanager
async def reading(
    api: Door, path: str, last_id: str | None = None, **headers: str
) -> AsyncIterator[Reader]:
    if last_id is not None:
        headers["Last-Event-ID"] = last_id
    accept = {"Accept": "text/event-stream"}
    async with api.client.stream("GET", path, headers=accept | headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        reader = Reader(response)
        try:
            yield reader
        finally:
            reader.task.cancel()
            await asyncio.gather(reader.task, return_exceptions=True)


def has_much_or_all(reader: Reader) -> bool:
    return len(reader.events) > 20 or reader.task.done()


async def ended(api: Door, reader: Reader) -> None:
    await asyncio.wait_for(reader.task, 20)


async def test_a_stream_brings_what_is_there_then_what_comes_then_the_end(api: Door) -> None:
    run = await running_job(api.database)
    await ship(api, part(run, *map(line, range(1, 301))))
    async with reading(api, f"/openapi/executions/{run.execution_id}/logs") as reader:
        await until_async(lambda: len(reader.seqs) == 300)
        await ship(api, part(run, line(301)))
        await until_async(lambda: len(reader.seqs) == 301)
        await api.report(outcome_of(run))
        await ship(api, part(run, line(302), complete=True))
        await ended(api, reader)
    assert reader.seqs == list(range(1, 303))
    assert [one[0] for one in reader.events[:-1]] == [str(seq) for seq in range(1, 303)]
    _, name, data = reader.events[-1]
    assert (name, data["status"], data["complete"]) == ("end", "SUCCEEDED", True)
    await until_async(lambda: api.parts.streams.count == 0)


async def test_a_stream_that_is_cut_again_and_again_has_no_gap_and_no_repeat(api: Door) -> None:
    run = await running_job(api.database)
    path = f"/openapi/executions/{run.execution_id}/logs"
    seen: list[int] = []
    last_id: str | None = None

    async def write() -> None:
        for start in range(1, 401, 7):
            await ship(api, part(run, *map(line, range(start, min(start + 7, 401)))))
        await api.report(outcome_of(run))
        await ship(api, part(run, complete=True))

    writing = asyncio.create_task(write())
    cuts, names = 0, [""]
    while names[-1] != "end":
        async with reading(api, path, last_id) as reader:
            # Cut off somewhere in the middle, with more on the way.
            await until_async(partial(has_much_or_all, reader))
            events = reader.events[:13] if len(reader.events) > 20 else reader.events
            cuts += 1
        names += [name for _, name, _ in events]
        seen += [data["seq"] for _, name, data in events if name == "line"]
        last_id = events[-1][0]
    await writing
    assert seen == list(range(1, 401))
    assert cuts > 10


async def test_lines_that_another_dispatcher_got_arrive_also_without_redis(
    sqlite_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = migrated(sqlite_engine)
    async with served(engine) as one, door(engine) as other:
        run = await running_job(one.database)
        async with reading(one, f"/openapi/executions/{run.execution_id}/logs") as reader:
            await ship(other, part(run, line(1)))
            await until_async(lambda: reader.seqs == [1])
            # Nothing is told any more: the poll alone must find it.
            monkeypatch.setattr(other.parts.ground.bus, "publish", lambda *_: None)
            await ship(other, part(run, line(2)))
            await until_async(lambda: reader.seqs == [1, 2])


async def test_the_end_of_a_run_without_lines_ends_its_stream_soon(one_api: Door) -> None:
    run = await running_job(one_api.database)
    path = f"/openapi/executions/{run.execution_id}/logs?follow=true"
    async with reading(one_api, path, Accept="*/*") as reader:
        await one_api.report(outcome_of(run))
        await ended(one_api, reader)
    assert reader.names == ["end"]
    assert reader.events[0][2]["complete"] is True


async def test_a_stream_does_not_wait_for_ever_for_last_lines(
    one_api: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.jobs.logs.LAST_LINES_MS", 500)
    run = await running_job(one_api.database)
    await ship(one_api, part(run, line(1)))
    async with reading(one_api, f"/openapi/executions/{run.execution_id}/logs") as reader:
        await one_api.report(outcome_of(run))
        await ended(one_api, reader)
    assert reader.names == ["line", "end"]
    assert reader.events[-1][2]["complete"] is False


async def test_silent_streams_are_kept_alive(
    one_api: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("logs", "events"):
        monkeypatch.setattr(f"app.jobs.{module}.KEEP_ALIVE_SECONDS", 0.2)
    run = await running_job(one_api.database)
    for path in (
        f"/openapi/executions/{run.execution_id}/logs",
        f"/openapi/jobs/{run.job_id}/events",
    ):
        async with reading(one_api, path) as reader:
            await until_async(lambda reader=reader: reader.comments >= 3)  # type: ignore[misc]


async def test_streams_are_bounded_and_a_place_is_free_when_a_reader_leaves(
    sqlite_engine: Engine,
) -> None:
    async with served(migrated(sqlite_engine), most_streams=2) as api:
        run = await running_job(api.database)
        logs = f"/openapi/executions/{run.execution_id}/logs"
        async with reading(api, logs), reading(api, f"/openapi/jobs/{run.job_id}/events"):
            await until_async(lambda: api.parts.streams.count == 2)
            refused = await api.client.get(logs, params={"follow": "true"})
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams")
            assert refused.headers["retry-after"] == "1"
            assert (await api.client.get(logs)).status_code == 200
        await until_async(lambda: api.parts.streams.count == 0)
        async with reading(api, logs):
            await until_async(lambda: api.parts.streams.count == 1)


async def test_streams_end_without_an_end_when_the_process_is_about_to(one_api: Door) -> None:
    run = await running_job(one_api.database)
    await ship(one_api, part(run, line(1)))
    logs = f"/openapi/executions/{run.execution_id}/logs"
    async with (
        reading(one_api, logs) as lines,
        reading(one_api, f"/openapi/jobs/{run.job_id}/events") as events,
    ):
        await until_async(lambda: lines.events and events.events)
        await stop_dispatching(one_api.parts)
        await ended(one_api, lines)
        await ended(one_api, events)
    assert (lines.names, events.names) == (["line"], ["claimed"])
    assert (await one_api.client.get(logs, params={"follow": "true"})).status_code == 503


async def test_a_job_is_followed_through_its_attempts_to_its_end(api: Door) -> None:
    job_id = (await insert(api.database, max_retry=1, retry_interval_ms=0))[0]
    term = await new_term(api.database)
    async with reading(api, f"/openapi/jobs/{job_id}/events") as reader:
        await until_async(lambda: reader.names == ["waiting"])
        (first,) = await claimed(api.database, [job_id], term=term)
        await until_async(lambda: reader.names[-1] == "claimed")
        await ship(api, part(first, progress={"value": 0.25, "text": "a quarter", "at": NOW}))
        await until_async(lambda: reader.names[-1] == "progress")
        await api.report(outcome_of(first, status="failed", error={"code": "e", "message": "m"}))
        await until_async(lambda: reader.names[-1] == "retrying")
        await change(api.database, "UPDATE job_info SET next_trigger_time = 1")
        (second,) = await claimed(api.database, [job_id], term=term)
        await until_async(lambda: reader.names[-1] == "claimed")
        await api.report(outcome_of(second, 42))
        await ended(api, reader)
    assert reader.names == ["waiting", "claimed", "progress", "retrying", "claimed", "ended"]
    assert reader.events[2][2]["progress"]["value"] == 0.25
    last = reader.events[-1]
    assert last[2] == (await api.client.get(f"/openapi/jobs/{job_id}")).json()
    again = await api.client.get(
        f"/openapi/jobs/{job_id}/events", headers={"Last-Event-ID": last[0]}
    )
    assert (again.status_code, again.content) == (204, b"")


async def test_a_reader_of_events_that_comes_back_gets_only_what_is_new(one_api: Door) -> None:
    run = await running_job(one_api.database)
    path = f"/openapi/jobs/{run.job_id}/events"
    async with reading(one_api, path) as reader:
        await until_async(lambda: reader.events)
    last_id = reader.events[-1][0]
    async with reading(one_api, path, last_id) as reader:
        await until_async(lambda: one_api.parts.streams.count == 1)
        assert reader.events == []
        await one_api.report(outcome_of(run))
        await ended(one_api, reader)
    assert reader.names == ["ended"]
    # The end came while nobody read: it is told to whoever comes back.
    async with reading(one_api, path, last_id) as reader:
        await ended(one_api, reader)
    assert reader.names == ["ended"]


@pytest.mark.parametrize("last_id", ["x", "1.2.3.4", "-1", "9" * 30])
async def test_an_id_that_is_none_of_ours_is_refused(one_api: Door, last_id: str) -> None:
    run = await running_job(one_api.database)
    for path in (
        f"/openapi/executions/{run.execution_id}/logs",
        f"/openapi/jobs/{run.job_id}/events",
    ):
        answer = await one_api.client.get(
            path, headers={"Last-Event-ID": last_id, "Accept": "text/event-stream"}
        )
        assert answer.status_code == 422


async def test_a_job_whose_end_is_a_lost_worker_ends_its_streams(one_api: Door) -> None:
    run = await running_job(one_api.database, max_retry=0)
    async with reading(one_api, f"/openapi/jobs/{run.job_id}/events") as reader:
        await until_async(lambda: reader.events)
        await one_api.parts.settler.settle(
            ending(run, ExecutionStatus.LOST, error_code="worker_lost", deliver_by=None)
        )
        await ended(one_api, reader)
    assert reader.names[-1] == "ended"
    assert await value_of(one_api.database, "SELECT COUNT(*) FROM execution_log") == 0


async def test_a_burst_of_readers_opens_no_stream_too_many(sqlite_engine: Engine) -> None:
    async with served(migrated(sqlite_engine), most_streams=3) as api:
        run = await running_job(api.database)
        statuses: list[int] = []
        gate = asyncio.Event()

        async def read() -> None:
            query = {"follow": "true"}
            path = f"/openapi/executions/{run.execution_id}/logs"
            async with api.client.stream("GET", path, params=query) as response:
                statuses.append(response.status_code)
                if response.status_code == 200:
                    await gate.wait()

        readers = [asyncio.create_task(read()) for _ in range(30)]
        await until_async(lambda: len(statuses) == 30)
        assert sorted(statuses) == [200] * 3 + [429] * 27
        gate.set()
        await asyncio.gather(*readers)
        await until_async(lambda: api.parts.streams.count == 0)
