"""What a shell offers on the Tab key where a handler, a job or a worker is named.

The server is asked once, for at most a second; where it does not answer nothing is offered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import typer

if TYPE_CHECKING:
    from oncue import Client

Offer = list[tuple[str, str]]
"""Words, each with what a shell shows beside it."""

SECONDS: Final = 1.0
NEWEST_JOBS: Final = 50
STATES: Final = (
    *("WAITING", "RUNNING", "SUCCEEDED", "FAILED", "PAUSED", "CANCELLED", "BLOCKED", "SCHEDULED"),
)


def handler_names(ctx: typer.Context, incomplete: str) -> Offer:
    """Offer the handlers that live workers offer."""
    return _offer(
        ctx, incomplete, lambda client: ((one.name, one.description) for one in client.handlers())
    )


def job_ids(ctx: typer.Context, incomplete: str) -> Offer:
    """Offer the newest jobs."""

    def newest(client: Client) -> Iterable[tuple[str, str]]:
        for job in itertools.islice(client.list(page_size=NEWEST_JOBS), NEWEST_JOBS):
            yield str(job.job_id), f"{job.status} {job.job_name}"

    return _offer(ctx, incomplete, newest)


def worker_names(ctx: typer.Context, incomplete: str) -> Offer:
    """Offer the workers that live."""
    return _offer(
        ctx,
        incomplete,
        lambda client: (
            (one.name or one.worker_id, f"{one.state} {one.active}/{one.capacity}")
            for one in client.workers()
            if one.state != "DOWN"
        ),
    )


def states(incomplete: str) -> list[str]:
    """Offer the states of a job."""
    return [one for one in STATES if one.startswith(incomplete)]


def _offer(
    ctx: typer.Context,
    incomplete: str,
    read: Callable[[Client], Iterable[tuple[str, str]]],
) -> Offer:
    from oncue import Client, OncueError, Retries

    try:
        with Client(
            ctx.params.get("url"),
            api_key=ctx.params.get("api_key"),
            timeout=SECONDS,
            retries=Retries(attempts=1),
        ) as client:
            return [(word, text) for word, text in read(client) if word.startswith(incomplete)]
    except (OncueError, ValueError):
        # A sentence in the middle of a line that is being typed helps nobody.
        return []
