"""What keeps everything from being dispatched: Redis, the lock, the clocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from app.dispatch.standing import DispatcherNote, Standings
from app.jobs.reason_codes import Reason, ReasonCode
from app.lifecycle.term import FIRST
from app.plumbing.clock import SKEW_REFUSE_MS, SKEW_WARN_MS

NAMED: Final = 10


def why_not_dispatched(told: Standings, own: DispatcherNote) -> Iterator[Reason]:
    """Tell what keeps everything from being dispatched."""
    if not told.reachable:
        yield Reason(
            ReasonCode.REDIS_AWAY,
            "Redis does not answer this dispatcher: nothing new is dispatched without it.",
            {"askedBy": own.name},
        )
        return
    known = (
        told.dispatchers
        if any(one.name == own.name for one in told.dispatchers)
        else (
            *told.dispatchers,
            own,
        )
    )
    if told.lock_held:
        skewed = [told.holder] if told.holder is not None else []
    else:
        yield _without_lock(known, told.partition)
        skewed = [one for one in known if one.dispatches]
    for one in skewed:
        if abs(one.skew_ms) > SKEW_WARN_MS:
            yield _skewed(one)


def _without_lock(known: Sequence[DispatcherNote], partition: int) -> Reason:
    able = [one for one in known if one.dispatches]
    if not able:
        why = "none of the dispatchers that are known takes part: all run with --no-dispatch"
    elif all(abs(one.skew_ms) > SKEW_REFUSE_MS for one in able):
        why = "the clock of each that takes part is more than 5 s off the database's"
    else:
        why = "it changes hands, or its last holder has just died"
    return Reason(
        ReasonCode.DISPATCHER_WITHOUT_LOCK,
        f"No dispatcher holds the dispatch lock{_of(partition)}: {why}.",
        {
            **({} if partition == FIRST else {"partition": partition}),
            "dispatchers": [
                {"name": one.name, "dispatches": one.dispatches, "skewMs": one.skew_ms}
                for one in known[:NAMED]
            ],
            "more": max(0, len(known) - NAMED),
        },
    )


def _of(partition: int) -> str:
    return "" if partition == FIRST else f" of partition {partition}"


def _skewed(one: DispatcherNote) -> Reason:
    refuses = abs(one.skew_ms) > SKEW_REFUSE_MS
    then = ", so it does not dispatch" if refuses else ""
    return Reason(
        ReasonCode.CLOCK_SKEW,
        f"The clock of dispatcher {one.name} is {abs(one.skew_ms) / 1000:.1f} s "
        f"{'ahead of' if one.skew_ms > 0 else 'behind'} the database's{then}.",
        {"dispatcher": one.name, "skewMs": one.skew_ms, "refuses": refuses},
    )
