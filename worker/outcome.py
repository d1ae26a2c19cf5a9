"""Outcomes and tries as they go over the wire, encoded once; outcomes under the run key too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import orjson
from cryptography.fernet import Fernet

from oncue.protocol import DeliveryResult, Run
from worker.verdict import Verdict

SMALL_BYTES = 1024


class EncodedOutcome(NamedTuple):
    """One `Outcome` as JSON; `small` is the same without a result of more than 1 KiB."""

    status: str
    stopping: bool
    wire: bytes
    small: bytes


class RunTimes(NamedTuple):
    """When a run was accepted, started and finished, in the database's epoch milliseconds."""

    accepted_at: int
    started_at: int | None
    finished_at: int


def encode_outcome(
    run: Run, verdict: Verdict, times: RunTimes, *, stopping: bool = False
) -> EncodedOutcome:
    """Encode a verdict; the result's JSON text is spliced in, so that big integers stay exact."""
    fields: dict[str, Any] = {
        "executionId": run.execution_id,
        "jobId": run.job_id,
        "triggerTs": run.trigger_ts,
        "status": verdict.status,
        "retryable": verdict.retryable,
        "stopping": stopping,
        "acceptedAt": times.accepted_at,
        "startedAt": times.started_at,
        "finishedAt": times.finished_at,
    }
    if verdict.code is not None:
        fields["error"] = {"code": verdict.code, "message": verdict.message}
    if verdict.retry_after_ms is not None:
        fields["retryAfterMs"] = verdict.retry_after_ms
    if verdict.result_json is not None and run.result_key is not None:
        # From here on it is nowhere in clear: not in Redis, not on the wire, not in the answers.
        sealed = Fernet(run.result_key).encrypt(verdict.result_json).decode()
        verdict = replace(verdict, result_json=orjson.dumps(sealed))
        fields["resultSealed"] = True
    if verdict.result_json is None:
        wire = small = orjson.dumps(fields)
    else:
        fields["result"] = orjson.Fragment(verdict.result_json)
        wire = small = orjson.dumps(fields)
        if len(wire) > SMALL_BYTES:
            del fields["result"]
            small = orjson.dumps(fields)
    return EncodedOutcome(verdict.status, stopping, wire, small)


def encode_try(result: DeliveryResult) -> bytes:
    """Encode what became of a try: as its model would, but sooner."""
    return orjson.dumps(
        {
            "deliveryId": result.delivery_id,
            "tryNumber": result.try_number,
            "delivered": result.delivered,
            "gone": result.gone,
            "statusCode": result.status_code,
            "error": result.error,
            "latencyMs": result.latency_ms,
            "retryAfterMs": result.retry_after_ms,
            "notTried": result.not_tried,
            "triedAt": result.tried_at,
            "answer": result.answer,
        }
    )
