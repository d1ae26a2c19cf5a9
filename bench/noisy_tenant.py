"""Measure what a tenant with a flood of waiting jobs does to another one's.

    python -m bench.noisy_tenant                        # MariaDB and Redis, 200,000 jobs, 30 s
    python -m bench.noisy_tenant --embedded --jobs 20000

One dispatcher. So many jobs of the tenant A are submitted in batches of 500 while there is no
worker. Then two workers come, and while they work A's jobs off, which do nothing and are due
already, the tenant B submits one job each second: told is the time from the start of its POST to
the start of its handler. The exit code is 1 if that is ever a second or more, or if A's jobs were
over before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Final

import aiohttp
import uvloop

from bench.cluster import CAPACITY, HANDLERS, TEXT, engine_flags, engine_name, platform, servers
from bench.figures import Figures, json_flag, percentile
from tests.support.engines import EngineName, Servers
from tests.support.processes import Platform

BATCH: Final = 500
AT_ONCE: Final = 3
PROMISED_SECONDS: Final = 1.0
ROOT_KEY: Final = "root-key-of-the-bench"


@contextlib.asynccontextmanager
async def tenant(running: Platform, name: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Make a tenant with a key, and lend a client of it."""
    root = {"Authorization": f"Bearer {ROOT_KEY}"}
    async with aiohttp.ClientSession(running.url, headers=root) as session:
        made = await posted(session, "/openapi/tenants", {"name": name})
        key = await posted(session, "/openapi/keys", {"name": name, "tenantId": made["tenantId"]})
    headers = {"Authorization": f"Bearer {key['key']}"}
    async with aiohttp.ClientSession(running.url, headers=headers) as session:
        yield session


async def posted(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST until it is not refused for the load, and return the answer."""
    while True:
        async with session.post(path, json=body) as response:
            if response.status not in (429, 503):
                response.raise_for_status()
                answer: dict[str, Any] = await response.json()
                return answer
            await asyncio.sleep(float(response.headers.get("Retry-After", 1)))


def job(label: str, number: int) -> dict[str, Any]:
    """Return the body of a job that is done at once."""
    return {
        "clientRequestId": f"{label}-{number}",
        "jobName": label,
        "jobHandler": "echo",
        "params": {"text": TEXT},
    }


async def flood(session: aiohttp.ClientSession, jobs: int) -> float:
    """Submit so many jobs that wait, and return the seconds that took."""
    began = time.monotonic()
    starts = iter(range(0, jobs, BATCH))

    async def send() -> None:
        for start in starts:
            some = [job("flood", number) for number in range(start, min(start + BATCH, jobs))]
            answer = await posted(session, "/openapi/jobs/batch", {"jobs": some})
            refused = [one for one in answer["items"] if one["httpStatus"] >= 300]
            if refused:
                raise RuntimeError(f"a job of the flood was refused: {refused[0]}")

    await asyncio.gather(*(send() for _ in range(AT_ONCE)))
    return time.monotonic() - began


async def probe(session: aiohttp.ClientSession, label: str, seconds: int) -> list[float]:
    """Submit a job each second, and return for each the seconds until its handler had started."""
    first = time.monotonic()
    waits = []
    for number in range(seconds):
        await asyncio.sleep(max(0.0, first + number - time.monotonic()))
        waits.append(asyncio.ensure_future(_start_of(session, label, number)))
    return await asyncio.gather(*waits)


async def _start_of(session: aiohttp.ClientSession, label: str, number: int) -> float:
    sent = time.time()
    made = await posted(session, "/openapi/jobs", job(label, number))
    while True:
        async with session.get(f"/openapi/jobs/{made['jobId']}", params={"wait": 20}) as response:
            ended = await response.json()
        if ended["status"] == "SUCCEEDED":
            started = datetime.fromisoformat(ended["executions"][0]["startedAt"])
            return started.timestamp() - sent


async def waiting(session: aiohttp.ClientSession) -> int:
    """Return how many jobs of the tenant wait, up to what a count looks at."""
    async with session.get("/openapi/counts") as response:
        counts = await response.json()
        return next(int(one["count"]) for one in counts["items"] if one["status"] == "WAITING")


async def measure(
    lent: Servers, engine: EngineName, jobs: int, seconds: int, figures: Figures
) -> bool:
    """Tell how the other tenant's jobs fare; return whether the promise was kept."""
    environment = {"ONCUE_API_KEYS": f"root:{ROOT_KEY}"}
    with platform(lent, engine, workers=0, environment=environment) as running:
        async with tenant(running, "a") as noisy, tenant(running, "b") as quiet:
            took = await flood(noisy, jobs)
            figures.tell("noisy tenant", "jobs put, by batches", jobs / took, "/s", engine=engine)
            waits = await _with_workers(running, quiet, seconds)
            left = await waiting(noisy)
    each = [round(one * 1000) for one in waits]
    told: dict[str, Any] = {"engine": engine, "ms": each, "left_at_least": left}
    for figure, value in (
        ("p50", statistics.median(waits)),
        ("p99", percentile(waits, 99)),
        ("max", max(waits)),
    ):
        figures.tell(
            *("noisy tenant", f"the other's POST to its handler, {figure}", value * 1000, "ms"),
            **told,
        )
    return left > 0 and max(waits) < PROMISED_SECONDS


async def _with_workers(
    running: Platform, quiet: aiohttp.ClientSession, seconds: int
) -> list[float]:
    for number in (1, 2):
        await asyncio.to_thread(
            running.worker, f"worker-{number}", handlers=HANDLERS, capacity=CAPACITY
        )
    # The first one pays for what is new to every part.
    await probe(quiet, "first", 1)
    return await probe(quiet, "probe", seconds)


def main() -> int:
    """Read the flags, measure, and tell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=200_000, help="that wait (%(default)s)")
    parser.add_argument("--seconds", type=int, default=30, help="a job each (%(default)s)")
    engine_flags(parser)
    json_flag(parser)
    given = parser.parse_args()
    figures = Figures(given.json)
    with servers(binlog=given.binlog) as lent:
        kept = uvloop.run(measure(lent, engine_name(given), given.jobs, given.seconds, figures))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
