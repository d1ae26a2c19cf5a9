"""Measure an idle platform: POST to its answer, handler start and webhook; and due times.

    python -m bench.latency                # MariaDB and Redis, 200 jobs, 300 due times
    python -m bench.latency --embedded

Starts servers of its own, one dispatcher, two workers and a receiver. Jobs are sent one at a
time, a few milliseconds after the last one's webhook. Then jobs are given random due times, and
their lateness is that of the handler's start by the worker's clock, in whole milliseconds; early
ones must be none, else the exit code is 1. A platform that already runs is measured, up to the
end of the handler, by `python -m bench.idle_latency --url`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp
import uvloop

from bench.cluster import engine_flags, engine_name, job_body, servers
from bench.drive import NUMBER
from bench.figures import Figures, json_flag, percentile
from bench.hook import Hook, listening
from bench.stacks import Stack, oncue
from tests.support.engines import EngineName, Servers

PAUSE_SECONDS: Final = (0.002, 0.015)
LEAD_SECONDS: Final = 3.0
WINDOW_SECONDS: Final = 10.0
ASKED_AT_ONCE: Final = 8


class WebhookMissing(Exception):
    """A job was accepted, and its webhook did not come."""


@dataclass
class Steps:
    """Milliseconds from the start of the POST of each job; `ids` are the jobs'."""

    answered: list[float] = field(default_factory=list)
    webhook: list[float] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    sent_at: dict[int, float] = field(default_factory=dict)


async def idle(stack: Stack, hook: Hook, label: str, count: int) -> Steps:
    """Send jobs one at a time, each after the webhook of the last."""
    steps, body = Steps(), stack.body(label)
    headers = {"Content-Type": "application/json"}
    hook.forget()
    async with aiohttp.ClientSession(headers=headers) as session:
        for number in range(1, count + 1):
            sent_at, sent = time.time(), time.monotonic()
            data = body.replace(NUMBER, f"{number:012}")
            async with session.post(stack.url, data=data) as response:
                response.raise_for_status()
                told: dict[str, Any] = await response.json()
            steps.answered.append((time.monotonic() - sent) * 1000)
            job = int(told["jobId"] if "jobId" in told else told["id"])
            steps.sent_at[job] = sent_at
            received = await hook.wait_for(number)
            if job not in received:
                raise WebhookMissing(f"no webhook came for job {job} of {stack.name}")
            steps.webhook.append((received[job] - sent) * 1000)
            await asyncio.sleep(random.uniform(*PAUSE_SECONDS))
        if stack.name == "oncue":
            starts = await _starts(session, stack.url, list(steps.sent_at))
            steps.started = [(starts[job] - at) * 1000 for job, at in steps.sent_at.items()]
    return steps


async def lateness(stack: Stack, count: int) -> list[float]:
    """Give jobs random due times; return how many milliseconds after them each handler began."""
    begin = time.time() + LEAD_SECONDS
    due: dict[int, float] = {}
    async with aiohttp.ClientSession() as session:
        for number in range(count):
            at = round(begin + random.uniform(0, WINDOW_SECONDS), 3)
            body = json.loads(job_body(None, label="due").replace(NUMBER, f"{number:012}"))
            body["runAt"] = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
            async with session.post(stack.url, json=body) as response:
                response.raise_for_status()
                due[int((await response.json())["jobId"])] = at
        await asyncio.sleep(begin + WINDOW_SECONDS - time.time())
        starts = await _starts(session, stack.url, list(due))
    return [(starts[job] - at) * 1000 for job, at in due.items()]


async def _starts(
    session: aiohttp.ClientSession, url: str, jobs: Sequence[int]
) -> dict[int, float]:
    """Return when the handler of each job began, epoch seconds, once the jobs have ended."""
    found: dict[int, float] = {}
    left = list(jobs)

    async def ask() -> None:
        while left:
            job = left.pop()
            async with session.get(f"{url}/{job}?wait=30") as response:
                response.raise_for_status()
                (execution, *_) = (await response.json())["executions"]
            found[job] = datetime.fromisoformat(execution["startedAt"]).timestamp()

    await asyncio.gather(*(ask() for _ in range(ASKED_AT_ONCE)))
    return found


async def measure(lent: Servers, engine: EngineName, jobs: int, due: int, figures: Figures) -> bool:
    """Tell the figures; return whether no job was early."""
    async with listening() as hook:
        with oncue(lent, engine, hook.url) as stack:
            await idle(stack, hook, "warm", 30)
            steps = await idle(stack, hook, "idle", jobs)
            for name, values in (
                ("idle: POST to answer", steps.answered),
                ("idle: POST to handler start", steps.started),
                ("idle: POST to webhook", steps.webhook),
            ):
                tell(figures, name, values, engine)
            late = await lateness(stack, due)
    tell(figures, "lateness of due times", late, engine, early=sum(one < 0 for one in late))
    return min(late) >= 0


def tell(
    figures: Figures, name: str, values: Sequence[float], engine: EngineName, **more: Any
) -> None:
    """Tell the median, with the 99th percentile beside it."""
    figures.tell(
        *("latency", name, percentile(values, 50), "ms"),
        engine=engine,
        p99=round(percentile(values, 99), 2),
        n=len(values),
        **more,
    )


def main() -> int:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=200, help="sent one at a time (%(default)s)")
    parser.add_argument("--due", type=int, default=300, help="random due times (%(default)s)")
    engine_flags(parser)
    json_flag(parser)
    given = parser.parse_args()
    figures = Figures(given.json)
    with servers(binlog=given.binlog) as lent:
        work = measure(lent, engine_name(given), given.jobs, given.due, figures)
        return 0 if uvloop.run(work) else 1


if __name__ == "__main__":
    sys.exit(main())
