"""Explain over real processes: the one that answers does not dispatch, another one does."""

from __future__ import annotations

from typing import Any

from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform
from tests.support.wait import until


def codes(platform: Platform, job_id: int) -> list[str]:
    found: dict[str, Any] = platform.get(f"/openapi/jobs/{job_id}/explain")
    return [reason["code"] for reason in found["reasons"]]


def comes_to(platform: Platform, job_id: int, *expected: str) -> None:
    until(
        lambda: codes(platform, job_id) == list(expected),
        what=f"job {job_id} to be explained by {', '.join(expected)}",
    )


def test_a_job_is_explained_all_the_way_to_its_end(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(engine, dispatchers=2)
    platform.dispatcher(1, "--no-dispatch")
    job_id = platform.submit("record_thread", {"ms": 60_000}, maxRetry=0)
    comes_to(platform, job_id, "dispatcher_without_lock", "no_live_worker")
    platform.dispatcher(2)
    comes_to(platform, job_id, "no_live_worker")
    platform.worker(capacity=1)
    comes_to(platform, job_id, "running")
    second = platform.submit("record", {"ms": 1})
    comes_to(platform, second, "all_full")
    urgent = platform.submit("record", {"ms": 1}, priority=9)
    comes_to(platform, second, "all_full", "higher_priority_first")
    assert platform.http.post(f"/openapi/jobs/{job_id}/cancel").is_success
    comes_to(platform, job_id, "ended_cancelled")
    for one in (urgent, second):
        comes_to(platform, one, "ended_succeeded")
    (attempt,) = platform.get(f"/openapi/jobs/{second}/explain")["attempts"]
    assert attempt["story"].startswith("Attempt 1 ran on worker-1 for ")
    assert attempt["story"].endswith(" and succeeded.")


def test_a_worker_that_cannot_be_reached_is_told_though_it_beats(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(engine)
    platform.dispatcher()
    nobody = {"ONCUE_ADVERTISE_URL": "http://127.0.0.1:9"}
    platform.worker(environment=nobody)
    platform.wait_for_workers(1)
    job_id = platform.submit("record")
    comes_to(platform, job_id, "worker_unreachable")
