"""Settling in groups: the ends that workers report and recovery finds share their commits."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.ground import Ground
from app.lifecycle.moves.ending import Ending, Settled, Settlement
from app.lifecycle.moves.settle import settle
from app.lifecycle.states import ExecutionStatus
from app.plumbing.bus import ENDED, FIRE, OWED, WAKE
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.group_commit import GroupCommit, Overloaded
from app.plumbing.json_text import Unencodable

log = structlog.get_logger(__name__)

_MOVED: Final = (Settled.ENDED, Settled.RETRIED)
BATCH_LIMIT = 200
BACKLOG_LIMIT = 100_000
UNSTORABLE_ERRORS = (DBAPIError, UnicodeError, OverflowError, Unencodable)
"""What the values themselves cause; every other trouble of the database passes with time."""


class Settler:
    """Ends executions; what it returns is committed, and everybody concerned has been told."""

    def __init__(self, ground: Ground) -> None:
        self._database = ground.database
        self._bus = ground.bus
        self._metrics = ground.metrics
        self._sealer = ground.sealer
        self._commits: GroupCommit[Ending, Settlement] = GroupCommit(
            self._commit,
            batch_limit=BATCH_LIMIT,
            backlog_limit=BACKLOG_LIMIT,
            shared_errors=(DatabaseUnavailable,),
        )

    async def settle(self, ending: Ending) -> Settlement:
        """Settle one ending; one that can never be stored ends as FAILED `result_unstorable`.

        Raises:
            DatabaseUnavailable: nothing is known to be stored.
            NoSecretKeys: its result is secret, and there is no key to seal it with.
        """
        (result,) = await self.settle_each([ending])
        if isinstance(result, BaseException):
            raise result
        return result

    async def settle_each(self, endings: Sequence[Ending]) -> list[Settlement | BaseException]:
        """Settle each ending as `settle` does; what that would raise of one stands in its place."""
        results = await asyncio.gather(*map(self._enter, endings), return_exceptions=True)
        again = [place for place, one in enumerate(results) if isinstance(one, UNSTORABLE_ERRORS)]
        for place in again:
            ending = endings[place]
            log.warning(
                "unstorable_report",
                job_id=ending.job_id,
                execution_id=ending.execution_id,
                error=f"{type(results[place]).__name__}",
            )
        if again:
            replaced = [self._enter(unstorable(endings[place])) for place in again]
            second = await asyncio.gather(*replaced, return_exceptions=True)
            for place, result in zip(again, second, strict=True):
                results[place] = result
        return results

    def _enter(self, ending: Ending) -> asyncio.Future[Settlement]:
        try:
            (result,) = self._commits.enter([ending])
        except Overloaded as error:
            result = asyncio.get_running_loop().create_future()
            result.set_exception(error)
        return result

    async def drained(self) -> None:
        """Return when nothing is being settled."""
        await self._commits.drained()

    async def _commit(self, endings: Sequence[Ending]) -> list[Settlement]:
        async def write(connection: AsyncConnection) -> list[Settlement]:
            return await settle(connection, self._database, endings, self._sealer)

        settlements = await self._database.write(write)
        self._tell(endings, settlements)
        return settlements

    def _tell(self, endings: Sequence[Ending], settlements: Sequence[Settlement]) -> None:
        moved = [
            (ending, one)
            for ending, one in zip(endings, settlements, strict=True)
            if one.kind in _MOVED
        ]
        if moved:
            self._bus.publish(ENDED, [[one.job_id, e.execution_id] for e, one in moved])
        wakes = [
            [one.queue_id, one.priority, one.next_due_ms]
            for one in settlements
            if one.next_due_ms is not None
        ]
        wakes += [list(task) for one in settlements for task in one.followed.claimable]
        if wakes:
            self._bus.publish(WAKE, wakes)
        if any(one.followed.schedules for one in settlements):
            self._bus.publish(FIRE, [])
        if any(one.kind is Settled.ENDED and e.deliver_by is None for e, one in moved):
            self._bus.publish(OWED, [])
        self._count(moved, settlements)
        # Asked once: under load a line that is not written costs as much as the counting.
        if log.is_enabled_for(logging.DEBUG):
            for ending, one in moved:
                log.debug(
                    "execution_ended",
                    job_id=one.job_id,
                    execution_id=ending.execution_id,
                    status=ending.status.name,
                    job_status=None if one.job_status is None else one.job_status.name,
                    code=ending.error_code,
                )

    def _count(
        self, moved: Sequence[tuple[Ending, Settlement]], settlements: Sequence[Settlement]
    ) -> None:
        for kind, count in Counter(one.kind for one in settlements).items():
            self._metrics.reports.labels(kind.value).inc(count)
        for status, count in Counter(ending.status for ending, _ in moved).items():
            self._metrics.executions.labels(status.name).inc(count)
        finished = Counter(one.job_status for _, one in moved if one.kind is Settled.ENDED)
        for job_status, count in finished.items():
            if job_status is not None:
                self._metrics.finished.labels(job_status.name).inc(count)
        for _, one in moved:
            if one.run_ms is not None:
                self._metrics.duration.observe(one.run_ms / 1000)
            if one.late_ms is not None:
                self._metrics.start_lateness.observe(one.late_ms / 1000)


def unstorable(ending: Ending) -> Ending:
    """Replace what cannot be stored by a failure that can."""
    return replace(
        ending,
        status=ExecutionStatus.FAILED,
        result=None,
        error_code="result_unstorable",
        error_message="The outcome that the worker reported cannot be stored.",
        retryable=False,
        retry_after_ms=None,
        accepted_at=None,
        started_at=None,
        finished_at=None,
        reason=None,
    )
