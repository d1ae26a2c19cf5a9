"""What callers send and get: camelCase, unknown fields refused, every length bounded."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic.alias_generators import to_camel

from app.jobs.callback_fields import CallbackEvents, CallbackHeaders, EventWord, SecretValue
from app.jobs.reason_codes import ReasonCode
from app.schedules.cron import DstFold, DstGap
from app.schedules.grammar import Dialect

MAX_FIRES = 2**53
MAX_CONCURRENCY = 1000
MIN_RATE, MAX_RATE = 0.001, 10_000.0
OverlapPolicy = Literal["skip", "queue", "allow", "replace"]
MAX_PARAMS_BYTES = 64 * 1024
MAX_LABELS = 16
MAX_DELAY_MS = 10 * 366 * 24 * 3600 * 1000
RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
LABEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,63}$"


def _printable(value: str) -> str:
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise ValueError("control characters are not allowed")
    return value


def _without_outer_spaces(value: str) -> str:
    """MySQL compares text without its trailing spaces: `x` and `x ` would be one key."""
    if value != value.strip(" "):
        raise ValueError("must not begin or end with a space")
    return value


def _rfc3339(value: object) -> object:
    if not (isinstance(value, str) and RFC3339.fullmatch(value)):
        raise ValueError("must be RFC 3339 text with an offset, as 2026-01-31T09:00:00Z")
    return value


def _sane_year(value: datetime) -> datetime:
    # Near the ends of the calendar a moment may have no UTC time at all.
    if not (1970 <= value.year <= 2200 and 1970 <= value.astimezone(UTC).year <= 2200):
        raise ValueError("must be between the years 1970 and 2200")
    return value


def _http_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        _ = parts.port
    except ValueError:
        raise ValueError("is not a URL") from None
    if parts.scheme.lower() not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an absolute http or https URL")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not carry a user name or password")
    if not value.isprintable() or " " in value:
        raise ValueError("must not have spaces or control characters")
    return value


Name = Annotated[str, StringConstraints(min_length=1, max_length=128), AfterValidator(_printable)]
Key = Annotated[Name, AfterValidator(_without_outer_spaces)]
Moment = Annotated[AwareDatetime, BeforeValidator(_rfc3339), AfterValidator(_sane_year)]
CallbackUrl = Annotated[
    str, StringConstraints(min_length=1, max_length=2048), AfterValidator(_http_url)
]
Int64 = Annotated[int, Field(json_schema_extra={"format": "int64"})]
Timestamp = Annotated[
    str, Field(json_schema_extra={"format": "date-time"}, examples=["2026-01-31T09:00:00.000Z"])
]
StatusWord = Literal[
    "WAITING", "RUNNING", "SUCCEEDED", "FAILED", "PAUSED", "CANCELLED", "BLOCKED", "SCHEDULED"
]
ExecutionWord = Literal[
    "CLAIMED", "RUNNING", "SUCCEEDED", "FAILED", "TIMED_OUT", "LOST", "CANCELLED", "RETURNED"
]


class _Wire(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=False, extra="forbid", frozen=True
    )


class SubmitJob(_Wire):
    """A job to run once (now, at `runAt`, after `delayMs`), or a schedule that makes such jobs."""

    client_request_id: Key = Field(
        description="The idempotency key: one job for each, while the job is retained."
    )
    job_name: Name
    job_handler: Key = Field(description="The name of the function that workers offer.")
    params: Any = Field(None, description="Any JSON, up to 64 KiB; the handler's argument.")
    secret_params: bool = Field(
        False, strict=True, description="`params` are kept encrypted and never shown."
    )
    secret_result: bool = Field(
        False,
        strict=True,
        description="The result is kept encrypted and not shown: only the callback tells it.",
    )
    run_at: Moment | None = Field(None, description="RFC 3339 with an offset.")
    delay_ms: int | None = Field(None, ge=0, le=MAX_DELAY_MS, strict=True)
    callback_url: CallbackUrl | None = Field(
        None, description="http or https; gets a signed POST when the job ends."
    )
    callback_events: CallbackEvents | None = Field(
        None,
        description="What it is called for: how the job ends by default; `started` and "
        "`retrying` are of each attempt.",
    )
    callback_headers: CallbackHeaders | None = Field(
        None,
        description='Sent with each callback; `{"secret": "..."}` is kept encrypted and not shown.',
    )
    expires_at: Moment | None = Field(
        None, description="FAILED with the code `expired` unless an attempt has begun by then."
    )
    cron_expr: str | None = Field(
        None, max_length=1024, description="Makes a schedule; up to 128 characters."
    )
    cron_dialect: Dialect | None = Field(None, description="Left out: as the fields tell.")
    timezone: str | None = Field(
        None, max_length=64, description="An IANA name, as `Europe/Berlin`; UTC by default."
    )
    dst_gap: DstGap | None = Field(None, description="`shift` by default.")
    dst_fold: DstFold | None = Field(None, description="`first` by default.")
    interval_ms: int | None = Field(
        None, ge=1, le=MAX_DELAY_MS, strict=True, description="Makes a schedule."
    )
    interval_mode: Literal["fixedRate", "fixedDelay"] | None = Field(
        None, description="`fixedRate` by default; `fixedDelay` counts from the end of a run."
    )
    start_at: Moment | None = Field(None, description="No fire before it.")
    end_at: Moment | None = Field(None, description="No fire after it.")
    max_fires: int | None = Field(None, ge=1, le=MAX_FIRES, strict=True)
    jitter_ms: int | None = Field(
        None, ge=0, le=86_400_000, strict=True, description="All its fires are put off by up to it."
    )
    misfire_policy: Literal["skip", "once", "all"] | None = Field(
        None, description="`once` by default: what becomes of fires that nobody was there for."
    )
    misfire_cap: int | None = Field(None, ge=1, le=1000, strict=True, description="For `all`: 100.")
    misfire_spacing_ms: int | None = Field(
        None, ge=0, le=86_400_000, strict=True, description="For `all`: 0."
    )
    catch_up_window_ms: int | None = Field(
        None, ge=1, le=MAX_DELAY_MS, strict=True, description="Older fires are never made up for."
    )
    overlap_policy: OverlapPolicy | None = Field(
        None, description="`skip` by default: what becomes of a fire while a run goes on."
    )
    priority: int = Field(5, ge=0, le=9, strict=True, description="9 first.")
    timeout_ms: int | None = Field(None, ge=1, le=604_800_000, strict=True)
    max_retry: int = Field(3, ge=0, le=1000, strict=True)
    retry_interval_seconds: float = Field(60, ge=0, le=86_400, strict=True)
    retry_backoff: Literal["fixed", "exponential"] = "fixed"
    concurrency_key: Key | None = Field(
        None,
        description="Of the tenant's jobs with this key at most concurrencyLimit run at once; "
        "one too many is BLOCKED until another has ended.",
    )
    concurrency_limit: int | None = Field(None, ge=1, le=MAX_CONCURRENCY, strict=True)
    rate_key: Key | None = Field(
        None, description="Runs of the tenant's jobs with this key begin ratePerSecond apart."
    )
    rate_per_second: float | None = Field(None, ge=MIN_RATE, le=MAX_RATE, strict=True)
    labels: dict[
        Annotated[str, StringConstraints(pattern=LABEL_NAME)],
        Annotated[str, StringConstraints(max_length=128), AfterValidator(_printable)],
    ] = Field(
        default_factory=dict,
        max_length=MAX_LABELS,
        description="`worker.NAME` asks for a worker whose label NAME has that value.",
    )

    @model_validator(mode="after")
    def _one_moment(self) -> Self:
        when = {
            "runAt": self.run_at,
            "delayMs": self.delay_ms,
            "cronExpr": self.cron_expr,
            "intervalMs": self.interval_ms,
        }
        sent = [name for name, value in when.items() if value is not None]
        if len(sent) > 1:
            raise ValueError(f"send {' or '.join(sent)}, not both")
        if self.run_at and self.expires_at and self.expires_at <= self.run_at:
            raise ValueError("expiresAt must be later than runAt")
        if self.callback_url is None and (self.callback_events or self.callback_headers):
            raise ValueError("callbackEvents and callbackHeaders need a callbackUrl")
        return self

    @model_validator(mode="after")
    def _whole_keys(self) -> Self:
        if (self.concurrency_key is None) != (self.concurrency_limit is None):
            raise ValueError("send concurrencyKey and concurrencyLimit together")
        if (self.rate_key is None) != (self.rate_per_second is None):
            raise ValueError("send rateKey and ratePerSecond together")
        keyed = self.concurrency_key is not None or self.rate_key is not None
        if keyed and (self.cron_expr is not None or self.interval_ms is not None):
            raise ValueError("a schedule takes no concurrencyKey and no rateKey: see overlapPolicy")
        return self


def _not_sent() -> Any:
    """Stand for a field that was not sent; the document shows no default for it."""
    return None


class ChangeJob(_Wire):
    """New values for a job that waits; what is not sent stays as it is."""

    run_at: Moment = Field(default_factory=_not_sent, description="RFC 3339 with an offset.")
    delay_ms: int = Field(default_factory=_not_sent, ge=0, le=MAX_DELAY_MS, strict=True)
    params: Any = Field(default_factory=_not_sent, description="Any JSON, up to 64 KiB.")
    callback_url: CallbackUrl | None = Field(
        default_factory=_not_sent, description="null: no callback."
    )
    callback_events: CallbackEvents | None = Field(
        default_factory=_not_sent, description="null: how it ends."
    )
    callback_headers: CallbackHeaders | None = Field(
        default_factory=_not_sent, description="All of them anew; null: none."
    )
    expires_at: Moment | None = Field(default_factory=_not_sent, description="null: never expires.")
    cron_expr: str = Field(
        default_factory=_not_sent,
        max_length=1024,
        description="Of a schedule, as all up to `overlapPolicy`; its next fire is found anew.",
    )
    cron_dialect: Dialect = Field(default_factory=_not_sent)
    timezone: str = Field(default_factory=_not_sent, max_length=64)
    dst_gap: DstGap = Field(default_factory=_not_sent)
    dst_fold: DstFold = Field(default_factory=_not_sent)
    interval_ms: int = Field(default_factory=_not_sent, ge=1, le=MAX_DELAY_MS, strict=True)
    start_at: Moment | None = Field(default_factory=_not_sent, description="null: at once.")
    end_at: Moment | None = Field(default_factory=_not_sent, description="null: for ever.")
    max_fires: int | None = Field(
        default_factory=_not_sent, ge=1, le=MAX_FIRES, strict=True, description="null: no limit."
    )
    jitter_ms: int | None = Field(default_factory=_not_sent, ge=0, le=86_400_000, strict=True)
    misfire_policy: Literal["skip", "once", "all"] = Field(default_factory=_not_sent)
    misfire_cap: int | None = Field(default_factory=_not_sent, ge=1, le=1000, strict=True)
    misfire_spacing_ms: int | None = Field(
        default_factory=_not_sent, ge=0, le=86_400_000, strict=True
    )
    catch_up_window_ms: int | None = Field(
        default_factory=_not_sent, ge=1, le=MAX_DELAY_MS, strict=True
    )
    overlap_policy: OverlapPolicy = Field(default_factory=_not_sent)
    priority: int = Field(
        default_factory=_not_sent, ge=0, le=9, strict=True, description="9 first."
    )
    timeout_ms: int | None = Field(
        default_factory=_not_sent, ge=1, le=604_800_000, strict=True, description="null: an hour."
    )
    max_retry: int = Field(default_factory=_not_sent, ge=0, le=1000, strict=True)
    retry_interval_seconds: float = Field(default_factory=_not_sent, ge=0, le=86_400, strict=True)
    retry_backoff: Literal["fixed", "exponential"] = Field(default_factory=_not_sent)

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("send at least one field to change")
        if {"run_at", "delay_ms"} <= self.model_fields_set:
            raise ValueError("send runAt or delayMs, not both")
        return self


class ResumeJob(_Wire):
    """What becomes of the fires of a schedule that passed while it was paused."""

    missed: Literal["skip", "catchUp"] = Field(
        "skip", description="`catchUp`: they are dealt with as its `misfirePolicy` says."
    )


class BackfillJobs(_Wire):
    """Past fires of a schedule to run after all: from and to are included."""

    from_: Moment = Field(alias="from")
    to: Moment
    dry_run: bool = Field(False, strict=True, description="Only tell what would be run.")
    max_concurrent: int = Field(
        1, ge=1, le=100, strict=True, description="Most of these runs at a time."
    )


class TriggerJob(_Wire):
    """What a job that is made due now is to run with; without `params` what it has."""

    params: Any = Field(
        default_factory=_not_sent, description="Any JSON, up to 64 KiB; replaces the job's params."
    )
    client_request_id: Annotated[Key, StringConstraints(max_length=120)] = Field(
        default_factory=_not_sent,
        description="For a schedule alone: one such id is one job, however often it is sent.",
    )


class JobError(_Wire):
    """Why a job or an execution did not succeed."""

    code: str
    message: str


class Progress(_Wire):
    """How far a run has come, by its handler's word."""

    value: float = Field(ge=0, le=1)
    text: str
    at: Timestamp


class Execution(_Wire):
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
    reason: str | None = Field(description="Why the platform, not the handler, ended it.")


class JobWarning(_Wire):
    """Something that keeps an accepted job from running now."""

    code: str
    message: str


class Schedule(_Wire):
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


class Job(_Wire):
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


class Reason(_Wire):
    """One reason why a job is where it is; docs/reasons.md says what each code means."""

    code: ReasonCode
    message: str = Field(description="For people; it may change, the code does not.")
    details: dict[str, Any] = Field(description="What the message is made of.")
    since: Timestamp | None = Field(description="From when it holds, where that is known.")


class ExplainedAttempt(_Wire):
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
    reason: str | None = Field(description="Why the platform, not the handler, ended it.")
    story: str


class Explanation(_Wire):
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


class RefusedItem(_Wire):
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


class SubmitBatch(_Wire):
    """Jobs to be answered one by one."""

    jobs: list[SubmitJob] = Field(min_length=1, max_length=500)


class BatchAnswer(_Wire):
    """One item a job, in the order of the request."""

    items: list[AcceptedItem | RefusedItem]


class ListedJob(Job):
    """A job in a list: `executions` is empty, and bodies over 1 KiB are left out."""

    omitted: list[Literal["params", "result"]] = Field(
        description="What is shown as null because it is long: look at the job for it."
    )


class JobList(_Wire):
    """A page of jobs, newest first. It may be short, even empty, while `nextCursor` is set."""

    items: list[ListedJob]
    next_cursor: str | None


class Skipped(_Wire):
    """Consecutive fires of a schedule that did not run, and why."""

    from_: Timestamp = Field(alias="from")
    to: Timestamp
    count: Int64
    reason: Literal[
        "misfire_skip", "misfire_once", "over_cap", "outside_window", "paused", "overlap"
    ]


class SkippedList(_Wire):
    """A page of what did not run, latest first."""

    items: list[Skipped]
    next_cursor: str | None


class Backfill(_Wire):
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


class BackfillList(_Wire):
    """A page of backfills, newest first."""

    items: list[Backfill]
    next_cursor: str | None


class CallbackTry(_Wire):
    """One try of a callback."""

    try_number: int = Field(alias="try")
    at: Timestamp
    worker_id: str
    delivered: bool
    status_code: int | None = Field(description="null: no answer.")
    latency_ms: int
    error: str | None
    answer: str | None = Field(description="The first 2 KiB of what was answered.")


class Callback(_Wire):
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


class Redelivered(_Wire):
    """How many callbacks are tried again."""

    redelivered: int


class CallbackList(_Wire):
    """A page of callbacks, newest first."""

    items: list[Callback]
    next_cursor: str | None


class ExecutionList(_Wire):
    """A page of executions, newest first."""

    items: list[Execution]
    next_cursor: str | None


class LogLine(_Wire):
    """One line that a run said. `seq` counts all of them from 1, dropped ones included."""

    seq: Int64
    time: Timestamp
    level: Literal["debug", "info", "warning", "error", "critical"]
    source: Literal["log", "stdout", "stderr", "ctx", "oncue"] = Field(
        description="`oncue`: the platform's word on lines that were dropped in this place."
    )
    message: str
    fields: dict[str, Any] | None


class LogPage(_Wire):
    """A page of lines, oldest first."""

    items: list[LogLine]
    next_cursor: str | None = Field(description="null: no more lines for now.")
    complete: bool = Field(description="Whether no more lines will come at all.")


class Worker(_Wire):
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


class WorkerList(_Wire):
    """A page of workers, newest heartbeat first."""

    items: list[Worker]
    next_cursor: str | None


class Handler(_Wire):
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


class HandlerList(_Wire):
    """The handlers on offer, by name."""

    items: list[Handler]
    next_cursor: str | None
