"""When an interval fires. Times are epoch milliseconds; nothing here walks or waits."""

from __future__ import annotations

import hashlib


class IntervalTimes:
    """A fixed rate: `start_ms`, and then every `every_ms` for ever, however long a run takes."""

    def __init__(self, every_ms: int, start_ms: int) -> None:
        if every_ms < 1:
            raise ValueError("an interval is 1 ms or longer")
        self._every = every_ms
        self._start = start_ms

    def next_after(self, instant_ms: int) -> int | None:
        """Return the first fire strictly after an instant."""
        return self._start + self._fires_until(instant_ms) * self._every

    def previous_before(self, instant_ms: int) -> int | None:
        """Return the last fire strictly before an instant, or None before the start."""
        fires = self._fires_until(instant_ms - 1)
        return None if fires == 0 else self._start + (fires - 1) * self._every

    def count(self, after_ms: int, until_ms: int) -> int:
        """Count the fires after the first instant, up to and with the second."""
        return max(0, self._fires_until(until_ms) - self._fires_until(after_ms))

    def _fires_until(self, instant_ms: int) -> int:
        """How many fires there were up to and with an instant."""
        return max(0, (instant_ms - self._start) // self._every + 1)


def spread_of(schedule: str, jitter_ms: int) -> int:
    """Return by how many milliseconds all fires of this schedule are put off: 0 to `jitter_ms`.

    The same name gives the same answer in every process and version; names are spread evenly,
    so that a thousand nightly schedules do not fire in one second.
    """
    digest = hashlib.blake2b(schedule.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (jitter_ms + 1)
