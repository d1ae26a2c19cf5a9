"""Waiting for the end of a job, with a bar on a terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from app.client import show
from app.client.talk import (
    INTERRUPTED,
    JOB_NOT_SUCCEEDED,
    NOT_REACHED,
    WAIT_TIMED_OUT,
    end,
    show_one,
)

if TYPE_CHECKING:
    from oncue import Client, Job

LOOK_SECONDS: Final = 1.0
"""How often a wait on a terminal shows the job's state anew."""
PATIENCE_SECONDS: Final = 30.0
"""How long a wait goes on without any answer of the server."""

Wait = Annotated[bool, typer.Option("--wait", help="Return when the job has ended.")]


def finish(client: Client, job: Job, timeout: float | None, *, as_json: bool) -> None:
    """Wait for the end, show the job, and end the command as the job ended."""
    from oncue import Unavailable, WaitTimeout

    try:
        ended = _waited(client, job, timeout)
    except WaitTimeout as error:
        show_one(error.job, as_json=as_json)
        end(WAIT_TIMED_OUT, str(error))
    except Unavailable as error:
        end(NOT_REACHED, f"{error}; job {job.job_id} is stored and goes on")
    except KeyboardInterrupt:
        end(INTERRUPTED, f"interrupted; job {job.job_id} goes on")
    show_one(ended, as_json=as_json)
    if not ended.succeeded:
        raise typer.Exit(JOB_NOT_SUCCEEDED)


def _waited(client: Client, job: Job, timeout: float | None) -> Job:
    """Wait for the job's end, with a bar that tells how it stands where a terminal is."""
    if not sys.stderr.isatty():
        return client.wait(job, timeout=timeout)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

    from oncue import Unavailable, WaitTimeout

    began = answered = time.monotonic()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(_state(job, 0), total=None)
        while True:
            left = LOOK_SECONDS if timeout is None else began + timeout - time.monotonic()
            try:
                return client.wait(job, timeout=max(0.0, min(LOOK_SECONDS, left)))
            except WaitTimeout as waiting:
                if timeout is not None and left <= LOOK_SECONDS:
                    raise WaitTimeout(waiting.job, timeout) from None
                answered = time.monotonic()
                told = waiting.job.progress
                bars.update(
                    bar,
                    description=_state(waiting.job, answered - began),
                    total=None if told is None else 1.0,
                    completed=0.0 if told is None else told.value,
                )
            except Unavailable:
                now = time.monotonic()
                out_of_time = timeout is not None and left <= LOOK_SECONDS
                if out_of_time or now - answered > PATIENCE_SECONDS:
                    raise
                silent = f"job {job.job_id}: the server does not answer; trying again"
                bars.update(bar, description=silent)


def _state(job: Job, seconds: float) -> str:
    said = "" if job.progress is None or not job.progress.text else f": {job.progress.text}"
    attempt = f", attempt {job.attempt} of {job.max_retry + 1}" if job.attempt else ""
    return show.printable(f"job {job.job_id} is {job.status}{attempt} ({seconds:.0f} s){said}")
