"""Retention: the holder's slow loop that deletes finished jobs in small batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from app.dispatch.lock import DispatchLock
from app.ground import Ground
from app.jobs.dropped_files import DroppedFiles
from app.jobs.pace import Pace
from app.lifecycle.audit import prune_audit
from app.lifecycle.dropped import read_whole
from app.lifecycle.handler_schemas import prune_schemas
from app.lifecycle.keep import DAY_MS, KeepClass, default_keeps, keep_classes
from app.lifecycle.moves.prune import (
    Finished,
    drop_jobs,
    find_again,
    find_finished,
    fit_together,
    may_leave,
    prune_skips,
)
from app.lifecycle.policies import next_tenant, read_policies
from app.lifecycle.states import JobKind, JobStatus
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.loops import Loop

log = structlog.get_logger(__name__)

WALKED_AT_ONCE: Final = 500
BETWEEN_BATCHES_SECONDS: Final = 0.05
BETWEEN_PASSES_SECONDS: Final = 600.0
AFRESH_SECONDS: Final = 24 * 3600.0
"""After so long a walk begins at the oldest job again, for what was passed over."""
MOST_KEPT: Final = 10_000
"""Of what was passed over, so many jobs are looked at again in each pass."""
START: Final = (-1, 0)


class Retention:
    """Deletes jobs that ended more than their retention ago, and nothing that is still owed.

    `strained` says that claims or submissions are slow now: then it steps back. With a
    directory for it, what is deleted is written down before.
    """

    def __init__(
        self, ground: Ground, lock: DispatchLock, strained: Callable[[], bool] = lambda: False
    ) -> None:
        self._database = ground.database
        self._lock = lock
        self._metrics = ground.metrics
        self._strained = strained
        settings = ground.settings
        self._retention_ms = int(settings.retention_days * DAY_MS)
        self._audit_ms = int(settings.audit_retention_days * DAY_MS)
        self._defaults = default_keeps(settings.retention_days, settings.retention)
        self._files = (
            None if settings.retention_export is None else DroppedFiles(settings.retention_export)
        )
        self._pace = Pace(one_writer=ground.database.is_sqlite)
        self._places: dict[tuple[int, frozenset[JobStatus]], tuple[int, int]] = {}
        self._kept: set[int] = set()
        self._afresh_at = float("-inf")
        self._term: int | None = None
        self._loop = Loop("retention", self._step, expected=(DatabaseUnavailable, OSError))

    def start(self) -> None:
        """Start a pass now and then."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop."""
        await self._loop.stop()

    async def run_pass(self, now_ms: int) -> int:
        """Delete what is old enough now, and return how many jobs were."""
        if time.monotonic() >= self._afresh_at:
            self._afresh_at = time.monotonic() + AFRESH_SECONDS
            self._places.clear()
        policies = await self._database.read(read_policies)
        classes = {
            tenant: keep_classes(self._defaults, chosen) for tenant, chosen in policies.items()
        }
        others = keep_classes(self._defaults, {})
        deleted, tenant = 0, await self._next_tenant(-1)
        while tenant is not None:
            for one in classes.get(tenant, others):
                deleted += await self._walk(tenant, one, now_ms)
            tenant = await self._next_tenant(tenant)
        return deleted + await self._look_again(classes, others, now_ms)

    async def prune_ledger(self, now_ms: int) -> int:
        """Walk the schedules' ledger once, and return how many of its rows were deleted."""
        cursor, deleted = 0, 0
        while True:
            pruned = await self._database.write(
                lambda connection, cursor=cursor: prune_skips(  # type: ignore[misc]
                    connection,
                    cursor=cursor,
                    before_ms=now_ms - self._retention_ms,
                    limit=WALKED_AT_ONCE,
                )
            )
            cursor, deleted = pruned.cursor, deleted + pruned.deleted
            if not pruned.more:
                return deleted
            await asyncio.sleep(BETWEEN_BATCHES_SECONDS)

    async def prune_audit(self, now_ms: int) -> int:
        """Delete the entries of the audit log that are too old, and return how many."""
        deleted = 0
        while True:
            batch = await self._database.write(
                lambda connection: prune_audit(
                    connection, before_ms=now_ms - self._audit_ms, limit=WALKED_AT_ONCE
                )
            )
            deleted += batch
            if batch < WALKED_AT_ONCE:
                return deleted
            await asyncio.sleep(BETWEEN_BATCHES_SECONDS)

    async def _step(self) -> None:
        if self._lock.term is None:
            await asyncio.sleep(1)
            return
        if self._lock.term != self._term:
            self._term, self._afresh_at = self._lock.term, float("-inf")
        now = await self._database.now()
        await self.prune_ledger(now)
        await self.prune_audit(now)
        deleted = await self.run_pass(now)
        await self._database.write(lambda connection: prune_schemas(connection, self._database))
        if deleted:
            log.info("pruned", jobs=deleted)
        await asyncio.sleep(BETWEEN_PASSES_SECONDS)

    async def _next_tenant(self, after: int) -> int | None:
        return await self._database.read(lambda connection: next_tenant(connection, after))

    async def _walk(self, tenant_id: int, kept: KeepClass, now_ms: int) -> int:
        """Go on through a tenant's finished jobs from where the last pass ended."""
        place = (tenant_id, kept.statuses)
        deleted, onward = 0, self._places.get(place, START)
        while True:
            walked = await self._database.read(
                lambda connection, after=onward: find_finished(  # type: ignore[misc]
                    connection,
                    self._database,
                    tenant_id=tenant_id,
                    after=after,
                    before_ms=now_ms - kept.keep_ms,
                    limit=WALKED_AT_ONCE,
                )
            )
            deleted += await self._drop(
                [job for job in walked.rows if job.status in kept.statuses], now_ms
            )
            if walked.rows:
                onward = (walked.rows[-1].finished_at, walked.rows[-1].id)
                self._places[place] = onward
            if walked.onward is None:
                return deleted

    async def _look_again(
        self, classes: dict[int, list[KeepClass]], others: list[KeepClass], now_ms: int
    ) -> int:
        """Try what was passed over before: a callback may have ended, the last child have left."""
        job_ids, self._kept = self._kept, set()
        found = await self._database.read(
            lambda connection: find_again(connection, self._database, job_ids)
        )
        old = [
            job
            for job in found
            for one in classes.get(job.tenant_id, others)
            if job.status in one.statuses and job.finished_at < now_ms - one.keep_ms
        ]
        return await self._drop(old, now_ms)

    async def _drop(self, jobs: Sequence[Finished], now_ms: int) -> int:
        """Delete jobs in batches, with a rest after each, and return how many left."""
        deleted, rest = 0, list(jobs)
        while rest:
            began = time.monotonic()
            wanted = rest[: self._pace.batch]
            batch = await self._database.read(
                lambda connection, wanted=wanted: fit_together(  # type: ignore[misc]
                    connection, self._database, wanted
                )
            )
            leaving = batch
            if self._files is not None:
                leaving = await self._write_down(self._files, batch, now_ms)
            left = await self._database.write(
                lambda connection, leaving=leaving: drop_jobs(  # type: ignore[misc]
                    connection, self._database, leaving
                )
            )
            self._note(batch, left)
            deleted, rest = deleted + len(left), rest[len(batch) :]
            pause = self._pace.rest_after(time.monotonic() - began, strained=self._strained())
            await asyncio.sleep(pause)
        return deleted

    def _note(self, batch: Sequence[Finished], left: Sequence[int]) -> None:
        self._metrics.pruned.inc(len(left))
        stay = {job.id for job in batch} - set(left)
        if len(self._kept) < MOST_KEPT:
            self._kept |= stay

    async def _write_down(
        self, files: DroppedFiles, batch: Sequence[Finished], now_ms: int
    ) -> list[Finished]:
        """Write down what is about to be deleted, and return it.

        What then stays after all is written down again when it leaves.
        """

        async def read(connection: AsyncConnection) -> tuple[list[Finished], list[Any]]:
            leaving = await may_leave(connection, self._database, batch)
            schedules = any(job.kind == JobKind.SCHEDULE for job in leaving)
            ids = [job.id for job in leaving]
            return leaving, await read_whole(connection, self._database, ids, schedules=schedules)

        leaving, whole = await self._database.read(read)
        if whole:
            try:
                await asyncio.to_thread(files.keep, whole, now_ms)
            except OSError:
                self._metrics.export_failures.inc()
                raise
            self._metrics.exported.inc(len(whole))
        return leaving
