"""Expiry: the lock holder's loop that ends jobs which did not begin in time."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from app.dispatch.lock import DispatchLock
from app.ground import Ground
from app.lifecycle.moves.expire import expire_jobs, is_expiry_due
from app.lifecycle.states import JobStatus
from app.plumbing.bus import ENDED, FIRE, OWED, WAKE
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.loops import Loop

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 1.0
BATCH_LIMIT: Final = 200


class Expiry:
    """Ends, within about a second of their `expiresAt`, jobs of which no attempt has begun."""

    def __init__(self, ground: Ground, lock: DispatchLock) -> None:
        self._database = ground.database
        self._bus = ground.bus
        self._metrics = ground.metrics
        self._lock = lock
        self._loop = Loop("expiry", self._step, expected=(DatabaseUnavailable,))

    def start(self) -> None:
        """Start looking while the lock is held."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop looking."""
        await self._loop.stop()

    async def look(self) -> list[int]:
        """End what has expired by now, and return the jobs."""
        ended: list[int] = []
        more = True
        while more:
            expired = await self._database.write(
                lambda connection: expire_jobs(connection, self._database, limit=BATCH_LIMIT)
            )
            more = expired.more
            ended += expired.job_ids
            if expired.job_ids:
                log.info("jobs_expired", jobs=len(expired.job_ids))
                self._metrics.finished.labels(JobStatus.FAILED.name).inc(len(expired.job_ids))
                self._bus.publish(ENDED, [[job_id, ""] for job_id in expired.job_ids])
            if expired.followed.claimable:
                self._bus.publish(WAKE, [list(task) for task in expired.followed.claimable])
            if expired.followed.schedules:
                self._bus.publish(FIRE, [])
            if expired.owed:
                self._bus.publish(OWED, [])
        return ended

    async def _step(self) -> None:
        await asyncio.sleep(LOOK_SECONDS)
        if self._lock.term is not None and await self._is_due():
            await self.look()

    async def _is_due(self) -> bool:
        return await self._database.read(
            lambda connection: is_expiry_due(connection, self._database)
        )
