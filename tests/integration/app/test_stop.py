"""A cancelled run is asked after until its worker, and no other, says that it is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from aiohttp import web

from app.dispatch import stop
from app.dispatch.lock import DispatchLock
from app.dispatch.stop import Stopper
from app.fleet.roster import Roster
from app.lifecycle.moves.claim import Claimed
from app.lifecycle.nodes import read_nodes
from oncue.protocol import CancelRequest
from tests.integration.app.rig import TOKEN, Door, door, running_job, value_of
from tests.support.engines import Engine
from tests.support.wait import until_async


class Held:
    """The lock as its holder sees it."""

    term = 1


class FakeWorker:
    """Answers `POST /cancel` as told."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] = {}
        self.status = 200
        self.asked: list[CancelRequest] = []

    async def cancel(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        self.asked.append(CancelRequest.model_validate(await request.json()))
        ids = self.asked[-1].execution_ids
        given = {"workerId": "w#boot", "stopped": [], "unknown": [], **self.answer}
        return web.json_response(
            {k: ids if v == "all" else v for k, v in given.items()}, status=self.status
        )


@asynccontextmanager
async def serving(worker: FakeWorker) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/cancel", worker.cancel)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def stopping(
    engine: Engine, worker: FakeWorker
) -> AsyncIterator[tuple[Door, Claimed, Stopper]]:
    """A dispatcher, a running job whose worker beats, and a stopper that is not started."""
    async with serving(worker) as url, door(engine) as api:
        ground = api.parts.ground
        await api.beat(url=url)
        roster = Roster(ground.clock.now_ms)
        roster.refresh(await api.database.read(read_nodes))
        stopper = Stopper(ground, cast(DispatchLock, Held()), roster)
        yield api, await running_job(api.database), stopper
        await stopper.stop()


async def noted(api: Door) -> int:
    return int(await value_of(api.database, "SELECT COUNT(*) FROM stopping_execution"))


async def test_a_worker_is_asked_at_once_and_a_run_it_does_not_know_is_over(
    migrated_engine: Engine,
) -> None:
    worker = FakeWorker()
    worker.answer = {"unknown": "all"}
    async with stopping(migrated_engine, worker) as (api, run, stopper):
        stopper.start()
        await asyncio.sleep(0.05)
        await api.client.post(f"/openapi/jobs/{run.job_id}/cancel")

        async def released() -> bool:
            return await noted(api) == 0

        await until_async(released)
        assert worker.asked[0].execution_ids == [run.execution_id]
        assert worker.asked[0].term == 1
        query = "SELECT stopping_execution_id FROM job_info"
        assert await value_of(api.database, query) is None


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ({"stopped": "all"}, 200),
        ({"unknown": "all", "workerId": "w#other"}, 200),
        ({"unknown": "all", "workerId": ""}, 200),
        ({"unknown": ["another"]}, 200),
        ({"unknown": "all"}, 409),
        ({"unknown": "all"}, 500),
        ({"unknown": None}, 200),
    ],
)
async def test_a_run_that_is_not_known_to_be_over_is_asked_after_again(
    migrated_engine: Engine, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], status: int
) -> None:
    monkeypatch.setattr(stop, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(stop, "AGAIN_SECONDS", 0.05)
    worker = FakeWorker()
    worker.answer, worker.status = answer, status
    async with stopping(migrated_engine, worker) as (api, run, stopper):
        await api.client.post(f"/openapi/jobs/{run.job_id}/cancel")
        stopper.start()
        await until_async(lambda: len(worker.asked) >= 3)
        assert await noted(api) == 1
