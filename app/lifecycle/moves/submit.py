"""The move `submit`: new jobs enter the database, repeated ones are recognised, in one commit.

A task that is due now and has a free worker may be claimed by the same commit: submit and claim
are then one move, with the guard of the claim (the holder's term).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple

from sqlalchemy import RowMapping, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.bulk import ColumnType, RowsInsert, insert_from_rows, rows_json
from app.lifecycle.moves.claim import Claimed, insert_executions
from app.lifecycle.reads import JOB_COLUMNS
from app.lifecycle.states import JobKind, JobStatus
from app.lifecycle.tables import INLINE_BYTES
from app.lifecycle.term import FIRST
from app.lifecycle.token import new_token
from app.plumbing.database import NOW_MS, Database, keep_first

PARAMS_SLOT: Final = "params"
NEW_VERSION: Final = 0
"""The version of a task that nothing has happened to yet."""


@dataclass(frozen=True, slots=True)
class NewSchedule:
    """What makes a job a schedule. Times are epoch ms, and None is what does not apply to it.

    `cursor_ms` is the moment after which its fires count, `first_ms` the first of them.
    """

    cursor_ms: int
    first_ms: int | None
    cron_expr: str | None = None
    cron_dialect: str | None = None
    timezone: str | None = None
    dst_gap: str | None = None
    dst_fold: str | None = None
    interval_ms: int | None = None
    interval_mode: str | None = None
    anchor_at: int | None = None
    start_at: int | None = None
    end_at: int | None = None
    max_fires: int | None = None
    jitter_ms: int | None = None
    misfire_policy: str | None = None
    misfire_cap: int | None = None
    misfire_spacing_ms: int | None = None
    catch_up_ms: int | None = None
    overlap_policy: str = "allow"


@dataclass(slots=True)
class NewJob:
    """A task to insert, or a schedule. `due_ms` is absolute, `delay_ms` counts from the commit.

    It is not frozen, though nothing changes it: so it is made in a third of the time.

    `submit_token` is drawn anew for each request: it tells a row that this request inserted,
    perhaps by a commit whose answer was lost, from one that was there before.
    """

    tenant_id: int
    client_request_id: str
    request_digest: str
    submit_token: str
    job_name: str
    job_handler: str
    queue_id: int
    priority: int
    max_retry: int
    retry_interval_ms: int
    retry_backoff: str
    due_ms: int | None = None
    delay_ms: int = 0
    timeout_ms: int | None = None
    callback_url: str | None = None
    callback_events: str | None = None
    callback_headers: str | None = None
    expires_at: int | None = None
    params: str | None = field(default=None, repr=False)
    secret: int = 0
    concurrency_key: str | None = None
    concurrency_limit: int | None = None
    rate_key: str | None = None
    rate_per_second: float | None = None
    labels: dict[str, str] = field(default_factory=dict)
    schedule: NewSchedule | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """The run that a new task is to begin with: its worker, and the id of its execution."""

    worker_id: str
    execution_id: str


@dataclass(frozen=True, slots=True)
class Starts:
    """What the holder of partition 0 deals of a batch, by the submit tokens of its tasks."""

    term: int
    of: dict[str, Start]


NO_STARTS: Final = Starts(0, {})

_FIELDS: Final[dict[str, ColumnType]] = {
    "tenant": "BIGINT",
    "request": "TEXT",
    "digest": "TEXT",
    "token": "TEXT",
    "name": "TEXT",
    "handler": "TEXT",
    "queue": "BIGINT",
    "priority": "BIGINT",
    "due": "BIGINT",
    "delay": "BIGINT",
    "retries": "BIGINT",
    "interval": "BIGINT",
    "backoff": "TEXT",
    "timeout": "BIGINT",
    "callback": "TEXT",
    "events": "TEXT",
    "headers": "TEXT",
    "expires": "BIGINT",
    "ckey": "TEXT",
    "climit": "BIGINT",
    "rkey": "TEXT",
    "rate": "TEXT",
    "params": "TEXT",
    "long": "BIGINT",
    "secret": "BIGINT",
}
_SCHEDULE_COLUMNS: Final = tuple(
    one.name for one in fields(NewSchedule) if one.name not in ("cursor_ms", "first_ms")
)
_TEXTS: Final = frozenset(
    {"cron_expr", "cron_dialect", "timezone", "dst_gap", "dst_fold", "interval_mode"}
    | {"misfire_policy", "overlap_policy"}
)
_SCHEDULE_FIELDS: Final[dict[str, ColumnType]] = {
    **_FIELDS,
    "cursor": "BIGINT",
    **{name: "TEXT" if name in _TEXTS else "BIGINT" for name in _SCHEDULE_COLUMNS},
}


def _plain(sqlite: bool) -> dict[str, str]:
    """The columns that tasks and schedules have in common, from the rows given."""
    return {
        "tenant_id": "v.v_tenant",
        "client_request_id": "v.v_request",
        "request_digest": "v.v_digest",
        "submit_token": "v.v_token",
        "job_name": "v.v_name",
        "job_handler": "v.v_handler",
        "priority": "v.v_priority",
        "max_retry": "v.v_retries",
        "retry_interval_ms": "v.v_interval",
        "retry_backoff": "v.v_backoff",
        "timeout_ms": "v.v_timeout",
        "callback_url": "v.v_callback",
        "callback_events": "v.v_events",
        "callback_headers": "v.v_headers",
        "expires_at": "v.v_expires",
        "concurrency_key": "v.v_ckey",
        "concurrency_limit": "v.v_climit",
        "rate_key": "v.v_rkey",
        "rate_per_second": "v.v_rate + 0.0",
        "params": "v.v_params",
        "params_in_payload": "v.v_long",
        "secret": "v.v_secret",
        "created_at": NOW_MS[sqlite],
        "updated_at": NOW_MS[sqlite],
    }


_INSERT: Final = RowsInsert(
    table="job_info",
    columns=_FIELDS,
    values=lambda sqlite: {
        **_plain(sqlite),
        "kind": str(int(JobKind.TASK)),
        "queue_id": "v.v_queue",
        "status": str(int(JobStatus.WAITING)),
        "next_trigger_time": (
            f"CASE WHEN v.v_due IS NULL THEN {NOW_MS[sqlite]} + v.v_delay ELSE v.v_due END"
        ),
    },
    keep_first="created_at",
)
_FIRST_ATTEMPT: Final = 1
_INSERT_CLAIMED: Final = RowsInsert(
    table="job_info",
    columns={**_FIELDS, "worker": "TEXT", "execution": "TEXT"},
    values=lambda sqlite: {
        **_plain(sqlite),
        "kind": str(int(JobKind.TASK)),
        "queue_id": "v.v_queue",
        "status": str(int(JobStatus.RUNNING)),
        "version": str(NEW_VERSION + 1),
        "next_trigger_time": NOW_MS[sqlite],
        "trigger_ts": NOW_MS[sqlite],
        "attempt": str(_FIRST_ATTEMPT),
        "owner_worker_id": "v.v_worker",
        "execution_id": "v.v_execution",
        "claim_token": ":claim_token",
    },
    keep_first="created_at",
)
_UNCLAIM: Final = {
    sqlite: text(
        f"UPDATE job_info {hint}SET status = {int(JobStatus.WAITING)}, version = {NEW_VERSION}, "
        "trigger_ts = 0, attempt = 0, owner_worker_id = NULL, execution_id = NULL, "
        "claim_token = NULL WHERE id IN :ids AND claim_token = :token"
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite, hint in ((True, ""), (False, "FORCE INDEX (PRIMARY) "))
}
_INSERT_SCHEDULES: Final = {
    sqlite: insert_from_rows(
        sqlite=sqlite,
        table="job_info",
        columns=_SCHEDULE_FIELDS,
        values={
            **_plain(sqlite),
            "kind": str(int(JobKind.SCHEDULE)),
            "queue_id": "0",
            "child_queue_id": "v.v_queue",
            "status": str(int(JobStatus.SCHEDULED)),
            "next_trigger_time": "v.v_due",
            "trigger_ts": "v.v_cursor",
            **{name: f"v.v_{name}" for name in _SCHEDULE_COLUMNS},
        },
        keep_first=keep_first(sqlite, "created_at"),
    )
    for sqlite in (True, False)
}
_SELECT_BY_KEY: Final = text(
    f"SELECT {JOB_COLUMNS} FROM job_info "
    "WHERE tenant_id = :tenant AND client_request_id IN :request_ids"
).bindparams(bindparam("request_ids", expanding=True))


class Entered(NamedTuple):
    """What the database made of a submission. Another token than its own: the job was there."""

    id: int
    client_request_id: str
    submit_token: str
    due_ms: int | None
    created_at: int
    claimed: Claimed | None = None
    """The run that it was stored with, to be sent now."""


_SELECT_ENTERED: Final = text(
    "SELECT id, client_request_id, submit_token, next_trigger_time, created_at, claim_token, "
    f"(SELECT term FROM dispatch_term WHERE partition_no = {FIRST}) AS term FROM job_info "
    "WHERE tenant_id = :tenant AND client_request_id IN :request_ids"
).bindparams(bindparam("request_ids", expanding=True))


async def insert_jobs(
    connection: AsyncConnection,
    database: Database,
    jobs: Sequence[NewJob],
    starts: Starts = NO_STARTS,
) -> dict[tuple[int, str], Entered]:
    """Insert the jobs that are new and return what each (tenant, clientRequestId) is now.

    Those with a start are stored as claimed, if the term is still the one of partition 0. What an
    earlier, unacknowledged commit claimed is not returned as such: whoever dispatches finds it.
    """
    in_key_order = sorted(jobs, key=lambda job: (job.tenant_id, job.client_request_id))
    claim_token = new_token()
    # No read of the row count: the SELECT by key tells what happened.
    tasks, claimed, schedules = [], [], []
    entered: set[tuple[int, str]] = set()
    for job in in_key_order:
        if (key := (job.tenant_id, job.client_request_id)) in entered:
            # By whichever statement they are stored, the first of a batch has the key.
            continue
        entered.add(key)
        if job.schedule is not None:
            schedules.append(_schedule_row(job))
        elif (start := starts.of.get(job.submit_token)) is not None:
            claimed.append(
                _job_row(job) | {"worker": start.worker_id, "execution": start.execution_id}
            )
        else:
            tasks.append(_job_row(job))
    if tasks:
        await _INSERT.run(connection, tasks)
    if claimed:
        await _INSERT_CLAIMED.run(connection, claimed, claim_token=claim_token)
    if schedules:
        await connection.execute(
            _INSERT_SCHEDULES[database.is_sqlite], {"rows": rows_json(_SCHEDULE_FIELDS, schedules)}
        )
    found, begun = await _find_entered(connection, in_key_order, claim_token, starts.term)
    own = [
        (found[key].id, job)
        for job in in_key_order
        if found[key := (job.tenant_id, job.client_request_id)].submit_token == job.submit_token
    ]
    if begun.too_late:
        await connection.execute(
            _UNCLAIM[database.is_sqlite], {"ids": sorted(begun.too_late), "token": claim_token}
        )
    if begun.ids:
        runs = [
            _first_run(found[job.tenant_id, job.client_request_id], job, starts)
            for job_id, job in own
            if job_id in begun.ids
        ]
        await insert_executions(
            connection, database, [_execution_row(run) for run in runs], term=starts.term
        )
        for run in runs:
            key = (run.tenant_id, run.client_request_id or "")
            found[key] = found[key]._replace(claimed=run)
    await _insert_extras(connection, database, own)
    return found


class _Begun(NamedTuple):
    """The jobs that this transaction has stored as claimed: within the term, and after it."""

    ids: set[int]
    too_late: set[int]


async def _find_entered(
    connection: AsyncConnection, jobs: Sequence[NewJob], claim_token: str, term: int
) -> tuple[dict[tuple[int, str], Entered], _Begun]:
    found: dict[tuple[int, str], Entered] = {}
    begun = _Begun(set(), set())
    by_tenant: dict[int, list[str]] = {}
    for job in jobs:
        by_tenant.setdefault(job.tenant_id, []).append(job.client_request_id)
    for tenant, request_ids in by_tenant.items():
        rows = await connection.execute(
            _SELECT_ENTERED, {"tenant": tenant, "request_ids": request_ids}
        )
        for *entered, claimed_by, current_term in rows:
            one = Entered(*entered)
            found[tenant, one.client_request_id] = one
            if claimed_by == claim_token:
                (begun.ids if current_term == term else begun.too_late).add(one.id)
    return found, begun


def _first_run(entered: Entered, job: NewJob, starts: Starts) -> Claimed:
    """Return the run that a task was stored with, as the claim of a waiting one returns it."""
    start = starts.of[job.submit_token]
    assert entered.due_ms is not None, "a task that is due now has a due time"
    return Claimed(
        job_id=entered.id,
        execution_id=start.execution_id,
        worker_id=start.worker_id,
        trigger_ts=entered.due_ms,
        attempt=_FIRST_ATTEMPT,
        max_retry=job.max_retry,
        job_name=job.job_name,
        job_handler=job.job_handler,
        client_request_id=job.client_request_id,
        timeout_ms=job.timeout_ms,
        shard_index=0,
        shard_total=1,
        queue_id=job.queue_id,
        due_ms=entered.due_ms,
        params=job.params,
        claimed_at=entered.created_at,
        callback_events=job.callback_events,
        tenant_id=job.tenant_id,
        secret=job.secret,
    )


def _execution_row(run: Claimed) -> dict[str, Any]:
    return {
        "execution_id": run.execution_id,
        "id": run.job_id,
        "attempt": run.attempt,
        "trigger_ts": run.trigger_ts,
        "owner_worker_id": run.worker_id,
        "updated_at": run.claimed_at,
    }


async def find_by_request(
    connection: AsyncConnection, keys: Sequence[tuple[int, str]]
) -> dict[tuple[int, str], RowMapping]:
    """Return the job of each (tenant, clientRequestId) that exists."""
    found: dict[tuple[int, str], RowMapping] = {}
    for tenant in {tenant for tenant, _ in keys}:
        request_ids = sorted({request_id for owner, request_id in keys if owner == tenant})
        rows = await connection.execute(
            _SELECT_BY_KEY, {"tenant": tenant, "request_ids": request_ids}
        )
        found.update({(tenant, row["client_request_id"]): row for row in rows.mappings()})
    return found


def _job_row(job: NewJob) -> dict[str, Any]:
    inline = job.params is None or len(job.params.encode()) <= INLINE_BYTES
    return {
        "tenant": job.tenant_id,
        "request": job.client_request_id,
        "digest": job.request_digest,
        "token": job.submit_token,
        "name": job.job_name,
        "handler": job.job_handler,
        "queue": job.queue_id,
        "priority": job.priority,
        "due": job.due_ms,
        "delay": job.delay_ms,
        "retries": job.max_retry,
        "interval": job.retry_interval_ms,
        "backoff": job.retry_backoff,
        "timeout": job.timeout_ms,
        "callback": job.callback_url,
        "events": job.callback_events,
        "headers": job.callback_headers,
        "expires": job.expires_at,
        "ckey": job.concurrency_key,
        "climit": job.concurrency_limit,
        "rkey": job.rate_key,
        "rate": None if job.rate_per_second is None else repr(float(job.rate_per_second)),
        "params": job.params if inline else None,
        "long": int(not inline),
        "secret": job.secret,
    }


def _schedule_row(job: NewJob) -> dict[str, Any]:
    schedule = job.schedule
    assert schedule is not None, "only schedules are given"
    return {
        **_job_row(job),
        **{name: getattr(schedule, name) for name in _SCHEDULE_COLUMNS},
        "due": schedule.first_ms,
        "cursor": schedule.cursor_ms,
    }


async def _insert_extras(
    connection: AsyncConnection, database: Database, own: Sequence[tuple[int, NewJob]]
) -> None:
    """Insert what has a table of its own; a repeat after an unknown commit finds it there."""
    payloads = [
        {"job_id": job_id, "slot": PARAMS_SLOT, "body": job.params}
        for job_id, job in own
        if job.params is not None and len(job.params.encode()) > INLINE_BYTES
    ]
    await insert_payloads(connection, database, payloads)
    labels = [
        {"job_id": job_id, "name": name, "value": value}
        for job_id, job in own
        for name, value in sorted(job.labels.items())
    ]
    if labels:
        await connection.execute(
            text(
                "INSERT INTO job_label (job_id, name, value) VALUES (:job_id, :name, :value) "
                + database.keep_first("name")
            ),
            labels,
        )
    expiries = [(job.expires_at, job_id) for job_id, job in own if job.expires_at is not None]
    await insert_expiries(connection, database, expiries)


async def insert_payloads(
    connection: AsyncConnection, database: Database, payloads: Sequence[dict[str, Any]]
) -> None:
    """Insert bodies (`job_id`, `slot`, `body`) that are too long for their row, once."""
    if payloads:
        await connection.execute(
            text(
                "INSERT INTO job_payload (job_id, slot, body, byte_count) "
                "VALUES (:job_id, :slot, :body, :byte_count) " + database.keep_first("slot")
            ),
            [{**one, "byte_count": len(one["body"].encode())} for one in payloads],
        )


async def forget_expiries(connection: AsyncConnection, expiries: Sequence[tuple[int, int]]) -> None:
    """Look no more at these moments (epoch ms) whether these jobs have expired."""
    if expiries:
        await connection.execute(
            text("DELETE FROM job_expiry WHERE look_at = :look_at AND job_id = :job_id"),
            [{"look_at": look_at, "job_id": job_id} for look_at, job_id in sorted(expiries)],
        )


async def insert_expiries(
    connection: AsyncConnection, database: Database, expiries: Sequence[tuple[int, int]]
) -> None:
    """Note when (epoch ms) to look whether a job has expired, once for each pair."""
    if expiries:
        await connection.execute(
            text(
                "INSERT INTO job_expiry (look_at, job_id) VALUES (:look_at, :job_id) "
                + database.keep_first("look_at")
            ),
            [{"look_at": look_at, "job_id": job_id} for look_at, job_id in sorted(expiries)],
        )
