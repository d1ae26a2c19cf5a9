"""A directed scene: a small cluster, a few jobs, and the judge at its end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from tests.faults.cluster import Cluster
from tests.faults.evidence import held_by_two, history
from tests.faults.handlers import Note
from tests.support.checker import Accepted, CancelAsked, Event, Report, judge
from tests.support.wait import until

DEATH_SECONDS: Final = 60.0
"""Longer than it ever takes until a dead worker's runs go on elsewhere."""


class Scene:
    """Jobs in a running cluster; what callers are told is kept for the judge."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.told: list[Event] = []
        self.platform = cluster.platform
        self.http = httpx.Client(timeout=10, trust_env=False)

    def submit(self, handler: str, ms: int, *, via: str = "dispatcher-1", **fields: Any) -> int:
        """Submit a job, with a callback, at one of the dispatchers; return its id."""
        body: dict[str, Any] = {
            "clientRequestId": secrets.token_hex(8),
            "jobName": handler,
            "jobHandler": handler,
            "params": {"ms": ms},
            "maxRetry": 3,
            "callbackUrl": self.cluster.receiver.url(),
            **fields,
        }
        url = self.platform.services[via].url
        answer = self.http.post(f"{url}/openapi/jobs", json=body)
        assert answer.status_code == 202, answer.text
        job_id = int(answer.json()["jobId"])
        self.told.append(
            Accepted(
                time.monotonic(), body["clientRequestId"], job_id, body["maxRetry"], webhook=True
            )
        )
        return job_id

    def cancel(self, job_id: int) -> dict[str, Any]:
        """Cancel a job and return what is answered."""
        self.told.append(CancelAsked(time.monotonic(), job_id))
        answer = self.platform.http.post(f"/openapi/jobs/{job_id}/cancel")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def started(self, job_id: int, times: int = 1, timeout: float = DEATH_SECONDS) -> Note:
        """Wait until a job's handler has begun so often, and return that begin."""
        return until(
            lambda: self.cluster.starts(job_id)[times - 1 : times],
            timeout,
            what=f"start {times} of job {job_id}",
        )[0]

    def noted(self, job_id: int, event: str, timeout: float = DEATH_SECONDS) -> Note:
        """Wait until a run of a job has ended so, and return the first note of it."""
        return until(
            lambda: [
                one for one in self.cluster.notes() if (one.job_id, one.event) == (job_id, event)
            ],
            timeout,
            what=f"job {job_id} to have {event}",
        )[0]

    def row(self, job_id: int) -> dict[str, Any]:
        """The job's row."""
        return self.cluster.rows(f"SELECT * FROM job_info WHERE id = {job_id}")[0]

    def sides(self) -> tuple[str, str]:
        """The active dispatcher and the other one."""
        active = self.cluster.active_dispatcher()
        return active, next(name for name in self.cluster.dispatchers if name != active)

    def isolate(self, worker: str) -> Any:
        """Cut a worker off from everything, until what is returned is called."""
        return self.cluster.cut(*self.cluster.links_of(worker))

    def judged(self) -> Report:
        """Judge what has happened until now."""
        report = judge(history(self.cluster, self.told))
        report.violations += held_by_two(self.cluster)
        return report

    def settled(self, timeout: float = DEATH_SECONDS) -> Report:
        """Wait until everything has come to its end, and judge it."""
        self.cluster.settled(timeout)
        return self.judged()


@contextmanager
def scene(
    directory: Path,
    *,
    dispatchers: int = 1,
    workers: int = 2,
    capacity: int = 10,
    plants: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Scene]:
    """Run a small cluster; `plants` names the function of `plants` that each node is given."""
    own = {
        node: {"ONCUE_TEST_PLANT": f"tests.faults.plants:{plant}"}
        for node, plant in (plants or {}).items()
        if plant
    }
    cluster = Cluster(
        directory,
        dispatchers=dispatchers,
        workers=workers,
        capacity=capacity,
        environment=environment,
        own=own,
    )
    with cluster.running():
        one = Scene(cluster)
        with one.http:
            yield one
