"""Whether a long backlog of callbacks to a dead host delays others.

    python -m bench.callback_backlog [--backlog 100000] [--seconds 30] [--rate 20]

Jobs end at a rate, half of them run (their worker calls back at once) and half cancelled (their
callbacks are handed over); how long each callback takes is measured, first alone and then with
the backlog due. The dead host accepts connections and never answers. Exits with 1 if the p99 has
grown by more than a fifth, or 20 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.plumbing.database import Database
from tests.support.engines import ENGINE_NAMES, Engine, Servers
from tests.support.hosts import Host, open_hosts
from tests.support.processes import Platform

DEAD = "127.0.0.250"
CHUNK = 2000
NOISE_SECONDS = 0.02
INSERT = text(
    "INSERT INTO callback_delivery (delivery_id, job_id, event_type, url, body, status, tries, "
    "next_try_at, created_at, owed_since, host) "
    "VALUES (:delivery, 1, 'job.failed', :url, '{}', 0, 0, :now, :now, :now, :host)"
)


async def owe(engine: Engine, port: int, count: int) -> None:
    """Owe callbacks to the dead host, all due now."""
    database = Database(engine.database_url)
    now = await database.now()
    for start in range(0, count, CHUNK):
        rows = [
            {
                "delivery": secrets.token_hex(16),
                "url": f"http://{DEAD}:{port}/hook",
                "host": f"{DEAD}:{port}",
                "now": now,
            }
            for _ in range(min(CHUNK, count - start))
        ]

        async def insert(connection: AsyncConnection, rows: list[dict[str, object]] = rows) -> None:
            await connection.execute(INSERT, rows)

        await database.write(insert)
    await database.close()


async def ends(platform: Platform, hosts: Sequence[Host], flags: argparse.Namespace) -> list[float]:
    """Let jobs end at a rate; return how long their callbacks took, sorted, in seconds."""
    before = sum(len(host.arrivals) for host in hosts)
    count = int(flags.seconds * flags.rate)
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=platform.url, timeout=60) as client:
        for number in range(count):
            cancelled = number % 2 == 1
            body = {
                "clientRequestId": secrets.token_hex(8),
                "jobName": "bench",
                "jobHandler": "echo",
                "callbackUrl": hosts[number % len(hosts)].url,
                **({"delayMs": 3_600_000} if cancelled else {}),
            }
            job = (await client.post("/openapi/jobs", json=body)).raise_for_status().json()
            if cancelled:
                answer = await client.post(f"/openapi/jobs/{job['jobId']}/cancel")
                answer.raise_for_status()
            await asyncio.sleep(max(0.0, began + (number + 1) / flags.rate - time.monotonic()))
    while sum(len(host.arrivals) for host in hosts) < before + count:  # noqa: ASYNC110 - as many
        await asyncio.sleep(0.1)
    found = [one for host in hosts for one in host.arrivals if one.at >= time.time() - 3600]
    newest = sorted(found, key=lambda one: one.at)[before:]
    return sorted(one.late_seconds for one in newest)


def p99(late: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(late, n=100)[98]


def tell(name: str, late: list[float]) -> None:
    """Print one line."""
    print(
        f"{name}: {len(late)} callbacks, median {statistics.median(late) * 1000:.0f} ms, "
        f"p99 {p99(late) * 1000:.0f} ms, longest {late[-1] * 1000:.0f} ms",
        flush=True,
    )


async def measure(platform: Platform, flags: argparse.Namespace) -> bool:
    """Measure alone, with the backlog, and alone again: the machine has its own moods."""
    with socket.create_server((DEAD, 0), backlog=4096) as dead:
        async with open_hosts(["healthy"] * 4, platform.webhook_secret) as hosts:
            await ends(platform, hosts, argparse.Namespace(seconds=3, rate=flags.rate))
            alone = await ends(platform, hosts, flags)
            tell("alone       ", alone)
            await owe(platform.engine, dead.getsockname()[1], flags.backlog)
            beside = await ends(platform, hosts, flags)
            tell(f"with {flags.backlog:7}", beside)
    return p99(beside) <= max(1.2 * p99(alone), p99(alone) + NOISE_SECONDS)


def main() -> None:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backlog", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=20.0, help="jobs a second")
    parser.add_argument("--engine", choices=ENGINE_NAMES, default=ENGINE_NAMES[0])
    flags = parser.parse_args()
    servers = Servers()
    with tempfile.TemporaryDirectory() as directory:
        platform = Platform(servers.engine(flags.engine), Path(directory))
        try:
            platform.start()
            kept = asyncio.run(measure(platform, flags))
        finally:
            platform.close()
            servers.remove()
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
