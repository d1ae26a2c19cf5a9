"""The body of a callback, rendered once, in the transaction that ends the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import orjson

from app.lifecycle.states import JobStatus
from app.plumbing.times import rfc3339

EVENT_TYPES: Final = {
    JobStatus.SUCCEEDED: "job.succeeded",
    JobStatus.FAILED: "job.failed",
    JobStatus.CANCELLED: "job.cancelled",
}


@dataclass(frozen=True, slots=True)
class CallbackJob:
    """What the callback tells of an ended job. `result` is JSON text; times are epoch ms."""

    job_id: int
    client_request_id: str | None
    job_name: str
    execution_id: str | None
    status: JobStatus
    attempt: int
    trigger_ts: int
    started_at: int | None
    finished_at: int
    result: str | None
    error_code: str | None
    error_message: str | None


def render_callback(job: CallbackJob) -> str:
    """Render `{type, timestamp, data}`; the result is passed through as it was reported."""
    succeeded = job.status is JobStatus.SUCCEEDED
    error = {"code": job.error_code, "message": job.error_message or ""}
    body = {
        "type": EVENT_TYPES[job.status],
        "timestamp": rfc3339(job.finished_at),
        "data": {
            "jobId": job.job_id,
            "clientRequestId": job.client_request_id,
            "executionId": job.execution_id,
            "runId": f"{job.job_id}:{job.trigger_ts}",
            "jobName": job.job_name,
            "status": job.status.name,
            "attempt": job.attempt,
            "triggerTime": rfc3339(job.trigger_ts),
            "startedAt": None if job.started_at is None else rfc3339(job.started_at),
            "finishedAt": rfc3339(job.finished_at),
            "result": orjson.Fragment(job.result) if succeeded and job.result else None,
            "error": None if succeeded or job.error_code is None else error,
        },
    }
    return orjson.dumps(body).decode()
