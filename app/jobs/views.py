"""Rows as the documents that callers see. Bodies are passed through as text, not parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from sqlalchemy import RowMapping

from app.fleet.live import HandlerOffer
from app.jobs.callback_fields import shown_events, shown_headers
from app.lifecycle.moves.backfill import WORDS
from app.lifecycle.moves.submit import Entered, NewJob
from app.lifecycle.nodes import Node
from app.lifecycle.reads import JobRecord
from app.lifecycle.run_logs import KeptLine
from app.lifecycle.secret_marks import SECRET_PARAMS, SECRET_RESULT
from app.lifecycle.states import TERMINAL_JOBS, DeliveryStatus, ExecutionStatus, JobStatus
from app.plumbing.json_text import plain_json
from app.plumbing.sealed import MASK, is_sealed
from app.plumbing.times import rfc3339
from app.schedules.decide import is_past_end

_WAITING: Final = JobStatus.WAITING.name


def job_view(record: JobRecord, warnings: Sequence[Mapping[str, str]] = ()) -> dict[str, Any]:
    """Show a job with its newest executions."""
    job = record.job
    status = JobStatus(job["status"])
    result = None
    if status is JobStatus.SUCCEEDED:
        result = _shown(record.results.get(job["execution_id"]))
    waits = status not in TERMINAL_JOBS and status is not JobStatus.RUNNING
    schedule = record.schedule
    if schedule is not None and job["next_trigger_time"]:
        waits = waits and not is_past_end(schedule, job["next_trigger_time"])
    return {
        "jobId": job["id"],
        "clientRequestId": job["client_request_id"],
        "jobName": job["job_name"],
        "jobHandler": job["job_handler"],
        "params": _shown(record.params),
        "secretParams": bool(job["secret"] & SECRET_PARAMS),
        "secretResult": bool(job["secret"] & SECRET_RESULT),
        "status": status.name,
        "attempt": job["attempt"],
        "maxRetry": job["max_retry"],
        "retryIntervalSeconds": job["retry_interval_ms"] / 1000,
        "retryBackoff": job["retry_backoff"],
        "timeoutMs": job["timeout_ms"],
        "callbackUrl": job["callback_url"],
        "callbackEvents": shown_events(job["callback_events"]),
        "callbackHeaders": shown_headers(job["callback_headers"]),
        "priority": job["priority"],
        "nextTriggerTime": _time(job["next_trigger_time"]) if waits else None,
        "expiresAt": _time(job["expires_at"]),
        "concurrencyKey": job["concurrency_key"],
        "concurrencyLimit": job["concurrency_limit"],
        "rateKey": job["rate_key"],
        "ratePerSecond": job["rate_per_second"],
        "parentId": job["parent_id"],
        "nominalTime": _time(job["nominal_time"]),
        "schedule": None if schedule is None else schedule_view(schedule),
        "result": result,
        "error": _error(job["error_code"], job["error_message"]),
        "progress": _progress(record.executions[0] if record.executions else record.current),
        "revision": job["revision"],
        "createdAt": _time(job["created_at"]),
        "updatedAt": _time(job["updated_at"]),
        "finishedAt": _time(job["finished_at"]),
        "executions": [execution_view(row, record.results) for row in record.executions],
        "warnings": [dict(warning) for warning in warnings],
    }


def new_task_view(
    new: NewJob, entered: Entered, warnings: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """Show a task that was stored just now, without its row: what `job_view` would show."""
    created_at = rfc3339(entered.created_at)
    return {
        "jobId": entered.id,
        "clientRequestId": new.client_request_id,
        "jobName": new.job_name,
        "jobHandler": new.job_handler,
        "params": _shown(new.params),
        "secretParams": bool(new.secret & SECRET_PARAMS),
        "secretResult": bool(new.secret & SECRET_RESULT),
        "status": _WAITING,
        "attempt": 0,
        "maxRetry": new.max_retry,
        "retryIntervalSeconds": new.retry_interval_ms / 1000,
        "retryBackoff": new.retry_backoff,
        "timeoutMs": new.timeout_ms,
        "callbackUrl": new.callback_url,
        "callbackEvents": shown_events(new.callback_events),
        "callbackHeaders": shown_headers(new.callback_headers),
        "priority": new.priority,
        "nextTriggerTime": _time(entered.due_ms),
        "expiresAt": _time(new.expires_at),
        "concurrencyKey": new.concurrency_key,
        "concurrencyLimit": new.concurrency_limit,
        "rateKey": new.rate_key,
        "ratePerSecond": new.rate_per_second,
        "parentId": None,
        "nominalTime": None,
        "schedule": None,
        "result": None,
        "error": None,
        "progress": None,
        "revision": 0,
        "createdAt": created_at,
        "updatedAt": created_at,
        "finishedAt": None,
        "executions": [],
        "warnings": [dict(warning) for warning in warnings],
    }


def schedule_view(row: RowMapping) -> dict[str, Any]:
    """Show what makes a job a schedule, by the names that it was submitted with."""
    return {
        "cronExpr": row["cron_expr"],
        "cronDialect": row["cron_dialect"],
        "timezone": row["timezone"],
        "dstGap": row["dst_gap"],
        "dstFold": row["dst_fold"],
        "intervalMs": row["interval_ms"],
        "intervalMode": row["interval_mode"],
        "startAt": _time(row["start_at"]),
        "endAt": _time(row["end_at"]),
        "maxFires": row["max_fires"],
        "jitterMs": row["jitter_ms"],
        "misfirePolicy": row["misfire_policy"],
        "misfireCap": row["misfire_cap"],
        "misfireSpacingMs": row["misfire_spacing_ms"],
        "catchUpWindowMs": row["catch_up_ms"],
        "overlapPolicy": None if row["interval_mode"] == "fixedDelay" else row["overlap_policy"],
        "fires": row["fires"],
        "decidedUntil": _time(row["trigger_ts"]),
    }


def skip_view(row: RowMapping) -> dict[str, Any]:
    """Show consecutive fires that did not run."""
    return {
        "from": _time(row["from_time"]),
        "to": _time(row["to_time"]),
        "count": row["count"],
        "reason": row["reason"],
    }


def backfill_view(row: RowMapping) -> dict[str, Any]:
    """Show a stored backfill."""
    return {
        "backfillId": row["id"],
        "scheduleId": row["schedule_id"],
        "status": WORDS[row["status"]],
        "from": _time(row["from_time"]),
        "to": _time(row["to_time"]),
        "maxConcurrent": row["max_concurrent"],
        "total": None,
        "existing": None,
        "spawned": row["spawned"],
        "nominalTimes": None,
        "createdAt": _time(row["created_at"]),
        "endedAt": _time(row["ended_at"]),
    }


def listed_job_view(
    job: RowMapping,
    results: Mapping[str, str],
    long_results: frozenset[str],
    current: Mapping[str, RowMapping],
    schedule: RowMapping | None = None,
) -> dict[str, Any]:
    """Show a job in a list: without executions, and naming the long bodies that are left out."""
    omitted = ["params"] if job["params_in_payload"] else []
    if job["status"] == JobStatus.SUCCEEDED and job["execution_id"] in long_results:
        omitted.append("result")
    record = JobRecord(
        job,
        (),
        job["params"],
        dict(results),
        current=current.get(job["execution_id"] or ""),
        schedule=schedule,
    )
    return job_view(record) | {"omitted": omitted}


def execution_view(row: RowMapping, results: Mapping[str, str]) -> dict[str, Any]:
    """Show one execution."""
    return {
        "executionId": row["execution_id"],
        "attempt": row["attempt"],
        "status": ExecutionStatus(row["status"]).name,
        "workerId": row["worker_id"],
        "triggerTime": _time(row["trigger_ts"]),
        "claimedAt": _time(row["claimed_at"]),
        "acceptedAt": _time(row["accepted_at"]),
        "startedAt": _time(row["started_at"]),
        "finishedAt": _time(row["finished_at"]),
        "progress": _progress(row),
        "result": _shown(results.get(row["execution_id"])),
        "error": _error(row["error_code"], row["error_message"]),
        "reason": row["reason"],
    }


def line_view(line: KeptLine) -> dict[str, Any]:
    """Show one line of a run."""
    return {
        "seq": line.seq,
        "time": rfc3339(line.time),
        "level": line.level,
        "source": line.source,
        "message": line.message,
        "fields": None if line.fields is None else orjson.Fragment(plain_json(line.fields)),
    }


def callback_view(row: RowMapping, tries: Sequence[RowMapping] = ()) -> dict[str, Any]:
    """Show one callback with its newest tries."""
    status = DeliveryStatus(row["status"])
    return {
        "deliveryId": row["delivery_id"],
        "jobId": row["job_id"],
        "event": row["event_type"],
        "url": row["url"],
        "status": status.name,
        "tries": row["tries"],
        "lastStatusCode": row["last_status_code"],
        "lastError": row["last_error"],
        "nextTryAt": _time(row["next_try_at"]) if status is DeliveryStatus.PENDING else None,
        "createdAt": _time(row["created_at"]),
        "endedAt": _time(row["ended_at"]),
        "history": [_try_view(one) for one in tries],
    }


def _try_view(row: RowMapping) -> dict[str, Any]:
    return {
        "try": row["try_number"],
        "at": _time(row["tried_at"]),
        "workerId": row["worker_id"],
        "delivered": bool(row["delivered"]),
        "statusCode": row["status_code"],
        "latencyMs": row["latency_ms"],
        "error": row["error"],
        "answer": row["answer"],
    }


def worker_view(node: Node) -> dict[str, Any]:
    """Show one worker."""
    return {
        "workerId": node.worker_id,
        "name": node.name,
        "url": node.url,
        "state": str(node.state),
        "version": node.version,
        "handlers": sorted(node.handler_names),
        "labels": node.labels,
        "capacity": node.capacity,
        "weight": node.weight,
        "active": node.active,
        "queued": node.queued,
        "avgCostMs": node.avg_cost_ms,
        "cpuIdlePercent": node.cpu_idle_percent,
        "delivers": node.delivers,
        "lastHeartbeat": rfc3339(node.last_heartbeat),
    }


def handler_view(offer: HandlerOffer) -> dict[str, Any]:
    """Show one handler on offer."""
    return {
        "name": offer.name,
        "description": offer.description,
        "isolation": offer.isolation,
        "workers": offer.workers,
        "paramsSchema": _fragment(next((one.body for one in offer.schemas if one.body), None)),
        "paramsChecked": offer.checked,
    }


def _progress(row: RowMapping | None) -> dict[str, Any] | None:
    if row is None or row["progress_at"] is None:
        return None
    return {
        "value": row["progress"],
        "text": row["progress_text"] or "",
        "at": rfc3339(row["progress_at"]),
    }


def _shown(body: str | None) -> Any:
    """Show params or a result; of a secret one only that there is one."""
    return {"secret": MASK} if is_sealed(body) else _fragment(body)


def _fragment(body: str | None) -> Any:
    return None if body is None else orjson.Fragment(body)


def _time(epoch_ms: int | None) -> str | None:
    return None if epoch_ms is None else rfc3339(epoch_ms)


def _error(code: str | None, message: str | None) -> dict[str, str] | None:
    return None if code is None else {"code": code, "message": message or ""}
