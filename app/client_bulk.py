"""What the commands cancel, retry, pause and resume do with --where: many jobs at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from app import client_show as show

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
}


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
