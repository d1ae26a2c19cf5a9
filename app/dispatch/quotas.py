"""How many more runs tenants with a quota may have, from the rows of what runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from app.access.limits import LimitBook
from app.dispatch.queues import QueueBook
from app.dispatch.shares import Quota
from app.lifecycle.limits import count_running
from app.lifecycle.moves.claim import Candidate
from app.plumbing.database import Database

COUNTED_SECONDS: Final = 1.0


class Quotas:
    """Counts the RUNNING tasks of tenants with a quota; those without one cost nothing.

    Between two counts only the claims of this process add to them, and ends are not looked at:
    what is known is never too low. It is counted anew each second, and at once when that matters.
    """

    def __init__(self, database: Database, queues: QueueBook, limits: LimitBook) -> None:
        self._database = database
        self._queues = queues
        self._limits = limits
        self._running: Counter[int] = Counter()
        self._counted_at: dict[int, float] = {}

    def forget(self) -> None:
        """Know nothing: another dispatcher may have claimed meanwhile."""
        self._running.clear()
        self._counted_at.clear()

    async def of(self, waiting: Sequence[Candidate]) -> dict[int, Quota]:
        """Return the quotas of the tenants of these tasks, of those that have one."""
        if not self._limits.any_running:
            return {}
        asked = Counter(self._queues.tenant_of(task.queue_id) for task in waiting)
        most = {
            tenant_id: limit
            for tenant_id in asked
            if (limit := self._limits.of(tenant_id).running_jobs) is not None
        }
        oldest = time.monotonic() - COUNTED_SECONDS
        await self._count(
            tenant_id
            for tenant_id, limit in most.items()
            if self._counted_at.get(tenant_id, float("-inf")) < oldest
            or self._running[tenant_id] + asked[tenant_id] > limit
        )
        return {
            tenant_id: Quota(
                limit - self._running[tenant_id], self._limits.of(tenant_id).may_borrow
            )
            for tenant_id, limit in most.items()
        }

    def note(self, queue_ids: Iterable[int]) -> None:
        """Count tasks of these queues as running from now on: they are about to be claimed."""
        if self._limits.any_running:
            self._running.update(self._queues.tenant_of(queue_id) for queue_id in queue_ids)

    async def _count(self, tenant_ids: Iterable[int]) -> None:
        wanted = list(tenant_ids)
        if not wanted:
            return
        queues = [queue_id for one in wanted for queue_id in self._queues.queues_of(one)]
        now = time.monotonic()
        found = await self._database.read(lambda connection: count_running(connection, queues))
        for tenant_id in wanted:
            self._running[tenant_id] = sum(
                found.get(queue_id, 0) for queue_id in self._queues.queues_of(tenant_id)
            )
            self._counted_at[tenant_id] = now
