"""Every reason why a job may be where it is: a stable code, and what it means. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final


class ReasonCode(StrEnum):
    """The codes are stable: none is renamed or given another meaning; new ones may come."""

    NOT_DUE = "not_due"
    RETRY_WAIT = "retry_wait"
    EXPIRES = "expires"
    PAUSED = "paused"
    BLOCKED = "blocked"
    CONCURRENCY_LIMIT = "concurrency_limit"
    RATE_LIMIT = "rate_limit"
    FIRES_LATER = "fires_later"
    FIRES_AFTER_RUN = "fires_after_run"
    CANNOT_BE_PLANNED = "cannot_be_planned"
    RUNS_GO_ON = "runs_go_on"
    LAST_FIRE_OVERLAPPED = "last_fire_overlapped"
    LAST_FIRE_MISSED = "last_fire_missed"
    LAST_FIRE_PAUSED = "last_fire_paused"
    NO_FIRE_LEFT = "no_fire_left"
    FIRED_LATE = "fired_late"
    WAITS_FOR_CHILDREN = "waits_for_children"
    STOPPING_EXECUTION = "stopping_execution"
    REDIS_AWAY = "redis_away"
    DISPATCHER_WITHOUT_LOCK = "dispatcher_without_lock"
    CLOCK_SKEW = "clock_skew"
    NO_LIVE_WORKER = "no_live_worker"
    NO_WORKER_MATCHES_LABELS = "no_worker_matches_labels"
    WORKERS_DRAINING = "workers_draining"
    WORKER_UNREACHABLE = "worker_unreachable"
    ALL_FULL = "all_full"
    TENANT_AT_LIMIT = "tenant_at_limit"
    HIGHER_PRIORITY_FIRST = "higher_priority_first"
    ABOUT_TO_START = "about_to_start"
    CLAIMED_NOT_SENT = "claimed_not_sent"
    SENT_NOT_ANSWERED = "sent_not_answered"
    RUNNING = "running"
    CANCELLING = "cancelling"
    ENDED_SUCCEEDED = "ended_succeeded"
    ENDED_FAILED = "ended_failed"
    ENDED_CANCELLED = "ended_cancelled"
    CALLBACK_OWED = "callback_owed"
    CALLBACK_DELIVERED = "callback_delivered"
    CALLBACK_GIVEN_UP = "callback_given_up"
    CALLBACK_REFUSED = "callback_refused"


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason; `since_ms` is from when it holds, where that is known."""

    code: ReasonCode
    message: str
    details: Mapping[str, Any] = field(default_factory=dict)
    since_ms: int | None = None


_C = ReasonCode
MEANING: Final[dict[ReasonCode, tuple[str, str]]] = {
    _C.NOT_DUE: ("its time has not come", "`trigger` runs it now, PATCH moves it"),
    _C.RETRY_WAIT: ("an attempt failed, and the next one has its time", "`trigger` begins it now"),
    _C.EXPIRES: (
        "it fails with the code `expired` unless an attempt has begun by its `expiresAt`",
        "PATCH `expiresAt`; what keeps it from beginning is told beside",
    ),
    _C.PAUSED: ("a caller has paused it", "`resume`"),
    _C.BLOCKED: ("it waits for other jobs to end", "explain those, or `cancel`"),
    _C.CONCURRENCY_LIMIT: (
        "as many jobs with its `concurrencyKey` run as may; the end of one lets the next begin",
        "explain those that hold the key (`details.holders`), or `cancel`",
    ),
    _C.RATE_LIMIT: (
        "runs with its `rateKey` begin `ratePerSecond` apart, and this is its time",
        "wait; `trigger` asks for the next free time anew",
    ),
    _C.FIRES_LATER: ("it is a schedule, which makes jobs and runs none", "look at its children"),
    _C.FIRES_AFTER_RUN: (
        "it is a schedule with a fixed delay, whose next time is set when its run ends",
        "explain that run",
    ),
    _C.CANNOT_BE_PLANNED: (
        "its next times cannot be found: its zone or expression is not known to this dispatcher; "
        "it is tried again each minute, and no time is lost",
        "mend the zone data (`tzdata`), or PATCH its `timezone` or `cronExpr`",
    ),
    _C.RUNS_GO_ON: (
        "jobs that the schedule has made have not ended; `overlapPolicy` tells what becomes of "
        "a fire meanwhile",
        "explain those",
    ),
    _C.LAST_FIRE_OVERLAPPED: (
        "the last time of the schedule did not run, because another run went on",
        "`trigger` or `backfill`; another `overlapPolicy`",
    ),
    _C.LAST_FIRE_MISSED: (
        "the last time of the schedule did not run: nobody was there at its time, and its "
        "`misfirePolicy` passes over it",
        "`backfill`; another `misfirePolicy`",
    ),
    _C.LAST_FIRE_PAUSED: (
        "the last time of the schedule did not run, because it was paused",
        "`backfill`",
    ),
    _C.NO_FIRE_LEFT: (
        "the schedule is SUCCEEDED, or next will be: it has no more times (`endAt`, `maxFires`, or "
        "its expression)",
        "submit a new one",
    ),
    _C.FIRED_LATE: (
        "its schedule made it later than its time: no dispatcher fired schedules then, or the "
        "schedule was paused or could not be planned (with the `jitterMs` of now)",
        "nothing; `misfirePolicy` and `catchUpWindowMs` say what is made up for",
    ),
    _C.WAITS_FOR_CHILDREN: ("it is a group: its children have not all ended", "explain those"),
    _C.STOPPING_EXECUTION: (
        "an earlier run goes on in a thread, which cannot be stopped",
        "wait; or stop that worker, if the handler hangs",
    ),
    _C.REDIS_AWAY: ("the dispatcher that answers cannot reach Redis", "bring Redis back"),
    _C.DISPATCHER_WITHOUT_LOCK: (
        "nobody dispatches: all run with `--no-dispatch`, all refuse for their clocks, or the lock "
        "is changing hands, which takes some seconds",
        "start a dispatcher that dispatches",
    ),
    _C.CLOCK_SKEW: (
        "the clock of the dispatcher that dispatches, or of one that would, is more than 1 s off "
        "the database's; over 5 s it refuses",
        "mend its clock",
    ),
    _C.NO_LIVE_WORKER: ("no worker that lives offers the handler", "start one; check the name"),
    _C.NO_WORKER_MATCHES_LABELS: (
        "live workers offer the handler, and none has the labels that the job asks for",
        "start one with them; or cancel the job and submit it with other labels",
    ),
    _C.WORKERS_DRAINING: ("workers that could run it are about to stop", "start others"),
    _C.WORKER_UNREACHABLE: (
        "its worker, or those that could run it, do not beat, or do not answer at their address",
        "look at `ONCUE_ADVERTISE_URL`, the internal token, the network, and whether it lives",
    ),
    _C.ALL_FULL: (
        "each worker that could run it has as many runs as it may",
        "wait, start more workers, or raise `ONCUE_WORKER_CAPACITY`",
    ),
    _C.TENANT_AT_LIMIT: (
        "as many jobs of the tenant run as its `runningJobs`; it may have no more, or only what no "
        "other tenant wants (`mayBorrow`)",
        "wait, or have the limit raised",
    ),
    _C.HIGHER_PRIORITY_FIRST: (
        "due jobs of the same queue (handler and labels asked for) have a higher priority; once it "
        "was due for `ONCUE_PRIORITY_AGEING_SECONDS`, every tenth turn is for it and its like",
        "PATCH its `priority`",
    ),
    _C.ABOUT_TO_START: ("it is due, and a worker is free", "look again"),
    _C.CLAIMED_NOT_SENT: (
        "it was claimed for a worker, and nothing shows yet that it was sent",
        "look again: a dispatcher that died meanwhile is followed by one that sends it",
    ),
    _C.SENT_NOT_ANSWERED: (
        "its worker does not answer what it is sent",
        "look at the worker: only its answer or its death lets the job go on",
    ),
    _C.RUNNING: ("it runs", "`cancel` stops it"),
    _C.CANCELLING: (
        "it is CANCELLED, and its worker has not said yet that the run is over",
        "a `retry` waits for that",
    ),
    _C.ENDED_SUCCEEDED: ("it has run and succeeded", "submit a new job to run it again"),
    _C.ENDED_FAILED: (
        "it failed, and is not tried again (`retryDecision`: `budget_used_up`, `not_retryable`)",
        "`retry` begins its attempts anew",
    ),
    _C.ENDED_CANCELLED: ("a caller cancelled it", "`retry` opens it again"),
    _C.CALLBACK_OWED: (
        "its callback is not delivered yet",
        "redeliver tries it now; a worker that delivers (with `ONCUE_WEBHOOK_SECRET`) must live",
    ),
    _C.CALLBACK_DELIVERED: ("its callback was answered with 2xx", "nothing"),
    _C.CALLBACK_GIVEN_UP: ("all tries of its callback are spent", "redeliver tries it once more"),
    _C.CALLBACK_REFUSED: (
        "the receiver of its callback answered 410",
        "redeliver, if it was wrong",
    ),
}
"""What each means, and what to do about it."""


def reason_table() -> str:
    """Write the codes as a table for the documentation."""
    lines = ["| code | means | then |", "|---|---|---|"]
    lines += [f"| `{code}` | {means} | {then} |" for code, (means, then) in MEANING.items()]
    return "\n".join(lines)
