"""How late jobs begin on an idle platform: from their due times to the starts of their handlers.

    python -m bench.lateness                     # over MariaDB and Redis
    python -m bench.lateness --embedded          # over SQLite and Valkey
    python -m bench.lateness --peers DIR --peers-python PYTHON

Starts servers, a dispatcher and a worker of its own, each a process, and submits jobs with random
due times, then schedules that have their first fires at such times. Prints p50, p99, the longest
and the earliest in milliseconds, and where they go.
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
HOUR_MS = 3_600_000
PEER_SECONDS = 300
PEERS = {
    "APScheduler": ("peer_apscheduler.py", "50", "db"),
    "Celery": ("peer_celery.py", "200", "redis"),
}


Steps = dict[str, list[float]]
"""Milliseconds from the due times to each step, by its name."""


def measure(
    engine: EngineName, jobs: int, fires: int, window: float, handler: str
) -> tuple[Steps, Steps]:
    """Return how late each step of each job was, and of each fire."""
    servers = Servers()
    try:
        with tempfile.TemporaryDirectory() as directory:
            quiet = {"ONCUE_LOG_LEVEL": "warning"}
            platform = Platform(servers.engine(engine), Path(directory), quiet)
            try:
                platform.dispatcher()
                platform.worker(handlers="bench.marks")
                platform.wait_for_workers(1)
                of_jobs = _lateness(platform, jobs, window, handler)
                of_fires = _lateness(platform, fires, window, handler, fires=True) if fires else {}
                return of_jobs, of_fires
            finally:
                platform.close()
    finally:
        servers.remove()


def _lateness(
    platform: Platform, jobs: int, window: float, handler: str, *, fires: bool = False
) -> Steps:
    """Give jobs random due times, or with `fires` the first fires of so many schedules."""
    name = "fire" if fires else "late"
    dice = random.Random(1)
    base = time.time() + LEAD_SECONDS
    due = {n: round((base + dice.uniform(0, window)) * 1000) for n in range(jobs)}
    bodies = [
        {
            "clientRequestId": f"{name}-{number}",
            "jobName": "lateness",
            "jobHandler": handler,
            "startAt" if fires else "runAt": _written(at),
            **({"intervalMs": HOUR_MS} if fires else {}),
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
    found: Steps = {"claimed": [], "accepted": [], "started": []}
    for number, submitted in enumerate(ids):
        job_id = submitted
        if fires:
            job_id = until(functools.partial(_child, platform, submitted), 30, what="a fire")
        job = until(functools.partial(_ended, platform, job_id), 30, what="a job to end")
        assert job["status"] == "SUCCEEDED", job
        execution = job["executions"][0]
        found["started"].append(job["result"] * 1000 - due[number])
        for step in ("claimed", "accepted"):
            at = datetime.fromisoformat(execution[f"{step}At"]).timestamp() * 1000
            found[step].append(at - due[number])
    return found


def _written(epoch_ms: int) -> str:
    return datetime.fromtimestamp(epoch_ms / 1000, UTC).isoformat(timespec="milliseconds")


def _child(platform: Platform, schedule: int) -> int | None:
    found = platform.get(f"/openapi/jobs/{schedule}/children")["items"]
    return int(found[0]["jobId"]) if found else None


def _ended(platform: Platform, job_id: int) -> dict[str, Any] | None:
    job = platform.job(job_id)
    return job if job["finishedAt"] else None


def figures(values: Sequence[float]) -> dict[str, float]:
    """Sum values up."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    named = {"p50": cuts[49], "p99": cuts[98], "longest": max(values), "earliest": min(values)}
    return {name: round(value, 2) for name, value in named.items()}


def tell(what: str, found: Steps, engine: str) -> tuple[dict[str, dict[str, float]], int]:
    """Print the figures of each step; return them, and how many began early."""
    table = {step: figures(values) for step, values in found.items()}
    early, count = sum(value < 0 for value in found["started"]), len(found["started"])
    print(f"{count} {what}, {engine}, milliseconds after they were due; {early} began early")
    for step, row in table.items():
        print(f"  {step:<12} " + "   ".join(f"{name} {value:7.2f}" for name, value in row.items()))
    return table, early


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
    parser.add_argument(
        "--fires", type=int, default=300, help="schedules with one fire each; 0: none"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="due times lie so far apart")
    parser.add_argument("--handler", choices=("mark", "mark_thread"), default="mark")
    parser.add_argument("--peers", default=os.environ.get("ONCUE_BENCH_PEERS", ""))
    parser.add_argument(
        "--peers-python", default=os.environ.get("ONCUE_BENCH_PEERS_PYTHON", sys.executable)
    )
    given = parser.parse_args()
    engine: EngineName = "sqlite+valkey" if given.embedded else "mariadb+redis"
    of_jobs, of_fires = measure(engine, given.jobs, given.fires, given.seconds, given.handler)
    table, early = tell("jobs", of_jobs, engine)
    fires, early_fires = tell("fires", of_fires, engine) if of_fires else ({}, 0)
    for name in PEERS:
        print(peer(name, given.peers, given.peers_python), flush=True)
    told = {"early": early, **table, "fires": {"early": early_fires, **fires}}
    print(json.dumps({"bench": "lateness", "engine": engine, **told}))


if __name__ == "__main__":
    main()
