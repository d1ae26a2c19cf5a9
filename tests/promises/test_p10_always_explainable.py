"""P10: for any job, at any moment, the API says what it waits for, or who ran it and its end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from app.lifecycle.states import TERMINAL_JOBS, JobKind, JobStatus
from tests.integration.app.every_state import BUILDS, job_in
from tests.integration.app.rig import door
from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform
from tests.support.wait import until

ROOT = Path(__file__).parents[2]
LISTED = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/reasons.md").read_text(), re.MULTILINE))
STATES = [(kind, status) for kind in JobKind for status in BUILDS[kind]]


def codes_of(answer: Any) -> list[str]:
    """Check one answer of `explain`, and return the codes of its reasons."""
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["reasons"]
    for reason in found["reasons"]:
        assert reason["code"] in LISTED
        assert re.fullmatch(r"\S+ .*\.", reason["message"], re.DOTALL), reason
    assert found["summary"] == found["reasons"][0]["message"]
    for attempt in found["attempts"]:
        assert attempt["workerId"]
        assert attempt["claimedAt"]
        assert attempt["story"].endswith(".")
        ended = attempt["status"] not in ("CLAIMED", "RUNNING")
        assert (attempt["finishedAt"] is not None) == ended
        assert attempt["status"] in ("CLAIMED", "RUNNING", "SUCCEEDED") or (
            attempt["error"] or attempt["reason"]
        )
    return [reason["code"] for reason in found["reasons"]]


@pytest.mark.parametrize("worker", [False, True])
async def test_a_job_in_any_state_is_explained_with_and_without_a_worker(
    migrated_engine: Engine, worker: bool
) -> None:
    async with door(migrated_engine) as api:
        if worker:
            await api.beat(handlers=["echo"])
        for kind, status in STATES:
            job_id = await job_in(api, kind, status, f"{kind.name}-{status.name}")
            codes = codes_of(await api.client.get(f"/openapi/jobs/{job_id}/explain"))
            if status in TERMINAL_JOBS and kind is JobKind.TASK:
                assert codes[0] == f"ended_{status.name.lower()}"
            if status is JobStatus.PAUSED:
                assert codes[0] == "paused"


def test_at_every_step_of_their_lives_jobs_are_explained(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(engine).start()
    jobs = _submitted(platform)
    platform.http.post(f"/openapi/jobs/{jobs['paused']}/pause").raise_for_status()
    seen: dict[str, set[str]] = {name: set() for name in jobs}

    def ask() -> None:
        for name, job_id in jobs.items():
            seen[name].update(codes_of(platform.http.get(f"/openapi/jobs/{job_id}/explain")))

    def missing(wanted: dict[str, str]) -> list[str]:
        ask()
        return [name for name, code in wanted.items() if code not in seen[name]]

    until(
        lambda: (
            not missing(
                {
                    "at once": "ended_succeeded",
                    "later": "not_due",
                    "of nobody": "no_live_worker",
                    "fails": "ended_failed",
                    "to be retried": "retry_wait",
                    "runs": "running",
                    "behind it": "concurrency_limit",
                    "paused": "paused",
                    "schedule": "fires_later",
                }
            )
        ),
        60,
        what="each job to be where it is to be",
    )
    platform.services["worker-1"].kill()
    until(lambda: not missing({"runs": "worker_unreachable"}), 60, what="the worker to be missed")
    for job_id in jobs.values():
        platform.http.post(f"/openapi/jobs/{job_id}/cancel")
    ended = ("ended_succeeded", "ended_failed", "ended_cancelled")
    for name, job_id in jobs.items():
        codes = codes_of(platform.http.get(f"/openapi/jobs/{job_id}/explain"))
        assert set(ended) & set(codes), (name, codes)


def _submitted(platform: Platform) -> dict[str, int]:
    alone = {"concurrencyKey": "k", "concurrencyLimit": 1}
    runs = platform.submit("record", {"ms": 600_000}, **alone)
    until(lambda: platform.job(runs)["status"] == "RUNNING", what="the run to be claimed")
    return {
        "runs": runs,
        "behind it": platform.submit("record", {"ms": 1}, **alone),
        "at once": platform.submit("echo"),
        "later": platform.submit("echo", delayMs=3_600_000),
        "of nobody": platform.submit("of_no_worker"),
        "fails": platform.submit("fail", {"message": "no"}, maxRetry=1, retryIntervalSeconds=0),
        "to be retried": platform.submit("fail", {"message": "no"}, retryIntervalSeconds=3600),
        "paused": platform.submit("echo", delayMs=3_600_000),
        "schedule": platform.submit("echo", intervalMs=3_600_000),
    }
