"""The outbox of callbacks: what is due, who tries it, and what came of a try."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.bulk import ColumnType, rows_json, update_from_rows
from app.lifecycle.moves.ending import OwedDelivery
from app.lifecycle.moves.owe import DELIVERY_LEASE_MS
from app.lifecycle.reads import read_now
from app.lifecycle.retry import next_try_pause_ms
from app.lifecycle.states import DeliveryStatus
from app.plumbing.database import Database
from oncue.protocol import DeliveryResult

_PENDING: Final = int(DeliveryStatus.PENDING)


async def read_next_try_at(connection: AsyncConnection) -> int | None:
    """Return when the next owed callback is due or its lease ends, epoch ms."""
    value = (
        await connection.execute(
            text(f"SELECT MIN(next_try_at) FROM callback_delivery WHERE status = {_PENDING}")
        )
    ).scalar_one_or_none()
    return None if value is None else int(value)


_TAKEN: Final[dict[str, ColumnType]] = {"id": "BIGINT", "seen": "BIGINT", "worker": "TEXT"}
_TAKE: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="callback_delivery",
        key="id",
        columns=_TAKEN,
        assignments=("owner_worker_id = v.v_worker, tries = j.tries + 1, next_try_at = :lease_end"),
        guard=f"j.status = {_PENDING} AND j.next_try_at = v.v_seen",
    )
    for sqlite in (True, False)
}


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A callback leased to a worker for one try."""

    worker_id: str
    delivery: OwedDelivery


async def take_due(
    connection: AsyncConnection, database: Database, workers: Sequence[str], *, limit: int
) -> list[HandedOver]:
    """Lease up to `limit` due callbacks to `workers` in turn, oldest first.

    The last owner is not preferred: a lease that ran out says that it could not.
    """
    now = await read_now(connection, database)
    lock = "" if database.is_sqlite else " FOR UPDATE SKIP LOCKED"
    rows = (
        await connection.execute(
            text(
                "SELECT id, delivery_id, tries, url, body, next_try_at FROM callback_delivery "
                f"WHERE status = {_PENDING} AND next_try_at <= :now "
                f"ORDER BY next_try_at, id LIMIT :limit{lock}"
            ),
            {"now": now, "limit": limit},
        )
    ).all()
    if not rows:
        return []
    offset = random.randrange(len(workers))
    owners = [workers[(offset + place) % len(workers)] for place in range(len(rows))]
    await connection.execute(
        _TAKE[database.is_sqlite],
        {
            "rows": rows_json(
                _TAKEN,
                sorted(
                    (
                        {"id": row.id, "seen": row.next_try_at, "worker": owner}
                        for row, owner in zip(rows, owners, strict=True)
                    ),
                    key=lambda taken: int(taken["id"]),
                ),
            ),
            "lease_end": now + DELIVERY_LEASE_MS,
        },
    )
    return [
        HandedOver(owner, OwedDelivery(row.delivery_id, row.tries + 1, row.url, row.body))
        for row, owner in zip(rows, owners, strict=True)
    ]


_GIVE_BACK: Final = text(
    f"UPDATE callback_delivery SET next_try_at = :due, tries = tries - 1 "
    f"WHERE delivery_id IN :ids AND owner_worker_id = :worker AND status = {_PENDING}"
).bindparams(bindparam("ids", expanding=True))


async def give_back(
    connection: AsyncConnection,
    database: Database,
    worker_id: str,
    delivery_ids: Sequence[str],
    *,
    pause_ms: int,
) -> None:
    """Make callbacks that a worker would not take due again after a pause; no try is counted."""
    if delivery_ids:
        now = await read_now(connection, database)
        await connection.execute(
            _GIVE_BACK, {"due": now + pause_ms, "ids": list(delivery_ids), "worker": worker_id}
        )


_OPEN_OF: Final = text(
    f"SELECT id FROM callback_delivery WHERE status = {_PENDING} AND owner_worker_id = :worker "
    "ORDER BY id LIMIT :limit"
)
_ORPHAN: Final = text(
    "UPDATE callback_delivery SET next_try_at = :now, owner_worker_id = NULL "
    f"WHERE id IN :ids AND owner_worker_id = :worker AND status = {_PENDING}"
).bindparams(bindparam("ids", expanding=True))


async def release_deliveries(
    connection: AsyncConnection, database: Database, worker_id: str, *, limit: int
) -> int:
    """Make callbacks of a dead worker due at once, and return how many."""
    rows = await connection.execute(_OPEN_OF, {"worker": worker_id, "limit": limit})
    ids = [row.id for row in rows]
    if ids:
        now = await read_now(connection, database)
        await connection.execute(_ORPHAN, {"now": now, "ids": ids, "worker": worker_id})
    return len(ids)


_EXTEND: Final = text(
    f"UPDATE callback_delivery SET next_try_at = :lease_end WHERE delivery_id IN :ids "
    f"AND owner_worker_id = :worker AND status = {_PENDING}"
).bindparams(bindparam("ids", expanding=True))


async def extend_leases(
    connection: AsyncConnection, database: Database, worker_id: str, delivery_ids: Sequence[str]
) -> None:
    """Extend the leases of the callbacks that a worker still holds."""
    if delivery_ids:
        now = await read_now(connection, database)
        await connection.execute(
            _EXTEND,
            {
                "lease_end": now + DELIVERY_LEASE_MS,
                "ids": sorted(delivery_ids),
                "worker": worker_id,
            },
        )


_TRIED: Final = text(
    f"SELECT id, delivery_id, tries FROM callback_delivery "
    f"WHERE delivery_id IN :ids AND status = {_PENDING} ORDER BY id"
).bindparams(bindparam("ids", expanding=True))
_NOTED: Final[dict[str, ColumnType]] = {
    "id": "BIGINT",
    "status": "BIGINT",
    "next": "BIGINT",
    "code": "BIGINT",
    "error": "TEXT",
    "latency": "BIGINT",
    "ended": "BIGINT",
}
_NOTE: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="callback_delivery",
        key="id",
        columns=_NOTED,
        assignments=(
            "status = v.v_status, next_try_at = v.v_next, last_status_code = v.v_code, "
            "last_error = v.v_error, last_latency_ms = v.v_latency, ended_at = v.v_ended, "
            f"owner_worker_id = CASE WHEN v.v_status = {_PENDING} THEN NULL "
            "ELSE j.owner_worker_id END"
        ),
        guard=f"j.status = {_PENDING}",
    )
    for sqlite in (True, False)
}


async def note_tries(
    connection: AsyncConnection,
    database: Database,
    results: Sequence[DeliveryResult],
    *,
    schedule_seconds: tuple[float, ...],
) -> int | None:
    """Write what came of tries, and return the earliest next try, epoch ms.

    A success ends the delivery whichever try it was; a failure counts only for the newest try,
    since another may already be under way.
    """
    newest: dict[str, DeliveryResult] = {}
    for result in sorted(results, key=lambda one: (one.delivered, one.try_number)):
        newest[result.delivery_id] = result
    now = await read_now(connection, database)
    changes = []
    for row in await connection.execute(_TRIED, {"ids": sorted(newest)}):
        result = newest[row.delivery_id]
        if not result.delivered and result.try_number != row.tries:
            continue
        changes.append(_after_try(row.id, result, now, schedule_seconds))
    if changes:
        await connection.execute(
            _NOTE[database.is_sqlite],
            {"rows": rows_json(_NOTED, [change.row() for change in changes])},
        )
    return min((change.next_try_at for change in changes if change.is_open), default=None)


@dataclass(frozen=True, slots=True)
class _AfterTry:
    """What a try makes of its delivery's row."""

    row_id: int
    status: DeliveryStatus
    next_try_at: int
    result: DeliveryResult
    now: int

    @property
    def is_open(self) -> bool:
        return self.status is DeliveryStatus.PENDING

    def row(self) -> dict[str, Any]:
        return {
            "id": self.row_id,
            "status": int(self.status),
            "next": self.next_try_at,
            "code": self.result.status_code,
            "error": self.result.error,
            "latency": self.result.latency_ms,
            "ended": None if self.is_open else self.now,
        }


def _after_try(
    row_id: int, result: DeliveryResult, now: int, schedule_seconds: tuple[float, ...]
) -> _AfterTry:
    pause = next_try_pause_ms(
        schedule_seconds,
        tries=result.try_number,
        retry_after_ms=result.retry_after_ms,
        jitter=random.random(),
    )
    if result.delivered:
        status = DeliveryStatus.DELIVERED
    elif result.gone:
        status = DeliveryStatus.GONE
    else:
        status = DeliveryStatus.EXHAUSTED if pause is None else DeliveryStatus.PENDING
    return _AfterTry(row_id, status, now + (pause or 0), result, now)
