"""What the client commands print: tables for people, JSON for scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console

    from app.schedules.preview import Fire
    from oncue.results import (
        Backfill,
        Execution,
        Job,
        OfferedHandler,
        Result,
        Schedule,
        Skipped,
        Worker,
    )

WIDE: Final = 100_000
"""Columns where no terminal is: nothing that goes into a pipe is cut."""
COLOUR_OF: Final = {
    "SUCCEEDED": "green",
    "UP": "green",
    "FAILED": "red",
    "TIMED_OUT": "red",
    "LOST": "red",
    "DOWN": "red",
    "RUNNING": "cyan",
    "CANCELLED": "yellow",
    "PAUSED": "yellow",
    "DRAINING": "yellow",
}


def show_json(result: Result) -> None:
    """Print one result as the API writes it."""
    print(json.dumps(result.model_dump(mode="json", by_alias=True), indent=2))


def show_json_list(results: Iterable[Result]) -> None:
    """Print results as one JSON list."""
    documents = [result.model_dump(mode="json", by_alias=True) for result in results]
    print(json.dumps(documents, indent=2))


def show_job(job: Job) -> None:
    """Print one job: what it is, how it stands, and its newest attempts."""
    from rich.table import Table

    lines: list[tuple[str, str | None]] = [
        ("job", str(job.job_id)),
        ("status", job.status),
        ("name", job.job_name),
        ("handler", job.job_handler),
        ("request id", job.client_request_id),
        ("attempts", None if job.schedule else f"{job.attempt} of {job.max_retry + 1}"),
        ("fires", None if job.schedule is None else _fires(job.schedule)),
        ("fire of", None if job.nominal_time is None else when(job.nominal_time)),
        ("created", when(job.created_at) or None),
        ("next run", when(job.next_trigger_time) or None),
        ("expires", (when(job.expires_at) or None) if job.finished_at is None else None),
        ("finished", when(job.finished_at) or None),
        ("params", None if job.params is None else json_line(job.params)),
        ("progress", None if job.progress is None else json_line(job.progress)),
        ("result", json_line(job.result) if job.succeeded else None),
        ("error", None if job.error is None else f"{job.error.message} ({job.error.code})"),
        *(("warning", warning.message) for warning in job.warnings),
    ]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in lines:
        if value is not None:
            grid.add_row(name, _text(value))
    console = out()
    console.print(grid)
    if job.executions:
        console.print()
        _print_executions(console, job.executions)


def show_jobs(jobs: Sequence[Job], *, more: bool) -> None:
    """Print a table of jobs, and say when there are more."""
    rows = [
        (
            str(job.job_id),
            job.status,
            job.job_handler,
            job.job_name,
            f"{job.attempt}/{job.max_retry + 1}",
            when(job.created_at),
            when(job.finished_at) or when(job.next_trigger_time),
        )
        for job in jobs
    ]
    names = ("JOB", "STATUS", "HANDLER", "NAME", "ATTEMPTS", "CREATED", "FINISHED OR NEXT")
    _print_table(out(), names, rows)
    if more:
        print(f"Only the newest {len(jobs)}: --limit shows more.", file=sys.stderr)


def show_workers(workers: Iterable[Worker]) -> None:
    """Print a table of workers."""
    rows = [
        (
            one.name or one.worker_id,
            one.state,
            f"{one.active}/{one.capacity}",
            str(one.queued),
            f"{one.avg_cost_ms:.0f} ms",
            when(one.last_heartbeat),
            one.url,
            " ".join(one.handlers),
        )
        for one in workers
    ]
    names = ("WORKER", "STATE", "ACTIVE", "QUEUED", "AVERAGE", "LAST BEAT", "ADDRESS", "HANDLERS")
    _print_table(out(), names, rows)


def show_handlers(handlers: Iterable[OfferedHandler]) -> None:
    """Print a table of handlers."""
    rows = [(one.name, str(one.workers), one.isolation, one.description) for one in handlers]
    _print_table(out(), ("HANDLER", "WORKERS", "ISOLATION", "DESCRIPTION"), rows)


def show_skips(rows: Iterable[Skipped]) -> None:
    """Print a table of fires that did not run."""
    cells = [(when(one.from_), when(one.to), str(one.count), one.reason) for one in rows]
    _print_table(out(), ("FROM", "TO", "FIRES", "WHY"), cells)


def show_backfill(backfill: Backfill) -> None:
    """Print what a backfill runs, or would."""
    number = "" if backfill.backfill_id is None else f" {backfill.backfill_id}"
    print(
        f"backfill{number} of schedule {backfill.schedule_id} is {backfill.status}: "
        f"{backfill.total} fires, {backfill.existing} of which have a job"
    )
    for moment in backfill.nominal_times or ():
        print(when(moment))


def show_fires(fires: Iterable[Fire]) -> None:
    """Print a table of the moments at which an expression fires."""
    rows = [
        (fire.local, when(fire.utc), (fire.clock_change or "").replace("_", " ")) for fire in fires
    ]
    _print_table(out(), ("FIRES", "UTC", "CLOCK CHANGE"), rows)


def _fires(schedule: Schedule) -> str:
    """Say in a line when a schedule fires."""
    if schedule.cron_expr is not None:
        return f"{schedule.cron_expr} ({schedule.cron_dialect}, {schedule.timezone})"
    every = f"{(schedule.interval_ms or 0) / 1000:g} s"
    return f"{every} after each run" if schedule.interval_mode == "fixedDelay" else f"every {every}"


def out() -> Console:
    """The console of stdout: as wide as the terminal, or without limit where none is."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False)


def when(moment: datetime | None) -> str:
    """Write a moment for people, in UTC."""
    return "" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def json_line(value: Any) -> str:
    """Write JSON on one line, readable."""
    return json.dumps(value, ensure_ascii=False)


def printable(text: str) -> str:
    """Escape what could move a terminal's cursor or hide other text."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def _print_executions(console: Console, executions: Sequence[Execution]) -> None:
    rows = [
        (
            str(one.attempt),
            one.status,
            (one.worker_id or "").partition("#")[0],  # the whole id is in the JSON
            when(one.started_at or one.claimed_at),
            _took(one),
            one.reason or (f"{one.error.message} ({one.error.code})" if one.error else ""),
        )
        for one in executions
    ]
    _print_table(console, ("ATTEMPT", "STATUS", "WORKER", "STARTED", "TOOK", "WHY"), rows)


def _took(execution: Execution) -> str:
    if execution.started_at is None or execution.finished_at is None:
        return ""
    return f"{(execution.finished_at - execution.started_at).total_seconds():.3f} s"


def _print_table(console: Console, names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=not console.is_terminal)
    for row in rows:
        table.add_row(*(_text(cell) for cell in row))
    console.print(table)


def _text(cell: str) -> Any:
    from rich.text import Text

    return Text(printable(cell), style=COLOUR_OF.get(cell, ""))
