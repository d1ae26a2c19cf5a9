"""What the client commands print: tables for people, JSON for scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from app.client.schema import field_rows

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from app.schedules.preview import Fire
    from oncue import ApiError
    from oncue.results import (
        Backfill,
        Callback,
        Counts,
        DueCount,
        Execution,
        Explanation,
        Job,
        OfferedHandler,
        Progress,
        Result,
        Schedule,
        Skipped,
        StatusCount,
        Worker,
    )

WIDE: Final = 100_000
"""Columns where no terminal is: nothing that goes into a pipe is cut."""
WHOLE: Final = frozenset({"CREATED", "FINISHED OR NEXT", "LAST BEAT", "STARTED", "STATE", "STATUS"})
"""Columns that are never folded: a time or a state in two lines cannot be read."""
COLOUR_OF: Final = {
    "SUCCEEDED": "green",
    "UP": "green",
    "DELIVERED": "green",
    "EXHAUSTED": "red",
    "GONE": "red",
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
        ("callback", job.callback_url),
        ("params", None if job.params is None else json_line(job.params)),
        ("progress", None if job.progress is None else _progress(job.progress)),
        ("result", json_line(job.result) if job.succeeded else None),
        ("error", None if job.error is None else f"{job.error.message} ({job.error.code})"),
        *(("warning", warning.message) for warning in job.warnings),
    ]
    console = out()
    _print(console, _grid(lines))
    if job.executions:
        print()
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
            _short(job.created_at),
            _short(job.finished_at) or _short(job.next_trigger_time),
        )
        for job in jobs
    ]
    names = ("JOB", "STATUS", "HANDLER", "NAME", "ATTEMPTS", "CREATED", "FINISHED OR NEXT")
    print_table(out(), names, rows)
    say_more(len(jobs), more=more)


def show_explanation(found: Explanation) -> None:
    """Print why a job is where it is, as a story for people."""
    console = out()
    code = f" ({found.reasons[0].code})" if found.reasons else ""
    lines = [f"Job {found.job_id} is {found.status}. {found.summary}{code}"]
    lines += [f"  also: {reason.message} ({reason.code})" for reason in found.reasons[1:]]
    if found.attempts:
        lines += ["", "Attempts, newest first:"]
        lines += [
            f"  {when(one.claimed_at) or 'at an unknown time'}  {one.story}"
            for one in found.attempts
        ]
    if found.more_attempts:
        lines.append("  There are older ones: `oncue executions` lists them.")
    if found.next_actions:
        lines += ["", f"Possible now: {', '.join(found.next_actions)}."]
    for line in lines:
        console.print(_text(line), soft_wrap=True)


def show_executions(executions: Sequence[Execution], *, more: bool) -> None:
    """Print a table of attempts, and say when there are more."""
    _print_executions(out(), executions)
    say_more(len(executions), more=more)


def show_callbacks(callbacks: Sequence[Callback], *, more: bool) -> None:
    """Print a table of callbacks, and say when there are more."""
    rows = [
        (
            one.delivery_id,
            one.status,
            one.event,
            str(one.tries),
            when(one.ended_at) or when(one.next_try_at),
            one.last_error or ("" if one.last_status_code is None else str(one.last_status_code)),
            one.url,
        )
        for one in callbacks
    ]
    names = ("DELIVERY", "STATUS", "EVENT", "TRIES", "ENDED OR NEXT TRY", "LAST ANSWER", "URL")
    print_table(out(), names, rows)
    say_more(len(callbacks), more=more)


def show_workers(workers: Iterable[Worker]) -> None:
    """Print a table of workers."""
    rows = [
        (
            one.name or one.worker_id,
            one.state,
            f"{one.active}/{one.capacity}",
            str(one.queued),
            f"{one.avg_cost_ms:.0f} ms",
            _short(one.last_heartbeat),
            one.url,
            " ".join(one.handlers),
        )
        for one in workers
    ]
    names = ("WORKER", "STATE", "ACTIVE", "QUEUED", "AVERAGE", "LAST BEAT", "ADDRESS", "HANDLERS")
    print_table(out(), names, rows)


def show_counts(found: Counts) -> None:
    """Print a table of states."""

    def told(one: StatusCount | DueCount) -> str:
        return f"{one.count}+" if one.at_least else str(one.count)

    rows = [(one.status, told(one)) for one in found.items]
    print_table(out(), ("STATUS", "JOBS"), [*rows, ("of WAITING, due", told(found.due))])


def show_handlers(handlers: Iterable[OfferedHandler]) -> None:
    """Print a table of handlers."""
    rows = [(one.name, str(one.workers), one.isolation, one.description) for one in handlers]
    print_table(out(), ("HANDLER", "WORKERS", "ISOLATION", "DESCRIPTION"), rows)


def show_skips(rows: Iterable[Skipped]) -> None:
    """Print a table of fires that did not run."""
    cells = [(when(one.from_), when(one.to), str(one.count), one.reason) for one in rows]
    print_table(out(), ("FROM", "TO", "FIRES", "WHY"), cells)


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
    print_table(out(), ("FIRES", "UTC", "CLOCK CHANGE"), rows)


def show_handler(handler: OfferedHandler) -> None:
    """Print one handler, and the fields of its params."""
    checked = "checked when submitted" if handler.params_checked else "not checked when submitted"
    console = out()
    grid = _grid(
        [
            ("handler", handler.name),
            ("description", handler.description or None),
            ("isolation", handler.isolation),
            ("workers", str(handler.workers)),
            ("params", "not typed" if handler.params_schema is None else f"typed, {checked}"),
        ]
    )
    _print(console, grid)
    if handler.params_schema is not None:
        print()
        rows = field_rows(handler.params_schema)
        print_table(console, ("FIELD", "TYPE", "REQUIRED", "NOTES"), rows)


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


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\n\n".join(("Examples:", *lines))


def json_line(value: Any) -> str:
    """Write JSON on one line, readable."""
    return json.dumps(value, ensure_ascii=False)


def refusal(error: ApiError) -> str:
    """Say why the server refused, with every fault: its document is not at hand on a terminal."""
    faults = error.problem.get("errors", ())
    if len(faults) < 2:
        return str(error)
    named = (f"{one['pointer'].strip('/') or 'the body'}: {one['detail']}" for one in faults)
    return f"{'; '.join(named)} ({error.code})"


def printable(text: str) -> str:
    """Escape what could move a terminal's cursor or hide other text."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def _progress(progress: Progress) -> str:
    said = f" {progress.text}" if progress.text else ""
    return f"{progress.value:.0%}{said} ({when(progress.at)})"


def _print_executions(console: Console, executions: Sequence[Execution]) -> None:
    rows = [
        (
            str(one.attempt),
            one.status,
            (one.worker_id or "").partition("#")[0],  # the whole id is in the JSON
            _short(one.started_at or one.claimed_at),
            _took(one),
            one.reason or (f"{one.error.message} ({one.error.code})" if one.error else ""),
        )
        for one in executions
    ]
    print_table(console, ("ATTEMPT", "STATUS", "WORKER", "STARTED", "TOOK", "WHY"), rows)


def say_more(shown: int, *, more: bool) -> None:
    """Say on standard error that a list has more than was shown."""
    if more:
        print(f"Only the newest {shown}: --limit shows more.", file=sys.stderr)


def _grid(lines: Iterable[tuple[str, str | None]]) -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in lines:
        if value is not None:
            grid.add_row(name, _text(value))
    return grid


def _took(execution: Execution) -> str:
    if execution.started_at is None or execution.finished_at is None:
        return ""
    return f"{(execution.finished_at - execution.started_at).total_seconds():.3f} s"


def print_grid(lines: Iterable[tuple[str, str | None]]) -> None:
    """Print names and what they are, without those that have no value."""
    _print(out(), _grid(lines))


def print_table(console: Console, names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table without lines."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        whole = not console.is_terminal or name in WHOLE
        table.add_column(name, overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*(_text(cell) for cell in row))
    _print(console, table)


def _print(console: Console, table: Any) -> None:
    """Print a table; where no terminal is, without the blanks that fill its last column."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _short(moment: datetime | None) -> str:
    """Write a moment for a table: on a terminal this year's dates go without their year."""
    text = when(moment)
    this_year = f"{datetime.now(UTC):%Y}-"
    return text.removeprefix(this_year) if sys.stdout.isatty() else text


def _text(cell: str) -> Any:
    """Write one cell: printable, and in the colour of the state that it names."""
    from rich.text import Text

    return Text(printable(cell), style=COLOUR_OF.get(cell, ""))
