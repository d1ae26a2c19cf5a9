"""Submission: check the shape, find the queue, commit in a group, answer new or repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import structlog
from pydantic import ValidationError
from pydantic_core import from_json
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from app.access.admission import Admission
from app.access.caller import Caller
from app.access.limits import LimitBook
from app.edge.problems import Problem, invalid, validation_problem
from app.fleet.live import LiveFleet
from app.ground import Ground
from app.jobs.callback_fields import (
    kept_events,
    kept_headers,
    no_secret_keys,
    refused_callback,
)
from app.jobs.check_params import refused_params
from app.jobs.digest import differing_fields, kept_digest, request_digest, secret_fields
from app.jobs.look import EXECUTIONS_SHOWN, find_job
from app.jobs.schedule_fields import schedule_of
from app.jobs.schemas import MAX_PARAMS_BYTES, SubmitJob
from app.jobs.views import job_view
from app.lifecycle.moves.submit import (
    Entered,
    NewJob,
    find_by_request,
    insert_jobs,
    row_of_new_task,
)
from app.lifecycle.reads import JobRecord, ensure_queue, read_job
from app.lifecycle.requirement import RequirementTooLong, requirement_of
from app.lifecycle.secret_marks import marks
from app.lifecycle.token import new_token
from app.plumbing.bus import FIRE, WAKE
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.group_commit import GroupCommit, Overloaded
from app.plumbing.json_text import Unencodable, plain_json
from app.plumbing.sealed import NoSecretKeys
from app.plumbing.times import epoch_ms

MAX_DEPTH: Final = 200
"""How deep pydantic's parser lets arrays and objects stand in the object of a body."""

log = structlog.get_logger(__name__)

MAX_KNOWN_QUEUES: Final = 10_000


@dataclass(frozen=True, slots=True)
class Submitted:
    """The answer to a submission: the job's document, and whether it is new."""

    job: dict[str, Any]
    created: bool
    headers: dict[str, str] = field(default_factory=dict)
    """What is left of the tenant's limits."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A job whose shape is right. `refusal` holds for a new job; a repeat is answered all the same.

    A refused job is looked up by its clientRequestId and never inserted.
    """

    new: NewJob
    refusal: Problem | None = None
    digest: str = ""
    """Of the request as it came; the stored one may be keyed."""


class Submitter:
    """Accepts jobs: what it returns is committed."""

    def __init__(
        self,
        ground: Ground,
        fleet: LiveFleet,
        limits: LimitBook,
    ) -> None:
        self._database = ground.database
        self._bus = ground.bus
        self._clock = ground.clock
        self._min_interval_ms = ground.settings.min_interval_ms
        self._fleet = fleet
        self._admission = Admission(
            ground.database, ground.redis, ground.settings.redis_prefix, limits
        )
        self._sealer = ground.sealer
        self._metrics = ground.metrics
        self._queues: dict[tuple[int, str, str], int] = {}
        self._commits: GroupCommit[NewJob, Entered] = GroupCommit(
            self._commit,
            batch_limit=ground.settings.submit_batch,
            backlog_limit=ground.settings.submit_backlog,
            shared_errors=(DatabaseUnavailable,),
        )
        self._lookups: GroupCommit[tuple[int, str], RowMapping | None] = GroupCommit(
            self._find,
            batch_limit=ground.settings.submit_batch,
            backlog_limit=ground.settings.submit_backlog,
            shared_errors=(DatabaseUnavailable,),
        )

    @property
    def backlog(self) -> int:
        """How many submissions wait for the next commit."""
        return self._commits.backlog

    async def submit(self, caller: Caller, body: bytes) -> Submitted:
        """Accept one job; once this returns, the job is in the database.

        Raises:
            Problem: `invalid_json`, `validation_failed`, `params_invalid`, `request_conflict`,
                `too_many_submissions`, `too_many_waiting` or `overloaded`.
            DatabaseUnavailable: nothing is known to be stored.
        """
        checked = await self.check(caller, parse_object(body))
        (checked,), headers = await self.admit(caller, [checked])
        return replace(await self.enter(caller, checked), headers=headers)

    async def admit(
        self, caller: Caller, checked: Sequence[Checked]
    ) -> tuple[list[Checked], dict[str, str]]:
        """Refuse what is beyond the limits of the tenant, unless it turns out to be a repeat.

        Returns them in their order, and headers that tell what is left.

        Raises:
            DatabaseUnavailable: what the tenant has waiting cannot be counted.
        """
        wanted = sum(one.refusal is None for one in checked)
        admitted = await self._admission.admit(caller.tenant_id, wanted)
        if admitted is None:
            return list(checked), {}
        left, found = admitted.count, []
        for one in checked:
            if one.refusal is None and (left := left - 1) < 0:
                found.append(replace(one, refusal=admitted.refusal))
            else:
                found.append(one)
        return found, admitted.headers

    def enter_together(self, jobs: Sequence[NewJob]) -> list[asyncio.Future[Entered]]:
        """Let checked jobs into one commit; each future is what `enter` then waits for.

        Raises:
            Problem: `overloaded`; none of them is stored.
        """
        try:
            return self._commits.enter(jobs)
        except Overloaded:
            raise _overloaded() from None

    async def enter(
        self, caller: Caller, checked: Checked, entered: asyncio.Future[Entered] | None = None
    ) -> Submitted:
        """Store a checked job, or wait until it is; what enters meanwhile shares its commit.

        Raises:
            Problem: the job's refusal, `request_conflict` or `overloaded`.
            DatabaseUnavailable: nothing is known to be stored.
        """
        new = checked.new
        try:
            if checked.refusal is not None:
                return await self._only_repeated(caller, checked, checked.refusal)
            one = await (self._commits.add(new) if entered is None else entered)
        except Overloaded:
            raise _overloaded() from None
        if one.submit_token != new.submit_token:
            return await self._repeated(caller, checked, one.id)
        self._metrics.accepted.inc()
        log.debug("job_accepted", job_id=one.id, job_handler=new.job_handler)
        warnings = await self._warnings(new.job_handler)
        record = JobRecord(row_of_new_task(new, one), (), new.params, {})
        if new.schedule is not None:
            record = await find_job(self._database, caller, one.id)
        return Submitted(job_view(record, warnings), created=True)

    async def drained(self) -> None:
        """Return when every accepted submission is committed."""
        await self._commits.drained()

    async def check(self, caller: Caller, sent: dict[str, Any]) -> Checked:
        """Check one job's shape and params and find its queue; nothing is stored yet.

        Raises:
            Problem: `validation_failed`.
            DatabaseUnavailable: its queue is new and cannot be stored.
        """
        try:
            request = SubmitJob.model_validate(sent)
        except ValidationError as error:
            raise validation_problem(list(error.errors(include_url=False))) from None
        params = params_text(request.params)
        try:
            digest = request_digest(sent)
        except Unencodable:
            raise _not_json() from None
        try:
            requirement = requirement_of(request.labels)
        except RequirementTooLong as error:
            raise invalid(str(error), "/labels") from None
        headers, kept, closed = None, params, None
        try:
            headers = kept_headers(request.callback_headers, self._sealer)
            kept = self._kept_params(request, params)
        except Problem as problem:
            closed = problem
        schedule, refusal = schedule_of(
            request,
            caller.tenant_id,
            now_ms=int(self._clock.now_ms()),
            min_interval_ms=self._min_interval_ms,
        )
        if refusal is None:
            refusal = await refused_params(self._fleet, request.job_handler, request.params, params)
        refusal = refusal or closed
        if refusal is None:
            refusal = await refused_callback(self._fleet, request.callback_url)
        queue_id = 0
        if refusal is None:
            queue_id = await self._queue(caller.tenant_id, request.job_handler, requirement)
        new = NewJob(
            tenant_id=caller.tenant_id,
            client_request_id=request.client_request_id,
            request_digest=self._kept_digest(sent, digest, caller.tenant_id),
            submit_token=new_token(),
            job_name=request.job_name,
            job_handler=request.job_handler,
            queue_id=queue_id,
            priority=request.priority,
            max_retry=request.max_retry,
            retry_interval_ms=round(request.retry_interval_seconds * 1000),
            retry_backoff=request.retry_backoff,
            due_ms=None if request.run_at is None else epoch_ms(request.run_at),
            delay_ms=request.delay_ms or 0,
            timeout_ms=request.timeout_ms,
            callback_url=request.callback_url,
            callback_events=kept_events(request.callback_events),
            callback_headers=headers,
            expires_at=None if request.expires_at is None else epoch_ms(request.expires_at),
            params=kept,
            concurrency_key=request.concurrency_key,
            concurrency_limit=request.concurrency_limit,
            rate_key=request.rate_key,
            rate_per_second=request.rate_per_second,
            secret=marks(params=request.secret_params, result=request.secret_result),
            labels=request.labels,
            schedule=schedule,
        )
        return Checked(new, refusal, digest)

    def _kept_params(self, request: SubmitJob, params: str | None) -> str | None:
        """Return params as they are stored.

        Raises:
            Problem: `secret_keys_missing`.
        """
        if request.secret_result and not self._sealer.has_keys:
            raise no_secret_keys("/secretResult")
        if not request.secret_params:
            return params
        try:
            return self._sealer.seal_body("null" if params is None else params)
        except NoSecretKeys:
            raise no_secret_keys("/secretParams") from None

    def _kept_digest(self, sent: dict[str, Any], digest: str, tenant_id: int) -> str:
        secret = secret_fields(sent)
        if not secret:
            return digest
        owner = _owner(tenant_id, sent["clientRequestId"])
        return kept_digest(digest, secret, owner, self._sealer)

    async def _queue(self, tenant_id: int, job_handler: str, requirement: str) -> int:
        key = (tenant_id, job_handler, requirement)
        known = self._queues.get(key)
        if known is not None:
            return known

        async def ensure(connection: AsyncConnection) -> int:
            return await ensure_queue(
                connection,
                self._database,
                tenant_id=tenant_id,
                job_handler=job_handler,
                requirement=requirement,
            )

        if len(self._queues) >= MAX_KNOWN_QUEUES:
            self._queues.clear()
        self._queues[key] = queue_id = await self._database.write(ensure)
        return queue_id

    async def _commit(self, jobs: Sequence[NewJob]) -> list[Entered]:
        async def insert(connection: AsyncConnection) -> dict[tuple[int, str], Entered]:
            return await insert_jobs(connection, self._database, jobs)

        found = await self._database.write(insert)
        rows = [found[(job.tenant_id, job.client_request_id)] for job in jobs]
        earliest: dict[tuple[int, int], int] = {}
        if any(job.schedule is not None for job in jobs):
            self._bus.publish(FIRE, [])
        for job, row in zip(jobs, rows, strict=True):
            is_new_task = row.submit_token == job.submit_token and job.schedule is None
            if is_new_task and row.due_ms is not None:
                place = (job.queue_id, job.priority)
                earliest[place] = min(row.due_ms, earliest.get(place, row.due_ms))
        if earliest:
            self._bus.publish(WAKE, [[*place, due] for place, due in earliest.items()])
        return rows

    async def _find(self, keys: Sequence[tuple[int, str]]) -> list[RowMapping | None]:
        found = await self._database.read(lambda connection: find_by_request(connection, keys))
        return [found.get(key) for key in keys]

    async def _only_repeated(self, caller: Caller, checked: Checked, refusal: Problem) -> Submitted:
        """Answer for the job that was stored before; there is none: the refusal stands."""
        new = checked.new
        row = await self._lookups.add((new.tenant_id, new.client_request_id))
        if row is None:
            raise refusal
        return await self._repeated(caller, checked, row["id"])

    async def _warnings(self, job_handler: str) -> list[dict[str, str]]:
        try:
            if await self._fleet.offers(job_handler):
                return []
        except DatabaseUnavailable:
            # The job is stored: that is what the caller must be told now.
            return []
        return [
            {
                "code": "no_live_worker",
                "message": f"No live worker offers the handler {job_handler!r}; "
                "the job waits until one does.",
            }
        ]

    async def _repeated(self, caller: Caller, checked: Checked, job_id: int) -> Submitted:
        record = await self._read(caller, job_id)
        if record is None:
            # Retention took the old job a moment ago: now the request is a new one.
            return await self.enter(caller, checked)
        self._metrics.repeated.inc()
        fields = differing_fields(
            record.job["request_digest"],
            checked.digest,
            owner=_owner(caller.tenant_id, checked.new.client_request_id),
            sealer=self._sealer,
        )
        if fields:
            raise Problem(
                "request_conflict",
                f"This clientRequestId belongs to job {job_id}, which was sent with other "
                f"values of: {', '.join(fields)}. Use a new clientRequestId for a new job.",
                jobId=job_id,
                fields=fields,
            )
        return Submitted(job_view(record), created=False)

    async def _read(self, caller: Caller, job_id: int) -> JobRecord | None:
        return await self._database.read(
            lambda connection: read_job(
                connection, job_id, tenant_id=caller.tenant_id, executions=EXECUTIONS_SHOWN
            )
        )


def _owner(tenant_id: int, request_id: str) -> str:
    """Name whose digest it is: equal secrets of two requests have different ones."""
    return f"{tenant_id}:{request_id}"


def _overloaded() -> Problem:
    return Problem("overloaded", "Repeat the same request after Retry-After.")


def params_text(params: Any) -> str | None:
    """Return params as JSON text, None for null.

    Raises:
        Problem: `validation_failed`, they have no JSON form or are too long.
    """
    if params is None:
        return None
    try:
        written = plain_json(params)
    except Unencodable:
        raise _not_json() from None
    if (size := len(written.encode())) > MAX_PARAMS_BYTES:
        raise invalid(
            f"{size} bytes of JSON are more than {MAX_PARAMS_BYTES}; "
            "store the data elsewhere and pass a reference",
            "/params",
        )
    return written


def _not_json() -> Problem:
    return invalid("numbers must be finite and text must be Unicode", "/params")


def parse_object(body: bytes) -> dict[str, Any]:
    """Read a body as a JSON object; integers keep all their digits.

    Raises:
        Problem: `invalid_json`.
    """
    try:
        sent = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        why = str(error)
        if why.startswith("recursion limit"):
            why = f"what is nested more than {MAX_DEPTH} deep is refused"
        raise Problem("invalid_json", f"The body must be one JSON object: {why}.") from None
    if not isinstance(sent, dict):
        raise Problem("invalid_json", "The body must be one JSON object.")
    return sent
