"""An independent judge of P8, and of what callers asked of many jobs at once.

It knows when a schedule was to fire from what its caller sent, and no code of the product. All
schedules that it can judge fire at whole multiples of a step since some moment.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from tests.support.checker import (
    Accepted,
    CancelAsked,
    Event,
    JobRow,
    RetryAsked,
    Run,
    of_kind,
    runs_of,
    slept,
)

DECIDED_SECONDS: Final = 25.0
"""So long after its time each fire is decided, in a cluster where nothing is broken any more."""


@dataclass(frozen=True, slots=True)
class ScheduleMade(Event):
    """A caller was told that its schedule is stored; its children inherit retries and webhook.

    The schedule counts from some moment of the `waited` seconds that the caller asked for it.
    """

    job_id: int
    step_ms: int
    overlap: str
    max_retry: int
    webhook: bool
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class ScheduleEnds(Event):
    """A caller asks for the cancel of a schedule; `late` when nothing is broken any more."""

    job_id: int
    late: bool
    children: bool


@dataclass(frozen=True, slots=True)
class BulkAsked(Event):
    """A caller asks for the cancel or the retry of all jobs whose request begins so."""

    action: str
    prefix: str


@dataclass(frozen=True, slots=True)
class ScheduleRow(Event):
    """A schedule as it stands in the end: made when, decided until when (epoch ms)."""

    job_id: int
    status: str
    made_ms: int
    decided_ms: int


@dataclass(frozen=True, slots=True)
class FireRow(Event):
    """A child of a schedule; `own` unless a caller triggered it."""

    schedule_id: int
    job_id: int
    nominal_ms: int
    own: bool


@dataclass(frozen=True, slots=True)
class SkipRow(Event):
    """A row of the ledger of what did not run."""

    schedule_id: int
    from_ms: int
    to_ms: int
    count: int
    reason: str


def implied(events: Sequence[Event]) -> list[Event]:
    """What follows from the events for single jobs: what is owed to children, what may end how."""
    made = {one.job_id: one for one in of_kind(events, ScheduleMade)}
    rows = {row.job_id: row for row in of_kind(events, JobRow)}
    with_children = {one.job_id for one in of_kind(events, ScheduleEnds) if one.children}
    found: list[Event] = []
    for fire in of_kind(events, FireRow):
        schedule = made.get(fire.schedule_id)
        row = rows.get(fire.job_id)
        if schedule is None or row is None:
            continue
        request = row.client_request_id
        found.append(Accepted(fire.at, request, fire.job_id, schedule.max_retry, schedule.webhook))
        if schedule.overlap == "replace" or fire.schedule_id in with_children:
            found.append(CancelAsked(fire.at, fire.job_id))
    for bulk in of_kind(events, BulkAsked):
        asked = CancelAsked if bulk.action == "cancel" else RetryAsked
        found += [
            asked(bulk.at, row.job_id)
            for row in rows.values()
            if row.client_request_id.startswith(bulk.prefix)
        ]
    return found


def judge_fires(events: Sequence[Event]) -> list[str]:
    """Return how P8 was broken: each nominal time is on record once, and overlap is as asked."""
    made = {one.job_id: one for one in of_kind(events, ScheduleMade)}
    rows = {row.job_id: row for row in of_kind(events, ScheduleRow)}
    fires: dict[int, list[FireRow]] = defaultdict(list)
    for fire in of_kind(events, FireRow):
        fires[fire.schedule_id].append(fire)
    skips: dict[int, list[SkipRow]] = defaultdict(list)
    for skip in of_kind(events, SkipRow):
        skips[skip.schedule_id].append(skip)
    ends = {one.job_id: one for one in of_kind(events, ScheduleEnds) if one.late}
    wrong: list[str] = []
    for schedule_id, schedule in made.items():
        row = rows.get(schedule_id)
        if row is None:
            wrong.append(f"P1: schedule {schedule_id} is gone")
            continue
        if row.status not in ("CANCELLED", "SUCCEEDED"):
            wrong.append(f"P1: schedule {schedule_id} never ended: it is {row.status}")
        own = [fire.nominal_ms for fire in fires[schedule_id] if fire.own]
        end = ends.get(schedule_id)
        last_moment = None if end is None else end.at
        wrong += [
            f"P8: schedule {schedule_id}: {one}"
            for one in _ledger_faults(schedule, row, own, skips[schedule_id], last_moment)
        ]
    return wrong + _overlaps(events, made, fires)


def _ledger_faults(
    schedule: ScheduleMade,
    row: ScheduleRow,
    own: Sequence[int],
    skips: Sequence[SkipRow],
    end: float | None,
) -> list[str]:
    step = schedule.step_ms
    times = Counter(own)
    faults: list[str] = []
    for skip in skips:
        covered = range(skip.from_ms, skip.to_ms + 1, step)
        times.update(covered)
        if len(covered) != skip.count or covered[-1] != skip.to_ms:
            faults.append(f"{skip.from_ms} to {skip.to_ms} counts {skip.count} fires")
        if skip.reason == "overlap" and schedule.overlap not in ("skip", "queue"):
            faults.append(f"{skip.from_ms} was an overlap, with overlapPolicy {schedule.overlap}")
    faults += [f"{time} is on record {count} times" for time, count in times.items() if count > 1]
    on_record = sorted(times)
    faults += [
        f"nothing is on record between {one} and {other}"
        for one, other in pairwise(on_record)
        if other - one != step
    ]
    asked_ms = row.made_ms - schedule.waited * 1000
    if on_record and not asked_ms < on_record[0] <= row.made_ms + 2 * step:
        faults.append(f"made at {row.made_ms}, first fire {on_record[0]}")
    if on_record and on_record[-1] != row.decided_ms:
        faults.append(f"decided until {row.decided_ms}, last fire {on_record[-1]}")
    if end is not None:
        # The times of rows are epoch ms, those of events seconds of another clock.
        until_ms = row.made_ms + (end - schedule.at - DECIDED_SECONDS) * 1000 - 2 * step
        if (on_record[-1] if on_record else 0) < until_ms and until_ms > row.made_ms:
            faults.append(f"still fires at {until_ms:.0f}, but nothing is on record then")
    return faults


def _overlaps(
    events: Sequence[Event], made: dict[int, ScheduleMade], fires: dict[int, list[FireRow]]
) -> list[str]:
    """Own fires of a schedule run one after another, unless it allows more."""
    runs: dict[int, list[Run]] = defaultdict(list)
    schedule_of = {
        fire.job_id: schedule_id
        for schedule_id, own in fires.items()
        for fire in own
        if fire.own and schedule_id in made and made[schedule_id].overlap != "allow"
    }
    for run in runs_of(events):
        if run.began.job_id in schedule_of:
            runs[schedule_of[run.began.job_id]].append(run)
    return [
        f"P8: schedule {schedule_id}: job {later.began.job_id} began at {later.began.at:.3f} while "
        f"job {earlier.began.job_id} ran on {earlier.began.worker}"
        for schedule_id, own in runs.items()
        for earlier, later in pairwise(own)
        if later.began.at < earlier.over_at and not slept(events, earlier, later.began.at)
    ]
