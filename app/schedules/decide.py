"""Which fires of one schedule that are due run, wait, or are passed over. Pure.

`plan` has the rule of misfires; here the rule of overlap and the bound on fires are added. Rows
are those of `job_info`; times are epoch milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from app.schedules.cron import CronTimes, parse_cron
from app.schedules.interval import IntervalTimes, spread_of
from app.schedules.misfire import Between, MisfireRule, Plan, Run, Times, pass_over, plan
from app.schedules.zone import zone_clock

FIXED_DELAY: Final = "fixedDelay"
DEFAULT_CAP: Final = 100
DEFAULT_SPACING_MS: Final = 1000
OVERLAP: Final = "overlap"

Row = Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class Due:
    """A fire that runs; one that `waits` runs when those before it have ended."""

    nominal_ms: int
    due_ms: int
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the ledger: consecutive fires that do not run, and why."""

    from_ms: int
    to_ms: int
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with a schedule now.

    `ledger` are the rows to write; the first may continue the open row, whose start it has then.
    `last` is the row that the cursor lies in, if the last fire was passed over. `replaces` says
    that what goes on is to be cancelled first.
    """

    cursor_ms: int
    next_ms: int | None
    ended: bool = False
    runs: tuple[Due, ...] = ()
    ledger: tuple[Entry, ...] = ()
    last: Entry | None = None
    replaces: bool = False


def times_of(row: Row) -> Times | None:
    """Return the nominal times of a schedule's row, or None for a fixed delay, which has none."""
    if row["interval_mode"] == FIXED_DELAY:
        return None
    if row["cron_expr"] is None:
        times: Times = IntervalTimes(row["interval_ms"], row["anchor_at"])
    else:
        times = CronTimes(
            parse_cron(row["cron_expr"], row["cron_dialect"]),
            zone_clock(row["timezone"]),
            dst_gap=row["dst_gap"],
            dst_fold=row["dst_fold"],
        )
    return Between(times, start_ms=row["start_at"], end_ms=row["end_at"])


def spread_ms_of(row: Row) -> int:
    """Return by how much all fires of a schedule are put off."""
    return spread_of(f"{row['tenant_id']}:{row['client_request_id']}", row["jitter_ms"] or 0)


def fires_left(row: Row) -> int | None:
    """Return how many runs a schedule may still begin, None for any number."""
    return None if row["max_fires"] is None else max(0, row["max_fires"] - row["fires"])


def is_past_end(row: Row, due_ms: int) -> bool:
    """Tell whether a next time lies behind `endAt`: then the schedule ends without that fire."""
    end = row["end_at"]
    return end is not None and due_ms > int(end + (row["jitter_ms"] or 0))


def has_undecided(row: Row, *, now_ms: int) -> bool:
    """Tell whether a nominal time until now is not decided, whatever the row's next time says.

    A fixed delay has no other time than its next.

    Raises:
        UnknownZone: nobody can tell.
    """
    times = times_of(row)
    first = row["next_trigger_time"] if times is None else times.next_after(row["trigger_ts"])
    return first is not None and first <= now_ms


def decide(
    row: Row, *, now_ms: int, grace_ms: int, going: int, waiting: int, ahead_ms: int = 0
) -> Decision:
    """Decide every fire of a schedule that is due by now, or within `ahead_ms`.

    `going` and `waiting` count its children that have not ended: those that may run, and those
    that wait for them.
    """
    left = fires_left(row)
    times = times_of(row)
    if left == 0:
        return Decision(row["trigger_ts"], None, ended=True)
    if times is None:
        return _decide_delay(row, left)
    planned = plan(
        times,
        _rule_of(row, grace_ms),
        cursor_ms=row["trigger_ts"],
        now_ms=now_ms,
        spread_ms=spread_ms_of(row),
        ahead_ms=ahead_ms,
    )
    runs, lapped, replaces = _lap(row, planned.runs, now_ms=now_ms, going=going, waiting=waiting)
    cursor, following, passed = planned.cursor_ms, planned.next_ms, planned.passed
    if left is not None and len(runs) >= left:
        # The last run ends the schedule: what would follow is no fire of it.
        runs = runs[:left]
        cursor, following = runs[-1].nominal_ms, None
        lapped = [one for one in lapped if one < cursor]
        passed = tuple(one for one in passed if one.first_ms < cursor)
    return _decision(row, Plan(cursor, following, (), passed), runs, lapped, replaces)


def passed_over(row: Row, *, now_ms: int, reason: Literal["paused", "cancelled"]) -> Decision:
    """Decide that none of the fires until now runs."""
    if fires_left(row) == 0:
        return Decision(row["trigger_ts"], None, ended=True)
    times = times_of(row)
    if times is None:
        due = row["next_trigger_time"]
        if due is not None and row["start_at"] is not None:
            due = max(due, row["start_at"])
        if due is None or due > now_ms or is_past_end(row, due):
            return Decision(row["trigger_ts"], due)
        entry = Entry(due, due, 1, reason)
        return Decision(due, now_ms + row["interval_ms"], ledger=(entry,), last=entry)
    planned = pass_over(
        times, cursor_ms=row["trigger_ts"], now_ms=now_ms - spread_ms_of(row), reason=reason
    )
    return _decision(row, planned, [], [], replaces=False)


def _decide_delay(row: Row, left: int | None) -> Decision:
    nominal = row["next_trigger_time"]
    if row["start_at"] is not None and nominal < row["start_at"]:
        # The start was put off while a run went on, whose end has set the time.
        return Decision(row["trigger_ts"], row["start_at"])
    if row["end_at"] is not None and nominal > row["end_at"]:
        return Decision(row["trigger_ts"], None, ended=True)
    return Decision(nominal, None, ended=left == 1, runs=(Due(nominal, nominal),))


def _rule_of(row: Row, grace_ms: int) -> MisfireRule:
    spacing = row["misfire_spacing_ms"]
    return MisfireRule(
        policy=row["misfire_policy"],
        grace_ms=grace_ms,
        window_ms=row["catch_up_ms"],
        cap=DEFAULT_CAP if row["misfire_cap"] is None else row["misfire_cap"],
        spacing_ms=DEFAULT_SPACING_MS if spacing is None else spacing,
    )


def _lap(
    row: Row, planned: Sequence[Run], *, now_ms: int, going: int, waiting: int
) -> tuple[list[Due], list[int], bool]:
    """Return what runs, which nominal times are passed over, and whether others are replaced.

    What is not due yet meets no rule of overlap: nobody knows what will go on at its time. It
    stands in a line, in which each waits for the one before it.
    """
    if row["overlap_policy"] == "allow":
        return [Due(one.nominal_ms, one.due_ms) for one in planned], [], False
    due = [one for one in planned if one.missed or one.due_ms <= now_ms]
    ahead = [one for one in planned if not one.missed and one.due_ms > now_ms]
    taken = _taken(row, due, going=going, waiting=waiting)
    begun = {one.nominal_ms for one in taken}
    lapped = [one.nominal_ms for one in due if one.nominal_ms not in begun]
    replaces = bool(due and row["overlap_policy"] == "replace" and (going or waiting))
    line = _line(ahead, stands_behind=bool(taken or going or waiting))
    return taken + line, lapped, replaces


def _taken(row: Row, due: Sequence[Run], *, going: int, waiting: int) -> list[Due]:
    """Return which of the fires that are due run, where no two may at once.

    Where some were missed and all are to run, they are made a line, with those that were not.
    """
    policy, busy = row["overlap_policy"], bool(going or waiting)
    if policy == "skip" and busy:
        return []
    line = _line(due, stands_behind=policy == "queue" and busy)
    if row["misfire_policy"] == "all" and len(due) > 1 and any(one.missed for one in due):
        return line
    if policy == "queue":
        return line[: 0 if waiting else 1 if busy else 2]
    if policy == "replace":
        # It would replace the others at once.
        return [Due(one.nominal_ms, one.due_ms) for one in due[-1:]]
    return line[:1]


def _line(runs: Sequence[Run], *, stands_behind: bool) -> list[Due]:
    """Let each wait for the one before it."""
    return [
        Due(one.nominal_ms, one.due_ms, waits=stands_behind or number > 0)
        for number, one in enumerate(runs)
    ]


def _decision(
    row: Row, planned: Plan, runs: Sequence[Due], lapped: Sequence[int], replaces: bool
) -> Decision:
    """Put what was decided into the rows of the ledger, in order of time."""
    passed = [Entry(one.first_ms, one.last_ms, one.count, one.reason) for one in planned.passed]
    passed += [Entry(one, one, 1, OVERLAP) for one in lapped]
    begun = {one.nominal_ms for one in runs}
    steps: list[Entry | int] = sorted(
        [*passed, *begun], key=lambda one: one if isinstance(one, int) else one.from_ms
    )
    ledger: list[Entry] = []
    is_open = False
    if row["skip_from"] is not None:
        ledger.append(Entry(row["skip_from"], row["trigger_ts"], 0, row["skip_reason"]))
        is_open = True
    for one in steps:
        if isinstance(one, int):
            is_open = False
        elif is_open and ledger[-1].reason == one.reason:
            before = ledger[-1]
            ledger[-1] = Entry(before.from_ms, one.to_ms, before.count + one.count, one.reason)
        else:
            ledger.append(one)
            is_open = True
    next_ms = planned.next_ms
    return Decision(
        planned.cursor_ms,
        None if next_ms is None else next_ms + spread_ms_of(row),
        ended=next_ms is None,
        runs=tuple(runs),
        ledger=tuple(one for one in ledger if one.count),
        last=ledger[-1] if is_open else None,
        replaces=replaces,
    )


def first_fire(row: Row, *, after_ms: int) -> int | None:
    """Return the first moment after an instant at which a schedule's row fires, with its spread.

    A fixed delay begins at its start, or its delay after the instant.
    """
    times = times_of(row)
    if times is None:
        start = row["start_at"]
        first = after_ms + row["interval_ms"] if start is None or start <= after_ms else start
        return None if row["end_at"] is not None and first > row["end_at"] else int(first)
    found = times.next_after(after_ms)
    return None if found is None else found + spread_ms_of(row)
