"""The commands of a caller, which speak to the API alone: submit, get, list, cancel and so on.

How they end: 0 done (with --wait: the job SUCCEEDED), 1 the job ended otherwise, 2 bad usage,
3 the server refused, 4 the server cannot be reached, 5 the wait timed out.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from app import client_show as show

if TYPE_CHECKING:
    from oncue import Client, Job

JOB_NOT_SUCCEEDED: Final = 1
BAD_USAGE: Final = 2
SERVER_REFUSED: Final = 3
NOT_REACHED: Final = 4
WAIT_TIMED_OUT: Final = 5
INTERRUPTED: Final = 130

LOOK_SECONDS: Final = 1.0
"""How often a wait on a terminal shows the job's state anew."""
PATIENCE_SECONDS: Final = 30.0
"""How long a wait goes on without any answer of the server."""

ATTEMPTS: Final = 5
"""Tries of each request, about three seconds of them: somebody waits for the prompt."""

commands = typer.Typer()


class Misfire(StrEnum):
    """What becomes of fires that nobody was there for."""

    skip = "skip"
    once = "once"
    all = "all"


class Overlap(StrEnum):
    """What becomes of a fire while a run goes on."""

    skip = "skip"
    queue = "queue"
    allow = "allow"
    replace_ = "replace"


class Dialect(StrEnum):
    """How a cron expression is read."""

    unix = "unix"
    quartz = "quartz"


class Gap(StrEnum):
    """What becomes of a time that the clock skips."""

    shift = "shift"
    skip = "skip"


class Fold(StrEnum):
    """Which pass of a time that the clock repeats runs."""

    first = "first"
    both = "both"
    second = "second"


class Backoff(StrEnum):
    """How the pauses between attempts grow."""

    fixed = "fixed"
    exponential = "exponential"


Url = Annotated[
    str | None,
    typer.Option(help="The server's address; http://127.0.0.1:8080.", envvar="ONCUE_URL"),
]
ApiKey = Annotated[
    str | None,
    typer.Option(help="The API key; the variable keeps it out of `ps`.", envvar="ONCUE_API_KEY"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
JobId = Annotated[int, typer.Argument(help="The job's id.", min=1, show_default=False)]
Wait = Annotated[bool, typer.Option("--wait", help="Return when the job has ended.")]
WaitSeconds = Annotated[
    float | None, typer.Option("--timeout", help="Most seconds to --wait.", min=0)
]


@commands.command()
def submit(
    handler: Annotated[str, typer.Option(help="The handler that runs the job.")],
    name: Annotated[
        str | None, typer.Option(help="A name for people; the handler's by default.")
    ] = None,
    params: Annotated[
        str | None, typer.Option(help="JSON, @FILE, or - for standard input.")
    ] = None,
    request_id: Annotated[
        str | None, typer.Option(help="The idempotency key; drawn when left out.")
    ] = None,
    run_at: Annotated[str | None, typer.Option(help="When, as 2030-01-31T09:00:00+01:00.")] = None,
    delay: Annotated[float | None, typer.Option(help="Seconds from now.", min=0)] = None,
    priority: Annotated[int | None, typer.Option(help="0 to 9, 9 first.", min=0, max=9)] = None,
    max_retry: Annotated[int | None, typer.Option(help="Attempts after the first.", min=0)] = None,
    retry_interval: Annotated[
        float | None, typer.Option(help="Seconds between attempts.", min=0)
    ] = None,
    retry_backoff: Annotated[Backoff | None, typer.Option(help="How the intervals grow.")] = None,
    attempt_timeout: Annotated[
        float | None, typer.Option(help="Seconds that one attempt may take.", min=0.001)
    ] = None,
    callback_url: Annotated[
        str | None, typer.Option(help="Gets a signed POST when the job has ended.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option(help="NAME=VALUE; may be repeated.")] = None,
    cron: Annotated[
        str | None, typer.Option(help="Make a schedule: fires as this expression says.")
    ] = None,
    timezone: Annotated[str | None, typer.Option(help="Of --cron, as Europe/Berlin.")] = None,
    dialect: Annotated[Dialect | None, typer.Option(help="Of --cron.")] = None,
    dst_gap: Annotated[Gap | None, typer.Option(help="Of --cron.")] = None,
    dst_fold: Annotated[Fold | None, typer.Option(help="Of --cron.")] = None,
    interval: Annotated[
        str | None, typer.Option(help="Make a schedule: fires so often, as 5s or 15m.")
    ] = None,
    fixed_delay: Annotated[
        bool, typer.Option("--fixed-delay", help="Count --interval from the end of each run.")
    ] = False,
    start_at: Annotated[str | None, typer.Option(help="No fire before it.")] = None,
    end_at: Annotated[str | None, typer.Option(help="No fire after it.")] = None,
    max_fires: Annotated[int | None, typer.Option(help="Runs until it ends.", min=1)] = None,
    jitter: Annotated[
        str | None, typer.Option(help="Put all its fires off by up to it, as 10m.")
    ] = None,
    misfire: Annotated[Misfire | None, typer.Option(help="For fires that were missed.")] = None,
    misfire_cap: Annotated[
        int | None, typer.Option(help="Most to make up for (with all).", min=1)
    ] = None,
    misfire_spacing: Annotated[
        str | None, typer.Option(help="Between those made up for (with all), as 30s.")
    ] = None,
    catch_up_window: Annotated[
        str | None, typer.Option(help="Make up for nothing older, as 2h.")
    ] = None,
    overlap: Annotated[Overlap | None, typer.Option(help="While a run goes on.")] = None,
    wait: Wait = False,
    timeout: WaitSeconds = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Submit a job or a schedule; with --wait, return when it has ended."""
    _needs_wait(wait, timeout)
    options: dict[str, Any] = {
        "name": name,
        "run_at": _moment("--run-at", run_at),
        "delay": delay,
        "priority": priority,
        "timeout": attempt_timeout,
        "max_retry": max_retry,
        "retry_interval": retry_interval,
        "retry_backoff": None if retry_backoff is None else retry_backoff.value,
        "callback_url": callback_url,
        "labels": dict(_pair("--label", one) for one in label) if label else None,
        "cron": cron,
        "timezone": timezone,
        "cron_dialect": _word(dialect),
        "dst_gap": _word(dst_gap),
        "dst_fold": _word(dst_fold),
        "interval": _duration("--interval", interval),
        "interval_mode": "fixedDelay" if fixed_delay else None,
        "start_at": _moment("--start-at", start_at),
        "end_at": _moment("--end-at", end_at),
        "max_fires": max_fires,
        "jitter": _duration("--jitter", jitter),
        "misfire_policy": _word(misfire),
        "misfire_cap": misfire_cap,
        "misfire_spacing": _duration("--misfire-spacing", misfire_spacing),
        "catch_up_window": _duration("--catch-up-window", catch_up_window),
        "overlap_policy": _word(overlap),
    }
    if request_id is not None:
        options["request_id"] = request_id
    document = _params(params)
    with _talking(url, api_key) as client:
        try:
            job = client.submit(handler, document, **options)
        except ValueError as error:
            _end(BAD_USAGE, str(error))
        if wait:
            _finish(client, job, timeout, as_json=as_json)
        else:
            _show(job, as_json=as_json)


@commands.command()
def get(
    job_id: JobId,
    wait: Wait = False,
    timeout: WaitSeconds = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Show a job and its newest attempts; with --wait, when it has ended."""
    _needs_wait(wait, timeout)
    with _talking(url, api_key) as client:
        job = client.get(job_id)
        if wait:
            _finish(client, job, timeout, as_json=as_json)
        else:
            _show(job, as_json=as_json)


@commands.command(name="list")
def list_jobs(
    status: Annotated[str | None, typer.Option(help="As WAITING or FAILED.")] = None,
    handler: Annotated[str | None, typer.Option(help="The handler's name.")] = None,
    name_prefix: Annotated[str | None, typer.Option(help="How the job's name begins.")] = None,
    label: Annotated[str | None, typer.Option(help="NAME=VALUE.")] = None,
    request_id: Annotated[str | None, typer.Option(help="The idempotency key.")] = None,
    created_from: Annotated[
        str | None, typer.Option(help="Created then or later, RFC 3339.")
    ] = None,
    created_to: Annotated[str | None, typer.Option(help="Created before that, RFC 3339.")] = None,
    limit: Annotated[int, typer.Option(help="Most jobs to show.", min=1)] = 50,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """List jobs, newest first; by one of status, handler, name, label or request id."""
    times = {
        "created_from": _moment("--created-from", created_from),
        "created_to": _moment("--created-to", created_to),
    }
    with _talking(url, api_key) as client:
        found = client.list(
            status=None if status is None else status.upper(),
            handler=handler,
            name_prefix=name_prefix,
            label=None if label is None else _pair("--label", label),
            request_id=request_id,
            page_size=min(limit, 200),
            **times,
        )
        jobs = list(itertools.islice(found, limit))
        if as_json:
            show.show_json_list(jobs)
        else:
            show.show_jobs(jobs, more=len(jobs) == limit and next(found, None) is not None)


@commands.command()
def cancel(job_id: JobId, as_json: AsJson = False, url: Url = None, api_key: ApiKey = None) -> None:
    """Cancel a job that has not ended."""
    with _talking(url, api_key) as client:
        _show(client.cancel(job_id), as_json=as_json)


@commands.command()
def retry(job_id: JobId, as_json: AsJson = False, url: Url = None, api_key: ApiKey = None) -> None:
    """Open a FAILED or CANCELLED job again, with all its attempts anew."""
    with _talking(url, api_key) as client:
        _show(client.retry(job_id), as_json=as_json)


@commands.command()
def pause(job_id: JobId, as_json: AsJson = False, url: Url = None, api_key: ApiKey = None) -> None:
    """Keep a waiting job from running until it is resumed."""
    with _talking(url, api_key) as client:
        _show(client.pause(job_id), as_json=as_json)


@commands.command()
def resume(
    job_id: JobId,
    catch_up: Annotated[
        bool,
        typer.Option("--catch-up", help="Deal with what a schedule missed by its misfire policy."),
    ] = False,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Let a paused job go on."""
    with _talking(url, api_key) as client:
        _show(client.resume(job_id, missed="catchUp" if catch_up else None), as_json=as_json)


@commands.command()
def backfill(
    schedule_id: JobId,
    first: Annotated[str, typer.Option("--from", help="The first moment, included; RFC 3339.")],
    last: Annotated[str, typer.Option("--to", help="The last moment, included; RFC 3339.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would run.")] = False,
    max_concurrent: Annotated[int, typer.Option(help="Runs at a time.", min=1, max=100)] = 1,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Run the fires of a schedule in a past range that have no job."""
    since, until = _given_moment("--from", first), _given_moment("--to", last)
    with _talking(url, api_key) as client:
        found = client.backfill(
            schedule_id, since, until, dry_run=dry_run, max_concurrent=max_concurrent
        )
        show.show_json(found) if as_json else show.show_backfill(found)


@commands.command()
def skips(
    schedule_id: JobId,
    limit: Annotated[int, typer.Option(help="Most rows to show.", min=1)] = 50,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """List the fires of a schedule that did not run, latest first, and why."""
    with _talking(url, api_key) as client:
        found = list(itertools.islice(client.skips(schedule_id, page_size=min(limit, 200)), limit))
        show.show_json_list(found) if as_json else show.show_skips(found)


@commands.command()
def workers(as_json: AsJson = False, url: Url = None, api_key: ApiKey = None) -> None:
    """List the workers and their load."""
    with _talking(url, api_key) as client:
        found = list(client.workers())
        show.show_json_list(found) if as_json else show.show_workers(found)


@commands.command()
def handlers(as_json: AsJson = False, url: Url = None, api_key: ApiKey = None) -> None:
    """List the handlers that live workers offer."""
    with _talking(url, api_key) as client:
        found = list(client.handlers())
        show.show_json_list(found) if as_json else show.show_handlers(found)


@contextmanager
def _talking(url: str | None, api_key: str | None) -> Iterator[Client]:
    """A client whose errors end the command with a sentence and the code of their kind."""
    from oncue import ApiError, Client, Retries, Unavailable

    try:
        client = Client(url, api_key=api_key, retries=Retries(attempts=ATTEMPTS))
    except ValueError as error:
        _end(BAD_USAGE, str(error))
    try:
        with client:
            yield client
    except ApiError as error:
        _end(SERVER_REFUSED, str(error))
    except Unavailable as error:
        again = (
            "" if error.request_id is None else f"; repeat it with --request-id {error.request_id}"
        )
        _end(NOT_REACHED, f"{error}{again}")
    except KeyboardInterrupt:
        _end(INTERRUPTED, "interrupted")


def _finish(client: Client, job: Job, timeout: float | None, *, as_json: bool) -> None:
    """Wait for the end, show the job, and end the command as the job ended."""
    from oncue import Unavailable, WaitTimeout

    try:
        ended = _waited(client, job, timeout)
    except WaitTimeout as error:
        _show(error.job, as_json=as_json)
        _end(WAIT_TIMED_OUT, str(error))
    except Unavailable as error:
        _end(NOT_REACHED, f"{error}; job {job.job_id} is stored and goes on")
    except KeyboardInterrupt:
        _end(INTERRUPTED, f"interrupted; job {job.job_id} goes on")
    _show(ended, as_json=as_json)
    if not ended.succeeded:
        raise typer.Exit(JOB_NOT_SUCCEEDED)


def _waited(client: Client, job: Job, timeout: float | None) -> Job:
    """Wait for the job's end, with a line that tells how it stands where a terminal is."""
    if not sys.stderr.isatty():
        return client.wait(job, timeout=timeout)
    from rich.console import Console

    from oncue import Unavailable, WaitTimeout

    began = answered = time.monotonic()
    with Console(stderr=True).status(_state(job, 0)) as line:
        while True:
            left = LOOK_SECONDS if timeout is None else began + timeout - time.monotonic()
            try:
                return client.wait(job, timeout=max(0.0, min(LOOK_SECONDS, left)))
            except WaitTimeout as waiting:
                if timeout is not None and left <= LOOK_SECONDS:
                    raise WaitTimeout(waiting.job, timeout) from None
                answered = time.monotonic()
                line.update(_state(waiting.job, answered - began))
            except Unavailable:
                now = time.monotonic()
                out_of_time = timeout is not None and left <= LOOK_SECONDS
                if out_of_time or now - answered > PATIENCE_SECONDS:
                    raise
                line.update(f"job {job.job_id}: the server does not answer; trying again")


def _state(job: Job, seconds: float) -> str:
    from rich.markup import escape

    progress = "" if job.progress is None else f", {show.json_line(job.progress)}"
    attempt = f", attempt {job.attempt} of {job.max_retry + 1}" if job.attempt else ""
    line = f"job {job.job_id} is {job.status}{attempt}{progress} ({seconds:.0f} s)"
    return escape(show.printable(line))


def _show(job: Job, *, as_json: bool) -> None:
    show.show_json(job) if as_json else show.show_job(job)


def _needs_wait(wait: bool, timeout: float | None) -> None:
    if timeout is not None and not wait:
        _end(BAD_USAGE, "--timeout is for --wait")


def _params(given: str | None) -> Any:
    """Read --params: JSON text, a file behind @, or standard input."""
    if given is None:
        return None
    try:
        if given == "-":
            text = sys.stdin.read()
        elif given.startswith("@"):
            text = Path(given[1:]).read_text(encoding="utf-8")
        else:
            text = given
        return json.loads(text, parse_constant=_no_constant)
    except OSError as error:
        _end(BAD_USAGE, f"--params: {given[1:]}: {error.strerror}")
    except (ValueError, RecursionError) as error:
        _end(BAD_USAGE, f"--params is not JSON: {error}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _moment(flag: str, given: str | None) -> datetime | None:
    return None if given is None else _given_moment(flag, given)


def _given_moment(flag: str, given: str) -> datetime:
    try:
        moment: datetime | None = datetime.fromisoformat(given)
    except ValueError:
        moment = None
    if moment is None or moment.utcoffset() is None:
        _end(BAD_USAGE, f"{flag} is a time with an offset, as 2030-01-31T09:00:00Z, not {given!r}")
    return moment


_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "": 1.0}


def _duration(flag: str, given: str | None) -> float | None:
    """Read a duration, as 5s, 250ms, 15m, 2h or 1d; a plain number is seconds."""
    if given is None:
        return None
    number = given.rstrip("smhd")
    try:
        return float(number) * _UNITS[given[len(number) :]]
    except (ValueError, KeyError):
        _end(BAD_USAGE, f"{flag} is a duration, as 5s, 250ms, 15m, 2h or 1d, not {given!r}")


def _word(choice: StrEnum | None) -> str | None:
    return None if choice is None else choice.value


def _pair(flag: str, given: str) -> tuple[str, str]:
    name, separator, value = given.partition("=")
    if not name or not separator:
        _end(BAD_USAGE, f"{flag} is NAME=VALUE, not {given!r}")
    return name, value


def _end(code: int, sentence: str) -> NoReturn:
    print(f"oncue: {show.printable(sentence)}", file=sys.stderr)
    raise typer.Exit(code)
