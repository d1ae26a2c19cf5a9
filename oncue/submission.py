"""What a caller submits and asks for, by Python's names, and the same as the API takes it."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypedDict

from oncue.results import rfc3339

Seconds = float | timedelta


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
    labels: Mapping[str, str] | None


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A job to submit. What is None is left to the server's default.

    `request_id` is the idempotency key: it is drawn here when none is given, so one NewJob is one
    job however often it is submitted. `name` is for people, the handler's name by default. It
    runs at once, at `run_at` (with a time zone), or after `delay`. `timeout` is that of each
    attempt. Durations are in seconds or a timedelta.

    Raises:
        ValueError: `run_at` has no time zone, `run_at` and `delay` are both given, or the
            request_id is empty.
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
    labels: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if not self.request_id:
            raise ValueError("request_id must not be empty; leave it out to have one drawn")
        if self.run_at is not None and self.delay is not None:
            raise ValueError("give run_at or delay, not both")
        if self.run_at is not None and self.run_at.utcoffset() is None:
            raise ValueError("run_at needs a time zone, as datetime.now(UTC) has")

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
            "runAt": None if self.run_at is None else rfc3339(self.run_at),
            "delayMs": _milliseconds(self.delay),
            "priority": self.priority,
            "timeoutMs": _milliseconds(self.timeout),
            "maxRetry": self.max_retry,
            "retryIntervalSeconds": _seconds(self.retry_interval),
            "retryBackoff": self.retry_backoff,
            "callbackUrl": self.callback_url,
            "labels": None if self.labels is None else dict(self.labels),
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return json.dumps(given, allow_nan=False, separators=(",", ":")).encode()


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


BulkAction = Literal["cancel", "retry", "pause", "resume"]


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
        if value is None:
            continue
        if isinstance(value, datetime):
            if value.utcoffset() is None:
                raise ValueError(f"{name} needs a time zone, as datetime.now(UTC) has")
            text = rfc3339(value)
        elif isinstance(value, tuple):
            text = "=".join(value)
        else:
            text = str(value)
        query[_QUERY_NAMES[name]] = text
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


def _seconds(duration: Seconds | None) -> float | None:
    return duration.total_seconds() if isinstance(duration, timedelta) else duration


def _milliseconds(duration: Seconds | None) -> int | None:
    seconds = _seconds(duration)
    if seconds is None:
        return None
    if not math.isfinite(seconds):
        raise ValueError("a duration must be finite")
    return round(seconds * 1000)
