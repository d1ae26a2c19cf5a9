"""Measure what limits cost: jobs a second with all limits of the tenant set, over none set.

    python -m bench.limits                        # MariaDB and Redis, 5,000 jobs, 3 runs of each
    python -m bench.limits --embedded --jobs 3000 # SQLite and Valkey

The limits are so high that nothing is refused: each submission is counted in Redis, what waits
is counted from the rows, and so is what runs. Runs without and with limits take turns on one
dispatcher with two workers; the figures are medians. The exit code is 1 if a webhook is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any, Final
from urllib.parse import urljoin

import httpx
import uvloop

from app.access.limits import FRESH_SECONDS
from bench.cluster import engine_flags, engine_name, servers
from bench.drive import missing
from bench.figures import Figures, json_flag
from bench.hook import Hook, listening
from bench.stacks import Stack, oncue
from bench.throughput import WARM_UP, Run, middle, to_webhook
from tests.support.engines import EngineName, Servers

LIMITS: Final = {
    "weight": 2.0,
    "submissionsPerSecond": 1_000_000.0,
    "waitingJobs": 1_000_000,
    "runningJobs": 100_000,
    "mayBorrow": True,
}
NONE: Final[dict[str, Any]] = dict.fromkeys(LIMITS)


async def limit(stack: Stack, limits: dict[str, Any]) -> None:
    """Set the limits of the tenant 0, and wait until each dispatcher must know them."""
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.patch(
            urljoin(stack.url, "/openapi/tenants/0"), json={"limits": limits}
        )
        answer.raise_for_status()
    await asyncio.sleep(FRESH_SECONDS / 10)


async def measure(
    lent: Servers, engine: EngineName, jobs: int, runs: int
) -> tuple[list[Run], list[Run]]:
    """Return the runs without limits, and those with limits."""
    off: list[Run] = []
    on: list[Run] = []
    async with listening() as hook:
        with oncue(lent, engine, hook.url) as stack:
            await to_webhook(stack, hook, "warm", WARM_UP)
            for number in range(runs):
                off.append(await _run(stack, hook, NONE, f"off-{number}", jobs))
                on.append(await _run(stack, hook, dict(LIMITS), f"on-{number}", jobs))
    return off, on


async def _run(stack: Stack, hook: Hook, limits: dict[str, Any], label: str, jobs: int) -> Run:
    await limit(stack, limits)
    return await to_webhook(stack, hook, label, jobs)


def tell(figures: Figures, engine: EngineName, off: list[Run], on: list[Run]) -> bool:
    """Tell the medians and their ratio; return whether every webhook came."""
    medians = []
    for name, runs in (("limits off", off), ("limits on", on)):
        run = middle(runs, lambda run: run.jobs_per_second)
        medians.append(run.jobs_per_second)
        figures.tell(
            *("limits", f"jobs to their webhooks, {name}", run.jobs_per_second, "/s"),
            engine=engine,
            runs=[round(one.jobs_per_second) for one in runs],
            cpu_us=run.cpu_us,
        )
    figures.tell(*("limits", "on over off", medians[1] / medians[0], ""), engine=engine)
    # What a busy machine does to the rate it does less to this.
    cpu_us = [middle(runs, lambda run: run.cpu_us["total"]).cpu_us["total"] for runs in (off, on)]
    figures.tell(
        *("limits", "processor a job, on over off", cpu_us[1] / cpu_us[0], ""), engine=engine
    )
    return not any(run.missing or run.load.refused for run in (*off, *on))


def main() -> int:
    """Read the flags, measure, and tell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=5000, help="of each run (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="of each kind (%(default)s)")
    engine_flags(parser)
    json_flag(parser)
    given = parser.parse_args()
    if (why := missing()) is not None:
        parser.error(why)
    engine = engine_name(given)
    with servers(binlog=given.binlog) as lent:
        off, on = uvloop.run(measure(lent, engine, given.jobs, given.runs))
    return 0 if tell(Figures(given.json), engine, off, on) else 1


if __name__ == "__main__":
    sys.exit(main())
