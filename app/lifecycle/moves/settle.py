"""The moves `succeed`, `fail`, `retry` and `give_back`: an execution ends and its job moves on.

One transaction ends the executions, moves the jobs and writes the callbacks that are owed.
Every row is fenced by execution id and status: the report of a superseded attempt changes
nothing and is recorded as stale.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, assert_never

import uuid_utils
from sqlalchemy import RowMapping, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.bulk import rows_json, update_from_rows
from app.lifecycle.callback_body import EVENT_TYPES, CallbackJob, render_callback
from app.lifecycle.moves.submit import insert_payloads
from app.lifecycle.retry import MAX_RETURNS, GiveUp, RetryAfter, RetryPolicy, after_failure
from app.lifecycle.states import (
    OPEN_EXECUTIONS,
    DeliveryStatus,
    ExecutionStatus,
    JobKind,
    JobStatus,
    in_list,
    sources,
)
from app.lifecycle.tables import INLINE_BYTES
from app.plumbing.database import NOW_MS, Database

DELIVERY_LEASE_MS: Final = 60_000
"""How long a worker has for one try of a callback; its heartbeats extend it."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How one execution ended: reported by its worker, or found by recovery.

    `result` is JSON text. `deliver_by` names the worker that will deliver the callback at once.
    Step times are epoch ms of the database's clock as the worker estimates it.
    """

    execution_id: str
    job_id: int
    status: ExecutionStatus
    result: str | None = None
    error_code: str | None = None
    error_message: str | None = None
    retryable: bool = True
    retry_after_ms: int | None = None
    stopping: bool = False
    accepted_at: int | None = None
    started_at: int | None = None
    finished_at: int | None = None
    reason: str | None = None
    deliver_by: str | None = None


class Settled(Enum):
    """What an ending changed."""

    ENDED = "ended"
    RETRIED = "retried"
    REPEATED = "repeated"
    STALE = "stale"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class OwedDelivery:
    """A callback that the named worker is to try now."""

    delivery_id: str
    try_number: int
    url: str
    body: str


@dataclass(frozen=True, slots=True)
class Settlement:
    """The outcome of settling one ending; `job_status` is the job's status afterwards."""

    kind: Settled
    job_id: int
    job_status: JobStatus | None = None
    queue_id: int | None = None
    priority: int = 0
    next_due_ms: int | None = None
    handler: str = ""
    run_ms: int | None = None
    delivery: OwedDelivery | None = None


@dataclass(slots=True)
class _Changes:
    """The rows to write, gathered while the endings are decided one by one."""

    jobs: list[dict[str, Any]] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)
    stale: list[dict[str, Any]] = field(default_factory=list)
    payloads: list[dict[str, Any]] = field(default_factory=list)
    callbacks: list[dict[str, Any]] = field(default_factory=list)


_RUNNING: Final = in_list(sources("succeed", JobKind.TASK))
_JOBS: Final = (
    "SELECT {now} AS now_ms, id, tenant_id, client_request_id, parent_id, kind, job_name, "
    "job_handler, queue_id, "
    "priority, status, execution_id, trigger_ts, attempt, returned, max_retry, "
    "retry_interval_ms, retry_backoff, callback_url, next_trigger_time FROM job_info {hint} "
    "WHERE id IN :ids ORDER BY id {lock}"
)


_LOCK_JOBS: Final = {
    sqlite: text(_JOBS.format(now=NOW_MS[sqlite], hint=hint, lock=lock)).bindparams(
        bindparam("ids", expanding=True)
    )
    for sqlite, hint, lock in (
        (True, "", ""),
        (False, "FORCE INDEX (PRIMARY)", "FOR UPDATE"),
    )
}
_LOGS: Final = text(
    "SELECT id, execution_id, job_id, status, worker_id, claimed_at, accepted_at, started_at, "
    "result IS NOT NULL OR result_in_payload AS has_result FROM job_log "
    "WHERE execution_id IN :executions"
).bindparams(bindparam("executions", expanding=True))

_MOVE_JOBS: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="job_info",
        key="id",
        columns={
            "id": "BIGINT",
            "execution": "TEXT",
            "status": "BIGINT",
            "due": "BIGINT",
            "attempt": "BIGINT",
            "returned": "BIGINT",
            "code": "TEXT",
            "message": "TEXT",
            "stopping": "TEXT",
            "finished": "BIGINT",
        },
        assignments=(
            "status = v.v_status, version = j.version + 1, next_trigger_time = v.v_due, "
            "attempt = v.v_attempt, returned = v.v_returned, error_code = v.v_code, "
            "error_message = v.v_message, stopping_execution_id = v.v_stopping, "
            "owner_worker_id = NULL, finished_at = v.v_finished, updated_at = :now"
        ),
        guard=f"j.status IN ({_RUNNING}) AND j.execution_id = v.v_execution",
    )
    for sqlite in (True, False)
}
_END_LOGS: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="job_log",
        key="id",
        columns={
            "id": "BIGINT",
            "status": "BIGINT",
            "accepted": "BIGINT",
            "started": "BIGINT",
            "finished": "BIGINT",
            "code": "TEXT",
            "message": "TEXT",
            "reason": "TEXT",
            "result": "TEXT",
            "long": "BIGINT",
        },
        assignments=(
            "status = v.v_status, accepted_at = v.v_accepted, started_at = v.v_started, "
            "finished_at = v.v_finished, error_code = v.v_code, error_message = v.v_message, "
            "reason = v.v_reason, result = v.v_result, result_in_payload = v.v_long"
        ),
        guard=f"j.status IN ({in_list(OPEN_EXECUTIONS)})",
    )
    for sqlite in (True, False)
}
_MARK_STALE: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="job_log",
        key="id",
        columns={"id": "BIGINT", "status": "TEXT"},
        assignments="stale_at = :now, stale_status = v.v_status",
        guard="j.stale_at IS NULL",
    )
    for sqlite in (True, False)
}
_OWE: Final = text(
    "INSERT INTO callback_delivery (delivery_id, tenant_id, job_id, execution_id, event_type, url, "
    "body, status, tries, owner_worker_id, next_try_at, created_at) VALUES (:delivery_id, "
    ":tenant_id, :job_id, :execution_id, :event_type, :url, :body, :status, :tries, "
    ":owner_worker_id, :next_try_at, :created_at)"
)
_OPEN_DELIVERIES: Final = text(
    "SELECT delivery_id, job_id, execution_id, tries, url, body, owner_worker_id "
    "FROM callback_delivery WHERE job_id IN :jobs AND status = 0"
).bindparams(bindparam("jobs", expanding=True))


async def settle(
    connection: AsyncConnection, database: Database, endings: Sequence[Ending]
) -> list[Settlement]:
    """End the executions of one batch; return what each ending changed, in order.

    Locks the jobs in primary-key order. Safe to repeat: an ending that is already stored comes
    back as REPEATED, with its callback if that is still open and the same worker's.
    """
    if not endings:
        return []
    locked = await connection.execute(
        _LOCK_JOBS[database.is_sqlite], {"ids": sorted({e.job_id for e in endings})}
    )
    jobs = {row["id"]: row for row in locked.mappings()}
    if not jobs:
        return [Settlement(Settled.UNKNOWN, ending.job_id) for ending in endings]
    now = int(next(iter(jobs.values()))["now_ms"])
    logs = {
        row["execution_id"]: row
        for row in (
            await connection.execute(
                _LOGS, {"executions": sorted({e.execution_id for e in endings})}
            )
        ).mappings()
    }
    changes = _Changes()
    settled: list[Settlement] = []
    done: set[str] = set()
    for ending in endings:
        settled.append(
            _settle_one(
                ending, jobs.get(ending.job_id), logs.get(ending.execution_id), now, changes, done
            )
        )
    await _write(connection, database, changes, now)
    return await _with_open_deliveries(connection, endings, settled)


def _settle_one(
    ending: Ending,
    job: RowMapping | None,
    log: RowMapping | None,
    now: int,
    changes: _Changes,
    done: set[str],
) -> Settlement:
    if job is None or log is None or log["job_id"] != job["id"]:
        return Settlement(Settled.UNKNOWN, ending.job_id)
    status = JobStatus(job["status"])
    if ending.execution_id in done or log["status"] == ending.status:
        return Settlement(Settled.REPEATED, job["id"], status)
    if log["status"] not in OPEN_EXECUTIONS or job["execution_id"] != ending.execution_id:
        changes.stale.append({"id": log["id"], "status": ending.status.name})
        return Settlement(Settled.STALE, job["id"], status)
    done.add(ending.execution_id)
    return _end(ending, job, log, now, changes)


def _end(
    ending: Ending, job: RowMapping, log: RowMapping, now: int, changes: _Changes
) -> Settlement:
    """Decide what follows a current execution's end, and note the rows to write."""
    times = _step_times(ending, log, now)
    next_status, due, attempt, returned = _what_follows(ending, job, now)
    ended = next_status is not JobStatus.WAITING
    changes.jobs.append(
        {
            "id": job["id"],
            "execution": ending.execution_id,
            "status": int(next_status),
            "due": due,
            "attempt": attempt,
            "returned": returned,
            "code": ending.error_code if ended else None,
            "message": ending.error_message if ended else None,
            "stopping": ending.execution_id if ending.stopping else None,
            "finished": times["finished"] if ended else None,
        }
    )
    long = ending.result is not None and len(ending.result.encode()) > INLINE_BYTES
    changes.logs.append(
        {
            "id": log["id"],
            "status": int(ending.status),
            **times,
            "code": ending.error_code,
            "message": ending.error_message,
            "reason": ending.reason,
            "result": None if long else ending.result,
            "long": int(long),
        }
    )
    if long:
        changes.payloads.append(
            {"job_id": job["id"], "slot": ending.execution_id, "body": ending.result}
        )
    delivery = _owe_callback(ending, job, next_status, times, now, changes) if ended else None
    return Settlement(
        kind=Settled.ENDED if ended else Settled.RETRIED,
        job_id=job["id"],
        job_status=next_status,
        queue_id=job["queue_id"],
        priority=job["priority"],
        next_due_ms=None if ended or ending.stopping else due,
        handler=job["job_handler"],
        run_ms=_run_ms(times),
        delivery=delivery,
    )


def _what_follows(
    ending: Ending, job: RowMapping, now: int
) -> tuple[JobStatus, int | None, int, int]:
    """Return the job's next status, due time, and counts of attempts and returns."""
    attempt, returned, due = job["attempt"], job["returned"], job["next_trigger_time"]
    match ending.status:
        case ExecutionStatus.SUCCEEDED:
            return JobStatus.SUCCEEDED, due, attempt, returned
        case ExecutionStatus.CANCELLED:
            return JobStatus.CANCELLED, due, attempt, returned
        case ExecutionStatus.RETURNED if returned < MAX_RETURNS:
            return JobStatus.WAITING, due, attempt - 1, returned + 1
        case (
            ExecutionStatus.FAILED
            | ExecutionStatus.TIMED_OUT
            | ExecutionStatus.LOST
            | ExecutionStatus.RETURNED
        ):
            decision = after_failure(
                RetryPolicy(job["max_retry"], job["retry_interval_ms"], job["retry_backoff"]),
                attempt=attempt,
                retryable=ending.retryable,
                retry_after_ms=ending.retry_after_ms,
                jitter=random.random(),
            )
            if isinstance(decision, GiveUp):
                return JobStatus.FAILED, due, attempt, returned
            if isinstance(decision, RetryAfter):
                return JobStatus.WAITING, now + decision.delay_ms, attempt, returned
            assert_never(decision)
        case _:
            raise ValueError(f"an execution cannot end as {ending.status.name}")


def _step_times(ending: Ending, log: RowMapping, now: int) -> dict[str, int | None]:
    """Fit the worker's step times between the claim and now, in order."""
    accepted = ending.accepted_at if ending.accepted_at is not None else log["accepted_at"]
    started = ending.started_at if ending.started_at is not None else log["started_at"]
    finished = now if ending.finished_at is None else ending.finished_at
    floor = log["claimed_at"]
    times: dict[str, int | None] = {}
    for name, value in (("accepted", accepted), ("started", started), ("finished", finished)):
        times[name] = None if value is None else min(max(value, floor), max(now, floor))
        floor = floor if times[name] is None else times[name]
    return times


def _run_ms(times: Mapping[str, int | None]) -> int | None:
    started, finished = times["started"], times["finished"]
    return None if started is None or finished is None else finished - started


def _owe_callback(
    ending: Ending,
    job: RowMapping,
    status: JobStatus,
    times: Mapping[str, int | None],
    now: int,
    changes: _Changes,
) -> OwedDelivery | None:
    if job["callback_url"] is None:
        return None
    body = render_callback(
        CallbackJob(
            job_id=job["id"],
            client_request_id=job["client_request_id"],
            job_name=job["job_name"],
            execution_id=ending.execution_id,
            status=status,
            attempt=job["attempt"],
            trigger_ts=job["trigger_ts"],
            started_at=times["started"],
            finished_at=times["finished"] or now,
            result=ending.result,
            error_code=ending.error_code,
            error_message=ending.error_message,
        )
    )
    delivery_id = str(uuid_utils.uuid7())
    owner = ending.deliver_by
    changes.callbacks.append(
        {
            "delivery_id": delivery_id,
            "tenant_id": job["tenant_id"],
            "job_id": job["id"],
            "execution_id": ending.execution_id,
            "event_type": EVENT_TYPES[status],
            "url": job["callback_url"],
            "body": body,
            "status": int(DeliveryStatus.PENDING),
            "tries": 0 if owner is None else 1,
            "owner_worker_id": owner,
            "next_try_at": now if owner is None else now + DELIVERY_LEASE_MS,
            "created_at": now,
        }
    )
    return None if owner is None else OwedDelivery(delivery_id, 1, job["callback_url"], body)


async def _write(
    connection: AsyncConnection, database: Database, changes: _Changes, now: int
) -> None:
    sqlite = database.is_sqlite
    if changes.jobs:
        changes.jobs.sort(key=lambda row: row["id"])
        moved = await connection.execute(
            _MOVE_JOBS[sqlite], {"rows": rows_json(changes.jobs), "now": now}
        )
        if moved.rowcount != len(changes.jobs):
            raise RuntimeError("a locked job changed under its settlement")
        changes.logs.sort(key=lambda row: row["id"])
        await connection.execute(_END_LOGS[sqlite], {"rows": rows_json(changes.logs)})
    await insert_payloads(connection, database, changes.payloads)
    if changes.callbacks:
        await connection.execute(_OWE, changes.callbacks)
    if changes.stale:
        changes.stale.sort(key=lambda row: row["id"])
        await connection.execute(
            _MARK_STALE[sqlite], {"rows": rows_json(changes.stale), "now": now}
        )


async def _with_open_deliveries(
    connection: AsyncConnection, endings: Sequence[Ending], settled: list[Settlement]
) -> list[Settlement]:
    """Add to repeated endings the callback that their worker still has to deliver."""
    repeated = {
        ending.execution_id: place
        for place, (ending, one) in enumerate(zip(endings, settled, strict=True))
        if one.kind is Settled.REPEATED and ending.deliver_by is not None
    }
    if not repeated:
        return settled
    rows = await connection.execute(
        _OPEN_DELIVERIES, {"jobs": sorted({settled[place].job_id for place in repeated.values()})}
    )
    for row in rows.mappings():
        place = repeated.get(row["execution_id"])
        if place is not None and row["owner_worker_id"] == endings[place].deliver_by:
            one = settled[place]
            settled[place] = Settlement(
                one.kind,
                one.job_id,
                one.job_status,
                delivery=OwedDelivery(row["delivery_id"], row["tries"], row["url"], row["body"]),
            )
    return settled


def new_token() -> str:
    """Draw a token that tells this process's own rows from others'."""
    return uuid.uuid4().hex


_STOPPED_JOBS: Final = text(
    "SELECT l.job_id, l.execution_id FROM job_log AS l WHERE l.execution_id IN :executions"
).bindparams(bindparam("executions", expanding=True))
_RELEASE: Final = text(
    "UPDATE job_info SET stopping_execution_id = NULL, version = version + 1 "
    "WHERE id = :job AND stopping_execution_id = :execution"
)


async def release_stopped(
    connection: AsyncConnection, executions: Sequence[str]
) -> list[tuple[int, int, int | None]]:
    """Let the jobs of executions whose thread has ended be claimed again.

    Returns (queue id, priority, next due time) of each job that was waiting for that.
    """
    jobs = sorted(
        tuple(row)
        for row in await connection.execute(_STOPPED_JOBS, {"executions": list(executions)})
    )
    released = []
    for job_id, execution_id in jobs:
        done = await connection.execute(_RELEASE, {"job": job_id, "execution": execution_id})
        if done.rowcount:
            row = (
                await connection.execute(
                    text(
                        "SELECT queue_id, priority, next_trigger_time FROM job_info WHERE id = :id"
                    ),
                    {"id": job_id},
                )
            ).one()
            released.append((row[0], row[1], row[2]))
    return released
