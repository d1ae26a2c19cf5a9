"""The whole way of a job over real processes: submitted, run once, called back."""

from __future__ import annotations

from tests.support.processes import Platform
from tests.support.receiver import Receiver


def test_a_job_runs_once_and_is_called_back_signed(platform: Platform, receiver: Receiver) -> None:
    job_id = platform.submit("record", {"ms": 20}, callbackUrl=receiver.url())
    job = platform.ended(job_id)
    assert (job["status"], job["result"]) == ("SUCCEEDED", {"attempt": 1})
    assert [line.event for line in platform.record(job_id)] == ["start", "returned"]

    (received,) = receiver.wait_for(1)
    told = received.verified(platform.webhook_secret)
    assert told["type"] == "job.succeeded"
    assert (told["data"]["jobId"], told["data"]["result"]) == (job_id, job["result"])
