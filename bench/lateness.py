"""How late jobs begin on an idle platform: from their due times to the starts of their handlers.

    python -m bench.lateness                     # over MariaDB and Redis
    python -m bench.lateness --embedded          # over SQLite and Valkey
    python -m bench.lateness --peers DIR --peers-python PYTHON

Starts servers, a dispatcher and a worker of its own, each a process, and submits jobs with random
due times. Prints p50, p99, the longest and the earliest in milliseconds, and where they go.
DIR (or ONCUE_BENCH_PEERS) has the drivers `peer_apscheduler.py` and `peer_celery.py`, which are
run as they are by PYTHON (or ONCUE_BENCH_PEERS_PYTHON); what they need must be running.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.support.engines import EngineName, Servers
from tests.support.processes import Platform
from tests.support.wait import until

LEAD_SECONDS = 4.0
BATCH = 100
PEER_SECONDS = 300
PEERS = {
    "APScheduler": ("peer_apscheduler.py", "50", "db"),
    "Celery": ("peer_celery.py", "200", "redis"),
}


def measure(engine: EngineName, jobs: int, window: float, handler: str) -> dict[str, list[float]]:
    """Return the milliseconds from the due time to each step of each job."""
    servers = Servers()
    try:
        with tempfile.TemporaryDirectory() as directory:
            quiet = {"ONCUE_LOG_LEVEL": "warning"}
            platform = Platform(servers.engine(engine), Path(directory), quiet)
            try:
                platform.dispatcher()
                platform.worker(handlers="bench.marks")
                platform.wait_for_workers(1)
                return _lateness(platform, jobs, window, handler)
            finally:
                platform.close()
    finally:
        servers.remove()


def _lateness(platform: Platform, jobs: int, window: float, handler: str) -> dict[str, list[float]]:
    dice = random.Random(1)
    base = time.time() + LEAD_SECONDS
    due = {n: round((base + dice.uniform(0, window)) * 1000) for n in range(jobs)}
    bodies = [
        {
            "clientRequestId": f"late-{number}",
            "jobName": "lateness",
            "jobHandler": handler,
            "runAt": datetime.fromtimestamp(at / 1000, UTC).isoformat(timespec="milliseconds"),
        }
        for number, at in due.items()
    ]
    ids: list[int] = []
    for start in range(0, jobs, BATCH):
        answer = platform.http.post(
            "/openapi/jobs/batch", json={"jobs": bodies[start : start + BATCH]}
        )
        answer.raise_for_status()
        ids += [item["jobId"] for item in answer.json()["items"]]
    assert time.time() < base, "the jobs were not submitted in time"
    time.sleep(max(0.0, base + window - time.time()))
    found: dict[str, list[float]] = {"claimed": [], "accepted": [], "started": []}
    for number, job_id in enumerate(ids):
        job = until(functools.partial(_ended, platform, job_id), 30, what="a job to end")
        assert job["status"] == "SUCCEEDED", job
        execution = job["executions"][0]
        found["started"].append(job["result"] * 1000 - due[number])
        for step in ("claimed", "accepted"):
            at = datetime.fromisoformat(execution[f"{step}At"]).timestamp() * 1000
            found[step].append(at - due[number])
    return found


def _ended(platform: Platform, job_id: int) -> dict[str, Any] | None:
    job = platform.job(job_id)
    return job if job["finishedAt"] else None


def figures(values: Sequence[float]) -> dict[str, float]:
    """Sum values up."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    named = {"p50": cuts[49], "p99": cuts[98], "longest": max(values), "earliest": min(values)}
    return {name: round(value, 2) for name, value in named.items()}


def peer(name: str, folder: str, python: str) -> str:
    """Run the driver of a peer and return its line of the table."""
    if not folder:
        return f"  {name:<12} not given"
    script, *arguments = PEERS[name]
    done = subprocess.run(
        [python, script, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PEER_SECONDS,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return f"  {name:<12} failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"
    told = json.loads(lines[-1])
    late = told["lateness"]
    return (
        f"  {name:<12} p50 {late['p50_ms']:7.2f}   p99 {late['p99_ms']:7.2f}   "
        f"longest {late['max_ms']:7.2f}   {told['peer']}"
    )


def main() -> None:
    """Read the flags, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--embedded", action="store_true", help="SQLite and Valkey")
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=20.0, help="due times lie so far apart")
    parser.add_argument("--handler", choices=("mark", "mark_thread"), default="mark")
    parser.add_argument("--peers", default=os.environ.get("ONCUE_BENCH_PEERS", ""))
    parser.add_argument(
        "--peers-python", default=os.environ.get("ONCUE_BENCH_PEERS_PYTHON", sys.executable)
    )
    given = parser.parse_args()
    engine: EngineName = "sqlite+valkey" if given.embedded else "mariadb+redis"
    found = measure(engine, given.jobs, given.seconds, given.handler)
    table = {step: figures(values) for step, values in found.items()}
    early = sum(value < 0 for value in found["started"])
    print(f"{given.jobs} jobs, {engine}, milliseconds after they were due; {early} began early")
    for step, row in table.items():
        print(f"  {step:<12} " + "   ".join(f"{name} {value:7.2f}" for name, value in row.items()))
    for name in PEERS:
        print(peer(name, given.peers, given.peers_python), flush=True)
    print(json.dumps({"bench": "lateness", "engine": engine, "early": early, **table}))


if __name__ == "__main__":
    main()
