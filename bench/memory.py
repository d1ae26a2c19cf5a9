"""Measure what each process holds of the machine's memory: idle, and while 10,000 jobs run.

    python -m bench.memory               # MariaDB and Redis, two workers

Jobs are submitted in batches and wait in their handlers. Told is the proportional set size of
whole process trees (what is shared counts once), in MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Final

import aiohttp
import uvloop

from bench.batch_submit import JSON, batch_body
from bench.cluster import engine_flags, engine_name, memory_mib, platform, servers, trees
from bench.figures import Figures, json_flag
from tests.support.engines import EngineName, Servers
from tests.support.processes import Platform
from tests.support.wait import until_async

BATCH: Final = 500
SETTLE_SECONDS: Final = 3.0
WORKERS: Final = 2


async def fill(running: Platform, jobs: int, run_ms: int) -> None:
    """Let so many jobs run at once."""
    async with aiohttp.ClientSession(running.url, headers=JSON) as session:
        for start in range(0, jobs, BATCH):
            body = batch_body(
                f"memory-{start}", min(BATCH, jobs - start), "bench-wait", {"ms": run_ms}
            )
            async with session.post("/openapi/jobs/batch", data=body) as response:
                response.raise_for_status()

        async def run() -> bool:
            async with session.get("/openapi/workers") as response:
                items = (await response.json())["items"]
            return bool(sum(one["active"] for one in items) >= jobs)

        await until_async(run, 120, what=f"{jobs} jobs to run at once")


async def measure(
    lent: Servers, engine: EngineName, jobs: int, run_seconds: float, figures: Figures
) -> None:
    """Tell the memory of each process, idle and full."""
    with platform(lent, engine, workers=WORKERS, capacity=-(-jobs // WORKERS)) as running:
        await asyncio.sleep(SETTLE_SECONDS)
        idle = {name: round(memory_mib(pid)) for name, pid in trees(running).items()}
        began = time.monotonic()
        await fill(running, jobs, round(run_seconds * 1000))
        filled = time.monotonic() - began
        full = {name: round(memory_mib(pid)) for name, pid in trees(running).items()}
    for name, held in (("idle", idle), (f"{jobs:,} jobs run", full)):
        figures.tell(
            *("memory", f"all processes, {name}", sum(held.values()), "MiB"),
            engine=engine,
            each=held,
        )
    figures.tell("memory", f"{jobs:,} jobs begun at", jobs / filled, "/s", engine=engine)


def main() -> None:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=10_000, help="at once (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=300, help="that each job would run (%(default)s)"
    )
    engine_flags(parser)
    json_flag(parser)
    given = parser.parse_args()
    with servers(binlog=given.binlog) as lent:
        uvloop.run(
            measure(lent, engine_name(given), given.jobs, given.seconds, Figures(given.json))
        )


if __name__ == "__main__":
    main()
