"""What a worker with the key of a group may touch: what was sent to workers of that group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from app.edge.problems import Problem
from app.lifecycle.nodes import (
    GroupKey,
    deliveries_of_group,
    executions_of_group,
    groups_of,
)
from app.plumbing.database import Database

log = structlog.get_logger(__name__)


def require_group(by_key: GroupKey, worker_id: str, worker_group: str | None) -> None:
    """Return if the worker is one of the key's group.

    Raises:
        Problem: `not_your_run`.
    """
    if worker_group != by_key.worker_group:
        log.warning("worker_of_another_group", worker_id=worker_id, key_group=by_key.worker_group)
        raise Problem(
            "not_your_run",
            f"{worker_id[:128]} is no worker of the group '{by_key.worker_group}' of this key: "
            "give it the ONCUE_WORKER_KEY of its group, or another ONCUE_WORKER_NAME.",
        )


class GroupFence:
    """Drops from reports what was not sent to the group of the key; each drop is on record."""

    def __init__(
        self, by_key: GroupKey, executions: frozenset[str], deliveries: frozenset[str]
    ) -> None:
        self._by_key = by_key
        self._executions = executions
        self._deliveries = deliveries
        self.dropped = 0

    def own_executions(self, ids: Iterable[str]) -> list[str]:
        """Return those of the executions that the group may report of."""
        return self._own(ids, self._executions, "execution_id")

    def own_deliveries(self, ids: Iterable[str]) -> list[str]:
        """Return those of the deliveries that the group may report of."""
        return self._own(ids, self._deliveries, "delivery_id")

    def _own(self, ids: Iterable[str], own: frozenset[str], word: str) -> list[str]:
        kept = []
        for one in ids:
            if one in own:
                kept.append(one)
            else:
                self.dropped += 1
                log.warning(
                    "report_of_another_group", **{word: one}, key_group=self._by_key.worker_group
                )
        return kept


async def read_fence(
    database: Database, by_key: GroupKey, worker_id: str, execution_ids: Any, delivery_ids: Any
) -> GroupFence:
    """Look up what of a report the group may touch.

    Raises:
        Problem: `not_your_run`, the worker itself is of another group.
    """

    async def read(connection: AsyncConnection) -> GroupFence:
        groups = await groups_of(connection, [worker_id])
        require_group(by_key, worker_id, groups.get(worker_id))
        group = by_key.worker_group
        return GroupFence(
            by_key,
            frozenset(await executions_of_group(connection, execution_ids, group)),
            frozenset(await deliveries_of_group(connection, delivery_ids, group)),
        )

    return await database.read(read)
