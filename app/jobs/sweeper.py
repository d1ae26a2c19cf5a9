"""The holder's loop that carries out bulk operations, a few jobs at a time, at their rate."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Final

import structlog
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from app.dispatch.lock import DispatchLock
from app.edge.problems import Problem
from app.ground import Ground
from app.jobs.announce import announce
from app.jobs.bulk import Scope, scope_of
from app.jobs.bulk_schemas import BulkFilter
from app.jobs.schedule_verbs import Outcome, ScheduleVerbs
from app.lifecycle.lists import Matching, next_matching
from app.lifecycle.moves.guard import Asked, Changed
from app.lifecycle.moves.sweep import Calendar, Swept, sweep
from app.lifecycle.operations import (
    Operation,
    OperationStatus,
    end_operation,
    open_operations,
    prune_operations,
)
from app.lifecycle.token import new_token
from app.plumbing.bus import BULK, Signal
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.loops import Loop

log = structlog.get_logger(__name__)

STEP_SECONDS: Final = 0.2
"""A step has the jobs that the rate allows in this time, up to `MOST_IN_A_STEP`."""
MOST_IN_A_STEP: Final = 50
LOOK_SECONDS: Final = 1.0
MOST_AT_ONCE: Final = 200
NEXT_PAGE_SECONDS: Final = 0.05
"""The pause between pages, where more than `MOST_AT_ONCE` operations are open."""
PRUNE_SECONDS: Final = 600.0
PRUNE_LIMIT: Final = 500
DAY_MS: Final = 24 * 3600 * 1000


class Sweeper:
    """Gives each open operation a step in turn, as soon as its rate allows one.

    How far an operation is stands in its row, so a later holder of the lock goes on from there.
    """

    def __init__(self, ground: Ground, lock: DispatchLock) -> None:
        self._ground = ground
        self._database = ground.database
        self._metrics = ground.metrics
        self._lock = lock
        self._schedules = ScheduleVerbs(ground)
        self._keep_ms = int(ground.settings.retention_days * DAY_MS)
        self._pruned_at = float("-inf")
        self._after = 0
        self._counted = 0
        self._asked = asyncio.Event()
        self._loop = Loop("bulk", self._turn, expected=(DatabaseUnavailable,))
        ground.bus.subscribe(BULK, self._on_asked)

    def start(self) -> None:
        """Start looking for operations while the lock is held."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop; what has been committed stays, another holder goes on."""
        await self._loop.stop()

    async def round(self, term: int) -> float:
        """Give a page of open operations a step; return how many seconds nothing may be done."""
        after = self._after
        operations, now = await self._database.read(
            lambda connection: open_operations(
                connection, self._database, after=after, limit=MOST_AT_ONCE
            )
        )
        # Slow ones, however many, must not keep others from their turn.
        self._after = operations[-1].key if len(operations) == MOST_AT_ONCE else 0
        self._counted = len(operations) + (self._counted if after else 0)
        if not self._after:
            self._metrics.bulk_open.set(self._counted)
        pause = NEXT_PAGE_SECONDS if after or self._after else LOOK_SECONDS
        for operation in operations:
            if operation.resume_at <= now:
                # One that was not this holder's to give means that another has the lock by now.
                pause = 0.0 if await self._step(operation, term) else pause
            else:
                pause = min(pause, (operation.resume_at - now) / 1000)
        return pause

    async def prune(self) -> int:
        """Delete the operations whose retention is over; return how many."""
        before = await self._database.now() - self._keep_ms
        total = 0
        while deleted := await self._database.write(
            lambda connection: prune_operations(connection, before_ms=before, limit=PRUNE_LIMIT)
        ):
            total += deleted
        return total

    async def _turn(self) -> None:
        term = self._lock.term
        pause = LOOK_SECONDS
        self._asked.clear()
        if term is not None:
            pause = await self.round(term)
            if time.monotonic() - self._pruned_at >= PRUNE_SECONDS:
                self._pruned_at = time.monotonic()
                await self.prune()
        if pause > 0:
            try:
                async with asyncio.timeout(pause):
                    await self._asked.wait()
            except TimeoutError:
                return

    async def _step(self, operation: Operation, term: int) -> bool:
        try:
            found = await self._find(operation)
        except DatabaseUnavailable:
            raise
        except Exception as error:
            # What cannot be read now never can: by then each error of the database has passed.
            log.exception("bulk_operation_failed", operation_id=operation.operation_id)
            await self._fail(operation, error)
            return True
        swept = await self._sweep(operation, found, term)
        if swept is not None:
            self._tell(operation, swept)
        return swept is not None

    async def _find(self, operation: Operation) -> Matching:
        scope = _scope(operation)
        wanted = scope.wanted
        if wanted.by_finish:
            # What is retried may finish again: it has had its turn.
            ends = [operation.created_at, wanted.finished_to]
            wanted = replace(wanted, finished_to=min(end for end in ends if end is not None))
        limit = max(1, min(MOST_IN_A_STEP, int(operation.rate * STEP_SECONDS)))
        return await self._database.read(
            lambda connection: next_matching(
                connection,
                self._database,
                tenant_id=operation.tenant_id,
                wanted=wanted,
                statuses=scope.statuses,
                after=operation.after,
                until_id=operation.until_id,
                limit=limit,
            )
        )

    async def _sweep(self, operation: Operation, found: Matching, term: int) -> Swept | None:
        """Carry out a step; a job whose move raises is counted alone, and passed over."""
        token = new_token()
        try:
            return await self._write(operation, found, term, token)
        except DatabaseUnavailable:
            raise
        except Exception as error:
            if len(found.turns) != 1:
                first = found.turns[0] if found.turns else None
                if first is None:
                    raise
                alone = Matching([first], first)
                return await self._sweep(operation, alone, term)
            if isinstance(error, Problem):
                return await self._write(operation, found, term, token, broken=error.code)
            log.exception("bulk_job_fault", job_id=found.turns[0][1], action=operation.action)
            return await self._write(operation, found, term, token, broken="internal_error")

    async def _write(
        self,
        operation: Operation,
        found: Matching,
        term: int,
        token: str,
        *,
        broken: str | None = None,
    ) -> Swept | None:
        return await self._database.write(
            lambda connection: sweep(
                connection,
                self._database,
                operation,
                found,
                term=term,
                token=token,
                calendar=Calendar(self._resume_schedule, self._schedules.close),
                statuses=_scope(operation).statuses,
                broken=broken,
            )
        )

    async def _resume_schedule(
        self, connection: AsyncConnection, job: RowMapping, asked: Asked
    ) -> Changed:
        # What is skipped fires nothing that were to be told.
        return await self._schedules.resume(connection, job, asked, "skip", Outcome())

    async def _fail(self, operation: Operation, error: Exception) -> None:
        ended = await self._database.write(
            lambda connection: end_operation(
                connection,
                self._database,
                operation.key,
                OperationStatus.FAILED,
                ("internal_error", f"{type(error).__name__}: {error}"),
            )
        )
        if ended:
            self._metrics.bulk_ended.labels(OperationStatus.FAILED.name).inc()

    def _tell(self, operation: Operation, swept: Swept) -> None:
        announce(self._ground, operation.action, swept.changed)
        jobs = self._metrics.bulk_jobs
        jobs.labels(operation.action, "changed").inc(len(swept.changed))
        jobs.labels(operation.action, "refused").inc(swept.refused.total())
        if swept.ended:
            self._metrics.bulk_ended.labels(OperationStatus.SUCCEEDED.name).inc()
            log.info(
                "bulk_operation_ended",
                operation_id=operation.operation_id,
                action=operation.action,
                changed=operation.changed + len(swept.changed),
            )

    def _on_asked(self, _signal: Signal) -> None:
        self._asked.set()


def _scope(operation: Operation) -> Scope:
    return scope_of(operation.action, BulkFilter.model_validate(operation.filter))
