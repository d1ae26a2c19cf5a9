"""Retention: the holder's slow loop that deletes finished jobs in small batches."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from app.dispatch.lock import DispatchLock
from app.ground import Ground
from app.lifecycle.audit import prune_audit
from app.lifecycle.handler_schemas import prune_schemas
from app.lifecycle.moves.prune import Pruned, prune_batch, prune_skips
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.loops import Loop

log = structlog.get_logger(__name__)

BATCH_LIMIT: Final = 500
BETWEEN_BATCHES_SECONDS: Final = 0.05
BETWEEN_PASSES_SECONDS: Final = 600.0
DAY_MS: Final = 24 * 3600 * 1000


class Retention:
    """Deletes jobs that ended more than the retention ago, and nothing that is still owed."""

    def __init__(
        self,
        ground: Ground,
        lock: DispatchLock,
    ) -> None:
        self._database = ground.database
        self._lock = lock
        self._metrics = ground.metrics
        self._retention_ms = int(ground.settings.retention_days * DAY_MS)
        self._audit_ms = int(ground.settings.audit_retention_days * DAY_MS)
        self._loop = Loop("retention", self._step, expected=(DatabaseUnavailable,))

    def start(self) -> None:
        """Start a pass now and then."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop."""
        await self._loop.stop()

    async def run_pass(self, now_ms: int) -> int:
        """Walk all jobs old enough once, and return how many were deleted."""
        cursor, deleted = 0, 0
        while True:
            pruned = await self._prune(cursor, now_ms - self._retention_ms)
            cursor, deleted = pruned.cursor, deleted + pruned.deleted
            self._metrics.pruned.inc(pruned.deleted)
            if not pruned.more:
                return deleted
            await asyncio.sleep(BETWEEN_BATCHES_SECONDS)

    async def prune_ledger(self, now_ms: int) -> int:
        """Walk the schedules' ledger once, and return how many of its rows were deleted."""
        cursor, deleted = 0, 0
        while True:
            pruned = await self._database.write(
                lambda connection, cursor=cursor: prune_skips(  # type: ignore[misc]
                    connection,
                    cursor=cursor,
                    before_ms=now_ms - self._retention_ms,
                    limit=BATCH_LIMIT,
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
                    connection, before_ms=now_ms - self._audit_ms, limit=BATCH_LIMIT
                )
            )
            deleted += batch
            if batch < BATCH_LIMIT:
                return deleted
            await asyncio.sleep(BETWEEN_BATCHES_SECONDS)

    async def _step(self) -> None:
        if self._lock.term is None:
            await asyncio.sleep(1)
            return
        now = await self._database.now()
        await self.prune_ledger(now)
        await self.prune_audit(now)
        deleted = await self.run_pass(now)
        await self._database.write(lambda connection: prune_schemas(connection, self._database))
        if deleted:
            log.info("pruned", jobs=deleted)
        await asyncio.sleep(BETWEEN_PASSES_SECONDS)

    async def _prune(self, cursor: int, before_ms: int) -> Pruned:
        return await self._database.write(
            lambda connection: prune_batch(
                connection, self._database, cursor=cursor, before_ms=before_ms, limit=BATCH_LIMIT
            )
        )
