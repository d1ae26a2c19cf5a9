"""The verbs of callers: cancel, pause, resume, trigger, retry, and PATCH of a job that waits."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, assert_never

import structlog
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.access.keys import Caller
from app.edge.problems import Problem, validation_problem
from app.ground import Ground
from app.jobs.look import find_job, no_such_job
from app.jobs.schemas import ChangeJob, TriggerJob
from app.jobs.submit import params_text, parse_object
from app.jobs.views import job_view
from app.lifecycle.moves.cancel import cancel_job
from app.lifecycle.moves.guard import Asked, Changed, NotPossible, Stale, TooFew, Unknown
from app.lifecycle.moves.hold import hold_job
from app.lifecycle.moves.reopen import reopen_job
from app.lifecycle.moves.revise import NewValues, revise_job
from app.lifecycle.moves.trigger import OtherParams, trigger_job
from app.lifecycle.states import JobStatus
from app.lifecycle.token import new_token
from app.plumbing.bus import CANCEL, ENDED, OWED, WAKE
from app.plumbing.times import epoch_ms

log = structlog.get_logger(__name__)

Answer = Changed | NotPossible | Unknown | Stale | TooFew
_ETAG: Final = re.compile(r'"(\d{1,9})"')
_COLUMNS: Final = ("priority", "max_retry", "retry_backoff", "timeout_ms", "callback_url")

_NOT_TRIGGERED: Final = {
    JobStatus.WAITING: "It is no task.",
    JobStatus.RUNNING: "It has begun already.",
    JobStatus.SUCCEEDED: "It has run: submit a new job, under another clientRequestId.",
    JobStatus.FAILED: "Its attempts are over: retry begins them anew.",
    JobStatus.PAUSED: "Resume it first.",
    JobStatus.CANCELLED: "It was cancelled: retry opens it again.",
    JobStatus.BLOCKED: "It waits for other jobs to end.",
    JobStatus.SCHEDULED: "It is a schedule.",
}
"""What a caller who wanted a job to run now should know of each state."""


class Changes:
    """Changes jobs for callers: what it returns is committed, and dispatch has been told."""

    def __init__(self, ground: Ground) -> None:
        self._database = ground.database
        self._bus = ground.bus
        self._metrics = ground.metrics

    async def cancel(self, caller: Caller, job_id: int) -> dict[str, Any]:
        """End a job; it is final even if the worker that runs it never answers.

        Raises:
            Problem: `job_not_found` or `verb_not_possible`.
        """
        asked = _asked(caller, job_id)
        changed = await self._write(
            "cancel", asked, lambda connection: cancel_job(connection, self._database, asked)
        )
        if not changed.repeated:
            self._metrics.finished.labels(JobStatus.CANCELLED.name).inc()
            execution_id = "" if changed.stopped is None else changed.stopped[1]
            self._bus.publish(ENDED, [[job_id, execution_id]])
        if changed.stopped is not None:
            self._bus.publish(CANCEL, list(changed.stopped))
        if changed.owed:
            self._bus.publish(OWED, [])
        return await self._look(caller, job_id)

    async def hold(
        self, caller: Caller, job_id: int, verb: Literal["pause", "resume"]
    ) -> dict[str, Any]:
        """Keep a job from being claimed, or let it go again.

        Raises:
            Problem: `job_not_found` or `verb_not_possible`.
        """
        asked = _asked(caller, job_id)
        changed = await self._write(
            verb, asked, lambda connection: hold_job(connection, self._database, asked, verb)
        )
        self._wake(changed)
        return await self._look(caller, job_id)

    async def retry(self, caller: Caller, job_id: int) -> dict[str, Any]:
        """Reopen a FAILED or CANCELLED task with a new budget of attempts.

        Raises:
            Problem: `job_not_found` or `verb_not_possible`.
        """
        asked = _asked(caller, job_id)
        changed = await self._write(
            "retry", asked, lambda connection: reopen_job(connection, self._database, asked)
        )
        self._wake(changed)
        return await self._look(caller, job_id)

    async def trigger(
        self, caller: Caller, job_id: int, body: bytes, if_match: str | None
    ) -> dict[str, Any]:
        """Make a task that waits due now, with other params if the body names some.

        Raises:
            Problem: `precondition_failed`, `invalid_json`, `validation_failed`, `job_not_found`
                or `verb_not_possible`.
        """
        revisions = None if if_match is None else _revisions(if_match)
        other = _other_params(parse_object(body)) if body.strip() else None
        asked = _asked(caller, job_id)
        changed = await self._write(
            "trigger",
            asked,
            lambda connection: trigger_job(
                connection, self._database, asked, other, revisions=revisions
            ),
        )
        self._wake(changed)
        return await self._look(caller, job_id)

    async def revise(
        self, caller: Caller, job_id: int, body: bytes, if_match: str | None
    ) -> dict[str, Any]:
        """Change a job that waits, if it still has the revision that the caller saw.

        Raises:
            Problem: `precondition_required`, `precondition_failed`, `invalid_json`,
                `validation_failed`, `job_not_found` or `verb_not_possible`.
        """
        if if_match is None:
            raise Problem(
                "precondition_required",
                'Send If-Match with the ETag of the job as you saw it, as If-Match: "3".',
            )
        revisions = _revisions(if_match)
        values = _new_values(parse_object(body))
        asked = _asked(caller, job_id)
        changed = await self._write(
            "change",
            asked,
            lambda connection: revise_job(
                connection, self._database, asked, values, revisions=revisions
            ),
        )
        self._wake(changed)
        return await self._look(caller, job_id)

    async def _write(
        self, verb: str, asked: Asked, work: Callable[[AsyncConnection], Awaitable[Answer]]
    ) -> Changed:
        answer = await self._database.write(work)
        if isinstance(answer, Changed):
            log.debug("job_changed", verb=verb, job_id=asked.job_id)
            return answer
        raise _problem(verb, asked.job_id, answer)

    def _wake(self, changed: Changed) -> None:
        if changed.due_ms is not None:
            self._bus.publish(WAKE, [[changed.queue_id, changed.priority, changed.due_ms]])

    async def _look(self, caller: Caller, job_id: int) -> dict[str, Any]:
        return job_view(await find_job(self._database, caller, job_id))


def _asked(caller: Caller, job_id: int) -> Asked:
    return Asked(job_id, caller.tenant_id, new_token())


def _problem(verb: str, job_id: int, answer: NotPossible | Unknown | Stale | TooFew) -> Problem:
    match answer:
        case Unknown():
            return no_such_job(job_id)
        case NotPossible():
            able = ", ".join(answer.possible) or "nothing"
            why = f" {_NOT_TRIGGERED[answer.status]}" if verb == "trigger" else ""
            return Problem(
                "verb_not_possible",
                f"Job {job_id} is {answer.status.name}: {verb} is not possible, {able} is.{why}",
                jobId=job_id,
                jobStatus=answer.status.name,
                possible=list(answer.possible),
            )
        case Stale():
            return Problem(
                "precondition_failed",
                f"Job {job_id} has revision {answer.revision} now: look at it and decide again.",
                jobId=job_id,
            )
        case TooFew():
            return Problem(
                "validation_failed",
                f"maxRetry: {answer.attempts} attempts have begun, so at least {answer.attempts}",
            )
        case _:
            assert_never(answer)


def _revisions(if_match: str) -> frozenset[int] | None:
    """Read If-Match: a list of ETags, or `*`; what is no ETag of ours matches nothing."""
    parts = [part.strip() for part in if_match.split(",")]
    if "*" in parts:
        return None
    return frozenset(int(found[1]) for part in parts if (found := _ETAG.fullmatch(part)))


def _other_params(sent: dict[str, Any]) -> OtherParams | None:
    try:
        request = TriggerJob.model_validate(sent)
    except ValidationError as error:
        raise validation_problem(list(error.errors(include_url=False))) from None
    return OtherParams(params_text(request.params)) if request.model_fields_set else None


def _new_values(sent: dict[str, Any]) -> NewValues:
    try:
        request = ChangeJob.model_validate(sent)
    except ValidationError as error:
        raise validation_problem(list(error.errors(include_url=False))) from None
    fields = request.model_fields_set
    columns: dict[str, Any] = {name: getattr(request, name) for name in _COLUMNS if name in fields}
    if "retry_interval_seconds" in fields:
        columns["retry_interval_ms"] = round(request.retry_interval_seconds * 1000)
    if "expires_at" in fields:
        columns["expires_at"] = None if request.expires_at is None else epoch_ms(request.expires_at)
    return NewValues(
        columns=columns,
        due_ms=epoch_ms(request.run_at) if "run_at" in fields else None,
        delay_ms=request.delay_ms if "delay_ms" in fields else None,
        new_params="params" in fields,
        params=params_text(request.params),
    )
