"""What a caller submits and asks for, by Python's names, and the same as the API takes it."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypedDict

from oncue.results import given_moment, rfc3339

Seconds = float | timedelta


SecretKind = Literal["symmetric", "ed25519"]
CallbackEvent = Literal["succeeded", "failed", "cancelled", "started", "retrying"]


class JobOptions(TypedDict, total=False):
    """The options of `submit`; `NewJob` says what they mean."""

    name: str | None
    request_id: str
    run_at: datetime | None
    delay: Seconds | None
    priority: int | None
    timeout: Seconds | None
    max_retry: int | None
    retry_interval: Seconds | None
    retry_backoff: Literal["fixed", "exponential"] | None
    callback_url: str | None
    callback_events: Sequence[CallbackEvent] | None
    callback_headers: Mapping[str, str | Mapping[str, str]] | None
    secret_params: bool | None
    secret_result: bool | None
    expires_at: datetime | None
    concurrency_key: str | None
    concurrency_limit: int | None
    rate_key: str | None
    rate_per_second: float | None
    labels: Mapping[str, str] | None
    cron: str | None
    cron_dialect: Literal["unix", "quartz"] | None
    timezone: str | None
    dst_gap: Literal["shift", "skip"] | None
    dst_fold: Literal["first", "both", "second"] | None
    interval: Seconds | None
    interval_mode: Literal["fixedRate", "fixedDelay"] | None
    start_at: datetime | None
    end_at: datetime | None
    max_fires: int | None
    jitter: Seconds | None
    misfire_policy: Literal["skip", "once", "all"] | None
    misfire_cap: int | None
    misfire_spacing: Seconds | None
    catch_up_window: Seconds | None
    overlap_policy: Literal["skip", "queue", "allow", "replace"] | None


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A job to submit. What is None is left to the server's default.

    `request_id` is the idempotency key: it is drawn here when none is given, so one NewJob is one
    job however often it is submitted. `name` is for people, the handler's name by default. It
    runs at once, at `run_at` (with a time zone), or after `delay`. `timeout` is that of each
    attempt. If no attempt has begun at `expires_at` (with a time zone), the job fails. Durations
    are in seconds or a timedelta.

    `callback_url` is called for `callback_events`, by default when the job ends, with
    `callback_headers`; a value of `{"secret": "..."}` is kept encrypted and never shown.

    Of the jobs of the tenant with one `concurrency_key` at most `concurrency_limit` run at once;
    those with one `rate_key` begin `rate_per_second` apart.
    With `secret_params` the params, with `secret_result` the result are kept encrypted and never
    shown: the handler gets the params, and only the callback tells the result.

    With `cron` or `interval` it is a schedule, which makes such a job at each of its times, from
    `start_at` to `end_at`; the options from `cron` on are those of schedules.

    Raises:
        ValueError: a moment has no time zone, more than one of `run_at`, `delay`, `cron` and
            `interval` is given, or the request_id is empty.
    """

    handler: str = field(kw_only=False)
    params: Any = field(default=None, kw_only=False)
    name: str | None = None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    run_at: datetime | None = None
    delay: Seconds | None = None
    priority: int | None = None
    timeout: Seconds | None = None
    max_retry: int | None = None
    retry_interval: Seconds | None = None
    retry_backoff: Literal["fixed", "exponential"] | None = None
    callback_url: str | None = None
    callback_events: Sequence[CallbackEvent] | None = None
    callback_headers: Mapping[str, str | Mapping[str, str]] | None = field(default=None, repr=False)
    secret_params: bool | None = None
    secret_result: bool | None = None
    expires_at: datetime | None = None
    concurrency_key: str | None = None
    concurrency_limit: int | None = None
    rate_key: str | None = None
    rate_per_second: float | None = None
    labels: Mapping[str, str] | None = None
    cron: str | None = None
    cron_dialect: Literal["unix", "quartz"] | None = None
    timezone: str | None = None
    dst_gap: Literal["shift", "skip"] | None = None
    dst_fold: Literal["first", "both", "second"] | None = None
    interval: Seconds | None = None
    interval_mode: Literal["fixedRate", "fixedDelay"] | None = None
    start_at: datetime | None = None
    end_at: datetime | None = None
    max_fires: int | None = None
    jitter: Seconds | None = None
    misfire_policy: Literal["skip", "once", "all"] | None = None
    misfire_cap: int | None = None
    misfire_spacing: Seconds | None = None
    catch_up_window: Seconds | None = None
    overlap_policy: Literal["skip", "queue", "allow", "replace"] | None = None

    def __post_init__(self) -> None:
        if not self.request_id:
            raise ValueError("request_id must not be empty; leave it out to have one drawn")
        when = ("run_at", "delay", "cron", "interval")
        given = [name for name in when if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give {' or '.join(given)}, not both")
        for name in ("run_at", "expires_at", "start_at", "end_at"):
            moment = getattr(self, name)
            if moment is not None:
                given_moment(name, moment)

    def body(self) -> bytes:
        """Return the JSON that is submitted; the same in every try.

        Raises:
            TypeError, ValueError: params are not JSON.
        """
        fields = {
            "clientRequestId": self.request_id,
            "jobName": self.handler if self.name is None else self.name,
            "jobHandler": self.handler,
            "params": self.params,
            "runAt": _moment(self.run_at),
            "delayMs": _milliseconds(self.delay),
            "priority": self.priority,
            "timeoutMs": _milliseconds(self.timeout),
            "maxRetry": self.max_retry,
            "retryIntervalSeconds": _seconds(self.retry_interval),
            "retryBackoff": self.retry_backoff,
            "callbackUrl": self.callback_url,
            "callbackEvents": None if self.callback_events is None else list(self.callback_events),
            "callbackHeaders": None
            if self.callback_headers is None
            else {
                name: value if isinstance(value, str) else dict(value)
                for name, value in self.callback_headers.items()
            },
            "secretParams": self.secret_params,
            "secretResult": self.secret_result,
            "expiresAt": _moment(self.expires_at),
            "concurrencyKey": self.concurrency_key,
            "concurrencyLimit": self.concurrency_limit,
            "rateKey": self.rate_key,
            "ratePerSecond": self.rate_per_second,
            "labels": None if self.labels is None else dict(self.labels),
            "cronExpr": self.cron,
            "cronDialect": self.cron_dialect,
            "timezone": self.timezone,
            "dstGap": self.dst_gap,
            "dstFold": self.dst_fold,
            "intervalMs": _milliseconds(self.interval),
            "intervalMode": self.interval_mode,
            "startAt": _moment(self.start_at),
            "endAt": _moment(self.end_at),
            "maxFires": self.max_fires,
            "jitterMs": _milliseconds(self.jitter),
            "misfirePolicy": self.misfire_policy,
            "misfireCap": self.misfire_cap,
            "misfireSpacingMs": _milliseconds(self.misfire_spacing),
            "catchUpWindowMs": _milliseconds(self.catch_up_window),
            "overlapPolicy": self.overlap_policy,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return json_body(given)


class JobChanges(TypedDict, total=False):
    """What `revise` changes: what is not given stays.

    None clears `params`, `timeout` (an hour), `callback_url`, `expires_at`, and keys, which are
    given with their limits. Moments need a time zone; durations are in seconds or a timedelta.
    """

    params: Any
    run_at: datetime
    delay: Seconds
    priority: int
    timeout: Seconds | None
    max_retry: int
    retry_interval: Seconds
    retry_backoff: Literal["fixed", "exponential"]
    callback_url: str | None
    callback_events: Sequence[str] | None
    callback_headers: Mapping[str, Any] | None
    expires_at: datetime | None
    concurrency_key: str | None
    concurrency_limit: int | None
    rate_key: str | None
    rate_per_second: float | None


def changes_body(changes: JobChanges) -> bytes:
    """Return the JSON of a PATCH.

    Raises:
        TypeError: there is no such field, or params are not JSON.
        ValueError: nothing is changed, or a value has no form in the API.
    """
    if not changes:
        raise ValueError("give at least one field to change")
    if "run_at" in changes and "delay" in changes:
        raise ValueError("give run_at or delay, not both")
    fields: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in _CHANGED_NAMES:
            raise TypeError(f"revise() changes no {name!r}")
        fields[_CHANGED_NAMES[name]] = _wire_value(name, value)
    return json_body(fields)


def _wire_value(name: str, value: Any) -> Any:
    match name:
        case "run_at":
            return given_moment(name, value)
        case "expires_at":
            return None if value is None else given_moment(name, value)
        case "delay" | "timeout":
            return _milliseconds(value)
        case "retry_interval":
            return _seconds(value)
    return value


def json_body(fields: Mapping[str, Any]) -> bytes:
    """Write the JSON of a request.

    Raises:
        TypeError, ValueError: a value is not JSON.
    """
    return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()


_CHANGED_NAMES: Final = {
    "params": "params",
    "run_at": "runAt",
    "delay": "delayMs",
    "priority": "priority",
    "timeout": "timeoutMs",
    "max_retry": "maxRetry",
    "retry_interval": "retryIntervalSeconds",
    "retry_backoff": "retryBackoff",
    "callback_url": "callbackUrl",
    "callback_events": "callbackEvents",
    "callback_headers": "callbackHeaders",
    "expires_at": "expiresAt",
    "concurrency_key": "concurrencyKey",
    "concurrency_limit": "concurrencyLimit",
    "rate_key": "rateKey",
    "rate_per_second": "ratePerSecond",
}


class TriggerOptions(TypedDict, total=False):
    """How `trigger` runs a job: with other `params` (None: null), and only at this `revision`.

    With a `request_id`, of a schedule alone, the call may be repeated: it is one job.
    """

    params: Any
    revision: int
    request_id: str


class JobFilter(TypedDict, total=False):
    """What `list` may be narrowed by: one of the first five, and one range (`to` excluded)."""

    status: str | None
    handler: str | None
    name_prefix: str | None
    label: tuple[str, str] | None
    request_id: str | None
    created_from: datetime | None
    created_to: datetime | None
    finished_from: datetime | None
    finished_to: datetime | None


BulkAction = Literal["cancel", "retry", "pause", "resume", "redeliver"]


class BulkFilter(TypedDict, total=False):
    """Which jobs a bulk action meets: a status, one of the next three, and one range."""

    status: str | None
    handler: str | None
    name_prefix: str | None
    label: tuple[str, str] | None
    created_from: datetime | None
    created_to: datetime | None
    finished_from: datetime | None
    finished_to: datetime | None


class CronOptions(TypedDict, total=False):
    """How `cron_preview` reads an expression, and from when on it looks."""

    dialect: Literal["unix", "quartz"] | None
    timezone: str | None
    after: datetime | None
    count: int | None
    dst_gap: Literal["shift", "skip"] | None
    dst_fold: Literal["first", "both", "second"] | None


_QUERY_NAMES: Final = {
    "status": "status",
    "handler": "handler",
    "name_prefix": "namePrefix",
    "label": "label",
    "request_id": "clientRequestId",
    "created_from": "createdFrom",
    "created_to": "createdTo",
    "finished_from": "finishedFrom",
    "finished_to": "finishedTo",
}


_CRON_NAMES: Final = {
    "dialect": "dialect",
    "timezone": "timezone",
    "after": "after",
    "count": "count",
    "dst_gap": "dstGap",
    "dst_fold": "dstFold",
}


def cron_query_of(expr: str, options: CronOptions) -> dict[str, str]:
    """Return the query of a preview.

    Raises:
        TypeError: there is no such option.
        ValueError: `after` has no time zone.
    """
    query = {"expr": expr}
    for name, value in options.items():
        if name not in _CRON_NAMES:
            raise TypeError(f"cron_preview() has no option {name!r}")
        if value is not None:
            query[_CRON_NAMES[name]] = _text(name, value)
    return query


def query_of(narrowed: JobFilter | BulkFilter) -> dict[str, str]:
    """Return the query of a list, or the filter of a bulk action.

    Raises:
        TypeError: there is no such filter.
        ValueError: a time has no time zone.
    """
    query: dict[str, str] = {}
    for name, value in narrowed.items():
        if name not in _QUERY_NAMES:
            raise TypeError(f"there is no filter {name!r}")
        if value is not None:
            query[_QUERY_NAMES[name]] = _text(name, value)
    return query


def bulk_body(
    action: str,
    narrowed: BulkFilter,
    *,
    rate: float | None = None,
    request_id: str | None = None,
    dry_run: bool = False,
) -> bytes:
    """Return the JSON that asks for a bulk action; the same in every try.

    Raises:
        TypeError: there is no such filter.
        ValueError: a time has no time zone, or the rate is not finite.
    """
    fields: dict[str, Any] = {"action": action, "filter": query_of(narrowed)}
    if dry_run:
        fields["dryRun"] = True
    if rate is not None:
        fields["ratePerSecond"] = rate
    if request_id is not None:
        fields["clientRequestId"] = request_id
    return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()


def _text(name: str, value: object) -> str:
    if isinstance(value, datetime):
        return given_moment(name, value)
    return "=".join(value) if isinstance(value, tuple) else str(value)


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else rfc3339(moment)


def _seconds(duration: Seconds | None) -> float | None:
    return duration.total_seconds() if isinstance(duration, timedelta) else duration


def _milliseconds(duration: Seconds | None) -> int | None:
    seconds = _seconds(duration)
    if seconds is None:
        return None
    if not math.isfinite(seconds):
        raise ValueError("a duration must be finite")
    return round(seconds * 1000)
