"""The limits of tenants as rows, and counts of their jobs by ranges of the claim index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.states import JobStatus


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may use; None is no limit. `weight` is its share beside others' weights."""

    weight: float = 1.0
    submissions_per_second: float | None = None
    waiting_jobs: int | None = None
    running_jobs: int | None = None
    may_borrow: bool = True
    stored_bytes: int | None = None


NO_LIMITS: Final = TenantLimits()
_COLUMNS: Final = (
    "weight, submissions_per_second, waiting_jobs, running_jobs, may_borrow, stored_bytes"
)


class Stored(NamedTuple):
    """What a tenant has stored, by a count that began then (epoch ms)."""

    bytes: int
    counted_from: int


async def read_all_limits(
    connection: AsyncConnection,
) -> dict[int, tuple[TenantLimits, Stored | None]]:
    """Return the limits of each tenant that has any, and what it has stored if that is counted."""
    rows = await connection.execute(
        text(
            f"SELECT l.tenant_id, {_COLUMNS}, s.bytes, s.counted_from FROM tenant_limits AS l "
            "LEFT JOIN tenant_stored AS s ON s.tenant_id = l.tenant_id "
            "AND l.stored_bytes IS NOT NULL"
        )
    )
    return {
        row["tenant_id"]: (
            _limits(row),
            None if row["bytes"] is None else Stored(row["bytes"], row["counted_from"]),
        )
        for row in rows.mappings()
    }


_OF: Final = text(
    f"SELECT tenant_id, {_COLUMNS} FROM tenant_limits WHERE tenant_id IN :ids"
).bindparams(bindparam("ids", expanding=True))


async def read_limits_of(
    connection: AsyncConnection, tenant_ids: Sequence[int]
) -> dict[int, TenantLimits]:
    """Return the limits of those of these tenants that have any."""
    if not tenant_ids:
        return {}
    rows = await connection.execute(_OF, {"ids": sorted(tenant_ids)})
    return {row["tenant_id"]: _limits(row) for row in rows.mappings()}


async def write_limits(connection: AsyncConnection, tenant_id: int, limits: TenantLimits) -> None:
    """Store the limits of a tenant; without any it has no row. Its row of `tenant` is locked."""
    await connection.execute(
        text("DELETE FROM tenant_limits WHERE tenant_id = :tenant"), {"tenant": tenant_id}
    )
    if limits != NO_LIMITS:
        await connection.execute(
            text(
                f"INSERT INTO tenant_limits (tenant_id, {_COLUMNS}) VALUES (:tenant, :weight, "
                ":submissions_per_second, :waiting_jobs, :running_jobs, :may_borrow, "
                ":stored_bytes)"
            ),
            {"tenant": tenant_id, **asdict(limits)},
        )


_WAITING: Final = text(
    "SELECT COUNT(*) FROM (SELECT id FROM job_info "
    f"WHERE status IN ({int(JobStatus.WAITING)}, {int(JobStatus.BLOCKED)}) "
    "AND queue_id IN :queues LIMIT :most) AS counted"
).bindparams(bindparam("queues", expanding=True))
_QUEUES: Final = text("SELECT id FROM queue WHERE tenant_id = :tenant")


async def count_waiting(connection: AsyncConnection, tenant_id: int, *, most: int) -> int:
    """Count the tasks of a tenant that wait, looking at no more than `most` of them."""
    queues = await _queues_of(connection, tenant_id)
    if not queues:
        return 0
    counted = await connection.execute(_WAITING, {"queues": queues, "most": most})
    return int(counted.scalar_one())


_RUNNING: Final = text(
    "SELECT queue_id, COUNT(*) FROM job_info "
    f"WHERE status = {int(JobStatus.RUNNING)} AND queue_id IN :queues GROUP BY queue_id"
).bindparams(bindparam("queues", expanding=True))


async def count_running(connection: AsyncConnection, queue_ids: Sequence[int]) -> dict[int, int]:
    """Count the RUNNING tasks of these queues: no more than the fleet has slots, by the index."""
    if not queue_ids:
        return {}
    rows = await connection.execute(_RUNNING, {"queues": sorted(queue_ids)})
    return {row[0]: row[1] for row in rows}


async def count_running_of(connection: AsyncConnection, tenant_id: int) -> int:
    """Count the RUNNING tasks of a tenant."""
    queues = await _queues_of(connection, tenant_id)
    return sum((await count_running(connection, queues)).values())


async def _queues_of(connection: AsyncConnection, tenant_id: int) -> list[int]:
    return [row[0] for row in await connection.execute(_QUEUES, {"tenant": tenant_id})]


def _limits(row: Any) -> TenantLimits:
    return TenantLimits(
        weight=row["weight"],
        submissions_per_second=row["submissions_per_second"],
        waiting_jobs=row["waiting_jobs"],
        running_jobs=row["running_jobs"],
        may_borrow=bool(row["may_borrow"]),
        stored_bytes=row["stored_bytes"],
    )
