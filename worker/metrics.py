"""What a worker counts, for Prometheus; each app has its own registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

DURATION_BUCKETS: Final = (0.001, 0.005, 0.025, 0.1, 0.5, 1, 5, 30, 120, 600, 3600)


class Metrics:
    """The counters and gauges of one worker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._runs = Counter(
            "oncue_worker_runs",
            "Runs ended, by handler and status.",
            ("handler", "status"),
            registry=self.registry,
        )
        self._duration = Histogram(
            "oncue_worker_run_duration_seconds",
            "Time from a run's acceptance to its end.",
            buckets=DURATION_BUCKETS,
            registry=self.registry,
        )
        self._tries = Counter(
            "oncue_worker_deliveries",
            "Callbacks tried, by outcome.",
            ("outcome",),
            registry=self.registry,
        )
        self.renewal_failures = Counter(
            "oncue_worker_lease_renewal_failures",
            "Renewals of leases that Redis did not answer.",
            registry=self.registry,
        )
        self.beat_failures = Counter(
            "oncue_worker_beat_failures",
            "Beats that no dispatcher acknowledged.",
            registry=self.registry,
        )
        self.stale_terms = Counter(
            "oncue_worker_stale_terms_refused",
            "Requests of a dispatcher that has lost its lock, refused.",
            registry=self.registry,
        )
        self._lines_shipped = Counter(
            "oncue_worker_log_lines_shipped",
            "Lines of runs that a dispatcher has stored.",
            registry=self.registry,
        )
        self._bytes_shipped = Counter(
            "oncue_worker_log_bytes_shipped",
            "Bytes of JSON in which lines and progress were shipped.",
            registry=self.registry,
        )
        self.log_lines_dropped = Counter(
            "oncue_worker_log_lines_dropped",
            "Lines of runs that were dropped here: over a bound, or refused.",
            registry=self.registry,
        )
        self._run_counts: dict[tuple[str, str], Counter] = {}
        self._try_counts: dict[str, Counter] = {}

    def count_run(self, handler: str, status: str, seconds: float) -> None:
        """Count one ended run."""
        counter = self._run_counts.get((handler, status))
        if counter is None:
            counter = self._run_counts[handler, status] = self._runs.labels(handler, status)
        counter.inc()
        self._duration.observe(seconds)

    def count_try(self, outcome: str) -> None:
        """Count one try of a callback."""
        counter = self._try_counts.get(outcome)
        if counter is None:
            counter = self._try_counts[outcome] = self._tries.labels(outcome)
        counter.inc()

    def count_shipped(self, lines: int, size: int) -> None:
        """Count lines that a dispatcher has stored."""
        self._lines_shipped.inc(lines)
        self._bytes_shipped.inc(size)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Export a number that is read when somebody asks."""
        Gauge(f"oncue_worker_{name}", text, registry=self.registry).set_function(value)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
