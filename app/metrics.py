"""The dispatcher's metrics, in a registry of its own."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_FAST: Final = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LONG: Final = (0.001, 0.01, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600)


class Metrics:
    """What `/metrics` shows. Names end in their unit; counters in `_total`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._watch_schedules(r)
        self._watch_callbacks(r)
        self._watch_retention(r)
        self.accepted = Counter("oncue_jobs_accepted", "Jobs accepted", registry=r)
        self.repeated = Counter("oncue_jobs_repeated", "Repeated submissions", registry=r)
        self.claimed = Counter("oncue_tasks_claimed", "Tasks claimed", registry=r)
        self.finished = Counter("oncue_jobs_finished", "Jobs ended", ["status"], registry=r)
        self.executions = Counter(
            "oncue_executions_ended", "Executions ended", ["status"], registry=r
        )
        self.reports = Counter(
            "oncue_reports", "Reports by what they changed", ["kind"], registry=r
        )
        self.sends = Counter("oncue_sends", "POST /run by outcome", ["outcome"], registry=r)
        self.recovered = Counter("oncue_recovered", "Recovery steps", ["step"], registry=r)
        self.bulk_jobs = Counter(
            "oncue_bulk_jobs",
            "Jobs by what a bulk operation did",
            ["action", "outcome"],
            registry=r,
        )
        self.bulk_ended = Counter(
            "oncue_bulk_operations_ended", "Bulk operations ended", ["status"], registry=r
        )
        self.bulk_open = Gauge(
            "oncue_bulk_operations_open", "Bulk operations that go on, up to 200", registry=r
        )
        self.in_flight = Gauge("oncue_runs_unanswered", "Runs sent, not answered", registry=r)
        self.running = Gauge(
            "oncue_tasks_running", "Tasks running, counted up to 10,000", registry=r
        )
        self.waiting = Gauge(
            "oncue_tasks_waiting", "Tasks waiting, counted up to 10,000", registry=r
        )
        self.due = Gauge(
            "oncue_tasks_due",
            "Waiting tasks whose time has come, among the first 10,000 waiting",
            registry=r,
        )
        self.backlog = Gauge("oncue_submit_backlog", "Submissions not committed", registry=r)
        self.refused = Counter(
            "oncue_requests_refused",
            "Refused for overload, by why: wait, lag, memory, requests",
            ["reason"],
            registry=r,
        )
        self.expected_wait = Gauge(
            "oncue_submit_expected_wait_seconds", "A new submission would wait so long", registry=r
        )
        self.loop_lag = Histogram(
            "oncue_event_loop_lag_seconds",
            "By how much a timer of this process was late",
            buckets=_FAST,
            registry=r,
        )
        self.long_polls = Gauge("oncue_long_polls", "Callers who wait", registry=r)
        self.log_lines = Counter("oncue_log_lines", "Lines of runs kept", registry=r)
        self.log_bytes = Counter("oncue_log_bytes", "Bytes of lines kept", registry=r)
        self.log_lines_dropped = Counter(
            "oncue_log_lines_dropped", "Lines that slid out of full logs", registry=r
        )
        self.streams = Gauge("oncue_streams", "Open event streams", registry=r)
        self.refused_keys = Counter(
            "oncue_keys_refused", "Keys refused: wrong, ended, too_many", ["reason"], registry=r
        )
        self.foreign_reports = Counter(
            "oncue_reports_of_other_groups",
            "What workers reported of runs that were not sent to their group",
            registry=r,
        )
        self.lock_held = Gauge("oncue_dispatch_lock_held", "1 for the holder", registry=r)
        self.term = Gauge("oncue_dispatch_term", "Term of the dispatch lock", registry=r)
        self.partitions_held = Gauge(
            "oncue_dispatch_partitions_held",
            "Partitions that this process dispatches; instance names it",
            ["instance"],
            registry=r,
        )
        self.lock_lost = Counter(
            "oncue_dispatch_lock_lost", "Times that the lock was lost or given up", registry=r
        )
        self.part_up = Gauge(
            "oncue_part_up", "1 while a server is reached: database, redis", ["part"], registry=r
        )
        self.part_seconds = Gauge(
            "oncue_part_answer_seconds", "Its last answer took so long", ["part"], registry=r
        )
        self.paused = Counter(
            "oncue_process_paused_seconds", "Seconds in which the process stood still", registry=r
        )
        self.database_retries = Counter(
            "oncue_database_retries",
            "Transactions begun anew, by why: deadlock, lock_wait, busy, lost",
            ["kind"],
            registry=r,
        )
        self.redis_flushes = Counter(
            "oncue_redis_flushes", "Times that Redis was found emptied", registry=r
        )
        self.schema = Gauge(
            "oncue_schema_revision",
            "Of the database, and what this code is for",
            ["of"],
            registry=r,
        )
        self.worker_versions = Gauge(
            "oncue_workers_of_version", "Workers that are not DOWN", ["version"], registry=r
        )
        self.skew = Gauge("oncue_clock_skew_seconds", "Clock minus database's", registry=r)
        self.workers = Gauge("oncue_workers", "Workers by state", ["state"], registry=r)
        self.lateness = Histogram(
            "oncue_claim_lateness_seconds", "Due time to claim", buckets=_FAST, registry=r
        )
        self.start_lateness = Histogram(
            "oncue_start_lateness_seconds",
            "Due time to the start of the handler",
            buckets=_FAST,
            registry=r,
        )
        self.duration = Histogram(
            "oncue_run_duration_seconds", "Start to end of runs", buckets=_LONG, registry=r
        )

    def _watch_schedules(self, r: CollectorRegistry) -> None:
        self.fires = Counter("oncue_schedule_fires", "Jobs made by schedules", registry=r)
        self.broken_schedules = Counter(
            "oncue_schedule_broken_looks",
            "Looks at schedules that cannot be planned or fired (their zone is gone, say)",
            registry=r,
        )
        self.fires_skipped = Counter(
            "oncue_schedule_fires_skipped", "Fires that did not run", ["reason"], registry=r
        )
        self.fire_lateness = Histogram(
            "oncue_schedule_fire_lateness_seconds",
            "Nominal time to spawn",
            buckets=_FAST,
            registry=r,
        )
        self.schedule_overdue = Gauge(
            "oncue_schedule_overdue_seconds",
            "How long the schedule that is due first has been due; read at each scrape",
            registry=r,
        )

    def _watch_callbacks(self, r: CollectorRegistry) -> None:
        self.callback_tries = Counter(
            "oncue_callback_tries", "Tries of callbacks", ["outcome"], registry=r
        )
        self.callback_backlog_age = Gauge(
            "oncue_callback_backlog_age_seconds",
            "How long the callback that is due for longest has been so; 0 without the lock",
            registry=r,
        )
        self.callback_hosts_due = Gauge(
            "oncue_callback_hosts_due",
            "Hosts to which callbacks are due; 0 without the lock",
            registry=r,
        )
        self.callback_hosts_paused = Gauge(
            "oncue_callback_hosts_paused",
            "Hosts that some worker calls no more for a while",
            registry=r,
        )

    def _watch_retention(self, r: CollectorRegistry) -> None:
        self.pruned = Counter("oncue_jobs_pruned", "Jobs past retention", registry=r)
        self.exported = Counter(
            "oncue_jobs_exported", "Jobs written down before they were deleted", registry=r
        )
        self.export_failures = Counter(
            "oncue_retention_export_failures",
            "Batches that could not be written down, and were not deleted",
            registry=r,
        )

    def render(self) -> bytes:
        """Write all metrics in the text format."""
        return generate_latest(self.registry)
