"""What callers send about jobs: every length and number bounded."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from app.edge.wire import CallbackUrl, Key, Moment, Name, Wire, printable
from app.jobs.callback_fields import CallbackEvents, CallbackHeaders
from app.schedules.cron import DstFold, DstGap
from app.schedules.grammar import Dialect

MAX_FIRES = 2**53
MAX_CONCURRENCY = 1000
MIN_RATE, MAX_RATE = 0.001, 10_000.0
OverlapPolicy = Literal["skip", "queue", "allow", "replace"]
MAX_PARAMS_BYTES = 64 * 1024
MAX_LABELS = 16
MAX_DELAY_MS = 10 * 366 * 24 * 3600 * 1000
LABEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,63}$"


def _expires_later(run_at: datetime, expires_at: datetime) -> None:
    if expires_at <= run_at:
        raise ValueError("expiresAt must be later than runAt")


class SubmitJob(Wire):
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
        None, ge=0, le=86_400_000, strict=True, description="For `all`: 1000. 0: all at once."
    )
    catch_up_window_ms: int | None = Field(
        None,
        ge=1,
        le=MAX_DELAY_MS,
        strict=True,
        description="No older fire runs; under 1000 is 1000.",
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
    concurrency_limit: int | None = Field(
        None,
        ge=1,
        le=MAX_CONCURRENCY,
        strict=True,
        description="With concurrencyKey: so many run at once.",
    )
    rate_key: Key | None = Field(
        None, description="Runs of the tenant's jobs with this key begin ratePerSecond apart."
    )
    rate_per_second: float | None = Field(
        None,
        ge=MIN_RATE,
        le=MAX_RATE,
        strict=True,
        description="With rateKey: so many runs begin in a second.",
    )
    labels: dict[
        Annotated[str, StringConstraints(pattern=LABEL_NAME)],
        Annotated[str, StringConstraints(max_length=128), AfterValidator(printable)],
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
        if self.run_at and self.expires_at:
            _expires_later(self.run_at, self.expires_at)
        if self.callback_url is None and (self.callback_events or self.callback_headers):
            raise ValueError("callbackEvents and callbackHeaders need a callbackUrl")
        return self

    @model_validator(mode="after")
    def _whole_keys(self) -> Self:
        if (self.concurrency_key is None) != (self.concurrency_limit is None):
            raise ValueError("send concurrencyKey and concurrencyLimit together")
        if (self.rate_key is None) != (self.rate_per_second is None):
            raise ValueError("send rateKey and ratePerSecond together")
        return self


def _not_sent() -> Any:
    """Stand for a field that was not sent; the document shows no default for it."""
    return None


class ChangeJob(Wire):
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
    concurrency_key: Key | None = Field(
        default_factory=_not_sent, description="With concurrencyLimit; null takes both away."
    )
    concurrency_limit: int | None = Field(
        default_factory=_not_sent, ge=1, le=MAX_CONCURRENCY, strict=True
    )
    rate_key: Key | None = Field(
        default_factory=_not_sent, description="With ratePerSecond; null takes both away."
    )
    rate_per_second: float | None = Field(
        default_factory=_not_sent, ge=MIN_RATE, le=MAX_RATE, strict=True
    )

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("send at least one field to change")
        if {"run_at", "delay_ms"} <= self.model_fields_set:
            raise ValueError("send runAt or delayMs, not both")
        if {"run_at", "expires_at"} <= self.model_fields_set and self.expires_at is not None:
            _expires_later(self.run_at, self.expires_at)
        return self

    @model_validator(mode="after")
    def _whole_keys(self) -> Self:
        if (self.concurrency_key is None) != (self.concurrency_limit is None):
            raise ValueError("send concurrencyKey and concurrencyLimit together, or both as null")
        if (self.rate_key is None) != (self.rate_per_second is None):
            raise ValueError("send rateKey and ratePerSecond together, or both as null")
        return self


class ResumeJob(Wire):
    """What becomes of the fires of a schedule that passed while it was paused."""

    missed: Literal["skip", "catchUp"] = Field(
        "skip", description="`catchUp`: they are dealt with as its `misfirePolicy` says."
    )


class BackfillJobs(Wire):
    """Past fires of a schedule to run after all: from and to are included."""

    from_: Moment = Field(alias="from")
    to: Moment
    dry_run: bool = Field(False, strict=True, description="Only tell what would be run.")
    max_concurrent: int = Field(
        1, ge=1, le=100, strict=True, description="Most of these runs at a time."
    )


class TriggerJob(Wire):
    """What a job that is made due now is to run with; without `params` what it has."""

    params: Any = Field(
        default_factory=_not_sent, description="Any JSON, up to 64 KiB; replaces the job's params."
    )
    client_request_id: Annotated[Key, StringConstraints(max_length=120)] = Field(
        default_factory=_not_sent,
        description="For a schedule alone: one such id is one job, however often it is sent.",
    )


class SubmitBatch(Wire):
    """Jobs to be answered one by one."""

    jobs: list[SubmitJob] = Field(min_length=1, max_length=500)
