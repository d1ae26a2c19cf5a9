"""Why a job is where it is, as stable codes and sentences. All evidence is an argument."""

from __future__ import annotations

from typing import Any, Final

from app.dispatch.standing import DispatcherNote, Standings
from app.jobs.reason_codes import Reason, ReasonCode
from app.jobs.stories import clipped, span
from app.jobs.why_dispatch import why_not_dispatched
from app.jobs.why_ended import ENDED, how_it_ended, what_became_of_its_callback
from app.jobs.why_running import why_running, why_still_stopping
from app.jobs.why_schedule import fired_late, paused, why_schedule
from app.jobs.why_workers import why_not_taken
from app.lifecycle.evidence import Evidence
from app.lifecycle.states import ExecutionStatus, JobKind, JobStatus, sources
from app.plumbing.times import rfc3339

HOLDERS_NAMED: Final = 10


def reasons_of(found: Evidence, told: Standings, own: DispatcherNote) -> list[Reason]:
    """Say why a job is where it is, the most telling reason first.

    `own` describes the process that answers, which need not be the one that dispatches.
    """
    match JobKind(found.job["kind"]), JobStatus(found.job["status"]):
        case JobKind.SCHEDULE, _ if found.schedule is not None:
            reasons = why_schedule(found, found.schedule)
        case _, status if status in ENDED:
            reasons = [how_it_ended(found), *what_became_of_its_callback(found)]
        case _, JobStatus.PAUSED:
            reasons = [paused(found)]
        case _, JobStatus.BLOCKED:
            job = found.job
            of_key = job["concurrency_key"] is not None and not job["behind_another_fire"]
            reasons = [_key_is_taken(found) if of_key else _blocked(found)]
        case JobKind.GROUP, _:
            reasons = [_group()]
        case _, JobStatus.RUNNING:
            reasons = why_running(found, told)
        case _:
            reasons = _waiting(found, told, own)
    reasons += [*_expires(found), *fired_late(found)]
    # It keeps a due job from being claimed, and is news beside anything else.
    stopping = list(why_still_stopping(found, told))
    return stopping + reasons if found.is_due else reasons + stopping


def _waiting(found: Evidence, told: Standings, own: DispatcherNote) -> list[Reason]:
    if not found.is_due:
        return [_later(found)]
    if found.job["stopping_execution_id"] is not None:
        return []
    reasons = [*why_not_dispatched(told, own), *why_not_taken(found, told)]
    running, most = found.running_of_tenant, found.job["running_jobs"]
    if running is not None and running >= most:
        reasons.append(_tenant_at_limit(running, most, may_borrow=bool(found.job["may_borrow"])))
    if found.ahead.higher:
        reasons.append(_higher_first(found))
    return reasons or [_about_to_start(found)]


def _later(found: Evidence) -> Reason:
    job = found.job
    due, now = job["next_trigger_time"], job["now_ms"]
    details = {"dueAt": rfc3339(due), "inMs": due - now}
    if job["rate_key"] is not None and job["rate_due"] == due:
        rate = f"{job['rate_per_second']:g}"
        return Reason(
            ReasonCode.RATE_LIMIT,
            f"Runs with the rateKey '{job['rate_key']}' begin {rate} a second: its turn "
            f"is at {rfc3339(due)}, in {span(due - now)}.",
            details | {"rateKey": job["rate_key"], "ratePerSecond": job["rate_per_second"]},
        )
    if not job["attempt"]:
        return Reason(
            ReasonCode.NOT_DUE, f"It is due at {rfc3339(due)}, in {span(due - now)}.", details
        )
    details |= {"attempt": job["attempt"], "maxRetry": job["max_retry"]}
    why, since = ".", None
    counted = (row for row in found.executions if row["status"] != ExecutionStatus.RETURNED)
    if (last := next(counted, None)) is not None:
        since = last["finished_at"]
        details |= {"executionId": last["execution_id"], "errorCode": last["error_code"]}
        what = last["error_message"] or last["reason"] or last["error_code"]
        why = f": {clipped(what)}" if what else "."
    return Reason(
        ReasonCode.RETRY_WAIT,
        f"Attempt {job['attempt']} of {job['max_retry'] + 1} failed{why} The next one "
        f"is due at {rfc3339(due)}, in {span(due - now)}.",
        details,
        since,
    )


def _expires(found: Evidence) -> list[Reason]:
    job = found.job
    expires_at = job["expires_at"]
    may_expire = JobStatus(job["status"]) in sources("expire", JobKind.TASK)
    if expires_at is None or job["attempt"] or not may_expire:
        return []
    left = expires_at - job["now_ms"]
    when = f"in {span(left)}" if left > 0 else "now"
    return [
        Reason(
            ReasonCode.EXPIRES,
            f"It expires at {rfc3339(expires_at)}, {when}, unless an attempt has begun by then.",
            {"expiresAt": rfc3339(expires_at), "inMs": max(0, left)},
        )
    ]


def _blocked(found: Evidence) -> Reason:
    job = found.job
    details: dict[str, Any] = {}
    if job["parent_id"] is not None:
        details["parentId"] = job["parent_id"]
        if job["parent_status"] is not None:
            details["parentStatus"] = JobStatus(job["parent_status"]).name
    return Reason(ReasonCode.BLOCKED, "It waits for other jobs to end.", details)


def _key_is_taken(found: Evidence) -> Reason:
    job = found.job
    limit = job["concurrency_limit"]
    return Reason(
        ReasonCode.CONCURRENCY_LIMIT,
        f"Of the jobs with the concurrencyKey '{job['concurrency_key']}' at most {limit} "
        f"{'runs' if limit == 1 else 'run'} at once: it begins when one of them has ended.",
        {
            "concurrencyKey": job["concurrency_key"],
            "concurrencyLimit": limit,
            "holders": list(found.holders[:HOLDERS_NAMED]),
            "more": len(found.holders) > HOLDERS_NAMED,
        },
    )


def _group() -> Reason:
    return Reason(ReasonCode.WAITS_FOR_CHILDREN, "It ends when its children have ended.")


def _tenant_at_limit(running: int, most: int, *, may_borrow: bool) -> Reason:
    more = "more only what no other tenant wants" if may_borrow else "no more"
    return Reason(
        ReasonCode.TENANT_AT_LIMIT,
        f"{running} jobs of its tenant run; its runningJobs are {most}, and it may have {more}.",
        {"running": running, "runningJobs": most, "mayBorrow": may_borrow},
    )


def _higher_first(found: Evidence) -> Reason:
    ahead = found.ahead
    least = "At least " if ahead.at_least else ""
    return Reason(
        ReasonCode.HIGHER_PRIORITY_FIRST,
        f"{least}{ahead.higher} due {'job' if ahead.higher == 1 else 'jobs'} of its queue "
        f"{'has' if ahead.higher == 1 else 'have'} a higher priority than {found.job['priority']}.",
        {"ahead": ahead.higher, "atLeast": ahead.at_least, "priority": found.job["priority"]},
    )


def _about_to_start(found: Evidence) -> Reason:
    due, now = found.job["next_trigger_time"], found.job["now_ms"]
    return Reason(
        ReasonCode.ABOUT_TO_START,
        "It is due and a worker has a free slot: it will be claimed at once.",
        {"dueForMs": now - due, "ahead": found.ahead.same, "atLeast": found.ahead.at_least},
        due,
    )
