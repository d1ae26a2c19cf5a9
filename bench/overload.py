"""Measure what becomes of three times the load that can be sustained.

    python -m bench.overload                          # 60 s of 3 x the sustainable rate
    python -m bench.overload --seconds 20 --factor 5

Starts servers of its own, one dispatcher and two workers. A closed load (wrk, 64 connections)
finds the rate of submissions that is sustained while jobs are dispatched; an open load then offers
a multiple of it. Told are accepted and refused submissions a second, the latency of the accepted
from when they were to be sent, the dispatcher's memory at the first and the last second, how late
the event loop was, how long a worker's beat took meanwhile, and how long after the flood all
accepted jobs were done. The exit code is 1 unless every accepted job is stored once and done.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from dataclasses import dataclass, field
from typing import Final

import aiohttp
import uvloop

from bench.cluster import engine_flags, engine_name, job_body, memory_mib, platform, servers
from bench.drive import missing, post
from bench.figures import Figures, json_flag, percentile
from bench.open_loop import Offered, OpenLoad
from oncue.protocol import HEARTBEAT_PATH, WorkerState
from tests.integration.app.rig import beat_of, opened, value_of
from tests.support.engines import EngineName, Servers
from tests.support.processes import Platform
from tests.support.wait import until_async

WARM_UP: Final = 1000
SUSTAINED: Final = 8000
CONNECTIONS: Final = 1500
BEAT_SECONDS: Final = 0.25
MEMORY_SECONDS: Final = 1.0
DONE_SECONDS: Final = 600.0
SUCCEEDED: Final = 2


@dataclass
class Watch:
    """Beats as a worker would, and looks at the dispatcher's memory, until stopped."""

    running: Platform
    beats_ms: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    async def beat(self) -> None:
        """Beat four times as often as asked for, and keep how long the answer took."""
        beat = beat_of("watch", state=WorkerState.DRAINING)
        headers = {"Authorization": f"Bearer {self.running.internal_token}"}
        url, body = f"{self.running.url}{HEARTBEAT_PATH}", beat.model_dump_json(by_alias=True)
        async with aiohttp.ClientSession(headers=headers) as session:
            while True:
                began = time.monotonic()
                async with session.post(url, data=body) as response:
                    response.raise_for_status()
                    await response.read()
                took = time.monotonic() - began
                self.beats_ms.append(took * 1000)
                await asyncio.sleep(max(0.0, BEAT_SECONDS - took))

    async def remember(self) -> None:
        """Keep the dispatcher's memory, each second."""
        pid = self.running.services["dispatcher-1"].child.pid
        while True:
            self.memory.append(memory_mib(pid))
            await asyncio.sleep(MEMORY_SECONDS)


async def lag_over(running: Platform, seconds: str) -> tuple[int, int]:
    """Return how often the event loop was later than that, and how often it was looked at."""
    async with aiohttp.ClientSession() as session, session.get(f"{running.url}/metrics") as answer:
        told = await answer.text()
    counts = dict(re.findall(r'oncue_event_loop_lag_seconds_bucket\{le="([^"]+)"\} ([\d.]+)', told))
    looked = int(float(counts["+Inf"]))
    return looked - int(float(counts[seconds])), looked


async def flood(
    running: Platform, rate: float, seconds: float, connections: int
) -> tuple[Offered, Watch]:
    """Offer the load, and watch meanwhile."""
    watch = Watch(running)
    load = OpenLoad(
        f"{running.url}/openapi/jobs", job_body(None, label="flood"), connections=connections
    )
    async with asyncio.TaskGroup() as group:
        watching = [group.create_task(one) for one in (watch.beat(), watch.remember())]
        offered = await load.offer(rate, seconds)
        for task in watching:
            task.cancel()
    return offered, watch


async def measure(
    lent: Servers,
    engine: EngineName,
    factor: float,
    seconds: float,
    connections: int,
    environment: dict[str, str],
    figures: Figures,
) -> bool:
    """Tell all; return whether every accepted job is stored once and done."""
    with platform(lent, engine, environment=environment) as running:
        url, first = f"{running.url}/openapi/jobs", job_body(None, label="warm")
        await post(url, first, WARM_UP)
        async with opened(running.engine) as database:

            async def done(count: int) -> bool:
                query = "SELECT COUNT(*) FROM job_info WHERE status = :status"
                return bool(await value_of(database, query, status=SUCCEEDED) == count)

            async def all_done(count: int) -> float:
                began = time.monotonic()
                await until_async(lambda: done(count), DONE_SECONDS, what=f"{count} jobs done")
                return time.monotonic() - began

            sustained = await post(url, job_body(None, label="sustained"), SUSTAINED)
            before = WARM_UP + SUSTAINED - sustained.refused
            await all_done(before)
            late_before, looked_before = await lag_over(running, "0.1")
            rate = factor * sustained.per_second
            offered, watch = await flood(running, rate, seconds, connections)
            late, looked = await lag_over(running, "0.1")
            finished = await value_of(
                database, "SELECT COUNT(*) FROM job_info WHERE status = :status", status=SUCCEEDED
            )
            accepted = offered.by_status[202]
            after = await all_done(before + accepted)
            stored = await value_of(database, "SELECT COUNT(*) FROM job_info")
    refused = offered.by_status[503]
    others = sum(offered.by_status.values()) - accepted - refused
    whole = stored == before + accepted and not others and not offered.broken
    tell = figures.tell
    tell("overload", "sustained", sustained.per_second, "/s", engine=engine)
    tell("overload", "offered", offered.sent / seconds, "/s", asked=rate, skipped=offered.not_sent)
    tell("overload", "accepted", accepted / seconds, "/s", jobs=accepted)
    tell("overload", "refused", refused / seconds, "/s", retry_after=dict(offered.retry_after))
    took = offered.accepted_seconds
    tell(
        *("overload", "accepted, p99", percentile(took, 99) * 1000, "ms"),
        p50=percentile(took, 50) * 1000,
        longest=max(took) * 1000,
    )
    quick = offered.refused_seconds or [0.0, 0.0]
    tell("overload", "refused, p99", percentile(quick, 99) * 1000, "ms")
    tell(
        *("overload", "dispatcher's memory, last", watch.memory[-1], "MiB"),
        first=round(watch.memory[0]),
        most=round(max(watch.memory)),
    )
    tell(
        *("overload", "a worker's beat, p99", percentile(watch.beats_ms, 99), "ms"),
        beats=len(watch.beats_ms),
        longest=max(watch.beats_ms),
    )
    tell(
        *("overload", "event loop later than 0.1 s", late - late_before, "times"),
        of=looked - looked_before,
    )
    tell("overload", "jobs done during the flood", (finished - before) / seconds, "/s")
    tell("overload", "all accepted done after", after, "s", others=others, broken=offered.broken)
    return whole


def main() -> int:
    """Read the flags, measure, and tell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60, help="of overload (%(default)s)")
    parser.add_argument("--factor", type=float, default=3, help="of overload (%(default)s)")
    parser.add_argument(
        "--connections", type=int, default=CONNECTIONS, help="of the open load (%(default)s)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="ONCUE_NAME=VALUE",
        help="a setting to try; may be repeated",
    )
    engine_flags(parser)
    json_flag(parser)
    given = parser.parse_args()
    if (why := missing()) is not None:
        parser.error(why)
    with servers(binlog=given.binlog) as lent:
        whole = uvloop.run(
            measure(
                lent,
                engine_name(given),
                given.factor,
                given.seconds,
                given.connections,
                dict(one.split("=", 1) for one in given.set),
                Figures(given.json),
            )
        )
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
