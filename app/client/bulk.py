"""What the commands cancel, retry, pause and resume do with --where: many jobs at once."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from app.client import show
from app.client.talk import (
    BAD_USAGE,
    INTERRUPTED,
    JOB_NOT_SUCCEEDED,
    NOT_REACHED,
    WAIT_TIMED_OUT,
    ApiKey,
    AsJson,
    Limit,
    Url,
    WaitSeconds,
    commands,
    end,
    has_more,
    needs_wait,
    talking,
)

if TYPE_CHECKING:
    from oncue import BulkCount, BulkOperation, Client
    from oncue.submission import BulkAction

_MOMENTS: Final = frozenset({"created_from", "created_to", "finished_from", "finished_to"})
_NAMES: Final = frozenset({"status", "handler", "name_prefix", "label", *_MOMENTS})
_DONE: Final = {
    "cancel": "cancelled",
    "retry": "retried",
    "pause": "paused",
    "resume": "resumed",
    "redeliver": "called back again",
}


Where = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=VALUE: status, handler, name-prefix, label, created-from, created-to, "
        "finished-from or finished-to. May be repeated; all must hold."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count what matches --where.")]
Rate = Annotated[float | None, typer.Option(help="Most jobs a second.", min=0.1)]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask before --where changes jobs.")]
BulkRequestId = Annotated[
    str | None, typer.Option(help="The idempotency key of --where; drawn when left out.")
]
BulkWait = Annotated[bool, typer.Option("--wait", help="Return when the bulk operation has ended.")]


@dataclass(frozen=True, slots=True)
class Asked:
    """An action with its flags, as they were given."""

    action: BulkAction
    where: Sequence[str]
    dry_run: bool
    rate: float | None
    yes: bool
    request_id: str | None
    wait: bool
    timeout: float | None

    @property
    def has_options(self) -> bool:
        """Whether a flag was given that one job has no use for."""
        given = (self.dry_run, self.rate, self.yes, self.request_id, self.wait, self.timeout)
        return any(flag not in (None, False) for flag in given)


def filter_of(where: Sequence[str]) -> dict[str, Any]:
    """Read the --where flags; a name may be written as `name-prefix` or `namePrefix`.

    Raises:
        ValueError: a sentence that says what to change.
    """
    narrowed: dict[str, Any] = {}
    for one in where:
        written, equals, value = one.partition("=")
        name = "".join(f"_{sign.lower()}" if sign.isupper() else sign for sign in written)
        name = name.replace("-", "_")
        if not equals or name not in _NAMES:
            names = ", ".join(sorted(each.replace("_", "-") for each in _NAMES))
            raise ValueError(f"--where is NAME=VALUE with one of {names}, not {one!r}")
        if name in narrowed:
            raise ValueError(f"--where {written} is given twice")
        narrowed[name] = _value(name, value)
    return narrowed


def _value(name: str, value: str) -> Any:
    if name in _MOMENTS:
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
        if moment is None or moment.utcoffset() is None:
            raise ValueError(
                f"--where {name.replace('_', '-')} is a time with an offset, "
                f"as 2030-01-31T09:00:00Z, not {value!r}"
            )
        return moment
    if name == "label":
        label, equals, of_label = value.partition("=")
        if not equals or not label:
            raise ValueError(f"--where label is label=NAME=VALUE, not {value!r}")
        return label, of_label
    return value.upper() if name == "status" else value


def confirmed(count: BulkCount) -> bool:
    """Tell a person how many jobs it would change, and ask."""
    # Not typer's own, which writes a space to standard output.
    print(f"{count.action} {_so_many(count)}? [y/N]: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def show_count(count: BulkCount) -> None:
    """Print what a dry run found."""
    print(f"{_so_many(count)} would be {_DONE.get(count.action, count.action)}")


def show_operation(operation: BulkOperation) -> None:
    """Print one operation: what it does, and how far it is."""
    lines: list[tuple[str, str | None]] = [
        ("operation", operation.operation_id),
        ("status", operation.status),
        ("action", operation.action),
        ("where", _where(operation)),
        ("request id", operation.client_request_id),
        ("matched", _matched(operation)),
        ("changed", str(operation.changed)),
        ("refused", _refused(operation) or None),
        ("rate", f"{operation.rate_per_second:g} a second"),
        ("error", None if operation.error is None else operation.error.message),
        ("created", show.when(operation.created_at) or None),
        ("finished", show.when(operation.finished_at) or None),
    ]
    show.print_grid(lines)


def show_operations(operations: Sequence[BulkOperation], *, more: bool) -> None:
    """Print a table of operations, and say when there are more."""
    rows = [
        (
            one.operation_id,
            one.status,
            one.action,
            f"{one.examined}/{_matched(one)}",
            str(one.changed),
            show.when(one.created_at),
            _where(one),
        )
        for one in operations
    ]
    names = ("OPERATION", "STATUS", "ACTION", "EXAMINED", "CHANGED", "CREATED", "WHERE")
    show.print_table(show.out(), names, rows)
    show.say_more(len(operations), more=more)


def watched(client: Client, operation: BulkOperation, timeout: float | None) -> BulkOperation:
    """Wait for the end, with a progress bar where a terminal is."""
    if not sys.stderr.isatty():
        return client.wait_bulk(operation, timeout=timeout)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.fields[matched]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(operation.action, total=None, matched=_matched(operation))

        def progress(one: BulkOperation) -> None:
            # What is not known to be all is no end to run towards.
            total = None if one.matched_is_minimum else max(one.matched, one.examined, 1)
            bar.update(task, completed=one.examined, total=total, matched=_matched(one))

        progress(operation)
        return client.wait_bulk(operation, timeout=timeout, progress=progress)


def _so_many(count: BulkCount) -> str:
    least = "at least " if count.matched_is_minimum else ""
    return f"{least}{count.matched} {'job' if count.matched == 1 else 'jobs'}"


def _matched(operation: BulkOperation) -> str:
    return f"{operation.matched}{'+' if operation.matched_is_minimum else ''}"


def _refused(operation: BulkOperation) -> str:
    return ", ".join(f"{count} {code}" for code, count in sorted(operation.refused.items()))


def _where(operation: BulkOperation) -> str:
    return " ".join(f"{name}={value}" for name, value in operation.filter.items())


@commands.command(
    name="bulk",
    epilog=show.examples(
        "oncue bulk",
        "oncue bulk 01998f2e-8f3c-7c62-9a51-0a9f6c1d2e3b --wait",
        "oncue bulk 01998f2e-8f3c-7c62-9a51-0a9f6c1d2e3b --cancel",
    ),
)
def bulk_operations(
    operation_id: Annotated[
        str | None,
        typer.Argument(help="One operation; all by default.", metavar="ID", show_default=False),
    ] = None,
    call_off: Annotated[
        bool, typer.Option("--cancel", help="End it; what is changed stays so.")
    ] = False,
    wait: BulkWait = False,
    timeout: WaitSeconds = None,
    limit: Limit = 50,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """List bulk operations, newest first; or show one, wait for its end, or cancel it."""
    needs_wait(wait, timeout)
    if operation_id is None and (call_off or wait):
        end(BAD_USAGE, "--cancel and --wait need an operation's id; see `oncue bulk --help`")
    with talking(url, api_key) as client:
        if operation_id is None:
            found = client.bulk_operations(page_size=min(limit, 200))
            operations = list(itertools.islice(found, limit))
            if as_json:
                show.show_json_list(operations)
            else:
                more = has_more(found, operations, limit)
                show_operations(operations, more=more)
            return
        one = (client.cancel_bulk if call_off else client.bulk_operation)(operation_id)
        finish_bulk(client, one, wait=wait, timeout=timeout, as_json=as_json)


def the_one(job_id: int | None, asked: Asked) -> int | None:
    """Return the one job that is meant, None for many; ends the command when it is not clear."""
    if job_id is not None and asked.where:
        end(BAD_USAGE, f"give a job's id or --where, not both; see `oncue {asked.action} --help`")
    if job_id is None and not asked.where:
        end(
            BAD_USAGE,
            "give a job's id, or --where NAME=VALUE for all that match; "
            f"see `oncue {asked.action} --help`",
        )
    if job_id is not None and asked.has_options:
        end(
            BAD_USAGE,
            "--dry-run, --rate, --yes, --request-id, --wait and --timeout are for --where; "
            f"see `oncue {asked.action} --help`",
        )
    needs_wait(asked.wait, asked.timeout)
    return job_id


def change_many(client: Client, asked: Asked, *, as_json: bool) -> None:
    """Count, ask, and change what matches; as careful as the answer of a person can be."""
    try:
        narrowed = filter_of(asked.where)
        if asked.dry_run:
            count = client.bulk_count(asked.action, **narrowed)
            show.show_json(count) if as_json else show_count(count)
            return
        if not asked.yes:
            if not sys.stdin.isatty():
                end(BAD_USAGE, "--where changes many jobs: say --yes, or --dry-run to count them")
            if not confirmed(client.bulk_count(asked.action, **narrowed)):
                end(BAD_USAGE, "nothing was changed")
        operation = client.bulk(
            asked.action, rate=asked.rate, request_id=asked.request_id, **narrowed
        )
    except ValueError as error:
        end(BAD_USAGE, str(error))
    finish_bulk(client, operation, wait=asked.wait, timeout=asked.timeout, as_json=as_json)


def finish_bulk(
    client: Client, operation: BulkOperation, *, wait: bool, timeout: float | None, as_json: bool
) -> None:
    """Show an operation, with `wait` once it has ended; the command ends as it did."""
    from oncue import BulkTimeout, Unavailable

    def shown(one: BulkOperation) -> None:
        show.show_json(one) if as_json else show_operation(one)

    if not wait:
        shown(operation)
        return
    try:
        ended = watched(client, operation, timeout)
    except BulkTimeout as error:
        shown(error.operation)
        end(WAIT_TIMED_OUT, str(error))
    except Unavailable as error:
        end(NOT_REACHED, f"{error}; bulk operation {operation.operation_id} goes on")
    except KeyboardInterrupt:
        end(INTERRUPTED, f"interrupted; bulk operation {operation.operation_id} goes on")
    shown(ended)
    if ended.status != "SUCCEEDED":
        raise typer.Exit(JOB_NOT_SUCCEEDED)
