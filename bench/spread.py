"""Measure how evenly a burst is spread over workers, equal ones and one at half speed.

    python -m bench.spread               # MariaDB and Redis, 2,000 jobs, 4 workers

Each job waits a random while (20 to 200 ms; the slow worker twice as long), so that the spread is
told by the work that each worker finished, not by the count of its jobs. Told are the
coefficient of variation over four equal workers, which should be at most 0.10, and, where one is
at half speed, its work as a share of the mean of the others, which should be about a half.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict
from typing import Any, Final

import aiohttp
import uvloop

from bench.cluster import HANDLERS, engine_flags, engine_name, platform, servers
from bench.figures import Figures, json_flag
from bench.hook import Hook, listening
from tests.integration.app.rig import opened, rows_of
from tests.support.engines import EngineName, Servers
from tests.support.processes import Platform

WORKERS: Final = 4
CAPACITY: Final = 16
SHORTEST_MS, LONGEST_MS = 20, 200
BATCH: Final = 500


async def burst(running: Platform, hook: Hook, jobs: int) -> dict[int, int]:
    """Submit so many jobs in batches; return the milliseconds of each once all have ended."""
    dice, lengths = random.Random(1), {}
    hook.forget()
    async with aiohttp.ClientSession(running.url) as session:
        for start in range(0, jobs, BATCH):
            some = [dice.randint(SHORTEST_MS, LONGEST_MS) for _ in range(min(BATCH, jobs - start))]
            body = {
                "jobs": [
                    {
                        "clientRequestId": f"spread-{start + number}",
                        "jobName": "spread",
                        "jobHandler": "bench-wait",
                        "params": {"ms": ms},
                        "callbackUrl": hook.url,
                    }
                    for number, ms in enumerate(some)
                ]
            }
            async with session.post("/openapi/jobs/batch", json=body) as response:
                response.raise_for_status()
                items: list[dict[str, Any]] = (await response.json())["items"]
            lengths.update({item["jobId"]: ms for item, ms in zip(items, some, strict=True)})
    received = await hook.wait_for(jobs)
    if len(received) != jobs:
        raise RuntimeError(f"{jobs - len(received)} jobs did not end")
    return lengths


async def work_of(running: Platform, lengths: dict[int, int]) -> dict[str, int]:
    """Return the milliseconds of work that each worker finished."""
    work: dict[str, int] = defaultdict(int)
    async with opened(running.engine) as database:
        for row in await rows_of(database, "SELECT job_id, worker_id FROM job_log"):
            work[row["worker_id"].partition("#")[0]] += lengths[row["job_id"]]
    return dict(work)


async def measure(lent: Servers, engine: EngineName, jobs: int, figures: Figures) -> None:
    """Tell the spread over equal workers, then with one that is slow."""
    async with listening() as hook:
        for slow in (False, True):
            with platform(lent, engine, workers=0) as running:
                for number in range(1, WORKERS + 1):
                    slowness = "2" if slow and number == WORKERS else "1"
                    running.worker(
                        f"worker-{number}",
                        handlers=HANDLERS,
                        capacity=CAPACITY,
                        environment={"ONCUE_BENCH_SLOWNESS": slowness},
                    )
                running.wait_for_workers(WORKERS)
                work = await work_of(running, await burst(running, hook, jobs))
            shares = [work.get(f"worker-{number}", 0) for number in range(1, WORKERS + 1)]
            told = json.dumps(shares)
            if slow:
                share = shares[-1] / statistics.fmean(shares[:-1])
                figures.tell(
                    *("spread", "work of one worker at half speed", share, "x"),
                    engine=engine,
                    work_ms=told,
                )
            else:
                variation = statistics.pstdev(shares) / statistics.fmean(shares)
                figures.tell(
                    *("spread", f"variation over {WORKERS} equal workers", variation, ""),
                    engine=engine,
                    work_ms=told,
                )


def main() -> None:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2000, help="of a burst (%(default)s)")
    engine_flags(parser)
    json_flag(parser)
    given = parser.parse_args()
    with servers(binlog=given.binlog) as lent:
        uvloop.run(measure(lent, engine_name(given), given.jobs, Figures(given.json)))


if __name__ == "__main__":
    main()
