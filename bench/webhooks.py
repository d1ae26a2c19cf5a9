"""Whether receivers that misbehave delay others: jobs with callbacks to 20 hosts, 6 of them ill.

    python -m bench.webhooks [--jobs 10000] [--rate 200] [--ill-seconds 60] [--engine mariadb]

Two hosts time out, two answer 500, one 429 with Retry-After, one resets connections, all until
they heal; then everything that is owed must arrive. Each request is verified by the independent
`standardwebhooks` package. The platform (a dispatcher and a worker, processes of their own) and
the receivers share the machine. Exits with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.support.engines import ENGINE_NAMES, Servers
from tests.support.hosts import Host, Manner, open_hosts
from tests.support.processes import Platform

MANNERS: Sequence[Manner] = (
    *("silent", "silent", "error", "error", "busy", "reset"),
    *("healthy",) * 14,
)
BATCH = 100
PROMISED_P99_SECONDS = 1.0


async def submit(
    platform: Platform, hosts: Sequence[Host], jobs: int, rate: float
) -> dict[int, Host]:
    """Submit jobs at a rate, their hosts in turn; return the host of each."""
    owed: dict[int, Host] = {}
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=platform.url, timeout=60) as client:
        for start in range(0, jobs, BATCH):
            turn = [
                hosts[(start + number) % len(hosts)] for number in range(min(BATCH, jobs - start))
            ]
            body = {
                "jobs": [
                    {
                        "clientRequestId": secrets.token_hex(8),
                        "jobName": "bench",
                        "jobHandler": "echo",
                        "params": {"number": number},
                        "callbackUrl": host.url,
                    }
                    for number, host in enumerate(turn)
                ]
            }
            answer = await client.post("/openapi/jobs/batch", json=body)
            answer.raise_for_status()
            for item, host in zip(answer.json()["items"], turn, strict=True):
                owed[item["jobId"]] = host
            await asyncio.sleep(max(0.0, began + (start + BATCH) / rate - time.monotonic()))
    return owed


def is_missing(owed: dict[int, Host]) -> list[int]:
    """Name the jobs of which no callback was accepted."""
    delivered = {host: host.delivered() for host in set(owed.values())}
    return [job_id for job_id, host in owed.items() if job_id not in delivered[host]]


def tell(owed: dict[int, Host], hosts: Sequence[Host]) -> bool:
    """Print what came, and tell whether all promises were kept."""
    late = sorted(
        one.late_seconds for host in hosts if host.manner == "healthy" for one in host.arrivals
    )
    p99 = statistics.quantiles(late, n=100)[98]
    missing = is_missing(owed)
    unstable = [job for host in hosts for job, ids in host.ids().items() if len(ids) != 1]
    refused = [reason for host in hosts for reason in host.refused]
    print(
        f"healthy hosts: {len(late)} requests, end of job to request: "
        f"median {statistics.median(late) * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms, "
        f"longest {late[-1] * 1000:.0f} ms"
    )
    for manner in dict.fromkeys(MANNERS):
        own = [host for host in hosts if host.manner == manner]
        came = sum(len(host.arrivals) for host in own)
        accepted = sum(len(host.delivered()) for host in own)
        print(f"  {manner:8} {len(own)} hosts: {came} requests, {accepted} callbacks accepted")
    print(
        f"callbacks missing: {len(missing)}; jobs with several ids: {len(unstable)}; "
        f"not verified: {len(refused)}"
    )
    return p99 < PROMISED_P99_SECONDS and not missing and not unstable and not refused


async def measure(platform: Platform, flags: argparse.Namespace) -> bool:
    """Submit, let the hosts heal, and wait until nothing is owed any more."""
    async with open_hosts(MANNERS, platform.webhook_secret) as hosts:
        began = time.monotonic()
        submitting = asyncio.create_task(submit(platform, hosts, flags.jobs, flags.rate))
        await asyncio.sleep(flags.ill_seconds)
        for host in hosts:
            host.healed.set()
        healed = time.monotonic()
        owed = await submitting
        print(f"submitted {len(owed)} jobs; healed after {healed - began:.0f} s", flush=True)
        # Looked at, not awaited: the receivers note what comes for all jobs at once.
        while is_missing(owed) and time.monotonic() - healed < flags.most_seconds:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        print(f"all that was owed arrived {time.monotonic() - healed:.0f} s after that")
        return tell(owed, hosts)


def main() -> None:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=200.0, help="jobs a second")
    parser.add_argument("--ill-seconds", type=float, default=60.0)
    parser.add_argument("--most-seconds", type=float, default=900.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--engine", choices=ENGINE_NAMES, default=ENGINE_NAMES[0])
    flags = parser.parse_args()
    servers = Servers()
    with tempfile.TemporaryDirectory() as directory:
        platform = Platform(servers.engine(flags.engine), Path(directory))
        try:
            platform.start(workers=flags.workers)
            kept = asyncio.run(measure(platform, flags))
        finally:
            platform.close()
            servers.remove()
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
