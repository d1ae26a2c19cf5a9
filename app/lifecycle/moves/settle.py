"""The moves `succeed`, `fail`, `retry` and `give_back`: an execution ends and its job moves on.

One transaction ends the executions, moves the jobs and writes the callbacks that are owed.
Every row is fenced by execution id and status: the report of a superseded attempt changes
nothing and is recorded as stale.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, assert_never

from sqlalchemy import RowMapping, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.bulk import ColumnType, RowsUpdate, rows_json, update_from_rows
from app.lifecycle.callback_body import EVENT_TYPES
from app.lifecycle.moves.ending import Ending, OwedDelivery, Settled, Settlement
from app.lifecycle.moves.follow import NOTHING, Claimable, Followed, follow_ends
from app.lifecycle.moves.free_keys import free_keys
from app.lifecycle.moves.limit_keys import Key, concurrency_key
from app.lifecycle.moves.owe import callback_row, insert_callbacks, insert_starts, started_row
from app.lifecycle.moves.release import note_stopping, release_stopped
from app.lifecycle.moves.submit import forget_expiries, insert_payloads
from app.lifecycle.retry import MAX_RETURNS, GiveUp, RetryAfter, RetryPolicy, after_failure
from app.lifecycle.secret_marks import SECRET_RESULT
from app.lifecycle.states import (
    OPEN_EXECUTIONS,
    DeliveryStatus,
    ExecutionStatus,
    JobKind,
    JobStatus,
    sources,
)
from app.lifecycle.tables import BY_EXECUTION_ID, INLINE_BYTES, job_info, job_log
from app.lifecycle.term import read_term
from app.plumbing.database import NOW_MS, Database
from app.plumbing.sealed import Sealer

_NO_KEYS: Final = Sealer("")
_RUNNING: Final = sources("succeed", JobKind.TASK)


class _Log(NamedTuple):
    """What a settlement has to know of an execution, by the columns of its row."""

    id: int
    execution_id: str
    job_id: int
    trigger_ts: int
    status: int
    worker_id: str
    claimed_at: int
    accepted_at: int | None
    started_at: int | None


_JOB_COLUMNS: Final = (
    "id, tenant_id, client_request_id, parent_id, kind, job_name, job_handler, queue_id, "
    "priority, status, execution_id, trigger_ts, attempt, returned, max_retry, "
    "retry_interval_ms, retry_backoff, callback_url, callback_events, callback_headers, version, "
    "next_trigger_time, stopping_execution_id, secret, concurrency_key, expires_at, nominal_time"
)
# Nearly always what ends is the execution that the job has.
_LOCK_JOBS: Final = {
    sqlite: text(
        f"SELECT {', '.join(f'l.{one} AS log_{one}' for one in _Log._fields)}, "
        f"{NOW_MS[sqlite]} AS now_ms, "
        f"{', '.join(f'j.{one}' for one in _JOB_COLUMNS.split(', '))} FROM job_info AS j {hint}"
        f"LEFT JOIN job_log AS l {BY_EXECUTION_ID[sqlite]}"
        "ON l.execution_id = j.execution_id AND l.job_id = j.id "
        f"WHERE j.id IN :ids ORDER BY j.id{lock}"
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite, hint, lock in (
        (True, "", ""),
        (False, "FORCE INDEX (PRIMARY) ", " FOR UPDATE"),
    )
}
_OTHER_LOGS: Final = {
    sqlite: text(
        f"SELECT {', '.join(_Log._fields)} FROM job_log {hint}WHERE execution_id IN :executions"
    ).bindparams(bindparam("executions", expanding=True))
    for sqlite, hint in BY_EXECUTION_ID.items()
}

_MOVE_JOBS: Final = RowsUpdate(
    table=job_info,
    columns={
        "status": "BIGINT",
        "next_trigger_time": "BIGINT",
        "attempt": "BIGINT",
        "returned": "BIGINT",
        "error_code": "TEXT",
        "error_message": "TEXT",
        "stopping_execution_id": "TEXT",
        "finished_at": "BIGINT",
    },
    same={"version": "j.version + 1", "owner_worker_id": "NULL", "updated_at": ":now"},
)
_MET: Final = {
    sqlite: text(f"UPDATE job_info {hint}SET expires_at = NULL WHERE id IN :ids").bindparams(
        bindparam("ids", expanding=True)
    )
    for sqlite, hint in ((True, ""), (False, "FORCE INDEX (PRIMARY) "))
}
_END_LOGS: Final = RowsUpdate(
    table=job_log,
    columns={
        "status": "BIGINT",
        "accepted_at": "BIGINT",
        "started_at": "BIGINT",
        "finished_at": "BIGINT",
        "error_code": "TEXT",
        "error_message": "TEXT",
        "reason": "TEXT",
        "result": "TEXT",
        "result_in_payload": "BIGINT",
    },
    same={},
)
_STALE: Final[dict[str, ColumnType]] = {"id": "BIGINT", "status": "TEXT"}
_MARK_STALE: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="job_log",
        key="id",
        columns=_STALE,
        assignments="stale_at = :now, stale_status = v.v_status",
        guard="j.stale_at IS NULL",
    )
    for sqlite in (True, False)
}
_OPEN_DELIVERIES: Final = text(
    "SELECT delivery_id, job_id, execution_id, tries, url, body, owner_worker_id, tenant_id, "
    "headers "
    f"FROM callback_delivery WHERE job_id IN :jobs AND +status = {int(DeliveryStatus.PENDING)} "
    f"AND event_type <> '{EVENT_TYPES[JobStatus.RUNNING]}'"
).bindparams(bindparam("jobs", expanding=True))


async def settle(
    connection: AsyncConnection,
    database: Database,
    endings: Sequence[Ending],
    sealer: Sealer = _NO_KEYS,
) -> list[Settlement]:
    """End the executions of one batch; return what each ending changed, in order.

    Locks the jobs in primary-key order. Safe to repeat: an ending that is already stored comes
    back as REPEATED, with its callback if that is still open and the same worker's.

    Raises:
        NoSecretKeys: a result is secret, and `sealer` cannot seal it.
    """
    jobs, logs = await _lock(connection, database, endings)
    if not jobs:
        return [Settlement(Settled.UNKNOWN, ending.job_id) for ending in endings]
    fenced = {ending.in_partition for ending in endings if ending.in_term is not None}
    batch = _Batch(
        now=int(next(iter(jobs.values()))["now_ms"]),
        terms={one: await read_term(connection, one) for one in sorted(fenced)},
        sealer=sealer,
    )
    settled = [
        batch.settle(ending, jobs.get(ending.job_id), logs.get(ending.execution_id))
        for ending in endings
    ]
    followed = await batch.write(connection, database)
    settled = await _with_open_deliveries(connection, endings, settled)
    if followed is not NOTHING:
        settled[0] = replace(settled[0], followed=followed)
    return settled


async def _lock(
    connection: AsyncConnection, database: Database, endings: Sequence[Ending]
) -> tuple[dict[int, RowMapping], dict[str, _Log]]:
    """Lock the jobs of these endings; return them by id, and the executions by theirs."""
    jobs: dict[int, RowMapping] = {}
    logs: dict[str, _Log] = {}
    locked = await connection.execute(
        _LOCK_JOBS[database.is_sqlite], {"ids": sorted({e.job_id for e in endings})}
    )
    for row in locked:
        job = row._mapping  # noqa: SLF001 - public, in spite of its name
        jobs[job["id"]] = job
        if job["log_id"] is not None:
            log = _Log(*row[: len(_Log._fields)])
            logs[log.execution_id] = log
    others = {ending.execution_id for ending in endings} - logs.keys()
    if jobs and others:
        found = await connection.execute(
            _OTHER_LOGS[database.is_sqlite], {"executions": sorted(others)}
        )
        logs.update((log.execution_id, log) for log in map(_Log._make, found))
    return jobs, logs


class _Batch:
    """Decides endings one by one, and gathers the rows that one write then changes."""

    def __init__(self, *, now: int, terms: Mapping[int, int], sealer: Sealer) -> None:
        self._now = now
        self._sealer = sealer
        self._terms = terms
        self._done: set[str] = set()
        self._jobs: list[dict[str, Any]] = []
        self._logs: list[dict[str, Any]] = []
        self._stale: list[dict[str, Any]] = []
        self._stopping: list[dict[str, Any]] = []
        self._payloads: list[dict[str, Any]] = []
        self._callbacks: list[dict[str, Any]] = []
        self._starts: list[dict[str, Any]] = []
        self._over: set[str] = set()
        self._ended_children: list[int] = []
        self._keys: set[Key] = set()
        self._met: list[tuple[int, int]] = []

    def settle(self, ending: Ending, job: RowMapping | None, log: _Log | None) -> Settlement:
        if job is None or log is None or log.job_id != job["id"]:
            return Settlement(Settled.UNKNOWN, ending.job_id)
        status = JobStatus(job["status"])
        if ending.execution_id in self._done or log.status == ending.status:
            return self._late(Settled.REPEATED, ending, job)
        if log.status not in OPEN_EXECUTIONS or job["execution_id"] != ending.execution_id:
            self._stale.append({"id": log.id, "status": ending.status.name})
            return self._late(Settled.STALE, ending, job)
        if ending.in_term is not None and (
            ending.in_term != self._terms[ending.in_partition]
            or log.status != ExecutionStatus.CLAIMED
        ):
            return Settlement(Settled.STALE, job["id"], status)
        if status not in _RUNNING:
            raise RuntimeError(f"job {job['id']} has a run, and is {status.name}")
        self._done.add(ending.execution_id)
        return self._end(ending, job, log)

    def _late(self, kind: Settled, ending: Ending, job: RowMapping) -> Settlement:
        """Change nothing but this: a cancelled run that its worker reports as over is over.

        What a dispatcher says of a run (`in_term`) proves nothing: its worker may have it.
        """
        status = JobStatus(job["status"])
        if (
            job["stopping_execution_id"] != ending.execution_id
            or ending.stopping
            or ending.in_term is not None
            or ending.execution_id in self._done
        ):
            return Settlement(kind, job["id"], status)
        self._over.add(ending.execution_id)
        return Settlement(
            kind,
            job["id"],
            status,
            queue_id=job["queue_id"],
            priority=job["priority"],
            next_due_ms=job["next_trigger_time"] if status is JobStatus.WAITING else None,
        )

    def _end(self, ending: Ending, job: RowMapping, log: _Log) -> Settlement:
        """Decide what follows a current execution's end, and note the rows to write."""
        times = _step_times(ending, log, self._now)
        next_status, due, attempt, returned = _what_follows(ending, job, self._now)
        ended = next_status is not JobStatus.WAITING
        if not ended and attempt == 0 and _had_begun(ending, log) and job["expires_at"] is not None:
            # Its attempts are none again, but one had begun: its queue deadline was met.
            self._met.append((job["expires_at"], job["id"]))
        self._jobs.append(
            {
                "id": job["id"],
                "status": int(next_status),
                "next_trigger_time": due,
                "attempt": attempt,
                "returned": returned,
                "error_code": ending.error_code if ended else None,
                "error_message": ending.error_message if ended else None,
                "stopping_execution_id": ending.execution_id if ending.stopping else None,
                "finished_at": times["finished"] if ended else None,
            }
        )
        if ended and job["parent_id"] is not None:
            self._ended_children.append(job["id"])
        if not ending.stopping and (key := concurrency_key(job)) is not None:
            self._keys.add(key)
        self._end_log(ending, job, log, times)
        delivery = None
        # A run that was given back was no attempt: there is nothing to tell of it.
        if ended or (job["callback_events"] and ending.status is not ExecutionStatus.RETURNED):
            delivery = self._owe_callback(ending, job, next_status, times, None if ended else due)
        return Settlement(
            kind=Settled.ENDED if ended else Settled.RETRIED,
            job_id=job["id"],
            job_status=next_status,
            queue_id=job["queue_id"],
            priority=job["priority"],
            next_due_ms=None if ended or ending.stopping else due,
            handler=job["job_handler"],
            run_ms=_run_ms(times),
            late_ms=_late_ms(job["next_trigger_time"], times),
            delivery=delivery,
        )

    def _end_log(
        self, ending: Ending, job: RowMapping, log: _Log, times: Mapping[str, int | None]
    ) -> None:
        result = ending.result
        if result is not None and _is_secret(ending, job):
            result = self._sealer.seal_body(result)
        long = result is not None and len(result.encode()) > INLINE_BYTES
        self._logs.append(
            {
                "id": log.id,
                "status": int(ending.status),
                **{f"{name}_at": at for name, at in times.items()},
                "error_code": ending.error_code,
                "error_message": ending.error_message,
                "reason": ending.reason,
                "result": None if long else result,
                "result_in_payload": int(long),
            }
        )
        if long:
            self._payloads.append(
                {"job_id": job["id"], "slot": ending.execution_id, "body": result}
            )
        if ending.stopping:
            self._stopping.append(
                {
                    "execution_id": ending.execution_id,
                    "job_id": job["id"],
                    "trigger_ts": log.trigger_ts,
                    "worker_id": log.worker_id,
                }
            )

    def _owe_callback(
        self,
        ending: Ending,
        job: RowMapping,
        status: JobStatus,
        times: Mapping[str, int | None],
        due: int | None,
    ) -> OwedDelivery | None:
        owner = ending.deliver_by
        if job["callback_events"] and times["started"] is not None:
            # Owed when the run was accepted, unless that was not written.
            start = started_row(
                job,
                execution_id=ending.execution_id,
                trigger_ts=job["trigger_ts"],
                started_at=times["started"],
                now=self._now,
            )
            self._starts += [] if start is None else [start]
        row = callback_row(
            job,
            status,
            execution_id=ending.execution_id,
            trigger_ts=job["trigger_ts"],
            started_at=times["started"],
            finished_at=times["finished"] or self._now,
            result=ending.result,
            error_code=ending.error_code,
            error_message=ending.error_message,
            owner=owner,
            next_trigger_at=due,
            now=self._now,
        )
        if row is None:
            return None
        if ending.result is not None and _is_secret(ending, job):
            row["body"] = self._sealer.seal_body(row["body"])
        self._callbacks.append(row)
        return (
            None
            if owner is None
            else OwedDelivery(
                row["delivery_id"], 1, row["url"], row["body"], row["tenant_id"], row["headers"]
            )
        )

    async def write(self, connection: AsyncConnection, database: Database) -> Followed:
        """Write everything that was decided, in primary-key order; return what it brought about."""
        sqlite = database.is_sqlite
        if self._jobs:
            await _MOVE_JOBS.run(connection, self._jobs, now=self._now)
            await _END_LOGS.run(connection, self._logs)
        if self._met:
            await connection.execute(_MET[sqlite], {"ids": sorted(job for _, job in self._met)})
            await forget_expiries(connection, self._met)
        await insert_payloads(connection, database, self._payloads)
        await note_stopping(connection, database, self._stopping)
        await insert_starts(connection, self._starts)
        await insert_callbacks(connection, self._callbacks)
        followed = NOTHING
        if self._over:
            released = await release_stopped(connection, sorted(self._over))
            freed = [
                Claimable(one.queue_id, one.priority, one.due_ms)
                for one in released
                if one.stood_behind and one.due_ms is not None
            ]
            followed = Followed(tuple(freed)) if freed else NOTHING
        if self._stale:
            await connection.execute(
                _MARK_STALE[sqlite],
                {
                    "rows": rows_json(_STALE, sorted(self._stale, key=lambda row: int(row["id"]))),
                    "now": self._now,
                },
            )
        if self._ended_children:
            followed += await follow_ends(connection, self._ended_children)
        if self._keys:
            followed += Followed(tuple(await free_keys(connection, self._keys)))
        return followed


def _is_secret(ending: Ending, job: RowMapping) -> bool:
    return ending.secret or bool(job["secret"] & SECRET_RESULT)


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
        case ExecutionStatus.RETURNED if returned < MAX_RETURNS or not ending.counts:
            return JobStatus.WAITING, due, attempt - 1, returned + ending.counts
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
                # The proof of its worker's death has taken its time already.
                retry_after_ms=(
                    0 if ending.status is ExecutionStatus.LOST else ending.retry_after_ms
                ),
                jitter=random.random(),
            )
            if isinstance(decision, GiveUp):
                return JobStatus.FAILED, due, attempt, returned
            if isinstance(decision, RetryAfter):
                return JobStatus.WAITING, now + decision.delay_ms, attempt, returned
            assert_never(decision)
        case _:
            raise ValueError(f"an execution cannot end as {ending.status.name}")


def _had_begun(ending: Ending, log: _Log) -> bool:
    """Tell whether the handler was called, by the worker's own word where there is one.

    Without one the row tells: in it a run that was accepted and goes on is taken to have begun.
    """
    if ending.accepted_at is not None:
        return ending.started_at is not None
    return ending.started_at is not None or log.started_at is not None


def _step_times(ending: Ending, log: _Log, now: int) -> dict[str, int | None]:
    """Fit the worker's step times between the claim and now, in order."""
    accepted = ending.accepted_at if ending.accepted_at is not None else log.accepted_at
    started = ending.started_at if ending.started_at is not None else log.started_at
    finished = now if ending.finished_at is None else ending.finished_at
    floor = log.claimed_at
    times: dict[str, int | None] = {}
    for name, value in (("accepted", accepted), ("started", started), ("finished", finished)):
        if value is None:
            times[name] = None
        else:
            times[name] = floor = min(max(value, floor), max(now, floor))
    return times


def _run_ms(times: Mapping[str, int | None]) -> int | None:
    started, finished = times["started"], times["finished"]
    return None if started is None or finished is None else finished - started


def _late_ms(due: int | None, times: Mapping[str, int | None]) -> int | None:
    started = times["started"]
    return None if started is None or due is None else max(0, started - due)


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
                delivery=OwedDelivery(
                    row["delivery_id"],
                    row["tries"],
                    row["url"],
                    row["body"],
                    row["tenant_id"],
                    row["headers"],
                ),
            )
    return settled
