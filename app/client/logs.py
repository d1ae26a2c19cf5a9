"""`oncue logs`: what a job's runs said, so far or as it comes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from app.client import show
from app.client.talk import ApiKey, JobId, Url, commands, talking

if TYPE_CHECKING:
    from rich.console import Console

    from oncue import LogLine

COLOUR_OF_LEVEL: Final = {
    "debug": "dim",
    "warning": "yellow",
    "error": "red",
    "critical": "bold red",
}


@commands.command(
    epilog=show.examples("oncue logs 7", "oncue logs 7 --follow", "oncue logs 7 --json")
)
def logs(
    job_id: JobId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as lines come, until the job has ended.")
    ] = False,
    execution: Annotated[
        str | None, typer.Option(help="Of this attempt (its executionId); the newest by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Show what a job's newest run said, oldest line first."""
    with talking(url, api_key) as client:
        job = client.get(job_id)
        of = execution or job
        console = show.out()
        if not (follow or execution or job.executions):
            print(f"oncue: job {job_id} has not run yet; -f waits for it", file=sys.stderr)
            return
        for line in client.follow_logs(of) if follow else client.logs(of, page_size=200):
            if as_json:
                print(json.dumps(line.model_dump(mode="json", by_alias=True)), flush=True)
            else:
                _print(console, line)


def _print(console: Console, line: LogLine) -> None:
    from rich.text import Text

    moment = "" if line.time is None else f"{line.time:%H:%M:%S}.{line.time.microsecond // 1000:03}"
    fields = "" if not line.fields else f" {show.printable(show.json_line(line.fields))}"
    # A line may have lines of its own (a traceback): those stay; nothing else moves the cursor.
    message = "\n".join(show.printable(one) for one in line.message.split("\n"))
    console.print(
        Text(f"{moment} {line.level:<8} {line.source:<6} ", style="dim"),
        Text(message, style=COLOUR_OF_LEVEL.get(line.level, "")),
        Text(fields, style="dim"),
        sep="",
        soft_wrap=True,
    )
    sys.stdout.flush()
