"""`oncue submit`: a job or a schedule, from flags."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from app.client import complete, show
from app.client.flags import (
    duration_of,
    headers_of,
    moment_or_none,
    pairs_of,
    params_of,
    word_of,
)
from app.client.talk import (
    BAD_USAGE,
    ApiKey,
    AsJson,
    Url,
    WaitSeconds,
    commands,
    end,
    needs_wait,
    show_one,
    talking,
)
from app.client.wait import Wait, finish


class Event(StrEnum):
    """What a callback may be for."""

    succeeded = "succeeded"
    failed = "failed"
    cancelled = "cancelled"
    started = "started"
    retrying = "retrying"


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
    callback_event: Annotated[
        list[Event] | None,
        typer.Option(help="What the callback is for, not only the end; may be repeated."),
    ] = None,
    callback_header: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE to send with it; may be repeated.")
    ] = None,
    callback_secret_header: Annotated[
        list[str] | None,
        typer.Option(
            help="The same, kept encrypted and never shown; NAME=@FILE keeps it out of `ps`."
        ),
    ] = None,
    secret_params: Annotated[
        bool,
        typer.Option(
            "--secret-params", help="Keep them encrypted and never show them; give them as @FILE."
        ),
    ] = False,
    secret_result: Annotated[
        bool,
        typer.Option("--secret-result", help="The same for the result: only callbacks tell it."),
    ] = False,
    expires_at: Annotated[
        str | None, typer.Option(help="Fails unless an attempt has begun by then, RFC 3339.")
    ] = None,
    concurrency_key: Annotated[
        str | None,
        typer.Option(help="With --concurrency-limit: so many with this key run at once."),
    ] = None,
    concurrency_limit: Annotated[
        int | None, typer.Option(help="Of --concurrency-key.", min=1)
    ] = None,
    rate_key: Annotated[
        str | None, typer.Option(help="With --rate: runs with this key begin so far apart.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Of --rate-key: runs a second.", min=0.001)
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
        str | None,
        typer.Option(help="Between those made up for (with all), as 30s; 1s by default."),
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
    needs_wait(wait, timeout)
    options: dict[str, Any] = {
        "name": name,
        "run_at": moment_or_none("--run-at", run_at),
        "delay": delay,
        "priority": priority,
        "timeout": attempt_timeout,
        "max_retry": max_retry,
        "retry_interval": retry_interval,
        "retry_backoff": None if retry_backoff is None else retry_backoff.value,
        "callback_url": callback_url,
        "callback_events": [one.value for one in callback_event] if callback_event else None,
        "callback_headers": headers_of(callback_header, callback_secret_header),
        "secret_params": secret_params or None,
        "secret_result": secret_result or None,
        "expires_at": moment_or_none("--expires-at", expires_at),
        "concurrency_key": concurrency_key,
        "concurrency_limit": concurrency_limit,
        "rate_key": rate_key,
        "rate_per_second": rate,
        "labels": pairs_of("--label", label) or None,
        "cron": cron,
        "timezone": timezone,
        "cron_dialect": word_of(dialect),
        "dst_gap": word_of(dst_gap),
        "dst_fold": word_of(dst_fold),
        "interval": duration_of("--interval", interval),
        "interval_mode": "fixedDelay" if fixed_delay else None,
        "start_at": moment_or_none("--start-at", start_at),
        "end_at": moment_or_none("--end-at", end_at),
        "max_fires": max_fires,
        "jitter": duration_of("--jitter", jitter),
        "misfire_policy": word_of(misfire),
        "misfire_cap": misfire_cap,
        "misfire_spacing": duration_of("--misfire-spacing", misfire_spacing),
        "catch_up_window": duration_of("--catch-up-window", catch_up_window),
        "overlap_policy": word_of(overlap),
    }
    if request_id is not None:
        options["request_id"] = request_id
    document = params_of(params)
    with talking(url, api_key) as client:
        try:
            job = client.submit(handler, document, **options)
        except ValueError as error:
            end(BAD_USAGE, str(error))
        if wait:
            finish(client, job, timeout, as_json=as_json)
        else:
            show_one(job, as_json=as_json)
