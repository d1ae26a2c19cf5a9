"""The body of a callback, rendered once, in the transaction of what it tells."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import orjson

from app.lifecycle.states import JobStatus
from app.plumbing.times import rfc3339

EVENT_TYPES: Final = {
    JobStatus.SUCCEEDED: "job.succeeded",
    JobStatus.FAILED: "job.failed",
    JobStatus.CANCELLED: "job.cancelled",
    JobStatus.RUNNING: "job.started",
    JobStatus.WAITING: "job.retrying",
}
"""By the status that the job has then."""
EVENT_WORDS: Final = {status: event.removeprefix("job.") for status, event in EVENT_TYPES.items()}
ENDS: Final = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED)
END_TYPES: Final = frozenset(EVENT_TYPES[status] for status in ENDS)


def wants(events: str | None, status: JobStatus) -> bool:
    """Tell whether a job whose `callback_events` these are is called back at this status."""
    if events is None:
        return status in ENDS
    return EVENT_WORDS[status] in events.split(",")


class CallbackJob(NamedTuple):
    """What the callback tells of a job. `result` is JSON text; times are epoch ms.

    `sequence` is the job's count of moves: it grows from each callback of a job to the next.
    """

    job_id: int
    client_request_id: str | None
    job_name: str
    execution_id: str | None
    status: JobStatus
    attempt: int
    trigger_ts: int
    started_at: int | None
    finished_at: int
    sequence: int
    result: str | None
    error_code: str | None
    error_message: str | None
    next_trigger_at: int | None = None
    nominal_time: int | None = None


def render_callback(job: CallbackJob) -> str:
    """Render `{type, timestamp, data}`; the result is passed through as it was reported."""
    succeeded = job.status is JobStatus.SUCCEEDED
    started = job.status is JobStatus.RUNNING
    error = {"code": job.error_code, "message": job.error_message or ""}
    body: dict[str, Any] = {
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
            "finishedAt": None if started else rfc3339(job.finished_at),
            "sequence": job.sequence,
            "result": orjson.Fragment(job.result) if succeeded and job.result else None,
            "error": None if succeeded or job.error_code is None else error,
        },
    }
    if job.nominal_time is not None:
        body["data"]["nominalTime"] = rfc3339(job.nominal_time)
    if job.next_trigger_at is not None:
        body["data"]["nextTriggerTime"] = rfc3339(job.next_trigger_at)
    return orjson.dumps(body).decode()
