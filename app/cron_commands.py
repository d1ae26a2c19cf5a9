"""`oncue cron-preview`: it needs no server, since it reads the expression itself."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from app.client import show
from app.plumbing.times import read_moment

if TYPE_CHECKING:
    from app.schedules.preview import Preview

BAD_USAGE: Final = 2

commands = typer.Typer()


@commands.command(
    name="cron-preview",
    epilog=show.examples(
        "oncue cron-preview '30 2 * * *' --timezone Europe/Berlin",
        "oncue cron-preview '0 0 9 ? * 2#1' --dialect quartz --count 3 --json",
    ),
)
def cron_preview(
    expr: Annotated[str, typer.Argument(help="The expression, as '30 2 * * *'.")],
    dialect: Annotated[
        str | None, typer.Option(help="unix or quartz; its form tells when left out.")
    ] = None,
    timezone: Annotated[str, typer.Option(help="An IANA name, as Europe/Berlin.")] = "UTC",
    after: Annotated[
        str | None, typer.Option(help="As 2026-03-07T12:00:00-05:00; now when left out.")
    ] = None,
    count: Annotated[int, typer.Option(help="How many fires, 1 to 100.")] = 5,
    dst_gap: Annotated[
        str, typer.Option(help="shift or skip: a fixed time that the clock skips.")
    ] = "shift",
    dst_fold: Annotated[
        str, typer.Option(help="first, both or second: a fixed time that the clock repeats.")
    ] = "first",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Show when a cron expression fires next, and what it means; no server is needed."""
    from app.schedules.grammar import CronError
    from app.schedules.preview import MAX_COUNT, preview
    from app.schedules.zone import UnknownZone

    if not 1 <= count <= MAX_COUNT:
        _refuse(f"--count is 1 to {MAX_COUNT}, not {count}")
    moment = _moment(after)
    options: dict[str, Any] = {
        "dialect": None if dialect is None else _one_of("--dialect", dialect, "unix", "quartz"),
        "dst_gap": _one_of("--dst-gap", dst_gap, "shift", "skip"),
        "dst_fold": _one_of("--dst-fold", dst_fold, "first", "both", "second"),
    }
    try:
        seen = preview(expr, after=moment, zone=timezone, count=count, **options)
    except (CronError, UnknownZone) as error:
        _refuse(str(error))
    if as_json:
        typer.echo(json.dumps([fire.local for fire in seen.fires], indent=2))
    else:
        _show(seen)


def _show(seen: Preview) -> None:
    typer.echo(f"{seen.description} ({seen.cron.dialect}, {seen.zone})")
    if seen.next_change is not None:
        change = seen.next_change
        typer.echo(f"The clock next changes from {change.before} to {change.after}.")
    if not seen.fires:
        typer.echo("It does not fire any more.")
        return
    typer.echo()
    show.show_fires(seen.fires)
    if seen.next_change is not None and not {*seen.next_change.fires} <= {*seen.fires}:
        typer.echo("\nAround the clock change:\n")
        show.show_fires(seen.next_change.fires)


def _moment(given: str | None) -> datetime:
    if given is None:
        return datetime.now(UTC)
    try:
        return read_moment(given)
    except ValueError:
        _refuse(
            "--after is a time with an offset, of the years 1970 to 2200, "
            f"as 2026-03-07T12:00:00-05:00, not {given!r}"
        )


def _one_of(flag: str, given: str, *words: str) -> str:
    if given not in words:
        _refuse(f"{flag} is {', '.join(words[:-1])} or {words[-1]}, not {given!r}")
    return given


def _refuse(sentence: str) -> NoReturn:
    typer.echo(f"oncue: {show.printable(sentence)}", err=True)
    raise typer.Exit(BAD_USAGE)
