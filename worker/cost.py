"""Mean duration of the runs of the last five minutes."""

from __future__ import annotations

BUCKET_SECONDS = 30
BUCKETS = 10


class RecentCost:
    """Keeps sums for ten slices of 30 seconds; `now` is seconds on any steady clock."""

    def __init__(self) -> None:
        self._slices = [(-1, 0.0, 0)] * BUCKETS

    def add(self, duration_ms: float, now: float) -> None:
        """Count one run."""
        number = int(now) // BUCKET_SECONDS
        known, total, count = self._slices[number % BUCKETS]
        if known != number:
            total, count = 0.0, 0
        self._slices[number % BUCKETS] = (number, total + duration_ms, count + 1)

    def mean_ms(self, now: float) -> float:
        """The mean over the last five minutes, 0 without runs."""
        oldest = int(now) // BUCKET_SECONDS - BUCKETS
        recent = [(total, count) for number, total, count in self._slices if number > oldest]
        runs = sum(count for _, count in recent)
        return sum(total for total, _ in recent) / runs if runs else 0.0
