"""Measure submissions by batch, and the seed figure: 1,000 jobs, 1 dispatcher, 2 workers.

    python -m bench.batch_submit         # MariaDB and Redis, batches of 500

Batches are POSTed one after the other over one connection to a dispatcher that does not
dispatch. The seed figure is the time from the POST of 1,000 one-off jobs, in two batches at
once, to the last webhook.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any, Final

import aiohttp
import orjson
import uvloop

from bench.cluster import TEXT, engine_flags, engine_name, platform, servers
from bench.figures import Figures, json_flag
from bench.hook import Hook, listening
from tests.support.engines import EngineName, Servers

SEED_JOBS: Final = 1000
JSON: Final = {"Content-Type": "application/json"}
PARAMS: Final = {"text": TEXT, "n": 1}


def batch_body(
    label: str, count: int, handler: str, params: Any, hook_url: str | None = None
) -> bytes:
    """Return the body of a batch of jobs."""
    job: dict[str, Any] = {"jobName": "bench", "jobHandler": handler, "params": params}
    if hook_url is not None:
        job["callbackUrl"] = hook_url
    return orjson.dumps(
        {"jobs": [{"clientRequestId": f"{label}-{n}", **job} for n in range(count)]}
    )


async def batches(
    lent: Servers, engine: EngineName, size: int, count: int, hook_url: str
) -> list[float]:
    """Submit batches; return the seconds of each."""
    taken = []
    with platform(lent, engine, workers=0, flags=["--no-dispatch"]) as running:
        async with aiohttp.ClientSession(running.url, headers=JSON) as session:
            for number in range(count + 1):
                body = batch_body(f"b{number}", size, "echo", PARAMS, hook_url)
                began = time.perf_counter()
                async with session.post("/openapi/jobs/batch", data=body) as response:
                    items = orjson.loads(await response.read())["items"]
                taken.append(time.perf_counter() - began)
                if any(item["httpStatus"] != 202 for item in items):
                    raise RuntimeError("a job of a batch was refused")
    return taken[1:]


async def seed(lent: Servers, engine: EngineName, hook: Hook, rounds: int) -> list[float]:
    """Submit 1,000 jobs at once, time after time; return the seconds to the last webhook."""
    taken = []
    with platform(lent, engine) as running:
        async with aiohttp.ClientSession(running.url, headers=JSON) as session:
            for number in range(rounds + 1):
                hook.forget()
                bodies = [
                    batch_body(f"s{number}-{part}", SEED_JOBS // 2, "echo", PARAMS, hook.url)
                    for part in range(2)
                ]
                began = time.monotonic()
                answers = await asyncio.gather(
                    *(session.post("/openapi/jobs/batch", data=body) for body in bodies)
                )
                for response in answers:
                    response.raise_for_status()
                    response.release()
                received = await hook.wait_for(SEED_JOBS)
                if len(received) != SEED_JOBS:
                    raise RuntimeError(f"{SEED_JOBS - len(received)} webhooks are missing")
                taken.append(max(received.values()) - began)
    return taken[1:]


async def measure(
    lent: Servers, engine: EngineName, size: int, count: int, figures: Figures
) -> None:
    """Tell both figures."""
    async with listening() as hook:
        taken = await batches(lent, engine, size, count, hook.url)
        rate = size / statistics.median(taken)
        figures.tell("batch", f"submissions, batches of {size}", rate, "/s", engine=engine)
        seconds = statistics.median(await seed(lent, engine, hook, 5))
        figures.tell(
            *("seed", f"{SEED_JOBS:,} jobs to the last webhook", seconds, "s"),
            engine=engine,
            per_second=round(SEED_JOBS / seconds),
        )


def main() -> None:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=500, help="of a batch (%(default)s)")
    parser.add_argument("--count", type=int, default=10, help="of batches (%(default)s)")
    engine_flags(parser)
    json_flag(parser)
    given = parser.parse_args()
    with servers(binlog=given.binlog) as lent:
        uvloop.run(measure(lent, engine_name(given), given.size, given.count, Figures(given.json)))


if __name__ == "__main__":
    main()
