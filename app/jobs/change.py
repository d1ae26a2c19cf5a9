"""The verbs of callers: cancel, pause, resume, trigger, retry, and PATCH of a job that waits."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final, Literal, assert_never

import structlog
from pydantic import ValidationError
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from app.access.caller import Caller
from app.access.roles import Role
from app.edge.bodies import parse_object
from app.edge.problems import Problem, invalid, validation_problem
from app.fleet.live import LiveFleet
from app.ground import Ground
from app.jobs.announce import announce
from app.jobs.callback_fields import (
    Receivers,
    kept_events,
    kept_headers,
    no_secret_keys,
)
from app.jobs.check import params_text
from app.jobs.check_params import refused_params
from app.jobs.digest import request_digest
from app.jobs.look import find_job, no_such_job
from app.jobs.requests import ChangeJob, ResumeJob, TriggerJob
from app.jobs.schedule_fields import ONLY_SCHEDULES, at_field
from app.jobs.schedule_verbs import ManualFire, Outcome, ScheduleVerbs
from app.jobs.views import job_view
from app.lifecycle.moves.cancel import cancel_job
from app.lifecycle.moves.guard import (
    Asked,
    Changed,
    NotPossible,
    Stale,
    TooFew,
    Unknown,
    WouldLeak,
    WrongKind,
)
from app.lifecycle.moves.hold import hold_job
from app.lifecycle.moves.reopen import reopen_job
from app.lifecycle.moves.revise import NewValues, revise_job
from app.lifecycle.moves.submit import find_by_request
from app.lifecycle.moves.trigger import OtherParams, trigger_job
from app.lifecycle.nodes import read_nodes
from app.lifecycle.reads import live_children, read_handler
from app.lifecycle.states import JobStatus
from app.lifecycle.token import new_token
from app.plumbing.sealed import NoSecretKeys, Sealer
from app.plumbing.times import epoch_ms

log = structlog.get_logger(__name__)

Answer = Changed | NotPossible | Unknown | Stale | TooFew | WouldLeak | WrongKind
_ETAG: Final = re.compile(r'"(\d{1,9})"')
_CONCURRENCY: Final = ("concurrency_key", "concurrency_limit")
_RATE: Final = ("rate_key", "rate_per_second")
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

    def __init__(self, ground: Ground, fleet: LiveFleet, receivers: Receivers) -> None:
        self._ground = ground
        self._database = ground.database
        self._clock = ground.clock
        self._schedules = ScheduleVerbs(ground)
        self._fleet = fleet
        self._receivers = receivers

    async def cancel(
        self, caller: Caller, job_id: int, *, children: bool = False
    ) -> dict[str, Any]:
        """End a job; it is final even if the worker that runs it never answers.

        With `children`, what it has made and has not ended is ended too, one after another.

        Raises:
            Problem: `job_not_found` or `verb_not_possible`.
        """
        await self._cancel(caller, job_id)
        if children:
            live = await self._database.read(lambda connection: live_children(connection, job_id))
            for child_id in live:
                try:
                    await self._cancel(caller, child_id)
                except Problem as problem:
                    if problem.code not in ("verb_not_possible", "job_not_found"):
                        raise
                    log.debug("child_ended_before", job_id=child_id, code=problem.code)
        return await self._look(caller, job_id)

    async def _cancel(self, caller: Caller, job_id: int) -> None:
        asked = _asked(caller, job_id, "cancel")
        changed = await self._write(
            "cancel",
            asked,
            lambda connection: cancel_job(
                connection, self._database, asked, close_schedule=self._schedules.close
            ),
        )
        announce(self._ground, "cancel", [(job_id, changed)])

    async def hold(
        self, caller: Caller, job_id: int, verb: Literal["pause", "resume"], body: bytes = b""
    ) -> dict[str, Any]:
        """Keep a job from being claimed, or a schedule from firing, or let it go again.

        Raises:
            Problem: `invalid_json`, `validation_failed`, `job_not_found` or `verb_not_possible`.
        """
        asked = _asked(caller, job_id, verb)
        missed = _missed(parse_object(body)) if body.strip() else None
        outcome = Outcome()

        async def resume(connection: AsyncConnection, job: RowMapping) -> Changed:
            return await self._schedules.resume(connection, job, asked, missed or "skip", outcome)

        async def work(connection: AsyncConnection) -> Answer:
            outcome.fired.clear()  # what an earlier try did was taken back
            return await hold_job(
                connection,
                self._database,
                asked,
                verb,
                resume_schedule=resume,
                of_schedules=() if missed is None else ("missed",),
            )

        changed = await self._write(verb, asked, work)
        self._schedules.tell(outcome)
        announce(self._ground, verb, [(job_id, changed)])
        return await self._look(caller, job_id)

    async def retry(self, caller: Caller, job_id: int) -> dict[str, Any]:
        """Reopen a FAILED or CANCELLED task with a new budget of attempts.

        Raises:
            Problem: `job_not_found` or `verb_not_possible`.
        """
        asked = _asked(caller, job_id, "retry")
        changed = await self._write(
            "retry", asked, lambda connection: reopen_job(connection, self._database, asked)
        )
        announce(self._ground, "retry", [(job_id, changed)])
        return await self._look(caller, job_id)

    async def trigger(
        self, caller: Caller, job_id: int, body: bytes, if_match: str | None
    ) -> dict[str, Any]:
        """Make a task that waits due now, with other params if the body names some.

        Raises:
            Problem: `precondition_failed`, `invalid_json`, `validation_failed`,
                `params_invalid`, `request_conflict`, `job_not_found` or `verb_not_possible`.
        """
        revisions = None if if_match is None else _revisions(if_match)
        sent = parse_object(body) if body.strip() else {}
        request = _trigger_request(sent)
        asked = _asked(caller, job_id, "trigger")
        other = None
        if "params" in request.model_fields_set:
            other = OtherParams(params_text(request.params), self._ground.sealer)
            repeats = request.client_request_id if _names_its_run(request) else None
            await self._check_params(asked, request.params, other.params, repeats)
        manual = self._manual_fire(job_id, sent, request, other)
        outcome = Outcome()

        async def trigger(connection: AsyncConnection, job: RowMapping) -> Changed:
            await self._schedules.trigger(connection, job, asked, manual, outcome)
            return Changed(job["queue_id"], job["priority"])

        async def work(connection: AsyncConnection) -> Answer:
            answer = await trigger_job(
                connection,
                self._database,
                asked,
                other,
                revisions=revisions,
                trigger_schedule=trigger,
                of_schedules=() if manual.request_id is None else ("clientRequestId",),
            )
            # A repeat is the run that it asked for, whatever has become of its schedule since.
            if isinstance(answer, NotPossible | Stale) and await self._schedules.is_repeat(
                connection, {"id": job_id, "tenant_id": asked.tenant_id}, manual, outcome
            ):
                return Changed(0, 0, repeated=True)
            return answer

        try:
            changed = await self._write("trigger", asked, work)
        except NoSecretKeys:
            raise no_secret_keys("/params") from None
        if outcome.child_id is None:
            announce(self._ground, "trigger", [(job_id, changed)])
            return await self._look(caller, job_id)
        self._schedules.tell(outcome)
        return await self._look(caller, outcome.child_id)

    def _manual_fire(
        self, job_id: int, sent: dict[str, Any], request: TriggerJob, other: OtherParams | None
    ) -> ManualFire:
        request_id = request.client_request_id if _names_its_run(request) else None
        token = new_token()
        return ManualFire(
            key=f"manual:{token if request_id is None else request_id}",
            nominal_ms=int(self._clock.now_ms()),
            token=token,
            request_id=request_id,
            digest=request_digest({**sent, "jobId": job_id}),
            own_params=other is not None,
            params=None if other is None else other.params,
            sealer=self._ground.sealer,
        )

    async def revise(
        self, caller: Caller, job_id: int, body: bytes, if_match: str | None
    ) -> dict[str, Any]:
        """Change a job that waits, if it still has the revision that the caller saw.

        Raises:
            Problem: `precondition_required`, `precondition_failed`, `invalid_json`,
                `validation_failed`, `params_invalid`, `job_not_found` or `verb_not_possible`.
        """
        if if_match is None:
            raise Problem(
                "precondition_required",
                'Send If-Match with the ETag of the job as you saw it, as If-Match: "3".',
            )
        revisions = _revisions(if_match)
        request = _request(parse_object(body))
        trusted = Role.ADMIN in caller.roles
        values = _new_values(request, self._ground.sealer, trusted=trusted)
        if request.callback_url is not None:
            refusal = await self._receivers.refused(caller.tenant_id, request.callback_url)
            if refusal is not None:
                raise refusal
            if not trusted:
                values = replace(values, secret_handlers=await self._secret_handlers())
        asked = _asked(caller, job_id, "change")
        if values.new_params:
            await self._check_params(asked, request.params, values.params)
        outcome = Outcome()

        async def revise(
            connection: AsyncConnection, job: RowMapping
        ) -> Changed | NotPossible | Unknown:
            return await self._schedules.revise(connection, job, asked, request, values, outcome)

        async def work(connection: AsyncConnection) -> Answer:
            outcome.fired.clear()  # what an earlier try did was taken back
            return await revise_job(
                connection,
                self._database,
                asked,
                values,
                revisions=revisions,
                revise_schedule=revise,
            )

        try:
            answer = await self._database.write(work)
        except NoSecretKeys:
            raise no_secret_keys("/params") from None
        # Also of a change that is refused: what was due before it may have ended the schedule.
        self._schedules.tell(outcome)
        announce(self._ground, "change", [(job_id, _changed("change", asked, answer))])
        return await self._look(caller, job_id)

    async def _secret_handlers(self) -> frozenset[str]:
        """Name the handlers whose results some worker marks as secret, dead ones of a day too."""
        nodes = await self._database.read(
            lambda connection: read_nodes(connection, include_down=True)
        )
        return frozenset[str]().union(*(node.secret_handlers for node in nodes))

    async def _check_params(
        self, asked: Asked, params: Any, text: str | None, request_id: str | None = None
    ) -> None:
        """Refuse params that no live worker would take; a repeat of `request_id` is not refused."""
        # A job never changes its handler: it may be read before the change.
        handler = await self._database.read(
            lambda connection: read_handler(connection, asked.job_id, tenant_id=asked.tenant_id)
        )
        if handler is None:
            raise no_such_job(asked.job_id)
        refusal = await refused_params(self._fleet, handler, params, text)
        if refusal is None:
            return
        key = (asked.tenant_id, request_id or "")
        if request_id is None or not await self._database.read(
            lambda connection: find_by_request(connection, [key])
        ):
            raise refusal

    async def _write(
        self, verb: str, asked: Asked, work: Callable[[AsyncConnection], Awaitable[Answer]]
    ) -> Changed:
        return _changed(verb, asked, await self._database.write(work))

    async def _look(self, caller: Caller, job_id: int) -> dict[str, Any]:
        return job_view(await find_job(self._database, caller, job_id))


def _asked(caller: Caller, job_id: int, verb: str) -> Asked:
    return Asked(job_id, caller.tenant_id, new_token(), caller.doing(f"job.{verb}"))


def _changed(verb: str, asked: Asked, answer: Answer) -> Changed:
    """Return what was done.

    Raises:
        Problem: it was not.
    """
    if isinstance(answer, Changed):
        log.debug("job_changed", verb=verb, job_id=asked.job_id)
        return answer
    raise _problem(verb, asked.job_id, answer)


def _problem(
    verb: str,
    job_id: int,
    answer: NotPossible | Unknown | Stale | TooFew | WouldLeak | WrongKind,
) -> Problem:
    match answer:
        case Unknown():
            return no_such_job(job_id)
        case NotPossible():
            able = ", ".join(answer.possible) or "nothing"
            why = _why_not_triggered(answer) if verb == "trigger" else ""
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
                f'Job {job_id} has the ETag "{answer.revision}" now, with its quotes, and If-Match '
                "does not name it: look at the job and decide again.",
                jobId=job_id,
            )
        case TooFew():
            return invalid(
                f"{answer.attempts} attempts have begun, so at least {answer.attempts}",
                "/maxRetry",
            )
        case WouldLeak():
            return _leak_problem(answer)
        case WrongKind():
            return at_field(answer.fields[0], "is for schedules")
        case _:
            assert_never(answer)


def _leak_problem(leak: WouldLeak) -> Problem:
    if leak.what == "callbackHeaders":
        return invalid(
            "these hold a secret that was given for another receiver: send callbackHeaders anew "
            "with the new callbackUrl, or null",
            "/callbackHeaders",
        )
    return Problem(
        "forbidden",
        "The result is secret, and the callback tells it: to let another receiver have it needs "
        "the role admin.",
        needs=str(Role.ADMIN),
    )


def _why_not_triggered(answer: NotPossible) -> str:
    """Return what to know of the state; a schedule is not advised to be opened again."""
    why = _NOT_TRIGGERED[answer.status]
    return "" if "retry" in why and "retry" not in answer.possible else f" {why}"


def _revisions(if_match: str) -> frozenset[int] | None:
    """Read If-Match: a list of ETags, or `*`; what is no ETag of ours matches nothing."""
    parts = [part.strip() for part in if_match.split(",")]
    if "*" in parts:
        return None
    return frozenset(int(found[1]) for part in parts if (found := _ETAG.fullmatch(part)))


def _names_its_run(request: TriggerJob) -> bool:
    return "client_request_id" in request.model_fields_set


def _missed(sent: dict[str, Any]) -> Literal["skip", "catchUp"] | None:
    try:
        asked = ResumeJob.model_validate(sent)
    except ValidationError as error:
        raise validation_problem(list(error.errors(include_url=False)), ResumeJob) from None
    return asked.missed if asked.model_fields_set else None


def _trigger_request(sent: dict[str, Any]) -> TriggerJob:
    try:
        return TriggerJob.model_validate(sent)
    except ValidationError as error:
        raise validation_problem(list(error.errors(include_url=False)), TriggerJob) from None


def _request(sent: dict[str, Any]) -> ChangeJob:
    try:
        return ChangeJob.model_validate(sent)
    except ValidationError as error:
        raise validation_problem(list(error.errors(include_url=False)), ChangeJob) from None


def _new_values(request: ChangeJob, sealer: Sealer, *, trusted: bool) -> NewValues:
    fields = request.model_fields_set
    columns: dict[str, Any] = {name: getattr(request, name) for name in _COLUMNS if name in fields}
    if "retry_interval_seconds" in fields:
        columns["retry_interval_ms"] = round(request.retry_interval_seconds * 1000)
    if "callback_events" in fields:
        columns["callback_events"] = kept_events(request.callback_events)
    if "callback_headers" in fields:
        columns["callback_headers"] = kept_headers(request.callback_headers, sealer)
    if "expires_at" in fields:
        columns["expires_at"] = None if request.expires_at is None else epoch_ms(request.expires_at)
    for pair in (_CONCURRENCY, _RATE):
        if not fields.isdisjoint(pair):
            columns |= {name: getattr(request, name) for name in pair}
    if not fields.isdisjoint(_RATE):
        columns["rate_due"] = None  # what the key before has given it is no time of this one
    return NewValues(
        columns=columns,
        due_ms=epoch_ms(request.run_at) if "run_at" in fields else None,
        delay_ms=request.delay_ms if "delay_ms" in fields else None,
        new_params="params" in fields,
        params=params_text(request.params),
        sealer=sealer,
        trusted=trusted,
        of_schedules=tuple(ONLY_SCHEDULES[name] for name in ONLY_SCHEDULES if name in fields),
    )
