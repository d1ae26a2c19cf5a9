"""The main path as it is deployed: dispatchers and workers as processes of their own."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx

from tests.integration.app.rig import body_of, fill, new_jobs, opened, rows_of, value_of
from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform
from tests.support.receiver import Receiver
from tests.support.wait import until, until_async

CLIENTS = 32


@dataclass(frozen=True)
class Answered:
    """What the door said to one submission."""

    request: int
    status: int
    job_id: int


async def submit_all(platform: Platform, requests: list[int], receiver: Receiver) -> list[Answered]:
    """Submit from 32 clients, in turn to each dispatcher; a request number is a request id."""
    urls = platform.dispatcher_urls
    queue = list(enumerate(requests))
    answers: list[Answered] = []

    async def one_client() -> None:
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            while queue:
                number, request = queue.pop(0)
                answer = await client.post(
                    f"{urls[number % len(urls)]}/openapi/jobs",
                    json=body_of(
                        f"request-{request}",
                        jobHandler="sleep",
                        params={"ms": 10, "request": request},
                        callbackUrl=receiver.url(),
                    ),
                )
                assert answer.is_success, answer.text
                answers.append(Answered(request, answer.status_code, answer.json()["jobId"]))

    await asyncio.gather(*(one_client() for _ in range(CLIENTS)))
    return answers


async def show_the_main_path(
    platform: Platform, receiver: Receiver, *, jobs: int, repeats: int
) -> None:
    """Submit `jobs` requests and repeat some of them: each is one job, one run, one webhook."""
    requests = list(range(jobs)) + [number * 3 % jobs for number in range(repeats)]
    requests.sort(key=lambda number: (number * 7919) % jobs)
    answers = await submit_all(platform, requests, receiver)
    ids = {answer.job_id for answer in answers}
    assert len(ids) == jobs
    assert len({(answer.request, answer.job_id) for answer in answers}) == jobs
    assert Counter(answer.status for answer in answers) == {202: jobs, 200: repeats}

    async with opened(platform.engine) as database:

        async def all_ended() -> bool:
            open_jobs = "SELECT COUNT(*) FROM job_info WHERE status NOT IN (2, 3, 5)"
            return int(await value_of(database, open_jobs)) == 0

        await until_async(all_ended, 60, what="all jobs to end")
        rows = await rows_of(database, "SELECT job_id, worker_id, status, attempt FROM job_log")
        statuses = await rows_of(database, "SELECT status, COUNT(*) AS n FROM job_info GROUP BY 1")
    assert [(row["status"], row["n"]) for row in statuses] == [(2, jobs)]
    assert len(rows) == jobs
    assert {row["job_id"] for row in rows} == ids
    by_worker = Counter(row["worker_id"] for row in rows)
    assert len(by_worker) == 3
    # None has it all; how even they share depends on the processor's other work.
    assert max(by_worker.values()) <= 0.9 * jobs, by_worker

    received = receiver.wait_for(jobs, timeout=60)
    told = [one.verified(platform.webhook_secret) for one in received]
    assert Counter(one["type"] for one in told) == {"job.succeeded": jobs}
    assert {one["data"]["jobId"] for one in told} == ids
    assert len({one.webhook_id for one in received}) == len(received) == jobs


async def test_2000_submissions_of_which_500_repeat_are_1500_jobs_runs_and_webhooks(
    mariadb_engine: Engine, new_platform: NewPlatform, receiver: Receiver
) -> None:
    platform = new_platform(mariadb_engine, dispatchers=2).start(workers=3)
    await show_the_main_path(platform, receiver, jobs=1500, repeats=500)


async def test_400_submissions_of_which_100_repeat_are_300_jobs_runs_and_webhooks(
    sqlite_engine: Engine, new_platform: NewPlatform, receiver: Receiver
) -> None:
    platform = new_platform(sqlite_engine, dispatchers=2).start(workers=3)
    await show_the_main_path(platform, receiver, jobs=300, repeats=100)


def test_while_one_worker_is_busy_with_long_jobs_the_others_take_the_new_ones(
    mariadb_engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(mariadb_engine)
    platform.dispatcher(wait=False)
    platform.worker("busy")
    platform.wait_for_workers(1)
    long = [platform.submit("record", {"ms": 600_000}) for _ in range(8)]
    until(lambda: len(platform.record()) == len(long))
    platform.worker("second", wait=False)
    platform.worker("third").wait_ready()
    platform.wait_for_workers(3)
    new = []
    for _ in range(10):  # so few at once that the two others have less in hand than the busy one
        wave = [platform.submit("record", {"ms": 30}) for _ in range(6)]
        for job_id in wave:
            assert platform.ended(job_id)["status"] == "SUCCEEDED"
        new += wave
    taken = Counter(platform.record(job_id)[0].worker for job_id in new)
    assert taken["busy"] == 0
    assert min(taken["second"], taken["third"]) > 10


async def test_a_worker_of_32_slots_runs_thousands_of_short_jobs_between_a_few_beats(
    mariadb_engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(mariadb_engine)
    platform.dispatcher(wait=False)
    platform.worker(capacity=32)
    platform.wait_for_workers(1)
    async with opened(mariadb_engine) as database:
        (job,) = await new_jobs(database, 1, job_handler="one_ms")
        before = await value_of(database, "SELECT beats FROM worker_node")
        await fill(database, 3000, status=0, queue_id=job.queue_id, priority=5, handler="one_ms")

        async def all_ended() -> bool:
            done = "SELECT COUNT(*) FROM job_info WHERE status = 2"
            return int(await value_of(database, done)) == 3000

        await until_async(all_ended, 60, what="3,000 jobs to succeed")
        beats = await value_of(database, "SELECT beats FROM worker_node") - before
        # A dispatcher that learned of free slots by beats alone could not have done more.
        assert 4 * 32 * (beats + 1) < 3000, f"{beats} beats"


async def test_100000_due_jobs_of_an_absent_handler_do_not_delay_another_handler(
    mariadb_engine: Engine, new_platform: NewPlatform, capsys: Any
) -> None:
    platform = new_platform(mariadb_engine).start()
    async with opened(mariadb_engine) as database:
        (flood,) = await new_jobs(database, 1, job_handler="absent")
        await fill(
            database, 100_000, status=0, queue_id=flood.queue_id, priority=9, handler="absent"
        )
        platform.ended(platform.submit("record", {"ms": 0}, priority=0))
        delays = []
        for _ in range(10):
            sent = time.monotonic()
            job_id = platform.submit("record", {"ms": 0}, priority=0)
            (start,) = until(lambda job_id=job_id: platform.record(job_id)[:1])  # type: ignore[misc]
            delays.append((start.monotonic - sent) * 1000)
        waiting = "SELECT COUNT(*) FROM job_info WHERE status = 0"
        assert await value_of(database, waiting) == 100_000
    with capsys.disabled():
        print(f"\nbehind 100,000 due jobs: {', '.join(f'{one:.0f}' for one in delays)} ms")
