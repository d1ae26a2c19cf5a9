"""Which fires run after a time in which nobody looked, and which are passed over. Pure.

A schedule remembers how far it has decided (its cursor). `plan` decides every fire from there to
now: each is either in `runs` or in one of `passed`, which tells why. However many there are, the
work is bounded by the runs: what is passed over is counted, not walked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

Policy = Literal["skip", "once", "all"]
Reason = Literal[
    "misfire_skip", "misfire_once", "over_cap", "outside_window", "paused", "cancelled"
]


MOST_AHEAD: Final = 1000
"""Fires that are decided before they are due, at once."""
PUNCTUAL_MS: Final = 1000
"""A fire that is late by no more is on time: no window, however short, passes over it."""


class Times(Protocol):
    """The fires of a schedule, ascending, in epoch milliseconds: cron, or an interval."""

    def next_after(self, instant_ms: int) -> int | None:
        """Return the first fire strictly after an instant, or None."""

    def previous_before(self, instant_ms: int) -> int | None:
        """Return the last fire strictly before an instant, or None."""

    def count(self, after_ms: int, until_ms: int) -> int:
        """Count the fires after the first instant, up to and with the second."""


class Between:
    """The fires of a schedule from its start date to its end date, both included."""

    def __init__(
        self, times: Times, *, start_ms: int | None = None, end_ms: int | None = None
    ) -> None:
        self._times = times
        self._start = start_ms
        self._end = end_ms

    def next_after(self, instant_ms: int) -> int | None:
        """Return the first fire strictly after an instant, or None."""
        found = self._times.next_after(self._not_before(instant_ms))
        return None if found is None or self._is_over(found) else found

    def previous_before(self, instant_ms: int) -> int | None:
        """Return the last fire strictly before an instant, or None."""
        before = instant_ms if self._end is None else min(instant_ms, self._end + 1)
        found = self._times.previous_before(before)
        is_early = found is not None and self._start is not None and found < self._start
        return None if is_early else found

    def count(self, after_ms: int, until_ms: int) -> int:
        """Count the fires after the first instant, up to and with the second."""
        until = until_ms if self._end is None else min(until_ms, self._end)
        return self._times.count(self._not_before(after_ms), until)

    def _not_before(self, instant_ms: int) -> int:
        return instant_ms if self._start is None else max(instant_ms, self._start - 1)

    def _is_over(self, fire_ms: int) -> bool:
        return self._end is not None and fire_ms > self._end


@dataclass(frozen=True, slots=True)
class MisfireRule:
    """What becomes of fires that were missed.

    Nobody was there if some fire is decided more than `grace_ms` after it was due. Then all that
    are due were missed, but for the newest if it is within the grace: that one is due now, and
    runs as usual. Otherwise what is late is not missed, and runs as usual.

    `skip` runs none of the missed, `once` one for all that are due, the latest; `all` runs them
    all, the newest `cap`, with `spacing_ms` between them. What is older than `window_ms` (None:
    no limit; at least `PUNCTUAL_MS`) is never run, missed or not.
    """

    policy: Policy = "once"
    grace_ms: int = 60_000
    window_ms: int | None = None
    cap: int = 100
    spacing_ms: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """A fire that runs: its nominal time, and when it is due. `missed` ones are due from now on."""

    nominal_ms: int
    due_ms: int
    missed: bool = False


@dataclass(frozen=True, slots=True)
class Passed:
    """Consecutive fires that do not run: the first, the last, how many, and why."""

    first_ms: int
    last_ms: int
    count: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now. `cursor_ms` is the last fire decided, `next_ms` the next nominal time."""

    cursor_ms: int
    next_ms: int | None
    runs: tuple[Run, ...] = ()
    passed: tuple[Passed, ...] = field(default=())


def plan(
    times: Times,
    rule: MisfireRule,
    *,
    cursor_ms: int,
    now_ms: int,
    spread_ms: int = 0,
    ahead_ms: int = 0,
    fires_left: int | None = None,
) -> Plan:
    """Decide every fire after the cursor that is due now, or within `ahead_ms`.

    `spread_ms` puts each fire off by so much (`interval.spread_of`). `fires_left` bounds the runs:
    the last one ends the schedule (`next_ms` is None), and what would follow is no fire of it.
    What is not due yet cannot be missed: the newest `MOST_AHEAD` of those run at their times.
    """
    until = now_ms - spread_ms
    newest = times.previous_before(until + ahead_ms + 1)
    if newest is None or newest <= cursor_ms:
        return Plan(cursor_ms, times.next_after(cursor_ms))
    too_old_until = cursor_ms
    if rule.window_ms is not None:
        too_old_until = max(cursor_ms, until - max(rule.window_ms, PUNCTUAL_MS) - 1)
    usual_after = max(too_old_until, _missed_until(times, rule, cursor_ms, until))
    passed = [_pass(times, cursor_ms, too_old_until, "outside_window")]
    late: list[int] = []
    if times.count(too_old_until, usual_after):
        match rule.policy:
            case "skip":
                passed.append(_pass(times, too_old_until, usual_after, "misfire_skip"))
            case "once":
                late = _newest(times, too_old_until, until, 1)
                passed.append(_pass(times, too_old_until, late[0] - 1, "misfire_once"))
                usual_after = until
            case "all":
                late = _newest(times, too_old_until, usual_after, rule.cap)
                first = late[0] if late else usual_after + 1
                passed.append(_pass(times, too_old_until, first - 1, "over_cap"))
    runs = [
        Run(nominal, now_ms + number * rule.spacing_ms, missed=True)
        for number, nominal in enumerate(late)
    ]
    due = _each(times, usual_after, min(until, newest))
    not_due_after = max(cursor_ms, until)
    ahead = _newest(times, not_due_after, newest, MOST_AHEAD)
    if len(ahead) == MOST_AHEAD:
        passed.append(_pass(times, not_due_after, ahead[0] - 1, "over_cap"))
    runs += [Run(nominal, nominal + spread_ms) for nominal in (*due, *ahead)]
    decided = Plan(
        newest,
        times.next_after(newest),
        tuple(runs),
        tuple(one for one in passed if one is not None),
    )
    return decided if fires_left is None else _end_after(decided, fires_left)


def _missed_until(times: Times, rule: MisfireRule, cursor_ms: int, until_ms: int) -> int:
    """Return up to when the fires after the cursor were missed: the cursor itself if none was."""
    first = times.next_after(cursor_ms)
    in_grace_from = until_ms - rule.grace_ms
    if first is None or first >= in_grace_from:
        return cursor_ms
    newest = times.previous_before(until_ms + 1)
    # The newest alone may be late without being missed: one more of them would be a burst.
    return until_ms if newest is None or newest < in_grace_from else newest - 1


def pass_over(times: Times, *, cursor_ms: int, now_ms: int, reason: Reason) -> Plan:
    """Decide that no fire after the cursor up to now runs: a paused schedule goes on, or ends."""
    passed = _pass(times, cursor_ms, now_ms, reason)
    cursor = cursor_ms if passed is None else passed.last_ms
    return Plan(cursor, times.next_after(cursor), passed=() if passed is None else (passed,))


def _pass(times: Times, after_ms: int, until_ms: int, reason: Reason) -> Passed | None:
    count = times.count(after_ms, until_ms)
    if count == 0:
        return None
    first, last = times.next_after(after_ms), times.previous_before(until_ms + 1)
    if first is None or last is None:
        raise AssertionError(f"{count} fires were counted and none was found")
    return Passed(first, last, count, reason)


def _newest(times: Times, after_ms: int, until_ms: int, most: int) -> list[int]:
    """The newest fires of a time, at most so many, in ascending order."""
    found: list[int] = []
    before: int | None = until_ms + 1
    while before is not None and len(found) < most:
        before = times.previous_before(before)
        if before is None or before <= after_ms:
            break
        found.append(before)
    return found[::-1]


def _each(times: Times, after_ms: int, until_ms: int) -> list[int]:
    found: list[int] = []
    fire = times.next_after(after_ms)
    while fire is not None and fire <= until_ms:
        found.append(fire)
        fire = times.next_after(fire)
    return found


def _end_after(decided: Plan, fires_left: int) -> Plan:
    """Cut a plan behind the last run that the schedule may still make."""
    if len(decided.runs) < fires_left:
        return decided
    runs = decided.runs[:fires_left]
    last = runs[-1].nominal_ms if runs else decided.cursor_ms
    passed = tuple(one for one in decided.passed if one.first_ms < last) if runs else ()
    return Plan(last, None, runs, passed)
