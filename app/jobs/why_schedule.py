"""What a schedule waits for, what became of its last time, why it has ended, and who was late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from sqlalchemy import RowMapping

from app.jobs.reason_codes import Reason, ReasonCode
from app.jobs.stories import span
from app.jobs.why_ended import how_it_ended
from app.lifecycle.evidence import CHILDREN_TOLD, Evidence
from app.lifecycle.states import JobKind, JobStatus
from app.plumbing.times import rfc3339
from app.schedules.decide import FIXED_DELAY, OVERLAP, is_past_end, spread_ms_of, times_of
from app.schedules.misfire import PUNCTUAL_MS

PAUSED: Final = "paused"
_BECAUSE: Final = {
    "misfire_skip": "they were missed, and its misfirePolicy is skip",
    "misfire_once": "they were missed, and one later fire stands for all of them",
    "over_cap": "they were missed, and more than its misfireCap were",
    "outside_window": "they were late or missed, and older than its catchUpWindowMs",
    OVERLAP: "another run of it went on",
    PAUSED: "it was paused",
}


_RUNS_LATE: Final = {
    "skip": "Its misfirePolicy is skip: it was late, and not missed.",
    "once": "Its misfirePolicy is once: of fires that were missed the latest runs.",
    "all": "Its misfirePolicy is all: fires that were missed run, the newest misfireCap of them.",
}


def fired_late(found: Evidence) -> Iterator[Reason]:
    """Tell of a fire that was made clearly later than its time by how much, and why it still ran.

    A run that a caller asked for, by trigger or backfill, has no time that it could miss.
    """
    job = found.job
    asked_for = job["child_key"] != "" or job["of_backfill"] is not None
    if job["nominal_time"] is None or job["parent_kind"] != JobKind.SCHEDULE or asked_for:
        return
    spread = spread_ms_of(
        {
            "tenant_id": job["tenant_id"],
            "client_request_id": job["parent_request_id"],
            "jitter_ms": job["parent_jitter_ms"],
        }
    )
    due, made = job["nominal_time"] + spread, job["created_at"]
    if made - due <= PUNCTUAL_MS:
        return
    policy = job["parent_misfire_policy"]
    details: dict[str, Any] = {"dueAt": rfc3339(due), "firedAt": rfc3339(made)}
    details |= {"lateMs": made - due, "spreadMs": spread, "misfirePolicy": policy}
    told = [
        f"Its time was {rfc3339(due)}, and its schedule made it {span(made - due)} later: until "
        "then no dispatcher fired schedules, or this one was paused or could not be planned."
    ]
    since = job["term_since"]
    if job["partition_no"] == 0 and since is not None and due < since <= made:
        details["dispatchChangedAt"] = rfc3339(since)
        told.append(f"The dispatcher that dispatches changed meanwhile, at {rfc3339(since)}.")
    if policy in _RUNS_LATE:
        told.append(_RUNS_LATE[policy])
    yield Reason(ReasonCode.FIRED_LATE, " ".join(told), details, made)


def why_schedule(found: Evidence, schedule: RowMapping) -> list[Reason]:
    """Say why a schedule is where it is, and what became of its last time if that did not run."""
    match JobStatus(found.job["status"]):
        case JobStatus.SUCCEEDED:
            return [_no_fire_left(found, schedule), *_runs(found, schedule)]
        case JobStatus.CANCELLED | JobStatus.FAILED:
            return [how_it_ended(found), *_runs(found, schedule)]
        case JobStatus.PAUSED:
            first = paused(found)
        case _ if not _can_be_planned(schedule):
            first = _cannot_be_planned(schedule)
        case _:
            first = _next_fire(found, schedule)
    return [first, *_last_time(schedule), *_runs(found, schedule)]


def paused(found: Evidence) -> Reason:
    """Tell that a caller has paused the job."""
    since = found.job["updated_at"]
    return Reason(
        ReasonCode.PAUSED,
        f"A caller has paused it; nothing has changed since {rfc3339(since)}.",
        {"lastChangedAt": rfc3339(since)},
        since,
    )


def _can_be_planned(schedule: RowMapping) -> bool:
    """Try what the dispatcher does: a zone may be gone, a rule may be of a later version."""
    try:
        times_of(schedule)
    except Exception:  # noqa: BLE001 - whatever it is, the dispatcher meets it too
        return False
    return True


def _cannot_be_planned(schedule: RowMapping) -> Reason:
    return Reason(
        ReasonCode.CANNOT_BE_PLANNED,
        f"Its next times cannot be found: the expression {schedule['cron_expr']!r} in the zone "
        f"{schedule['timezone']!r} is not understood here. It is tried again each minute.",
        {"cronExpr": schedule["cron_expr"], "timezone": schedule["timezone"]},
    )


def _next_fire(found: Evidence, schedule: RowMapping) -> Reason:
    due, now = found.job["next_trigger_time"], found.job["now_ms"]
    if due is not None and is_past_end(schedule, due):
        return _ends_next(schedule, due)
    if due is not None:
        return Reason(
            ReasonCode.FIRES_LATER,
            f"A schedule does not run itself: it makes a job at {rfc3339(due)}.",
            {"nextFireAt": rfc3339(due), "inMs": max(0, due - now)},
        )
    if schedule["interval_mode"] == FIXED_DELAY:
        return Reason(
            ReasonCode.FIRES_AFTER_RUN,
            f"It makes the next job {span(schedule['interval_ms'])} after the end of its last one.",
            {"intervalMs": schedule["interval_ms"], "children": list(found.going[:CHILDREN_TOLD])},
        )
    return Reason(ReasonCode.FIRES_LATER, "A schedule does not run itself: it makes jobs.")


def _ends_next(schedule: RowMapping, due_ms: int) -> Reason:
    end = rfc3339(schedule["end_at"])
    return Reason(
        ReasonCode.NO_FIRE_LEFT,
        f"It makes no more jobs: its next one would be made at {rfc3339(due_ms)}, after its "
        f"endAt, {end}. Then it ends.",
        {"fires": schedule["fires"], "endAt": end},
    )


def _last_time(schedule: RowMapping) -> Iterator[Reason]:
    """Tell why the last time that was decided did not run, if so: it stands in the ledger."""
    reason, first, last = schedule["skip_reason"], schedule["from_time"], schedule["to_time"]
    if reason is None or first is None:
        return
    code = {
        OVERLAP: ReasonCode.LAST_FIRE_OVERLAPPED,
        PAUSED: ReasonCode.LAST_FIRE_PAUSED,
    }.get(reason, ReasonCode.LAST_FIRE_MISSED)
    count = schedule["skipped"]
    when = rfc3339(last) if count == 1 else f"{rfc3339(first)} to {rfc3339(last)}"
    because = _BECAUSE.get(reason, reason)
    yield Reason(
        code,
        f"Its last {'fire' if count == 1 else f'{count} fires'} ({when}) did not run: {because}.",
        {"reason": reason, "from": rfc3339(first), "to": rfc3339(last), "count": count},
        first,
    )


def _runs(found: Evidence, schedule: RowMapping) -> Iterator[Reason]:
    if not found.going:
        return
    told = list(found.going[:CHILDREN_TOLD])
    more = len(found.going) > CHILDREN_TOLD
    details: dict[str, Any] = {"children": told, "more": more}
    details["overlapPolicy"] = schedule["overlap_policy"]
    which = ", ".join(str(one) for one in told) + (" and more" if more else "")
    verb = "has" if len(found.going) == 1 else "have"
    yield Reason(ReasonCode.RUNS_GO_ON, f"Of its jobs {which} {verb} not ended.", details)


def _no_fire_left(found: Evidence, schedule: RowMapping) -> Reason:
    job, limit, end = found.job, schedule["max_fires"], schedule["end_at"]
    details: dict[str, Any] = {"fires": schedule["fires"]}
    if limit is not None:
        details["maxFires"] = limit
    if end is not None:
        details["endAt"] = rfc3339(end)
    if limit is not None and schedule["fires"] >= limit:
        why = f"it has made the {limit} jobs of its maxFires"
    elif end is not None:
        why = f"no time is left until its endAt, {rfc3339(end)}"
    else:
        why = "its expression has no more times"
    return Reason(
        ReasonCode.NO_FIRE_LEFT, f"The schedule has ended: {why}.", details, job["finished_at"]
    )
