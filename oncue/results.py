"""What the server tells, as frozen objects. Fields of a newer server are ignored."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final, Generic, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer
from pydantic.alias_generators import to_camel

ENDED: Final = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})
Item = TypeVar("Item")


def rfc3339(moment: datetime) -> str:
    """Write a moment as the API does: UTC, with milliseconds."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def given_moment(name: str, moment: object) -> str:
    """Write a moment that a caller gave as `name`; it has a time zone of its own.

    Raises:
        TypeError: it is no datetime.
        ValueError: it has no time zone; that of this machine would be a guess.
    """
    if not isinstance(moment, datetime):
        raise TypeError(f"{name} is a datetime with a time zone, not {moment!r}")
    if moment.utcoffset() is None:
        raise ValueError(f"{name} needs a time zone, as datetime.now(UTC) has")
    return rfc3339(moment)


Moment = Annotated[AwareDatetime, PlainSerializer(rfc3339, when_used="json")]


class Result(BaseModel):
    """A frozen answer with Python's names; `model_dump(mode="json", by_alias=True)` undoes it."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore"
    )


class JobError(Result):
    """Why a job or an execution did not succeed: a stable code and a sentence."""

    code: str
    message: str = ""


class JobWarning(JobError):
    """Something that keeps an accepted job from running now."""


class Progress(Result):
    """How far a run has come, by its handler's word: `value` is from 0 to 1."""

    value: float
    text: str = ""
    at: Moment | None = None


class LogLine(Result):
    """One line that a run said; `seq` counts all of them from 1, dropped ones included.

    `source` is ctx, log, stdout or stderr; `oncue` tells in their place of lines that were dropped.
    """

    seq: int
    time: Moment | None = None
    level: str = "info"
    source: str = "ctx"
    message: str
    fields: dict[str, Any] | None = None


class Execution(Result):
    """One attempt to run a job on one worker, with the time of each step.

    `reason` tells why the platform, not the handler, ended it.
    """

    execution_id: str
    attempt: int
    status: str
    worker_id: str | None = None
    trigger_time: Moment | None = None
    claimed_at: Moment | None = None
    accepted_at: Moment | None = None
    started_at: Moment | None = None
    finished_at: Moment | None = None
    progress: Progress | None = None
    result: Any = None
    error: JobError | None = None
    reason: str | None = None


class Schedule(Result):
    """What a schedule was told, by the names that it was submitted with, and how far it is.

    `fires` counts the runs begun by its own fires; every fire up to `decided_until` is one of its
    children, or was skipped and is on record.
    """

    cron_expr: str | None = None
    cron_dialect: str | None = None
    timezone: str | None = None
    dst_gap: str | None = None
    dst_fold: str | None = None
    interval_ms: int | None = None
    interval_mode: str | None = None
    start_at: Moment | None = None
    end_at: Moment | None = None
    max_fires: int | None = None
    jitter_ms: int | None = None
    misfire_policy: str | None = None
    misfire_cap: int | None = None
    misfire_spacing_ms: int | None = None
    catch_up_window_ms: int | None = None
    overlap_policy: str | None = None
    fires: int = 0
    decided_until: Moment | None = None


class Skipped(Result):
    """Consecutive fires of a schedule that did not run: from the first to the last, and why."""

    from_: Moment = Field(alias="from")
    to: Moment
    count: int
    reason: str


class Backfill(Result):
    """A backfill of a schedule; a dry run has no id, and names in `nominal_times` what would run.

    `status` is DRY_RUN, OPEN, DONE or STOPPED. `total` counts the fires of the range, `existing`
    those that had a job already, `spawned` the jobs that were made so far.
    """

    backfill_id: int | None = None
    schedule_id: int
    status: str
    from_: Moment = Field(alias="from")
    to: Moment
    max_concurrent: int = 1
    total: int | None = None
    existing: int | None = None
    spawned: int = 0
    nominal_times: tuple[Moment, ...] | None = None
    created_at: Moment | None = None
    ended_at: Moment | None = None


class Job(Result):
    """A job as it was when the server answered.

    `status` is WAITING, RUNNING, SUCCEEDED, FAILED, PAUSED, CANCELLED, BLOCKED or SCHEDULED;
    `attempt` counts the attempts begun so far; `executions` are the newest few, newest first.
    In a list there are none, and `omitted` names what is None because it is long (`get` has it).
    Secret params, and a secret result, are `{"secret": "********"}`.
    """

    job_id: int
    client_request_id: str | None = None
    job_name: str
    job_handler: str
    params: Any = None
    secret_params: bool = False
    secret_result: bool = False
    status: str
    attempt: int = 0
    max_retry: int = 0
    retry_interval_seconds: float | None = None
    retry_backoff: str | None = None
    timeout_ms: int | None = None
    callback_url: str | None = None
    callback_events: tuple[str, ...] = ()
    callback_headers: dict[str, str | dict[str, str]] | None = None
    priority: int = 5
    next_trigger_time: Moment | None = None
    expires_at: Moment | None = None
    concurrency_key: str | None = None
    concurrency_limit: int | None = None
    rate_key: str | None = None
    rate_per_second: float | None = None
    parent_id: int | None = None
    nominal_time: Moment | None = None
    schedule: Schedule | None = None
    result: Any = None
    error: JobError | None = None
    progress: Progress | None = None
    revision: int = 0
    created_at: Moment | None = None
    updated_at: Moment | None = None
    finished_at: Moment | None = None
    executions: tuple[Execution, ...] = ()
    warnings: tuple[JobWarning, ...] = ()
    omitted: tuple[str, ...] = Field(default=(), exclude_if=lambda names: not names)

    @property
    def ended(self) -> bool:
        """Whether the job is SUCCEEDED, FAILED or CANCELLED."""
        return self.status in ENDED

    @property
    def succeeded(self) -> bool:
        """Whether the job is SUCCEEDED, so that `result` is what its handler returned."""
        return self.status == "SUCCEEDED"


class CallbackTry(Result):
    """One try of a callback; `answer` is the first 2 KiB of what the receiver said."""

    number: int = Field(alias="try")
    at: Moment
    worker_id: str = ""
    delivered: bool
    status_code: int | None = None
    latency_ms: int = 0
    error: str | None = None
    answer: str | None = None


class Callback(Result):
    """The callback that a job owes or owed.

    `delivery_id` is its `webhook-id`; `status` is PENDING, DELIVERED, EXHAUSTED (all tries are
    spent) or GONE (the receiver answered 410). In a list `history` has its newest tries, newest
    first.
    """

    delivery_id: str
    job_id: int
    event: str
    url: str = ""
    status: str
    tries: int = 0
    last_status_code: int | None = None
    last_error: str | None = None
    next_try_at: Moment | None = None
    created_at: Moment | None = None
    ended_at: Moment | None = None
    history: tuple[CallbackTry, ...] = ()


class Redelivered(Result):
    """How many callbacks are tried again."""

    redelivered: int


class WebhookSecret(Result):
    """A secret that signs callbacks: `kind` is symmetric, ed25519 or default (the operator's).

    `secret` is there in the answer that set it, and never again; `public_key` checks what an
    ed25519 key signs.
    """

    kind: str
    masked: str | None = None
    public_key: str | None = None
    created_at: Moment | None = None
    expires_at: Moment | None = None
    secret: str | None = Field(default=None, repr=False)


class WebhookSecrets(Result):
    """What signs callbacks now, the newest first; none: the operator's secret alone."""

    items: tuple[WebhookSecret, ...] = ()


class EgressAllow(Result):
    """The networks that callbacks may reach besides public ones; None: all that workers allow."""

    networks: tuple[str, ...] | None = None


class Reason(Result):
    """One reason why a job is where it is: `code` is stable, `message` is for people."""

    code: str
    message: str
    details: dict[str, Any] = Field(default_factory=dict)
    since: Moment | None = None


class ExplainedAttempt(Result):
    """One execution of a job, with its story in a sentence."""

    execution_id: str
    attempt: int
    worker_id: str
    status: str
    claimed_at: Moment | None = None
    accepted_at: Moment | None = None
    started_at: Moment | None = None
    finished_at: Moment | None = None
    error: JobError | None = None
    reason: str | None = None
    story: str = ""


class Explanation(Result):
    """Why a job is where it is, the most telling reason first.

    `attempts` are the newest 20, newest first; with `more_attempts` there are older ones.
    `next_actions` are the verbs that are possible.
    """

    job_id: int
    status: str
    at: Moment | None = None
    summary: str
    reasons: tuple[Reason, ...] = ()
    attempts: tuple[ExplainedAttempt, ...] = ()
    more_attempts: bool = False
    next_actions: tuple[str, ...] = ()


class JobEvent(Result):
    """What happened to a job, and the job as it was then.

    `name` is waiting, claimed, started, progress, retrying, paused, blocked, scheduled or ended.
    """

    event_id: str
    name: str
    job: Job


class Worker(Result):
    """A worker as its last heartbeat described it; `state` is UP, DRAINING or DOWN."""

    worker_id: str
    name: str = ""
    url: str = ""
    state: str
    version: str = ""
    handlers: tuple[str, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    capacity: int
    weight: float = 1.0
    active: int
    queued: int = 0
    avg_cost_ms: float = 0.0
    cpu_idle_percent: float | None = None
    delivers: bool = False
    last_heartbeat: Moment | None = None


class OfferedHandler(Result):
    """A handler that at least one live worker offers; `workers` is how many do.

    `params_schema` is the JSON Schema of its params, None when they are not typed.
    `params_checked` tells whether a submission that does not fit is refused now.
    """

    name: str
    description: str = ""
    isolation: str = "none"
    workers: int = 0
    params_schema: dict[str, Any] | None = None
    params_checked: bool = False


class CronFire(Result):
    """A moment at which a cron expression fires.

    `local` is what the zone's clock shows, with its offset. `clock_change` is `shifted` when the
    clock skips the fire's own time, `first_pass` or `second_pass` when it shows the time twice.
    """

    local: str
    utc: Moment
    clock_change: str | None = None


class ClockChange(Result):
    """A change of a zone's clock: what it would show then, unchanged, and what it does show.

    `kind` is `gap` (times are skipped) or `fold` (times are repeated). `fires` are what the
    expression does there: the last fire before the change, and the first two from it on.
    """

    utc: Moment
    before: str
    after: str
    kind: str
    fires: tuple[CronFire, ...] = ()


class CronPreview(Result):
    """When a cron expression fires next (`items`), and what it means (`description`).

    `dialect` is the one it was read in. With `follows_real_time` its minute or hour is a wildcard,
    and clock changes neither skip nor repeat a fire.
    """

    expr: str
    dialect: str
    timezone: str
    description: str
    follows_real_time: bool = False
    dst_gap: str = "shift"
    dst_fold: str = "first"
    after: Moment
    items: tuple[CronFire, ...]
    next_clock_change: ClockChange | None = None


class StatusCount(Result):
    """How many jobs are in a state; `at_least`: so many were counted, there may be more."""

    status: str
    count: int
    at_least: bool = False


class DueCount(Result):
    """How many of the WAITING jobs that were counted could run now."""

    count: int
    at_least: bool = False


class Counts(Result):
    """How many jobs are in each state, counted up to a bound."""

    items: tuple[StatusCount, ...]
    due: DueCount

    def of(self, status: str) -> StatusCount:
        """Return the count of one state; of one that the server does not know it is 0."""
        zero = StatusCount(status=status, count=0)
        return next((one for one in self.items if one.status == status), zero)


class BulkCount(Result):
    """How many jobs a bulk action would change; `matched_is_minimum`: at least so many."""

    action: str
    filter: dict[str, str] = Field(default_factory=dict)
    matched: int
    matched_is_minimum: bool = False


class BulkOperation(Result):
    """A bulk action as it was when the server answered.

    `status` is QUEUED, RUNNING, SUCCEEDED, CANCELLED or FAILED. Of `matched` jobs (at least so
    many, if `matched_is_minimum`) `examined` have had their turn: `changed` of them did change,
    and `refused` counts the others by the code that says why.
    """

    operation_id: str
    client_request_id: str | None = None
    action: str
    filter: dict[str, str] = Field(default_factory=dict)
    status: str
    rate_per_second: float = 0.0
    matched: int = 0
    matched_is_minimum: bool = False
    examined: int = 0
    changed: int = 0
    refused: dict[str, int] = Field(default_factory=dict)
    error: JobError | None = None
    created_at: Moment | None = None
    updated_at: Moment | None = None
    started_at: Moment | None = None
    finished_at: Moment | None = None

    @property
    def ended(self) -> bool:
        """Whether the operation is SUCCEEDED, CANCELLED or FAILED."""
        return self.status in ENDED


class ApiKey(Result):
    """A key, without its secret; `state` is ACTIVE, EXPIRED or REVOKED.

    A key of callers has `roles` in a tenant, one of workers a `worker_group`. While
    `old_works_until` is set, the secret before the last rotation works, too.
    """

    key_id: int
    prefix: str
    name: str
    tenant_id: int = 0
    roles: tuple[str, ...] = ()
    worker_group: str | None = None
    state: str = "ACTIVE"
    created_at: Moment | None = None
    created_by: str = ""
    rotated_at: Moment | None = None
    old_works_until: Moment | None = None
    expires_at: Moment | None = None
    revoked_at: Moment | None = None
    last_used_at: Moment | None = None


class NewApiKey(ApiKey):
    """A key just made or rotated: `key` is what its owner sends, and is never shown again."""

    key: str = Field(repr=False)


class TenantLimits(Result):
    """What a tenant may use; None is no limit. `weight` is its share beside others' weights."""

    weight: float = 1.0
    submissions_per_second: float | None = None
    waiting_jobs: int | None = None
    running_jobs: int | None = None
    stored_bytes: int | None = None
    may_borrow: bool = True


class Tenant(Result):
    """Who has jobs of its own. While `disabled`, its callers are refused."""

    tenant_id: int
    name: str
    disabled: bool = False
    created_at: Moment | None = None
    disabled_at: Moment | None = None
    limits: TenantLimits = TenantLimits()


class Draining(Result):
    """A worker that takes no more runs, and what it still holds."""

    worker_id: str
    name: str = ""
    state: str = "DRAINING"
    active: int = 0
    unreported: int = 0
    deliveries: int = 0


class AuditEntry(Result):
    """Who changed what: `before` and `after` have the values that changed, and no secrets."""

    entry_id: int
    at: Moment
    tenant_id: int = 0
    actor: str
    actor_key_id: int | None = None
    actor_tenant_id: int = 0
    action: str
    target: str
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    address: str = ""
    request_id: str = ""


class Page(Result, Generic[Item]):
    """One page of a list; the next is at `next_cursor`, if there is one."""

    items: tuple[Item, ...]
    next_cursor: str | None = None
