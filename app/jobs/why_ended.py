"""How a job ended, why it was not tried again, and what became of its callback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from app.jobs.reason_codes import Reason, ReasonCode
from app.jobs.stories import clipped, retry_decision, worker_name
from app.jobs.why_workers import is_live
from app.lifecycle.evidence import Evidence
from app.lifecycle.states import DeliveryStatus, JobStatus
from app.plumbing.times import rfc3339
from oncue.protocol import WorkerState

ENDED: Final = {
    JobStatus.SUCCEEDED: ReasonCode.ENDED_SUCCEEDED,
    JobStatus.FAILED: ReasonCode.ENDED_FAILED,
    JobStatus.CANCELLED: ReasonCode.ENDED_CANCELLED,
}


def how_it_ended(found: Evidence) -> Reason:
    """Tell how an ended job ended and, when it failed, why it was not tried again."""
    job = found.job
    status = JobStatus(job["status"])
    details: dict[str, Any] = {"attempts": job["attempt"], "maxRetry": job["max_retry"]}
    if job["error_code"] is not None:
        details["errorCode"] = job["error_code"]
    match status:
        case JobStatus.SUCCEEDED:
            message = "It succeeded."
            if found.executions:
                message = f"It succeeded on {worker_name(found.executions[0]['worker_id'])}."
        case JobStatus.CANCELLED:
            # The fire that took its place may have, and says so.
            message = job["error_message"] or "A caller cancelled it."
        case _:
            decision, sentence = retry_decision(job, found.executions)
            details["retryDecision"] = decision
            what = clipped(job["error_message"] or job["error_code"] or "it is not said why")
            message = f"It failed: {what} {sentence}"
    return Reason(ENDED[status], message, details, job["finished_at"])


_OF_CALLBACK: Final = {
    DeliveryStatus.PENDING: ReasonCode.CALLBACK_OWED,
    DeliveryStatus.DELIVERED: ReasonCode.CALLBACK_DELIVERED,
    DeliveryStatus.EXHAUSTED: ReasonCode.CALLBACK_GIVEN_UP,
    DeliveryStatus.GONE: ReasonCode.CALLBACK_REFUSED,
}


def _who_delivers(found: Evidence) -> tuple[str, int]:
    """Count the live workers that deliver callbacks, and say so if there is none."""
    live = [node for node in found.nodes if is_live(node, found.job["now_ms"])]
    count = sum(node.delivers and node.state is WorkerState.UP for node in live)
    if count:
        return "", count
    others = f"; none of the {len(live)} that live does" if live else ""
    return (
        f" No live worker delivers callbacks: it takes one with ONCUE_WEBHOOK_SECRET{others}.",
        0,
    )


def what_became_of_its_callback(found: Evidence) -> Iterator[Reason]:
    """Tell what became of the callback of this end."""
    row = found.callback
    if row is None:
        return
    status, owner = DeliveryStatus(row["status"]), row["owner_worker_id"]
    is_due = row["next_try_at"] <= found.job["now_ms"]
    details: dict[str, Any] = {
        "deliveryId": row["delivery_id"],
        "tries": row["tries"],
        "lastStatusCode": row["last_status_code"],
        "lastError": row["last_error"],
    }
    last = f" The last one: {clipped(row['last_error'])}" if row["last_error"] else ""
    match status:
        case DeliveryStatus.PENDING if owner is not None and not is_due:
            details["workerId"] = owner
            message = f"Its callback is being delivered by {worker_name(owner)}.{last}"
        case DeliveryStatus.PENDING:
            details["nextTryAt"] = rfc3339(row["next_try_at"])
            when = "has been due since" if is_due else "is tried next at"
            nobody, details["deliveringWorkers"] = _who_delivers(found)
            message = f"Its callback {when} {rfc3339(row['next_try_at'])}.{nobody}{last}"
        case DeliveryStatus.DELIVERED:
            message = "Its callback was delivered."
        case DeliveryStatus.EXHAUSTED:
            message = f"Its callback was given up after {row['tries']} tries.{last}"
        case _:
            message = "The receiver of its callback answered 410: it wants no more."
    since = row["ended_at"] if status is not DeliveryStatus.PENDING else row["created_at"]
    yield Reason(_OF_CALLBACK[status], message, details, since)
