"""Commands that look: get, list, explain, executions, callbacks, skips."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated

import typer

from app.client import complete, show
from app.client.flags import moment_or_none, pair_of
from app.client.talk import (
    BAD_USAGE,
    SERVER_REFUSED,
    ApiKey,
    AsJson,
    JobId,
    Limit,
    ScheduleId,
    Url,
    WaitSeconds,
    commands,
    end,
    has_more,
    needs_wait,
    show_one,
    talking,
)
from app.client.wait import Wait, finish

if TYPE_CHECKING:
    from oncue import Client, Job


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
    needs_wait(wait, timeout)
    if (job_id is None) == (request_id is None):
        end(BAD_USAGE, "give the job's id or --client-request-id; see `oncue get --help`")
    with talking(url, api_key) as client:
        job = _found(client, request_id) if job_id is None else client.get(job_id)
        if wait:
            finish(client, job, timeout, as_json=as_json)
        else:
            show_one(job, as_json=as_json)


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
        "created_from": moment_or_none("--created-from", created_from),
        "created_to": moment_or_none("--created-to", created_to),
        "finished_from": moment_or_none("--finished-from", finished_from),
        "finished_to": moment_or_none("--finished-to", finished_to),
    }
    with talking(url, api_key) as client:
        found = client.list(
            status=None if status is None else status.upper(),
            handler=handler,
            name_prefix=name_prefix,
            label=None if label is None else pair_of("--label", label),
            request_id=request_id,
            page_size=min(limit, 200),
            **times,
        )
        jobs = list(itertools.islice(found, limit))
        if as_json:
            show.show_json_list(jobs)
        else:
            show.show_jobs(jobs, more=has_more(found, jobs, limit))


@commands.command(epilog=show.examples("oncue counts", "oncue counts --json"))
def counts(as_json: AsJson = False, url: Url = None, api_key: ApiKey = None) -> None:
    """Count jobs by state, each up to 10,000."""
    with talking(url, api_key) as client:
        found = client.counts()
        show.show_json(found) if as_json else show.show_counts(found)


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
            show.show_executions(shown, more=has_more(found, shown, limit))


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
            show.show_callbacks(shown, more=has_more(found, shown, limit))


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


def _found(client: Client, request_id: str | None) -> Job:
    job = client.find(request_id or "")
    if job is None:
        end(SERVER_REFUSED, f"no job has the clientRequestId {request_id!r} (job_not_found)")
    return job
