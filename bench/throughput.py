"""Measure submissions a second, jobs a second from POST to webhook, and what a job costs.

    python -m bench.throughput                        # MariaDB and Redis, 10,000 jobs, 3 runs
    python -m bench.throughput --embedded --jobs 3000 # SQLite and Valkey
    python -m bench.throughput --processes 2 --partitions 2

Starts servers of its own (MariaDB flushes every commit), one dispatcher, two workers and a
receiver of webhooks, and drives them by wrk over keep-alive connections. Figures are medians of
the runs; `missing` (jobs whose webhook did not come) and `refused` must be 0, else the exit code
is 1. Processor microseconds are those of whole process trees, for one job.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import uvloop

from bench.cluster import engine_flags, engine_name, servers
from bench.cpu import Processor
from bench.drive import Load, missing, post
from bench.figures import Figures, json_flag
from bench.hook import Hook, listening
from bench.stacks import Spread, Stack, oncue
from tests.support.engines import EngineName, Servers

WARM_UP: Final = 500
LONGEST_SECONDS: Final = 180.0
REPORTED_SECONDS: Final = 0.3
"""After the last webhook: until the try is on record too."""


@dataclass(frozen=True)
class Run:
    """One load and what it cost; without webhooks `jobs_per_second` is 0."""

    load: Load
    cpu_us: dict[str, int]
    jobs_per_second: float = 0.0
    missing: int = 0


async def submitted(stack: Stack, label: str, jobs: int, connections: int = 64) -> Run:
    """Submit jobs and wait for the answers alone."""
    processor = Processor(stack.pids)
    load = await post(stack.url, stack.body(label), jobs, connections=connections)
    return Run(load, processor.microseconds_each(jobs))


async def to_webhook(stack: Stack, hook: Hook, label: str, jobs: int, connections: int = 64) -> Run:
    """Submit jobs that run at once, and wait for the webhook of each."""
    hook.forget()
    processor = Processor(stack.pids)
    load = await post(
        stack.url, stack.body(label), jobs, connections=connections, timeout=LONGEST_SECONDS
    )
    got = await hook.wait_for(jobs - load.refused)
    await asyncio.sleep(REPORTED_SECONDS)
    seconds = max(got.values(), default=float("inf")) - load.began
    return Run(
        load,
        processor.microseconds_each(jobs),
        len(got) / seconds,
        missing=jobs - load.refused - len(got),
    )


def tell(figures: Figures, engine: EngineName, alone: list[Run], whole: list[Run]) -> bool:
    """Tell the medians; return whether every job was accepted and its webhook came."""
    bad = {
        "missing": sum(run.missing for run in whole),
        "refused": sum(run.load.refused for run in (*alone, *whole)),
    }
    for name, runs in (("API alone", alone), ("dispatch on", whole)):
        if runs:
            run = middle(runs, lambda run: run.load.per_second)
            figures.tell(
                *("throughput", f"submissions, {name}", run.load.per_second, "/s"),
                engine=engine,
                cpu_us=run.cpu_us,
                p50_ms=run.load.p50_ms,
                p99_ms=run.load.p99_ms,
            )
    if whole:
        run = middle(whole, lambda run: run.jobs_per_second)
        rates = [round(run.jobs_per_second) for run in whole]
        figures.tell(
            *("throughput", "jobs, first POST to last webhook", run.jobs_per_second, "/s"),
            engine=engine,
            runs=rates,
            missing=bad["missing"],
            refused=bad["refused"],
        )
        figures.tell(
            *("throughput", "processor a job", run.cpu_us["total"], "us"),
            engine=engine,
            cpu_us=run.cpu_us,
        )
    return not any(bad.values())


def middle(runs: list[Run], key: Callable[[Run], float]) -> Run:
    """Return the run whose figure is the median; of two in the middle the lower."""
    return sorted(runs, key=key)[(len(runs) - 1) // 2]


async def measure(
    lent: Servers,
    engine: EngineName,
    jobs: int,
    runs: int,
    connections: int,
    spread: Spread,
) -> tuple[list[Run], list[Run]]:
    """Return the runs of the API alone, and those from POST to webhook."""
    async with listening() as hook:
        with oncue(lent, engine, hook.url, dispatch=False, spread=spread) as stack:
            await submitted(stack, "warm", WARM_UP, connections)
            alone = [await submitted(stack, f"run-{n}", jobs, connections) for n in range(runs)]
        with oncue(lent, engine, hook.url, spread=spread) as stack:
            await to_webhook(stack, hook, "warm", WARM_UP, connections)
            whole = [
                await to_webhook(stack, hook, f"run-{n}", jobs, connections) for n in range(runs)
            ]
    return alone, whole


def main() -> int:
    """Read the flags, measure, and tell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=10_000, help="of each run (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--connections", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="of the dispatcher (%(default)s)")
    parser.add_argument("--partitions", type=int, default=1, help="of dispatch (%(default)s)")
    engine_flags(parser)
    json_flag(parser)
    given = parser.parse_args()
    if (why := missing()) is not None:
        parser.error(why)
    engine = engine_name(given)
    with servers(binlog=given.binlog) as lent:
        alone, whole = uvloop.run(
            measure(
                lent,
                engine,
                given.jobs,
                given.runs,
                given.connections,
                Spread(given.processes, given.partitions),
            )
        )
    return 0 if tell(Figures(given.json), engine, alone, whole) else 1


if __name__ == "__main__":
    sys.exit(main())
