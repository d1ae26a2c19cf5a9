"""Cancel and retry as a caller lives through them: real workers, real handlers, real webhooks."""

from __future__ import annotations

import time

import pytest

from tests.support.processes import Platform
from tests.support.receiver import Receiver
from tests.support.wait import until


def started(platform: Platform, job_id: int, times: int = 1) -> None:
    """Wait until a handler has begun the job so often."""
    until(
        lambda: [line.event for line in platform.record(job_id)].count("start") >= times,
        what=f"job {job_id} to start",
    )


@pytest.mark.parametrize("handler", ["record", "record_thread", "record_process"])
def test_a_cancelled_run_is_stopped_at_once_and_told_by_a_webhook(
    platform: Platform, receiver: Receiver, handler: str
) -> None:
    job_id = platform.submit(handler, {"ms": 60_000}, callbackUrl=receiver.url())
    started(platform, job_id)
    began = time.monotonic()
    answer = platform.http.post(f"/openapi/jobs/{job_id}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (200, "CANCELLED")
    until(
        lambda: platform.get("/openapi/workers")["items"][0]["active"] == 0,
        20,
        what="the slot to be free",
    )
    (delivery,) = receiver.wait_for(1)
    body = delivery.verified(platform.webhook_secret)
    assert (body["type"], body["data"]["jobId"]) == ("job.cancelled", job_id)
    again = platform.submit("echo", 1)
    assert platform.ended(again)["status"] == "SUCCEEDED"
    assert platform.job(job_id)["status"] == "CANCELLED"
    assert time.monotonic() - began < 30


def test_a_retried_job_starts_only_after_the_thread_of_its_cancelled_run_has_ended(
    platform: Platform,
) -> None:
    job_id = platform.submit("stubborn_thread", {"ms": 8000})
    started(platform, job_id)
    assert platform.http.post(f"/openapi/jobs/{job_id}/cancel").status_code == 200
    assert platform.http.post(f"/openapi/jobs/{job_id}/retry").status_code == 200
    job = platform.ended(job_id, timeout=90)
    assert (job["status"], job["attempt"]) == ("SUCCEEDED", 1)
    assert [one["status"] for one in job["executions"]] == ["SUCCEEDED", "CANCELLED"]
    events = [line.event for line in platform.record(job_id)]
    assert events == ["start", "returned", "start", "returned"]
