"""Measure what limits cost: jobs a second with limits, over none, in one sitting.

    python -m bench.limits                        # MariaDB and Redis, 3,000 jobs, 5 rounds
    python -m bench.limits --embedded --jobs 1000 # SQLite and Valkey

Limits are so high that nothing is refused or waits. `tenant` are all limits of a tenant: each
submission is counted, what waits and what runs is counted from the rows. With `keys` each job has
a concurrencyKey and a rateKey, one of 50. Every round runs them and `off` on one dispatcher with
two workers, each round in another order; the figures are medians, and those of the rounds'
ratios. The exit code is 1 if a webhook is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections import defaultdict
from typing import Any, Final
from urllib.parse import urljoin

import httpx
import uvloop

from app.access.limits import FRESH_SECONDS
from bench.cluster import engine_flags, engine_name, job_body, servers
from bench.drive import TURN, missing
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
KEYS: Final[dict[str, Any]] = {
    "concurrencyKey": f"customer-{TURN}",
    "concurrencyLimit": 1000,
    "rateKey": f"mail-{TURN}",
    "ratePerSecond": 10_000.0,
}
KINDS: Final = ("off", "tenant", "keys")
NONE: Final[dict[str, Any]] = dict.fromkeys(LIMITS)
Rounds = dict[str, list[Run]]


async def limit(stack: Stack, limits: dict[str, Any]) -> None:
    """Set the limits of the tenant 0, and wait until each dispatcher must know them."""
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.patch(
            urljoin(stack.url, "/openapi/tenants/0"), json={"limits": limits}
        )
        answer.raise_for_status()
    await asyncio.sleep(FRESH_SECONDS / 10)


async def measure(lent: Servers, engine: EngineName, jobs: int, rounds: int) -> Rounds:
    """Return the runs of each kind, in the order of the rounds."""
    found: Rounds = defaultdict(list)
    async with listening() as hook:
        with oncue(lent, engine, hook.url) as stack:
            await to_webhook(stack, hook, "warm", WARM_UP)
            for number in range(rounds):
                first = number % len(KINDS)
                for kind in (*KINDS[first:], *KINDS[:first]):
                    run = await _run(stack, hook, kind, f"{kind}-{number}", jobs)
                    found[kind].append(run)
    return found


async def _run(stack: Stack, hook: Hook, kind: str, label: str, jobs: int) -> Run:
    await limit(stack, dict(LIMITS) if kind == "tenant" else NONE)
    keys: dict[str, Any] = KEYS if kind == "keys" else {}
    one = Stack(
        stack.name, stack.url, lambda name: job_body(hook.url, label=name, **keys), stack.pids
    )
    return await to_webhook(one, hook, label, jobs)


def tell(figures: Figures, engine: EngineName, found: Rounds) -> bool:
    """Tell the medians and the ratios; return whether every webhook came."""
    for kind in KINDS:
        run = middle(found[kind], lambda run: run.jobs_per_second)
        figures.tell(
            *("limits", f"jobs to their webhooks, {kind}", run.jobs_per_second, "/s"),
            engine=engine,
            runs=[round(one.jobs_per_second) for one in found[kind]],
            cpu_us=_middle_cpu(found[kind]),
        )
    for kind in KINDS[1:]:
        pairs = list(zip(found[kind], found["off"], strict=True))
        rates = [on.jobs_per_second / off.jobs_per_second for on, off in pairs]
        # What a busy machine does to the rate it does less to this.
        costs = [on.cpu_us["total"] / off.cpu_us["total"] for on, off in pairs]
        for what, ratios in (("jobs a second", rates), ("processor a job", costs)):
            figures.tell(
                *("limits", f"{what}, {kind} over off", statistics.median(ratios), ""),
                engine=engine,
                rounds=[round(one, 3) for one in ratios],
            )
    runs = [run for kind in KINDS for run in found[kind]]
    return not any(run.missing or run.load.refused for run in runs)


def _middle_cpu(runs: list[Run]) -> dict[str, int]:
    return {
        name: round(statistics.median(run.cpu_us[name] for run in runs)) for name in runs[0].cpu_us
    }


def main() -> int:
    """Read the flags, measure, and tell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=3000, help="of each run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    engine_flags(parser)
    json_flag(parser)
    given = parser.parse_args()
    if (why := missing()) is not None:
        parser.error(why)
    engine = engine_name(given)
    with servers(binlog=given.binlog) as lent:
        found = uvloop.run(measure(lent, engine, given.jobs, given.rounds))
    return 0 if tell(Figures(given.json), engine, found) else 1


if __name__ == "__main__":
    sys.exit(main())
