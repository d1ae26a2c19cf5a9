"""A job costs no more statements, round trips and requests than docs/performance.md says."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from app.in_process import open_dispatcher
from app.plumbing.database import Database
from tests.integration.app.rig import opened, value_of
from tests.support.counted import Asked, counted
from tests.support.engines import Engine
from tests.support.receiver import Receiver
from tests.support.wait import until_async
from worker.in_process import open_worker

JOBS_AT_ONCE = 200
LONE_JOBS = 25
BATCHES = 5
DOCS = Path(__file__).parents[2] / "docs/performance.md"


class Cost(NamedTuple):
    """What was asked for some jobs."""

    statements: int
    commits: int
    round_trips: int
    requests: int


@dataclass(frozen=True)
class Running:
    """A dispatcher and a worker in this process, and what they ask."""

    asked: Asked
    session: aiohttp.ClientSession
    database: Database
    hook_url: str

    def body(self) -> dict[str, Any]:
        return {
            "clientRequestId": uuid.uuid4().hex,
            "jobName": "cost",
            "jobHandler": "echo",
            "params": {"n": 1},
            "callbackUrl": self.hook_url,
        }

    async def delivered(self, count: int) -> None:
        """Return once so many callbacks are on record as delivered."""

        async def found() -> bool:
            query = "SELECT COUNT(*) FROM callback_delivery WHERE ended_at IS NOT NULL"
            return bool(await value_of(self.database, query) >= count)

        await until_async(found, 30, what=f"{count} callbacks to be delivered")


@pytest.fixture
async def running(
    migrated_engine: Engine, receiver: Receiver, tmp_path: Path
) -> AsyncIterator[Running]:
    async with opened(migrated_engine) as database:
        with counted(but_not=database) as asked:
            async with (
                open_dispatcher(tmp_path, migrated_engine.environment) as dispatcher,
                open_worker(
                    {**dispatcher.environment, "ONCUE_WORKER_CAPACITY": str(JOBS_AT_ONCE)}, {}
                ),
                aiohttp.ClientSession(dispatcher.url) as session,
            ):
                yield Running(asked, session, database, receiver.url())


async def test_a_lone_job_costs_what_the_docs_say(running: Running) -> None:
    found = []
    for number in range(1, LONE_JOBS + 1):
        running.asked.clear()
        async with running.session.post("/openapi/jobs", json=running.body()) as answer:
            assert answer.status == 202
        await running.delivered(number)
        found.append(cost(running.asked))
    assert usual(found) == documented("one job on an idle platform")


async def test_a_batch_shares_its_statements_as_the_docs_say(running: Running) -> None:
    found = []
    for number in range(1, BATCHES + 1):
        running.asked.clear()
        jobs = [running.body() for _ in range(JOBS_AT_ONCE)]
        async with running.session.post("/openapi/jobs/batch", json={"jobs": jobs}) as answer:
            items = (await answer.json())["items"]
            assert [one["httpStatus"] for one in items] == [202] * JOBS_AT_ONCE
        await running.delivered(number * JOBS_AT_ONCE)
        found.append(cost(running.asked))
    most = documented(f"{JOBS_AT_ONCE} jobs of one batch, at most")
    assert all(one <= limit for one, limit in zip(usual(found), most, strict=True)), found


def usual(found: Sequence[Cost]) -> Cost:
    """Return a low one of each: what the platform does each second falls into some of them.

    Not the least: what a job asks for may be late, and be counted with the next one.
    """
    return Cost(*(sorted(column)[len(found) // 5] for column in zip(*found, strict=True)))


def cost(asked: Asked) -> Cost:
    return Cost(
        len(asked.statements), asked.commits, len(asked.round_trips), asked.requests.total()
    )


def documented(row: str) -> Cost:
    """Read a row of the table in docs/performance.md; webhooks are counted apart there."""
    cells = re.search(rf"^\| {row} \|(.*)\|$", DOCS.read_text(), re.MULTILINE)
    assert cells is not None, f"docs/performance.md has no row {row!r}"
    numbers = [re.match(r" (\d+)\b", cell) for cell in cells[1].split("|")]
    return Cost(*(int(number[1]) for number in numbers if number is not None))
