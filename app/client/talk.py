"""What the commands share: how they speak to the server, what they are told, and how they end.

0 done (with --wait: the job SUCCEEDED), 1 the job ended otherwise, 2 bad usage, 3 the server
refused, 4 the server cannot be reached, 5 the wait timed out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer

from app.client import complete, show

if TYPE_CHECKING:
    from oncue import Client, Job

JOB_NOT_SUCCEEDED: Final = 1
BAD_USAGE: Final = 2
SERVER_REFUSED: Final = 3
NOT_REACHED: Final = 4
WAIT_TIMED_OUT: Final = 5
INTERRUPTED: Final = 130

UNKNOWN_KEY: Final = 401
ATTEMPTS: Final = 5
"""Tries of each request, about three seconds of them: somebody waits for the prompt."""

commands = typer.Typer()

Url = Annotated[
    str | None,
    typer.Option(help="The server's address; http://127.0.0.1:8080.", envvar="ONCUE_URL"),
]
ApiKey = Annotated[
    str | None,
    typer.Option(help="The API key; the variable keeps it out of `ps`.", envvar="ONCUE_API_KEY"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
JobId = Annotated[
    int,
    typer.Argument(
        help="The job's id.",
        min=1,
        show_default=False,
        metavar="ID",
        autocompletion=complete.job_ids,
    ),
]
ScheduleId = Annotated[
    int, typer.Argument(help="The schedule's id.", min=1, metavar="ID", show_default=False)
]
Limit = Annotated[int, typer.Option(help="Most to show.", min=1)]
WaitSeconds = Annotated[
    float | None, typer.Option("--timeout", help="Most seconds to --wait.", min=0)
]


@contextmanager
def talking(url: str | None, api_key: str | None) -> Iterator[Client]:
    """A client whose errors end the command with a sentence and the code of their kind."""
    from oncue import ApiError, Client, Retries, Unauthorized, Unavailable

    try:
        client = Client(url, api_key=api_key, retries=Retries(attempts=ATTEMPTS))
    except ValueError as error:
        end(BAD_USAGE, str(error))
    try:
        with client:
            yield client
    except Unauthorized as error:
        if error.status != UNKNOWN_KEY:
            end(SERVER_REFUSED, show.refusal(error))
        end(SERVER_REFUSED, f"set ONCUE_API_KEY to a key that the server knows ({error.code})")
    except ApiError as error:
        end(SERVER_REFUSED, show.refusal(error))
    except Unavailable as error:
        again = (
            "" if error.request_id is None else f"; repeat it with --request-id {error.request_id}"
        )
        end(NOT_REACHED, f"{error}{again}")
    except KeyboardInterrupt:
        end(INTERRUPTED, "interrupted")


def show_one(job: Job, *, as_json: bool) -> None:
    """Print one job, for a script or for people."""
    show.show_json(job) if as_json else show.show_job(job)


def needs_wait(wait: bool, timeout: float | None) -> None:
    """End the command when a time to wait is given, and no wait."""
    if timeout is not None and not wait:
        end(BAD_USAGE, "--timeout is for --wait")


def has_more(found: Iterator[object], shown: Sequence[object], limit: int) -> bool:
    """Whether a list that was read up to its limit goes on."""
    return len(shown) == limit and next(found, None) is not None


def end(code: int, sentence: str) -> NoReturn:
    """End the command with a sentence on standard error, and an exit code."""
    print(f"oncue: {show.printable(sentence)}", file=sys.stderr)
    raise typer.Exit(code)
