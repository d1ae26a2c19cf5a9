"""Submission: commit in a group, and answer new or repeated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import structlog
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from app.access.caller import Caller
from app.access.limits import LimitBook
from app.access.stored_quota import StoredQuota
from app.access.submission_quota import SubmissionQuota
from app.dispatch.at_once import AtOnce
from app.edge.bodies import parse_object
from app.edge.problems import Problem
from app.fleet.live import LiveFleet
from app.ground import Ground
from app.jobs.callback_fields import Receivers
from app.jobs.check import Checked, Checker, owner_of
from app.jobs.digest import differing_fields
from app.jobs.look import find_job, find_job_or_none
from app.jobs.views import job_view, new_task_view
from app.lifecycle.moves.claim import Claimed
from app.lifecycle.moves.submit import (
    Entered,
    NewJob,
    find_by_request,
    insert_jobs,
)
from app.plumbing.bus import FIRE, WAKE
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.group_commit import GroupCommit, Overloaded

log = structlog.get_logger(__name__)


class Submitted(NamedTuple):
    """The answer to a submission: the job's document, and whether it is new."""

    job: dict[str, Any]
    created: bool
    headers: Mapping[str, str] = MappingProxyType({})
    """What is left of the tenant's limits."""


class Submitter:
    """Accepts jobs: what it returns is committed."""

    def __init__(
        self,
        ground: Ground,
        fleet: LiveFleet,
        receivers: Receivers,
        limits: LimitBook,
        at_once: AtOnce,
    ) -> None:
        self._at_once = at_once
        self._database = ground.database
        self._bus = ground.bus
        self._fleet = fleet
        self.checker = Checker(ground, fleet, receivers)
        self._quota = SubmissionQuota(
            ground.database,
            ground.redis,
            ground.settings.redis_prefix,
            limits,
            StoredQuota(ground.clock, limits),
        )
        self._sealer = ground.sealer
        self._metrics = ground.metrics
        self._commits: GroupCommit[NewJob, Entered] = GroupCommit(
            self._commit,
            batch_limit=ground.settings.submit_batch,
            backlog_limit=ground.settings.submit_backlog,
            shared_errors=(DatabaseUnavailable,),
            gather_seconds=ground.settings.submit_gather_ms / 1000,
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
                `too_many_submissions`, `too_many_waiting`, `too_much_stored` or `overloaded`.
            DatabaseUnavailable: nothing is known to be stored.
        """
        checked = await self.checker.check(caller, parse_object(body))
        if checked.unknown_queue is not None:
            (checked,) = await self.checker.place([checked])
        (checked,), headers = await self.admit(caller, [checked])
        try:
            submitted = await self.enter(caller, checked)
        except Problem as problem:
            problem.headers = {**headers, **problem.headers}
            raise
        return submitted._replace(headers=headers) if headers else submitted

    async def admit(
        self, caller: Caller, checked: Sequence[Checked]
    ) -> tuple[list[Checked], dict[str, str]]:
        """Refuse what is beyond the limits of the tenant, unless it turns out to be a repeat.

        Returns them in their order, and headers that tell what is left.

        Raises:
            DatabaseUnavailable: what the tenant has waiting cannot be counted.
        """
        wanted = [one.new.params for one in checked if one.refusal is None]
        admitted = await self._quota.admit(caller.tenant_id, wanted)
        if admitted is None:
            return list(checked), {}
        left, found = admitted.count, []
        for one in checked:
            if one.refusal is None and (left := left - 1) < 0:
                found.append(one._replace(refusal=admitted.refusal))
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
        if new.schedule is not None:
            record = await find_job(self._database, caller, one.id)
            return Submitted(job_view(record, warnings), created=True)
        return Submitted(new_task_view(new, one, warnings), created=True)

    async def drained(self) -> None:
        """Return when every accepted submission is committed."""
        await self._commits.drained()

    async def _commit(self, jobs: Sequence[NewJob]) -> list[Entered]:
        starts = self._at_once.deal(jobs)
        runs: list[Claimed] = []
        began = time.monotonic()

        async def insert(connection: AsyncConnection) -> dict[tuple[int, str], Entered]:
            return await insert_jobs(connection, self._database, jobs, starts)

        try:
            found = await self._database.write(insert)
            runs = [one.claimed for one in found.values() if one.claimed is not None]
        finally:
            self._at_once.begin(starts, runs, seconds=time.monotonic() - began)
        rows = [found[(job.tenant_id, job.client_request_id)] for job in jobs]
        earliest: dict[tuple[int, int], int] = {}
        new: list[list[int]] = []
        if any(job.schedule is not None for job in jobs):
            self._bus.publish(FIRE, [])
        for job, row in zip(jobs, rows, strict=True):
            is_new_task = row.submit_token == job.submit_token and job.schedule is None
            if is_new_task and row.claimed is None and row.due_ms is not None:
                place = (job.queue_id, job.priority)
                earliest[place] = min(row.due_ms, earliest.get(place, row.due_ms))
                new.append([*place, row.due_ms, row.id])
        if earliest:
            wakes = [[*place, due] for place, due in earliest.items()]
            self._bus.publish(WAKE, wakes, here=new)
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
        record = await find_job_or_none(self._database, caller, job_id)
        if record is None:
            # Retention took the old job a moment ago: now the request is a new one.
            return await self.enter(caller, checked)
        self._metrics.repeated.inc()
        fields = differing_fields(
            record.job["request_digest"],
            checked.digest,
            owner=owner_of(caller.tenant_id, checked.new.client_request_id),
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


def _overloaded() -> Problem:
    return Problem("overloaded", "Repeat the same request after Retry-After.")
