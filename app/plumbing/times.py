"""Epoch milliseconds and RFC 3339 text."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache


def rfc3339(epoch_ms: int) -> str:
    """Write a time as RFC 3339 in UTC with milliseconds: `2026-01-31T09:00:00.000Z`."""
    seconds, milliseconds = divmod(epoch_ms, 1000)
    return f"{_whole_second(seconds)}.{milliseconds:03d}Z"


def epoch_ms(moment: datetime) -> int:
    """Return an aware moment as epoch milliseconds, rounded up so that nothing runs early."""
    whole = int(moment.timestamp() // 1)
    return whole * 1000 + -(-moment.microsecond // 1000)


def read_moment(text: str) -> datetime:
    """Read an aware moment of the years 1970 to 2200; `t` and `z` may be small.

    Raises:
        ValueError: it is none.
    """
    moment = datetime.fromisoformat(text.upper())
    try:
        if moment.utcoffset() is not None and 1970 <= moment.astimezone(UTC).year <= 2200:
            return moment
    except OverflowError:
        pass  # near the ends of the calendar a moment may have no UTC time at all
    raise ValueError("not a moment with an offset, of the years 1970 to 2200")


@lru_cache(maxsize=4096)
def _whole_second(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"
