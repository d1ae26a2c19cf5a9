"""From the fields of a submission or a PATCH to the columns of a schedule: which go together."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from app.edge.problems import Problem
from app.jobs.requests import SubmitJob
from app.lifecycle.moves.submit import NewSchedule
from app.plumbing.times import epoch_ms
from app.schedules.cron import parse_cron
from app.schedules.decide import first_fire
from app.schedules.grammar import CronError
from app.schedules.routes import cron_problem
from app.schedules.zone import UnknownZone, zone_clock

OF_CRON: Final = {
    "cron_dialect": "cronDialect",
    "timezone": "timezone",
    "dst_gap": "dstGap",
    "dst_fold": "dstFold",
}
OF_INTERVALS: Final = {"interval_mode": "intervalMode"}
OF_FIXED_TIMES: Final = {
    "jitter_ms": "jitterMs",
    "misfire_policy": "misfirePolicy",
    "misfire_cap": "misfireCap",
    "misfire_spacing_ms": "misfireSpacingMs",
    "catch_up_window_ms": "catchUpWindowMs",
    "overlap_policy": "overlapPolicy",
}
OF_ALL: Final = {"start_at": "startAt", "end_at": "endAt", "max_fires": "maxFires"}
OF_SCHEDULES: Final = {**OF_CRON, **OF_INTERVALS, **OF_FIXED_TIMES, **OF_ALL}
ONLY_SCHEDULES: Final = {"cron_expr": "cronExpr", "interval_ms": "intervalMs", **OF_SCHEDULES}
ONLY_TASKS: Final = {"run_at": "runAt", "delay_ms": "delayMs", "expires_at": "expiresAt"}
_NAMES: Final = frozenset(ONLY_SCHEDULES)
COLUMN_OF: Final = {"catch_up_window_ms": "catch_up_ms"}
"""The columns that are not named like their field."""


def at_field(name: str, detail: str, *, code: str = "validation_failed") -> Problem:
    """Return a problem that points at a field."""
    sentence = f"{name}: {detail}"
    return Problem(code, sentence, errors=[{"pointer": f"/{name}", "detail": detail}])


def schedule_of(
    request: SubmitJob, tenant_id: int, *, now_ms: int, min_interval_ms: int
) -> tuple[NewSchedule | None, Problem | None]:
    """Return the schedule that a submission asks for, None if it is for a task.

    The second is why a new one is refused although its shape is right: never a repeat.

    Raises:
        Problem: `validation_failed` or `cron_invalid`.
    """
    if request.model_fields_set.isdisjoint(_NAMES):
        return None, None
    sent = {name: value for name in ONLY_SCHEDULES if (value := getattr(request, name)) is not None}
    if request.cron_expr is None and request.interval_ms is None:
        for name in sent:
            raise at_field(ONLY_SCHEDULES[name], "is for schedules; send cronExpr or intervalMs")
        return None, None
    if request.expires_at is not None:
        raise at_field("expiresAt", "is for jobs that run once, not for schedules")
    check_together(sent)
    columns = columns_of(sent)
    if request.cron_expr is not None:
        columns = {"timezone": "UTC", "dst_gap": "shift", "dst_fold": "first"} | columns
    else:
        columns.setdefault("interval_mode", "fixedRate")
        start = columns.get("start_at")
        columns["anchor_at"] = now_ms + columns["interval_ms"] if start is None else start
    if columns.get("interval_mode") == "fixedDelay":
        columns["overlap_policy"] = "allow"
    else:
        columns = {"misfire_policy": "once", "overlap_policy": "skip"} | columns
    columns = read_cron(columns)
    schedule = NewSchedule(cursor_ms=now_ms, first_ms=None, **columns)
    row = plan_row(schedule, tenant_id, request.client_request_id)
    first = first_fire(row, after_ms=now_ms)
    refusal = never_fires() if first is None else too_short(columns, min_interval_ms)
    return NewSchedule(cursor_ms=now_ms, first_ms=first, **columns), refusal


def check_together(sent: Mapping[str, Any]) -> None:
    """Refuse fields that mean nothing beside the others, so that none is without effect.

    Raises:
        Problem: `validation_failed`.
    """
    if sent.get("cron_expr") is None:
        _refuse(sent, OF_CRON, "is for cronExpr")
    if sent.get("interval_ms") is None:
        _refuse(sent, OF_INTERVALS, "is for intervalMs")
    if sent.get("interval_mode") == "fixedDelay":
        _refuse(
            sent,
            OF_FIXED_TIMES,
            "has no meaning with fixedDelay, whose next run begins when the last one has ended",
        )
    if sent.get("misfire_policy") != "all":
        _refuse(
            sent,
            {name: OF_FIXED_TIMES[name] for name in ("misfire_cap", "misfire_spacing_ms")},
            "is for the misfirePolicy all",
        )
    if sent.get("misfire_policy") == "skip":
        _refuse(
            sent,
            {"catch_up_window_ms": "catchUpWindowMs"},
            "is not for the misfirePolicy skip, which makes up for nothing",
        )
    start, end = sent.get("start_at"), sent.get("end_at")
    if start is not None and end is not None and end <= start:
        raise at_field("endAt", "must be later than startAt")


def columns_of(sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields as columns: moments as epoch ms."""
    return {
        COLUMN_OF.get(name, name): epoch_ms(value) if isinstance(value, datetime) else value
        for name, value in sent.items()
    }


def read_cron(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns with the expression read: trimmed, and with its dialect.

    Raises:
        Problem: `cron_invalid`, or `validation_failed` for an unknown zone.
    """
    if columns.get("cron_expr") is None:
        return dict(columns)
    try:
        zone_clock(columns["timezone"])
    except UnknownZone as error:
        raise at_field("timezone", str(error)) from None
    try:
        cron = parse_cron(columns["cron_expr"], columns.get("cron_dialect"))
    except CronError as error:
        raise cron_problem(error, "/cronExpr") from None
    return {**columns, "cron_expr": cron.expression, "cron_dialect": cron.dialect}


def plan_row(schedule: NewSchedule, tenant_id: int, request_id: str) -> dict[str, Any]:
    """Return what a plan is made from, for a schedule that is not stored yet."""
    names = (*COLUMN_OF.values(), *ONLY_SCHEDULES, "anchor_at")
    row = {name: getattr(schedule, name, None) for name in names}
    return row | {"tenant_id": tenant_id, "client_request_id": request_id}


def too_short(columns: Mapping[str, Any], min_interval_ms: int) -> Problem | None:
    """Return why an interval is refused, if it is."""
    interval = columns.get("interval_ms")
    if interval is None or interval >= min_interval_ms:
        return None
    return at_field("intervalMs", f"must be at least {min_interval_ms}")


def never_fires() -> Problem:
    """Say that a schedule has no fire before it ends."""
    return Problem(
        "schedule_never_fires",
        "No time of this schedule lies in the future and before endAt: change the expression, "
        "startAt or endAt.",
    )


def _refuse(sent: Mapping[str, Any], names: Mapping[str, str], why: str) -> None:
    for name, wire_name in names.items():
        if sent.get(name) is not None:
            raise at_field(wire_name, why)
