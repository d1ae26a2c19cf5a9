"""The slow and simple truth: look at every minute or second of a window."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from tests.unit.schedules.expressions import Sample

LONGEST_SHIFTED_GAP = timedelta(hours=3)


def fires(
    sample: Sample, zone: ZoneInfo, start: int, end: int, *, dst_gap: str, dst_fold: str
) -> list[int]:
    """Return the instants from `start` to before `end` (epoch seconds, whole steps) that fire."""
    step = timedelta(seconds=1 if sample.every_second else 60)
    found = []
    before = (datetime.fromtimestamp(start, UTC) - step).astimezone(zone)
    for instant in range(start, end, int(step.total_seconds())):
        now = datetime.fromtimestamp(instant, UTC).astimezone(zone)
        wall = now.replace(tzinfo=None, fold=0)
        if sample.matches(wall) and (sample.real_time or _wanted(now, dst_fold)):
            found.append(instant)
        elif not sample.real_time and dst_gap == "shift":
            skipped = before.replace(tzinfo=None, fold=0) + step
            if wall - skipped < LONGEST_SHIFTED_GAP:
                while skipped < wall:
                    if sample.matches(skipped):
                        found.append(instant)
                        break
                    skipped += step
        before = now
    return found


def _wanted(now: datetime, dst_fold: str) -> bool:
    """Whether this pass of a wall time fires."""
    if dst_fold == "both":
        return True
    if dst_fold == "first":
        return now.fold == 0
    return now.fold == 1 or now.replace(fold=1).utcoffset() == now.utcoffset()
