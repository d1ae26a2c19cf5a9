"""What callers get about jobs."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from app.edge.wire import ExecutionWord, Int64, StatusWord, Timestamp, Wire
from app.jobs.callback_fields import EventWord, SecretValue
from app.jobs.reason_codes import ReasonCode
from app.jobs.requests import OverlapPolicy
from app.schedules.cron import DstFold, DstGap
from app.schedules.grammar import Dialect

WHY: Final = (
    "Why the platform, not the handler, ended it; or how its end was found when its worker died."
)


class JobError(Wire):
    """Why a job or an execution did not succeed."""

    code: str
    message: str


class Progress(Wire):
    """How far a run has come, by its handler's word."""

    value: float = Field(ge=0, le=1)
    text: str
    at: Timestamp


class Execution(Wire):
    """One attempt to run the job on one worker, with the time of every step."""

    execution_id: str
    attempt: int
    status: ExecutionWord
    worker_id: str
    trigger_time: Timestamp
    claimed_at: Timestamp
    accepted_at: Timestamp | None
    started_at: Timestamp | None
    finished_at: Timestamp | None
    progress: Progress | None
    result: Any
    error: JobError | None
    reason: str | None = Field(description=WHY)


class JobWarning(Wire):
    """Something that keeps an accepted job from running now."""

    code: str
    message: str


class Schedule(Wire):
    """What a schedule was told, and how far it is."""

    cron_expr: str | None
    cron_dialect: Dialect | None
    timezone: str | None
    dst_gap: DstGap | None
    dst_fold: DstFold | None
    interval_ms: int | None
    interval_mode: Literal["fixedRate", "fixedDelay"] | None
    start_at: Timestamp | None
    end_at: Timestamp | None
    max_fires: int | None
    jitter_ms: int | None
    misfire_policy: Literal["skip", "once", "all"] | None
    misfire_cap: int | None
    misfire_spacing_ms: int | None
    catch_up_window_ms: int | None
    overlap_policy: OverlapPolicy | None
    fires: int = Field(description="Runs begun by its own fires so far; `maxFires` bounds them.")
    decided_until: Timestamp = Field(
        description="Every fire up to then is a child, or was skipped."
    )


class Job(Wire):
    """A job as it is now."""

    job_id: Int64
    client_request_id: str | None
    job_name: str
    job_handler: str
    params: Any = Field(description='Secret ones are `{"secret": "********"}`.')
    secret_params: bool
    secret_result: bool
    status: StatusWord
    attempt: int = Field(description="Attempts begun so far; at most maxRetry + 1.")
    max_retry: int
    retry_interval_seconds: float
    retry_backoff: Literal["fixed", "exponential"]
    timeout_ms: Int64 | None = Field(description="Of each attempt; null is the server's default.")
    callback_url: str | None
    callback_events: list[EventWord]
    callback_headers: dict[str, str | SecretValue] | None = Field(
        description="Of a secret value only that there is one."
    )
    priority: int
    next_trigger_time: Timestamp | None
    expires_at: Timestamp | None = Field(description="When it fails unless an attempt has begun.")
    concurrency_key: str | None
    concurrency_limit: Int64 | None
    rate_key: str | None
    rate_per_second: float | None
    parent_id: Int64 | None = Field(description="The schedule or group that made it.")
    nominal_time: Timestamp | None = Field(description="The fire of its schedule that it is.")
    schedule: Schedule | None = Field(description="null unless it is a schedule.")
    result: Any
    error: JobError | None
    progress: Progress | None = Field(description="Of the current or newest execution.")
    revision: int
    created_at: Timestamp
    updated_at: Timestamp
    finished_at: Timestamp | None
    executions: list[Execution] = Field(description="The newest few, newest first.")
    warnings: list[JobWarning]


class Reason(Wire):
    """One reason why a job is where it is; docs/reasons.md says what each code means."""

    code: ReasonCode
    message: str = Field(description="For people; it may change, the code does not.")
    details: dict[str, Any] = Field(description="What the message is made of.")
    since: Timestamp | None = Field(description="From when it holds, where that is known.")


class ExplainedAttempt(Wire):
    """One execution of a job, with its story in a sentence."""

    execution_id: str
    attempt: int
    worker_id: str
    status: ExecutionWord
    claimed_at: Timestamp
    accepted_at: Timestamp | None
    started_at: Timestamp | None
    finished_at: Timestamp | None
    error: JobError | None
    reason: str | None = Field(description=WHY)
    story: str


class Explanation(Wire):
    """Why a job is where it is."""

    job_id: Int64
    status: StatusWord
    at: Timestamp = Field(description="When this was so.")
    summary: str = Field(description="One sentence: the first reason.")
    reasons: list[Reason] = Field(description="The most telling one first.")
    attempts: list[ExplainedAttempt] = Field(description="The newest 20, newest first.")
    more_attempts: bool = Field(description="True when there are older ones: see executions.")
    next_actions: list[str] = Field(description="The verbs that are possible now.")


class AcceptedItem(Job):
    """A job of a batch that was stored (202) or was there before (200)."""

    http_status: Literal[200, 202]


class RefusedItem(Wire):
    """A job of a batch that was not stored: a problem, with the status of its own."""

    http_status: int
    type: str
    title: str
    status: int
    code: str
    detail: str
    errors: list[dict[str, str]] | None = None
    job_id: Int64 | None = None
    fields: list[str] | None = None


class BatchAnswer(Wire):
    """One item a job, in the order of the request."""

    items: list[AcceptedItem | RefusedItem]


class ListedJob(Job):
    """A job in a list: `executions` is empty, and bodies over 1 KiB are left out."""

    omitted: list[Literal["params", "result"]] = Field(
        description="What is shown as null because it is long: look at the job for it."
    )


class JobList(Wire):
    """A page of jobs, newest first. It may be short, even empty, while `nextCursor` is set."""

    items: list[ListedJob]
    next_cursor: str | None


class Skipped(Wire):
    """Consecutive fires of a schedule that did not run, and why."""

    from_: Timestamp = Field(alias="from")
    to: Timestamp
    count: Int64
    reason: Literal[
        "misfire_skip",
        "misfire_once",
        "over_cap",
        "outside_window",
        "paused",
        "overlap",
        "cancelled",
    ]


class SkippedList(Wire):
    """A page of what did not run, latest first."""

    items: list[Skipped]
    next_cursor: str | None


class Backfill(Wire):
    """A backfill: how much of it is spawned. A dry run has no id and stores nothing."""

    backfill_id: Int64 | None
    schedule_id: Int64
    status: Literal["DRY_RUN", "OPEN", "DONE", "STOPPED"]
    from_: Timestamp = Field(alias="from")
    to: Timestamp
    max_concurrent: int
    total: int | None = Field(description="Nominal times in the range; null in a list.")
    existing: int | None = Field(description="Those that had a child then; null in a list.")
    spawned: int = Field(description="Jobs made of it so far.")
    nominal_times: list[Timestamp] | None = Field(
        description="In a dry run: what would be run, in order."
    )
    created_at: Timestamp | None
    ended_at: Timestamp | None


class BackfillList(Wire):
    """A page of backfills, newest first."""

    items: list[Backfill]
    next_cursor: str | None


class CallbackTry(Wire):
    """One try of a callback."""

    try_number: int = Field(alias="try")
    at: Timestamp
    worker_id: str
    delivered: bool
    status_code: int | None = Field(description="null: no answer.")
    latency_ms: int
    error: str | None
    answer: str | None = Field(description="The first 2 KiB of what was answered.")


class Callback(Wire):
    """A callback that a job owes or owed."""

    delivery_id: str = Field(description="The `webhook-id`: the same in every try.")
    job_id: Int64
    event: Literal["job.succeeded", "job.failed", "job.cancelled", "job.started", "job.retrying"]
    url: str
    status: Literal["PENDING", "DELIVERED", "EXHAUSTED", "GONE"]
    tries: int = Field(description="Begun; the last one may be under way.")
    last_status_code: int | None
    last_error: str | None
    next_try_at: Timestamp | None
    created_at: Timestamp
    ended_at: Timestamp | None
    history: list[CallbackTry] = Field(
        description="The newest 20 tries, newest first; empty but in the list of a job's callbacks."
    )


class Redelivered(Wire):
    """How many callbacks are tried again."""

    redelivered: int


class CallbackList(Wire):
    """A page of callbacks, newest first."""

    items: list[Callback]
    next_cursor: str | None


class ExecutionList(Wire):
    """A page of executions, newest first."""

    items: list[Execution]
    next_cursor: str | None


class LogLine(Wire):
    """One line that a run said. `seq` counts all of them from 1, dropped ones included."""

    seq: Int64
    time: Timestamp
    level: Literal["debug", "info", "warning", "error", "critical"]
    source: Literal["log", "stdout", "stderr", "ctx", "oncue"] = Field(
        description="`oncue`: the platform's word on lines that were dropped in this place."
    )
    message: str
    fields: dict[str, Any] | None


class LogPage(Wire):
    """A page of lines, oldest first."""

    items: list[LogLine]
    next_cursor: str | None = Field(description="null: no more lines for now.")
    complete: bool = Field(description="Whether no more lines will come at all.")


class Worker(Wire):
    """A worker as its last heartbeat described it."""

    worker_id: str
    name: str
    url: str
    state: Literal["UP", "DRAINING", "DOWN"]
    version: str
    handlers: list[str]
    labels: dict[str, str]
    capacity: int
    weight: float
    active: int
    queued: int
    avg_cost_ms: float
    cpu_idle_percent: float
    delivers: bool
    last_heartbeat: Timestamp


class WorkerList(Wire):
    """A page of workers, newest heartbeat first."""

    items: list[Worker]
    next_cursor: str | None


class Handler(Wire):
    """A handler that at least one live worker offers."""

    name: str
    description: str
    isolation: str
    workers: int = Field(description="How many live workers offer it.")
    params_schema: dict[str, Any] | None = Field(
        description="JSON Schema (draft 2020-12) of the params, that of most workers if they "
        "differ; null when they are not typed."
    )
    params_checked: bool = Field(
        description="Whether submissions are checked now: all live workers publish a schema, and "
        "one of these must accept the params."
    )


class HandlerList(Wire):
    """The handlers on offer, by name."""

    items: list[Handler]
    next_cursor: str | None
