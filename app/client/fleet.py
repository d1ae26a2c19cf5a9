"""Commands about those who work: workers, handlers, drain."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from app.client import complete, show
from app.client.talk import (
    NOT_REACHED,
    SERVER_REFUSED,
    WAIT_TIMED_OUT,
    ApiKey,
    AsJson,
    Url,
    WaitSeconds,
    commands,
    end,
    needs_wait,
    talking,
)


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
        end(SERVER_REFUSED, f"no live worker offers the handler {name!r} (handler_not_offered)")
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
    from app.client.drain import (
        Draining,
        DrainRefused,
        StillHeld,
        WorkerNotReached,
        ask_through,
        drain_by,
        find_targets,
    )
    from app.client.drain import drain as drain_workers

    def watch(one: Draining) -> None:
        if not as_json:
            print(show.printable(one.sentence()))

    needs_wait(wait, timeout)
    try:
        with talking(url, api_key) as client:
            targets = find_targets(client, workers)
            if internal_token is None and all(one.worker_id is not None for one in targets):
                told = drain_by(
                    ask_through(client), targets, wait=wait, timeout=timeout, watch=watch
                )
            else:
                told = drain_workers(
                    targets, internal_token, wait=wait, timeout=timeout, watch=watch
                )
    except DrainRefused as error:
        end(SERVER_REFUSED, str(error))
    except WorkerNotReached as error:
        end(NOT_REACHED, str(error))
    except StillHeld as error:
        end(WAIT_TIMED_OUT, str(error))
    if as_json:
        print(json.dumps([one.document() for one in told], indent=2))
