"""Commands that change jobs: the verbs, for one job or with --where for many."""

from __future__ import annotations

import json
from typing import Annotated, Final, Literal

import typer

from app.client import bulk, complete, show
from app.client.bulk import BulkRequestId, BulkWait, DryRun, Rate, Where, Yes, change_many, the_one
from app.client.flags import moment_of, params_of
from app.client.talk import (
    BAD_USAGE,
    ApiKey,
    AsJson,
    JobId,
    ScheduleId,
    Url,
    WaitSeconds,
    commands,
    end,
    show_one,
    talking,
)
from oncue.submission import TriggerOptions

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


@commands.command(
    epilog=show.examples(
        "oncue cancel 7",
        "oncue cancel 7 --children",
        "oncue cancel --where handler=send-invoice --where status=WAITING --dry-run",
    )
)
def cancel(
    job_id: OneJob = None,
    children: Annotated[
        bool,
        typer.Option("--children", help="Also what a schedule has made and has not ended."),
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
    """Cancel a job that has not ended, or with --where all that match."""
    asked = bulk.Asked("cancel", where or [], dry_run, rate, yes, request_id, wait, timeout)
    if children and where:
        end(BAD_USAGE, "--children is for one schedule; see `oncue cancel --help`")
    with talking(url, api_key) as client:
        if (one := the_one(job_id, asked)) is None:
            change_many(client, asked, as_json=as_json)
        else:
            show_one(client.cancel(one, children=children), as_json=as_json)


_Verb = Literal["retry", "pause"]
_MANY: Final[dict[_Verb, tuple[str, str]]] = {
    "retry": (
        "Open a FAILED or CANCELLED job again, with all its attempts anew; or all that match.",
        "oncue retry --where status=FAILED --where finished-from=2030-01-31T02:00:00Z --rate 50",
    ),
    "pause": (
        "Keep a waiting job from running until it is resumed; or all that match.",
        "oncue pause --where label=team=billing --yes --wait",
    ),
}


def _add_verb(verb: _Verb, does: str, example: str) -> None:
    """Add a command that changes one job, or all that match."""

    def change(
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
        asked = bulk.Asked(verb, where or [], dry_run, rate, yes, request_id, wait, timeout)
        with talking(url, api_key) as client:
            if (one := the_one(job_id, asked)) is None:
                change_many(client, asked, as_json=as_json)
            else:
                show_one(getattr(client, verb)(one), as_json=as_json)

    epilog = show.examples(f"oncue {verb} 7", example)
    commands.command(name=verb, help=does, epilog=epilog)(change)


for _verb, (_does, _example) in _MANY.items():
    _add_verb(_verb, _does, _example)


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
        end(BAD_USAGE, "--catch-up is for one schedule; see `oncue resume --help`")
    with talking(url, api_key) as client:
        if (one := the_one(job_id, asked)) is None:
            change_many(client, asked, as_json=as_json)
        else:
            show_one(client.resume(one, missed="catchUp" if catch_up else None), as_json=as_json)


@commands.command(
    epilog=show.examples(
        "oncue trigger 7",
        'oncue trigger 7 --params \'{"to": "Ada"}\'',
        "oncue trigger 8 --request-id report-of-may",
    )
)
def trigger(
    job_id: JobId,
    params: Annotated[
        str | None, typer.Option(help="Other params: JSON, @FILE, or - for standard input.")
    ] = None,
    request_id: Annotated[
        str | None,
        typer.Option(help="Of a schedule: one such id is one job, however often it is sent."),
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Run a job now that waits for its time or for its retry, or let a schedule make one."""
    options: TriggerOptions = {}
    if params is not None:
        options["params"] = params_of(params)
    if request_id is not None:
        options["request_id"] = request_id
    with talking(url, api_key) as client:
        show_one(client.trigger(job_id, **options), as_json=as_json)


@commands.command(
    epilog=show.examples(
        "oncue redeliver 01998f2e-8f3c-7c62-9a51-0a9f6c1d2e3b",
        "oncue redeliver --job 7",
        "oncue redeliver --where finished-from=2030-01-31T02:00:00Z --rate 50 --dry-run",
    )
)
def redeliver(
    delivery_id: Annotated[
        str | None,
        typer.Argument(help="As `callbacks` shows it.", metavar="DELIVERY", show_default=False),
    ] = None,
    job: Annotated[
        int | None, typer.Option(help="All callbacks of this job that have failed.", min=1)
    ] = None,
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
    """Deliver a callback again now, under the same webhook-id; or all that have failed.

    Those that were given up, and those that wait for their next try after a failed one.
    """
    asked = bulk.Asked("redeliver", where or [], dry_run, rate, yes, request_id, wait, timeout)
    if sum((delivery_id is not None, job is not None, bool(where))) != 1:
        end(BAD_USAGE, "give a delivery's id, --job or --where; see `oncue redeliver --help`")
    with talking(url, api_key) as client:
        if the_one(1 if where is None else None, asked) is None:
            change_many(client, asked, as_json=as_json)
        elif job is not None:
            count = client.redeliver_failed(job)
            print(json.dumps({"redelivered": count}) if as_json else f"{count} are tried again")
        elif delivery_id is not None:
            found = client.redeliver(delivery_id)
            show.show_json(found) if as_json else show.show_callbacks([found], more=False)


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
    since, until = moment_of("--from", first), moment_of("--to", last)
    with talking(url, api_key) as client:
        found = client.backfill(
            schedule_id, since, until, dry_run=dry_run, max_concurrent=max_concurrent
        )
        show.show_json(found) if as_json else show.show_backfill(found)
