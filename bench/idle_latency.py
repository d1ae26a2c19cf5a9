"""Measure an idle platform: from the submission's start to its answer, claim, handler start, end.

    oncue up &                                   # or any dispatcher and worker
    python -m bench.idle_latency --url http://127.0.0.1:8080 --jobs 200

Prints p50 and p99 in milliseconds. Dispatcher and worker must share this machine's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import aiohttp

PAUSE_SECONDS = 0.02


async def measure(url: str, jobs: int, key: str | None) -> dict[str, list[float]]:
    """Submit jobs one after the other, and return the milliseconds of each step of each."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    found: dict[str, list[float]] = {"answered": [], "claimed": [], "started": [], "ended": []}
    async with aiohttp.ClientSession(url, headers=headers) as session:
        for _ in range(jobs):
            body = {
                "clientRequestId": str(uuid.uuid4()),
                "jobName": "idle latency",
                "jobHandler": "echo",
                "params": {"n": 1},
            }
            sent = time.time()
            async with session.post("/openapi/jobs", json=body) as response:
                response.raise_for_status()
                submitted = await response.json()
            answered = time.time()
            async with session.get(f"/openapi/jobs/{submitted['jobId']}?wait=30") as response:
                job: dict[str, Any] = await response.json()
            execution = job["executions"][0]
            found["answered"].append((answered - sent) * 1000)
            for step, field in (
                ("claimed", "claimedAt"),
                ("started", "startedAt"),
                ("ended", "finishedAt"),
            ):
                moment = datetime.fromisoformat(execution[field]).timestamp()
                found[step].append((moment - sent) * 1000)
            # Idle means idle: the next submission meets a platform that has gone to sleep.
            await asyncio.sleep(PAUSE_SECONDS)
    return found


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of the values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main() -> None:
    """Measure and print one table and one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--jobs", type=int, default=200, choices=range(10, 5001), metavar="N")
    given = parser.parse_args()
    found = asyncio.run(measure(given.url, given.jobs, os.environ.get("ONCUE_API_KEY")))
    table = {
        step: {"p50": round(percentile(values, 50), 1), "p99": round(percentile(values, 99), 1)}
        for step, values in found.items()
    }
    print(f"{given.jobs} jobs, one at a time, milliseconds after the POST was sent")
    for step, row in table.items():
        print(f"  {step:<9} p50 {row['p50']:7.1f}   p99 {row['p99']:7.1f}")
    print(json.dumps({"bench": "idle_latency", "jobs": given.jobs, **table}))


if __name__ == "__main__":
    main()
