"""An independent judge of the promises P1 to P7, over what was observed and nothing else.

`judge` is a pure function of a history: what callers were told, when handlers began and ended
and where, which workers died, what receivers got, and the rows that are left in the end. It knows
no code of the product. Times are seconds on one clock; `worker` is the id of one boot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Final, TypeVar

SAFE_SECONDS: Final = 3.0
"""So long after its end the outcome of a run must outlive its worker, if Redis could be reached."""
WAKE_SECONDS: Final = 2.5
"""How long a process that was frozen may need, after it wakes, to see that it was given up."""
RESTORE_SECONDS: Final = 12.0
"""So long a living worker may take, once it reaches Redis, to see that an outcome is gone and to
store it again: it renews every 5 s, gives up a call after 2 s, and tries again."""
CLOCK_SECONDS: Final = 0.01
"""What two readings of one moment may differ by."""
TERMINAL: Final = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})
REPEATABLE: Final = frozenset({"FAILED", "TIMED_OUT", "LOST", "RETURNED"})
"""Ends of an execution after which its job may run again."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was observed at a time."""

    at: float


@dataclass(frozen=True, slots=True)
class Accepted(Event):
    """A caller was told that its job is stored."""

    client_request_id: str
    job_id: int
    max_retry: int
    webhook: bool


@dataclass(frozen=True, slots=True)
class CancelAsked(Event):
    """A caller asked for the cancel of a job; it may or may not have been heard."""

    job_id: int


@dataclass(frozen=True, slots=True)
class RetryAsked(Event):
    """A caller asked for another life of an ended job; it may or may not have been heard.

    Each life has its own end, its own webhook id and its own budget of attempts.
    """

    job_id: int


@dataclass(frozen=True, slots=True)
class Seen(Event):
    """A caller read a job's status."""

    job_id: int
    status: str


@dataclass(frozen=True, slots=True)
class Began(Event):
    """A handler began, as it says itself."""

    worker: str
    job_id: int
    execution_id: str
    trigger_ts: int


@dataclass(frozen=True, slots=True)
class Ended(Event):
    """A handler ended: it `returned`, `raised`, or was `stopped`."""

    worker: str
    execution_id: str
    how: str


@dataclass(frozen=True, slots=True)
class Died(Event):
    """A worker's process ended, and with it all its handlers."""

    worker: str


@dataclass(frozen=True, slots=True)
class Frozen(Event):
    """From `since` to `at` a worker's process was stopped, and its handlers with it."""

    since: float
    worker: str


@dataclass(frozen=True, slots=True)
class RedisTrouble(Event):
    """From `since` to `at` Redis was away, slow or emptied, for one node or (empty) for all."""

    since: float
    node: str = ""


@dataclass(frozen=True, slots=True)
class Webhook(Event):
    """A receiver got a callback and answered it."""

    webhook_id: str
    job_id: int
    status: str
    execution_id: str
    answer: int


@dataclass(frozen=True, slots=True)
class Healed(Event):
    """From now on nothing is broken any more."""


@dataclass(frozen=True, slots=True)
class JobRow(Event):
    """A job as it stands in the end."""

    job_id: int
    client_request_id: str
    status: str
    execution_id: str
    finished_at: float | None
    error_code: str = ""


@dataclass(frozen=True, slots=True)
class ExecutionRow(Event):
    """An execution as it stands in the end; `told_by` is the execution whose result it carries."""

    execution_id: str
    job_id: int
    trigger_ts: int
    worker: str
    status: str
    told_by: str
    stale: bool
    ended_at: float | None


@dataclass(slots=True)
class Report:
    """What was found; `violations` is empty when every promise was kept."""

    violations: list[str] = field(default_factory=list)
    jobs: int = 0
    runs: int = 0
    lost: int = 0
    overlapping: int = 0
    run_again: int = 0
    run_again_after_death: int = 0
    webhooks_missing: int = 0
    webhooks_repeated: int = 0
    stale_reports: int = 0
    slowest_recovery_seconds: float = 0.0

    def table(self, faults: dict[str, int] | None = None) -> str:
        """The figures, one a line."""
        by_kind = ", ".join(f"{name} {count}" for name, count in sorted((faults or {}).items()))
        rows: list[tuple[str, object]] = [
            ("jobs", self.jobs),
            ("runs", self.runs),
            ("faults", f"{sum((faults or {}).values())} ({by_kind})" if by_kind else 0),
            ("lost", self.lost),
            ("run twice at once", self.overlapping),
            ("run again", self.run_again),
            ("  of these after a proven death", self.run_again_after_death),
            ("late reports that changed nothing", self.stale_reports),
            ("webhooks missing", self.webhooks_missing),
            ("webhooks repeated", self.webhooks_repeated),
            ("slowest recovery", f"{self.slowest_recovery_seconds:.1f} s"),
            ("violations", len(self.violations)),
        ]
        return "\n".join(f"{name:<36}{value}" for name, value in rows)


def add_up(reports: Iterable[Report]) -> Report:
    """The figures of many histories."""
    total = Report()
    for one in reports:
        for item in fields(Report):
            mine, other = getattr(total, item.name), getattr(one, item.name)
            slowest = item.name == "slowest_recovery_seconds"
            setattr(total, item.name, max(mine, other) if slowest else mine + other)
    return total


@dataclass(slots=True)
class Run:
    """One run of a handler, from its begin to its end or its worker's."""

    began: Began
    over_at: float = float("inf")
    how: str = "unfinished"


Kind = TypeVar("Kind", bound=Event)


def judge(events: Sequence[Event]) -> Report:
    """Judge a whole history, in the order of its events."""
    report = Report()
    accepted = of_kind(events, Accepted)
    jobs = {row.job_id: row for row in of_kind(events, JobRow)}
    executions = {row.execution_id: row for row in of_kind(events, ExecutionRow)}
    runs = runs_of(events)
    report.jobs = len({one.job_id for one in accepted})
    report.runs = len(runs)
    report.stale_reports = sum(row.stale for row in executions.values())
    _judge_acceptance(report, accepted, jobs)
    _judge_ends(report, events, jobs, executions, runs)
    _judge_budgets(report, events, accepted, executions)
    _judge_overlaps(report, events, runs)
    _judge_given_up(report, events, runs, executions)
    _judge_repeats(report, events, runs, executions)
    _judge_outcomes(report, events, runs, executions)
    _judge_webhooks(report, events, accepted, jobs)
    healed = of_kind(events, Healed)
    if healed:
        ends = [row.finished_at for row in jobs.values() if row.finished_at is not None]
        report.slowest_recovery_seconds = max(0.0, max(ends, default=0.0) - healed[-1].at)
    return report


def _judge_acceptance(
    report: Report, accepted: Iterable[Accepted], jobs: dict[int, JobRow]
) -> None:
    """P1 and P2: what was accepted is there and ends; one request is one job."""
    ids: dict[str, int] = {}
    for one in accepted:
        first = ids.setdefault(one.client_request_id, one.job_id)
        if first != one.job_id:
            report.violations.append(
                f"P2: request {one.client_request_id} is job {first} and job {one.job_id}"
            )
    for request, job_id in ids.items():
        job = jobs.get(job_id)
        if job is None or job.client_request_id != request:
            report.lost += 1
            report.violations.append(f"P1: job {job_id} of request {request} is gone")
        elif job.status not in TERMINAL:
            report.lost += 1
            report.violations.append(f"P1: job {job_id} never ended: it is {job.status}")
    requests: dict[str, list[int]] = defaultdict(list)
    for job in jobs.values():
        requests[job.client_request_id].append(job.job_id)
    report.violations += [
        f"P2: request {request} made jobs {made}" for request, made in requests.items() if made[1:]
    ]


def _judge_ends(
    report: Report,
    events: Sequence[Event],
    jobs: dict[int, JobRow],
    executions: dict[str, ExecutionRow],
    runs: Sequence[Run],
) -> None:
    """P5: an end is the current execution's own, was earned by a run, and never changes."""
    cancelled = {one.job_id for one in of_kind(events, CancelAsked)}
    lives = _lives(events)
    returned = {run.began.execution_id for run in runs if run.how == "returned"}
    for row in executions.values():
        if row.told_by and row.told_by != row.execution_id:
            report.violations.append(
                f"P5: execution {row.execution_id} of job {row.job_id} carries the result of "
                f"{row.told_by}"
            )
        if row.status == "SUCCEEDED" and row.execution_id not in returned:
            report.violations.append(
                f"P5: execution {row.execution_id} of job {row.job_id} SUCCEEDED, and no run of "
                "it returned"
            )
    for job in jobs.values():
        last = executions.get(job.execution_id)
        if job.status == "SUCCEEDED" and (last is None or last.status != "SUCCEEDED"):
            report.violations.append(f"P5: job {job.job_id} SUCCEEDED, its last execution did not")
        if job.status == "CANCELLED" and job.job_id not in cancelled:
            report.violations.append(f"P5: job {job.job_id} is CANCELLED, and nobody asked for it")
    begun = {run.began.job_id: run.began for run in reversed(runs)}
    report.violations += [
        f"expired: job {job.job_id} is said to have begun too late, and {began.execution_id} of it "
        f"began at {began.at:.3f}"
        for job in jobs.values()
        if job.error_code == "expired" and (began := begun.get(job.job_id)) is not None
    ]
    first: dict[int, Seen] = {}
    for seen in of_kind(events, Seen):
        if lives[seen.job_id] > 1:
            continue
        if seen.status not in TERMINAL:
            if seen.job_id in first:
                report.violations.append(
                    f"P5: job {seen.job_id} was {first[seen.job_id].status} and then {seen.status}"
                )
            continue
        ended = first.setdefault(seen.job_id, seen)
        job_now = jobs.get(seen.job_id)
        if ended.status != seen.status or (job_now is not None and job_now.status != seen.status):
            report.violations.append(f"P5: job {seen.job_id} was {seen.status} and did not stay so")


def _judge_budgets(
    report: Report,
    events: Sequence[Event],
    accepted: Iterable[Accepted],
    executions: dict[str, ExecutionRow],
) -> None:
    """At most maxRetry + 1 attempts in each life, not counting those given back."""
    lives = _lives(events)
    attempts: dict[int, int] = defaultdict(int)
    for row in executions.values():
        attempts[row.job_id] += row.status != "RETURNED"
    most = {one.job_id: (one.max_retry + 1) * lives[one.job_id] for one in accepted}
    report.violations += [
        f"budget: job {job_id} made {made} attempts, {most[job_id]} are allowed"
        for job_id, made in attempts.items()
        if job_id in most and made > most[job_id]
    ]


def _judge_overlaps(report: Report, events: Sequence[Event], runs: Sequence[Run]) -> None:
    """P3 and P4: one attempt begins once, and one task never runs twice at once."""
    begun: dict[tuple[int, int], Run] = {}
    for run in runs:
        attempt = (run.began.job_id, run.began.trigger_ts)
        other = begun.setdefault(attempt, run)
        if other is not run:
            report.violations.append(
                f"P3: attempt {attempt[0]}:{attempt[1]} began as {other.began.execution_id} on "
                f"{other.began.worker} and as {run.began.execution_id} on {run.began.worker}"
            )
    for of_job in _by_job(runs).values():
        open_until, holder = float("-inf"), of_job[0]
        for run in of_job:
            if run.began.at < open_until and not slept(events, holder, run.began.at):
                report.overlapping += 1
                report.violations.append(
                    f"P4: job {run.began.job_id} began on {run.began.worker} at "
                    f"{run.began.at:.3f} while {holder.began.worker} still ran it"
                )
            if run.over_at > open_until:
                open_until, holder = run.over_at, run


def _judge_given_up(
    report: Report,
    events: Sequence[Event],
    runs: Sequence[Run],
    executions: dict[str, ExecutionRow],
) -> None:
    """P4: a worker has stopped its runs before anybody gives them up, whether they run again."""
    for run in runs:
        row = executions.get(run.began.execution_id)
        if row is None or row.status != "LOST" or row.ended_at is None:
            continue
        if run.over_at > row.ended_at + CLOCK_SECONDS and not slept(events, run, row.ended_at):
            report.violations.append(
                f"P4: execution {row.execution_id} of job {row.job_id} was given up at "
                f"{row.ended_at:.3f} and went on until {run.over_at:.3f} on {run.began.worker}"
            )


def slept(events: Sequence[Event], run: Run, moment: float) -> bool:
    """Tell whether a run was frozen at a moment and ended as soon as it woke.

    Nobody can stop a frozen process; all it can do is to look before it goes on.
    """
    return any(
        freeze.worker == run.began.worker
        and freeze.since <= moment <= freeze.at + WAKE_SECONDS
        and run.over_at <= freeze.at + WAKE_SECONDS
        for freeze in of_kind(events, Frozen)
    )


def _judge_repeats(
    report: Report,
    events: Sequence[Event],
    runs: Sequence[Run],
    executions: dict[str, ExecutionRow],
) -> None:
    """A job runs again only after an end that allows it."""
    died = {one.worker: one.at for one in of_kind(events, Died)}
    lives = _lives(events)
    for of_job in _by_job(runs).values():
        for earlier, later in pairwise(of_job):
            row = executions.get(earlier.began.execution_id)
            status = "unknown" if row is None else row.status
            report.run_again += 1
            if status == "LOST" and died.get(earlier.began.worker, 1e18) <= later.began.at:
                report.run_again_after_death += 1
            reopened = status == "CANCELLED" and lives[later.began.job_id] > 1
            if status not in REPEATABLE and not reopened:
                report.violations.append(
                    f"P4: job {later.began.job_id} ran again as {later.began.execution_id} after "
                    f"{earlier.began.execution_id}, which is {status}"
                )


def _judge_outcomes(
    report: Report,
    events: Sequence[Event],
    runs: Sequence[Run],
    executions: dict[str, ExecutionRow],
) -> None:
    """P6: a run that ended is lost only if Redis failed it, and its worker could not mend that."""
    died = {one.worker: one.at for one in of_kind(events, Died)}
    troubles = of_kind(events, RedisTrouble)
    frozen = of_kind(events, Frozen)
    for run in runs:
        row = executions.get(run.began.execution_id)
        if row is None or row.status != "LOST" or run.how not in ("returned", "raised"):
            continue
        if run.over_at > (row.ended_at or float("inf")):
            # It was given up before it ended: whether that was right is P4's.
            continue
        gone_at = died.get(run.began.worker, float("inf"))
        lost_at = row.ended_at or float("inf")
        node = run.began.worker.partition("#")[0]
        own = [trouble for trouble in troubles if trouble.node in ("", node)]
        away = [(trouble.since, trouble.at) for trouble in own]
        away += [(one.since, one.at) for one in frozen if one.worker == run.began.worker]
        away.append((gone_at, float("inf")))
        excused = gone_at < run.over_at + SAFE_SECONDS or any(
            trouble.at >= run.over_at - SAFE_SECONDS
            and trouble.since <= lost_at
            and _longest_contact(away, max(trouble.at, run.over_at), lost_at) < RESTORE_SECONDS
            for trouble in own
        )
        if not excused:
            report.violations.append(
                f"P6: execution {row.execution_id} of job {row.job_id} {run.how} at "
                f"{run.over_at:.3f} on {run.began.worker}, and is LOST"
            )


def _longest_contact(away: Iterable[tuple[float, float]], since: float, until: float) -> float:
    """The longest time in a span, seconds, that no interval of `away` covers."""
    longest, free_since = 0.0, since
    for begin, end in sorted(away):
        longest = max(longest, min(begin, until) - free_since)
        free_since = max(free_since, end)
    return max(longest, until - free_since)


def _judge_webhooks(
    report: Report,
    events: Sequence[Event],
    accepted: Iterable[Accepted],
    jobs: dict[int, JobRow],
) -> None:
    """P7: each end is told at least once, under one id, and as it is."""
    got: dict[int, list[Webhook]] = defaultdict(list)
    lives = _lives(events)
    for one in of_kind(events, Webhook):
        got[one.job_id].append(one)
    for job_id in sorted({one.job_id for one in accepted if one.webhook}):
        job = jobs.get(job_id)
        if job is None or job.status not in TERMINAL:
            continue
        taken = [one for one in got[job_id] if 200 <= one.answer < 300]
        if not any(one.status == job.status or lives[job_id] == 1 for one in taken):
            report.webhooks_missing += 1
            report.violations.append(f"P7: nobody was told that job {job_id} is {job.status}")
        ends = {one.webhook_id for one in got[job_id]}
        report.webhooks_repeated += max(0, len(taken) - max(1, len(ends)))
        if len(ends) > lives[job_id]:
            report.violations.append(f"P7: the end of job {job_id} has several webhook ids")
        if lives[job_id] == 1 and any(one.status != job.status for one in got[job_id]):
            report.violations.append(f"P7: job {job_id} was told as another end than it has")


def runs_of(events: Sequence[Event]) -> list[Run]:
    """Put begins, ends and deaths together, in order of begin."""
    open_runs: dict[tuple[str, str], Run] = {}
    all_runs: dict[tuple[str, str], Run] = {}
    runs: list[Run] = []
    for event in events:
        if isinstance(event, Began):
            run = Run(event)
            runs.append(run)
            open_runs[event.execution_id, event.worker] = run
            all_runs[event.execution_id, event.worker] = run
        elif isinstance(event, Ended):
            # Also after its worker's death: a child may outlive the process that started it.
            open_runs.pop((event.execution_id, event.worker), None)
            run = all_runs[event.execution_id, event.worker]
            run.over_at, run.how = event.at, event.how
        elif isinstance(event, Died):
            for key in [key for key in open_runs if key[1] == event.worker]:
                run = open_runs.pop(key)
                run.over_at, run.how = event.at, "died"
    return runs


def _lives(events: Sequence[Event]) -> dict[int, int]:
    """How many lives each job may have had: one, and one more for each retry that was asked."""
    lives: dict[int, int] = defaultdict(lambda: 1)
    for one in of_kind(events, RetryAsked):
        lives[one.job_id] += 1
    return lives


def _by_job(runs: Sequence[Run]) -> dict[int, list[Run]]:
    found: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        found[run.began.job_id].append(run)
    return found


def of_kind(events: Sequence[Event], kind: type[Kind]) -> list[Kind]:
    return [event for event in events if isinstance(event, kind)]
