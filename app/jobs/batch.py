"""Batches: up to 500 jobs in one request, each answered on its own, in one commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

import structlog

from app.access.caller import Caller
from app.edge.bodies import parse_object
from app.edge.problems import STATUS_OF, Problem, invalid
from app.jobs.check import Checked
from app.jobs.submit import Submitter
from app.lifecycle.moves.submit import Entered
from app.plumbing.database import DatabaseUnavailable

log = structlog.get_logger(__name__)

MAX_JOBS: Final = 500
MAX_BATCH_BYTES: Final = 8 * 1024 * 1024
CHECKED_AT_ONCE: Final = 20


async def submit_batch(
    submitter: Submitter, caller: Caller, body: bytes, weigh: Callable[[int], None]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Accept each job of a batch or refuse it, and return one item a job, in order.

    The second are headers that tell what is left of the tenant's limits. `weigh` is told how many
    jobs they are as soon as that is known.

    Raises:
        Problem: the envelope itself is wrong; nothing was stored.
    """
    sent = _envelope(body)
    weigh(len(sent))
    checked: list[Checked | Problem] = []
    for number, one in enumerate(sent, start=1):
        checked.append(await _check(submitter, caller, one))
        if number % CHECKED_AT_ONCE == 0:
            await asyncio.sleep(0)
    try:
        placed = await submitter.checker.place([one for one in checked if isinstance(one, Checked)])
        admitted, headers = await submitter.admit(caller, placed)
    except DatabaseUnavailable:
        return {"items": [_refused(_unavailable()) for _ in checked]}, {}
    # Each in its place; those whose shape is wrong were not counted.
    jobs = iter(admitted)
    checked = [next(jobs) if isinstance(one, Checked) else one for one in checked]
    items = await asyncio.gather(*_answers(submitter, caller, checked))
    return {"items": items}, headers


def _answers(
    submitter: Submitter, caller: Caller, checked: Sequence[Checked | Problem]
) -> list[Coroutine[Any, Any, dict[str, Any]]]:
    """Let all that is new into one commit; the answers are in the order of the batch."""
    new = [one.new for one in checked if isinstance(one, Checked) and one.refusal is None]
    overloaded: Problem | None = None
    entered: Iterator[asyncio.Future[Entered]] = iter(())
    try:
        entered = iter(submitter.enter_together(new))
    except Problem as problem:
        overloaded = problem
    answers = []
    for one in checked:
        if isinstance(one, Problem) or one.refusal is not None:
            answers.append(_enter(submitter, caller, one))
        elif overloaded is not None:
            answers.append(_enter(submitter, caller, overloaded))
        else:
            answers.append(_enter(submitter, caller, one, next(entered)))
    return answers


def _envelope(body: bytes) -> list[Any]:
    envelope = parse_object(body)
    jobs = envelope.get("jobs")
    if envelope.keys() != {"jobs"} or not isinstance(jobs, list):
        raise invalid('send {"jobs": [...]} and nothing else', "/jobs")
    if not 1 <= len(jobs) <= MAX_JOBS:
        raise invalid(f"send 1 to {MAX_JOBS} in one batch, not {len(jobs)}", "/jobs")
    return jobs


async def _check(submitter: Submitter, caller: Caller, sent: Any) -> Checked | Problem:
    if not isinstance(sent, dict):
        return invalid("each of jobs must be an object", "")
    try:
        return await submitter.checker.check(caller, sent)
    except Problem as problem:
        return problem
    except DatabaseUnavailable:
        return _unavailable()


async def _enter(
    submitter: Submitter,
    caller: Caller,
    checked: Checked | Problem,
    entered: asyncio.Future[Entered] | None = None,
) -> dict[str, Any]:
    if isinstance(checked, Problem):
        return _refused(checked)
    try:
        submitted = await submitter.enter(caller, checked, entered)
    except Problem as problem:
        return _refused(problem)
    except DatabaseUnavailable:
        return _refused(_unavailable())
    except Exception:
        log.exception("batch_item_fault", client_request_id=checked.new.client_request_id)
        return _refused(Problem("internal_error", "This job failed; send it again, unchanged."))
    return {"httpStatus": 202 if submitted.created else 200, **submitted.job}


def _refused(problem: Problem) -> dict[str, Any]:
    return {"httpStatus": STATUS_OF[problem.code], **problem.document()}


def _unavailable() -> Problem:
    return Problem(
        "database_unavailable",
        "It is not known whether this job was stored: send it again later, unchanged.",
    )
