"""The commands of a caller, which speak to the API alone: submit, get, explain, cancel and so on.

How they end: 0 done (with --wait: the job SUCCEEDED), 1 the job ended otherwise, 2 bad usage,
3 the server refused, 4 the server cannot be reached, 5 the wait timed out.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from app import client_bulk as bulk
from app import client_complete as complete
from app import client_show as show

if TYPE_CHECKING:
    from oncue import BulkOperation, Client, Job

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
Wait = Annotated[bool, typer.Option("--wait", help="Return when the job has ended.")]
OneJob = Annotated[
    int | None,
    typer.Argument(
        help="The job's id; or give --where.",
        min=1,
        show_default=False,
        metavar="ID",
        autocompletion=complete.job_ids,
    ),
]
ScheduleId = Annotated[
    int, typer.Argument(help="The schedule's id.", min=1, metavar="ID", show_default=False)
]
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
Limit = Annotated[int, typer.Option(help="Most to show.", min=1)]
WaitSeconds = Annotated[
    float | None, typer.Option("--timeout", help="Most seconds to --wait.", min=0)
]


@commands.command(
    epilog=show.examples(
        'oncue submit --handler echo --params \'{"hello": "world"}\' --wait',
        "oncue submit --handler send-invoice --params @invoice.json --request-id order-1001",
        "oncue submit --handler echo --cron '0 9 * * MON-FRI' --timezone Europe/Berlin",
        "oncue submit --handler echo --run-at 2030-01-31T09:00:00+01:00 --label team=billing",
    )
)
def submit(
    handler: Annotated[
        str,
        typer.Option(help="The handler that runs the job.", autocompletion=complete.handler_names),
    ],
    name: Annotated[
        str | None, typer.Option(help="A name for people; the handler's by default.")
    ] = None,
    params: Annotated[
        str | None, typer.Option(help="JSON, @FILE, or - for standard input.")
    ] = None,
    request_id: Annotated[
        str | None, typer.Option(help="The idempotency key; drawn when left out.")
    ] = None,
    run_at: Annotated[str | None, typer.Option(help="When, as 2030-01-31T09:00:00Z.")] = None,
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
    expires_at: Annotated[
        str | None, typer.Option(help="Fails unless an attempt has begun by then, RFC 3339.")
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
        "expires_at": _moment("--expires-at", expires_at),
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
    with talking(url, api_key) as client:
        try:
            job = client.submit(handler, document, **options)
        except ValueError as error:
            _end(BAD_USAGE, str(error))
        if wait:
            _finish(client, job, timeout, as_json=as_json)
        else:
            _show(job, as_json=as_json)


@commands.command(
    epilog=show.examples(
        "oncue get 7",
        "oncue get 7 --wait --timeout 60 --json",
        "oncue get --client-request-id order-1001",
    )
)
def get(
    job_id: Annotated[
        int | None, typer.Argument(help="The job's id.", min=1, show_default=False)
    ] = None,
    request_id: Annotated[
        str | None,
        typer.Option("--client-request-id", "--request-id", help="The idempotency key instead."),
    ] = None,
    wait: Wait = False,
    timeout: WaitSeconds = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Show a job and its newest attempts; with --wait, when it has ended."""
    _needs_wait(wait, timeout)
    if (job_id is None) == (request_id is None):
        _end(BAD_USAGE, "give the job's id or --client-request-id; see `oncue get --help`")
    with talking(url, api_key) as client:
        job = _found(client, request_id) if job_id is None else client.get(job_id)
        if wait:
            _finish(client, job, timeout, as_json=as_json)
        else:
            _show(job, as_json=as_json)


@commands.command(
    name="list",
    epilog=show.examples(
        "oncue list --status FAILED --limit 20",
        "oncue list --label team=billing --json",
        "oncue list --created-from 2030-01-31T00:00:00Z",
    ),
)
def list_jobs(
    status: Annotated[
        str | None,
        typer.Option(help="As WAITING or FAILED.", autocompletion=complete.states),
    ] = None,
    handler: Annotated[
        str | None,
        typer.Option(help="The handler's name.", autocompletion=complete.handler_names),
    ] = None,
    name_prefix: Annotated[str | None, typer.Option(help="How the job's name begins.")] = None,
    label: Annotated[str | None, typer.Option(help="NAME=VALUE.")] = None,
    request_id: Annotated[str | None, typer.Option(help="The idempotency key.")] = None,
    created_from: Annotated[
        str | None, typer.Option(help="Created then or later, RFC 3339.")
    ] = None,
    created_to: Annotated[str | None, typer.Option(help="Created before that, RFC 3339.")] = None,
    finished_from: Annotated[
        str | None, typer.Option(help="Finished then or later, RFC 3339.")
    ] = None,
    finished_to: Annotated[str | None, typer.Option(help="Finished before that, RFC 3339.")] = None,
    limit: Limit = 50,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """List jobs, newest first; by one of status, handler, name, label or request id."""
    times = {
        "created_from": _moment("--created-from", created_from),
        "created_to": _moment("--created-to", created_to),
        "finished_from": _moment("--finished-from", finished_from),
        "finished_to": _moment("--finished-to", finished_to),
    }
    with talking(url, api_key) as client:
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
            show.show_jobs(jobs, more=_has_more(found, jobs, limit))


@commands.command(epilog=show.examples("oncue explain 7", "oncue explain 7 --json"))
def explain(
    job_id: JobId, as_json: AsJson = False, url: Url = None, api_key: ApiKey = None
) -> None:
    """Say why a job is not running, who ran it, and why it ended so."""
    with talking(url, api_key) as client:
        found = client.explain(job_id)
        show.show_json(found) if as_json else show.show_explanation(found)


@commands.command(
    epilog=show.examples("oncue executions 7", "oncue executions 7 --limit 200 --json")
)
def executions(
    job_id: JobId,
    limit: Limit = 50,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """List the attempts to run a job, newest first."""
    with talking(url, api_key) as client:
        found = client.executions(job_id, page_size=min(limit, 200))
        shown = list(itertools.islice(found, limit))
        if as_json:
            show.show_json_list(shown)
        else:
            show.show_executions(shown, more=_has_more(found, shown, limit))


@commands.command(epilog=show.examples("oncue callbacks 7"))
def callbacks(
    job_id: JobId,
    limit: Limit = 50,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """List what the ends of a job owe or owed to its callback URL, newest first."""
    with talking(url, api_key) as client:
        found = client.callbacks(job_id, page_size=min(limit, 200))
        shown = list(itertools.islice(found, limit))
        if as_json:
            show.show_json_list(shown)
        else:
            show.show_callbacks(shown, more=_has_more(found, shown, limit))


@commands.command(epilog=show.examples("oncue redeliver 01998f2e-8f3c-7c62-9a51-0a9f6c1d2e3b"))
def redeliver(
    delivery_id: Annotated[
        str, typer.Argument(help="As `callbacks` shows it.", metavar="DELIVERY", show_default=False)
    ],
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Deliver a callback again now, under the same webhook-id."""
    with talking(url, api_key) as client:
        found = client.redeliver(delivery_id)
        show.show_json(found) if as_json else show.show_callbacks([found], more=False)


@commands.command(
    epilog=show.examples("oncue trigger 7", 'oncue trigger 7 --params \'{"to": "Ada"}\'')
)
def trigger(
    job_id: JobId,
    params: Annotated[
        str | None, typer.Option(help="Other params: JSON, @FILE, or - for standard input.")
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Run a job now that waits for its time or for its retry."""
    document = _params(params)
    with talking(url, api_key) as client:
        if params is None:
            _show(client.trigger(job_id), as_json=as_json)
        else:
            _show(client.trigger(job_id, params=document), as_json=as_json)


@commands.command(
    epilog=show.examples(
        "oncue cancel 7",
        "oncue cancel --where handler=send-invoice --where status=WAITING --dry-run",
    )
)
def cancel(
    job_id: OneJob = None,
    where: Where = None,
    dry_run: DryRun = False,
    rate: Rate = None,
    yes: Yes = False,
    request_id: BulkRequestId = None,
    wait: BulkWait = False,
    timeout: WaitSeconds = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Cancel a job that has not ended, or with --where all that match."""
    asked = bulk.Asked("cancel", where or [], dry_run, rate, yes, request_id, wait, timeout)
    with talking(url, api_key) as client:
        if (one := _the_one(job_id, asked)) is None:
            _bulk(client, asked, as_json=as_json)
        else:
            _show(client.cancel(one), as_json=as_json)


@commands.command(
    epilog=show.examples(
        "oncue retry 7",
        "oncue retry --where status=FAILED --where finished-from=2030-01-31T02:00:00Z --rate 50",
    )
)
def retry(
    job_id: OneJob = None,
    where: Where = None,
    dry_run: DryRun = False,
    rate: Rate = None,
    yes: Yes = False,
    request_id: BulkRequestId = None,
    wait: BulkWait = False,
    timeout: WaitSeconds = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Open a FAILED or CANCELLED job again, with all its attempts anew; or all that match."""
    asked = bulk.Asked("retry", where or [], dry_run, rate, yes, request_id, wait, timeout)
    with talking(url, api_key) as client:
        if (one := _the_one(job_id, asked)) is None:
            _bulk(client, asked, as_json=as_json)
        else:
            _show(client.retry(one), as_json=as_json)


@commands.command(
    epilog=show.examples(
        "oncue pause 7",
        "oncue pause --where label=team=billing --yes --wait",
    )
)
def pause(
    job_id: OneJob = None,
    where: Where = None,
    dry_run: DryRun = False,
    rate: Rate = None,
    yes: Yes = False,
    request_id: BulkRequestId = None,
    wait: BulkWait = False,
    timeout: WaitSeconds = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Keep a waiting job from running until it is resumed; or all that match."""
    asked = bulk.Asked("pause", where or [], dry_run, rate, yes, request_id, wait, timeout)
    with talking(url, api_key) as client:
        if (one := _the_one(job_id, asked)) is None:
            _bulk(client, asked, as_json=as_json)
        else:
            _show(client.pause(one), as_json=as_json)


@commands.command(
    epilog=show.examples(
        "oncue resume 7",
        "oncue resume 7 --catch-up",
        "oncue resume --where label=team=billing --yes",
    )
)
def resume(
    job_id: OneJob = None,
    catch_up: Annotated[
        bool,
        typer.Option("--catch-up", help="Deal with what a schedule missed by its misfire policy."),
    ] = False,
    where: Where = None,
    dry_run: DryRun = False,
    rate: Rate = None,
    yes: Yes = False,
    request_id: BulkRequestId = None,
    wait: BulkWait = False,
    timeout: WaitSeconds = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Let a paused job go on, or all that match."""
    asked = bulk.Asked("resume", where or [], dry_run, rate, yes, request_id, wait, timeout)
    if catch_up and where:
        _end(BAD_USAGE, "--catch-up is for one schedule; see `oncue resume --help`")
    with talking(url, api_key) as client:
        if (one := _the_one(job_id, asked)) is None:
            _bulk(client, asked, as_json=as_json)
        else:
            _show(client.resume(one, missed="catchUp" if catch_up else None), as_json=as_json)


@commands.command(
    epilog=show.examples(
        "oncue backfill 7 --from 2026-01-01T00:00:00Z --to 2026-01-07T00:00:00Z --dry-run",
        "oncue backfill 7 --from 2026-01-01T00:00:00Z --to 2026-01-07T00:00:00Z --max-concurrent 4",
    )
)
def backfill(
    schedule_id: ScheduleId,
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
    with talking(url, api_key) as client:
        found = client.backfill(
            schedule_id, since, until, dry_run=dry_run, max_concurrent=max_concurrent
        )
        show.show_json(found) if as_json else show.show_backfill(found)


@commands.command(epilog=show.examples("oncue skips 7", "oncue skips 7 --limit 200 --json"))
def skips(
    schedule_id: ScheduleId,
    limit: Limit = 50,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """List the fires of a schedule that did not run, latest first, and why."""
    with talking(url, api_key) as client:
        found = list(itertools.islice(client.skips(schedule_id, page_size=min(limit, 200)), limit))
        show.show_json_list(found) if as_json else show.show_skips(found)


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
    _needs_wait(wait, timeout)
    if operation_id is None and (call_off or wait):
        _end(BAD_USAGE, "--cancel and --wait need an operation's id; see `oncue bulk --help`")
    with talking(url, api_key) as client:
        if operation_id is None:
            found = client.bulk_operations(page_size=min(limit, 200))
            operations = list(itertools.islice(found, limit))
            if as_json:
                show.show_json_list(operations)
            else:
                more = _has_more(found, operations, limit)
                bulk.show_operations(operations, more=more)
            return
        one = (client.cancel_bulk if call_off else client.bulk_operation)(operation_id)
        _finish_bulk(client, one, wait=wait, timeout=timeout, as_json=as_json)


@commands.command(epilog=show.examples("oncue workers", "oncue workers --json"))
def workers(as_json: AsJson = False, url: Url = None, api_key: ApiKey = None) -> None:
    """List the workers and their load."""
    with talking(url, api_key) as client:
        found = list(client.workers())
        show.show_json_list(found) if as_json else show.show_workers(found)


@commands.command(
    epilog=show.examples("oncue handlers", "oncue handlers echo", "oncue handlers --json")
)
def handlers(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show this one, with its params.",
            show_default=False,
            autocompletion=complete.handler_names,
        ),
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """List the handlers that live workers offer, or show one and the fields of its params."""
    with talking(url, api_key) as client:
        found = [one for one in client.handlers() if name in (None, one.name)]
    if name is None:
        show.show_json_list(found) if as_json else show.show_handlers(found)
    elif not found:
        _end(SERVER_REFUSED, f"no live worker offers the handler {name!r} (handler_not_offered)")
    else:
        show.show_json(found[0]) if as_json else show.show_handler(found[0])


@commands.command(
    epilog=show.examples(
        "oncue drain worker-1",
        "oncue drain worker-1 worker-2 --wait --timeout 600",
        "oncue drain http://10.0.0.7:8081",
    )
)
def drain(
    workers: Annotated[
        list[str],
        typer.Argument(
            help="Names, ids or addresses of workers.",
            metavar="WORKER",
            show_default=False,
            autocompletion=complete.worker_names,
        ),
    ],
    wait: Annotated[bool, typer.Option("--wait", help="Return when they hold nothing.")] = False,
    timeout: WaitSeconds = None,
    internal_token: Annotated[
        str | None,
        typer.Option(
            help="What workers and dispatchers share; the variable keeps it out of `ps`.",
            envvar="ONCUE_INTERNAL_TOKEN",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Let workers take no more runs; what runs goes on. Only a restart undoes it."""
    from app.client_drain import DrainRefused, StillHeld, WorkerNotReached, find_targets
    from app.client_drain import drain as drain_workers

    _needs_wait(wait, timeout)
    try:
        with talking(url, api_key) as client:
            told = drain_workers(
                find_targets(client, workers),
                internal_token,
                wait=wait,
                timeout=timeout,
                watch=lambda one: None if as_json else print(show.printable(one.sentence())),
            )
    except DrainRefused as error:
        _end(SERVER_REFUSED, str(error))
    except WorkerNotReached as error:
        _end(NOT_REACHED, str(error))
    except StillHeld as error:
        _end(WAIT_TIMED_OUT, str(error))
    if as_json:
        print(json.dumps([one.document() for one in told], indent=2))


def _the_one(job_id: int | None, asked: bulk.Asked) -> int | None:
    """Return the one job that is meant, None for many; ends the command when it is not clear."""
    if job_id is not None and asked.where:
        _end(BAD_USAGE, f"give a job's id or --where, not both; see `oncue {asked.action} --help`")
    if job_id is None and not asked.where:
        _end(
            BAD_USAGE,
            "give a job's id, or --where NAME=VALUE for all that match; "
            f"see `oncue {asked.action} --help`",
        )
    if job_id is not None and asked.has_options:
        _end(
            BAD_USAGE,
            "--dry-run, --rate, --yes, --request-id, --wait and --timeout are for --where; "
            f"see `oncue {asked.action} --help`",
        )
    _needs_wait(asked.wait, asked.timeout)
    return job_id


def _bulk(client: Client, asked: bulk.Asked, *, as_json: bool) -> None:
    """Count, ask, and change what matches; as careful as the answer of a person can be."""
    try:
        narrowed = bulk.filter_of(asked.where)
        if asked.dry_run:
            count = client.bulk_count(asked.action, **narrowed)
            show.show_json(count) if as_json else bulk.show_count(count)
            return
        if not asked.yes:
            if not sys.stdin.isatty():
                _end(BAD_USAGE, "--where changes many jobs: say --yes, or --dry-run to count them")
            if not bulk.confirmed(client.bulk_count(asked.action, **narrowed)):
                _end(BAD_USAGE, "nothing was changed")
        operation = client.bulk(
            asked.action, rate=asked.rate, request_id=asked.request_id, **narrowed
        )
    except ValueError as error:
        _end(BAD_USAGE, str(error))
    _finish_bulk(client, operation, wait=asked.wait, timeout=asked.timeout, as_json=as_json)


def _finish_bulk(
    client: Client, operation: BulkOperation, *, wait: bool, timeout: float | None, as_json: bool
) -> None:
    from oncue import BulkTimeout, Unavailable

    def shown(one: BulkOperation) -> None:
        show.show_json(one) if as_json else bulk.show_operation(one)

    if not wait:
        shown(operation)
        return
    try:
        ended = bulk.watched(client, operation, timeout)
    except BulkTimeout as error:
        shown(error.operation)
        _end(WAIT_TIMED_OUT, str(error))
    except Unavailable as error:
        _end(NOT_REACHED, f"{error}; bulk operation {operation.operation_id} goes on")
    except KeyboardInterrupt:
        _end(INTERRUPTED, f"interrupted; bulk operation {operation.operation_id} goes on")
    shown(ended)
    if ended.status != "SUCCEEDED":
        raise typer.Exit(JOB_NOT_SUCCEEDED)


@contextmanager
def talking(url: str | None, api_key: str | None) -> Iterator[Client]:
    """A client whose errors end the command with a sentence and the code of their kind."""
    from oncue import ApiError, Client, Retries, Unauthorized, Unavailable

    try:
        client = Client(url, api_key=api_key, retries=Retries(attempts=ATTEMPTS))
    except ValueError as error:
        _end(BAD_USAGE, str(error))
    try:
        with client:
            yield client
    except Unauthorized as error:
        _end(SERVER_REFUSED, f"set ONCUE_API_KEY to a key that the server knows ({error.code})")
    except ApiError as error:
        _end(SERVER_REFUSED, show.refusal(error))
    except Unavailable as error:
        again = (
            "" if error.request_id is None else f"; repeat it with --request-id {error.request_id}"
        )
        _end(NOT_REACHED, f"{error}{again}")
    except KeyboardInterrupt:
        _end(INTERRUPTED, "interrupted")


def _found(client: Client, request_id: str | None) -> Job:
    job = client.find(request_id or "")
    if job is None:
        _end(SERVER_REFUSED, f"no job has the clientRequestId {request_id!r} (job_not_found)")
    return job


def _has_more(found: Iterator[object], shown: Sequence[object], limit: int) -> bool:
    return len(shown) == limit and next(found, None) is not None


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
