"""What a tenant has stored, summed up from the rows of its jobs, a slice at a time.

Counted are params, results and lines of runs, in bytes as they are stored. A slice is a range of
the index of the tenant's clientRequestIds (children of schedules have none, and come first), and
of each job the rows that its id leads to; bodies that are long tell their length by a column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.limits import Stored

JOBS_A_SLICE: Final = 500


@dataclass(frozen=True, slots=True)
class Place:
    """Where the walk through a tenant's jobs stands: behind this job without an id, or with it."""

    job_id: int = 0
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """The bytes of some jobs, and where to go on; None: these were the last."""

    bytes: int
    onward: Place | None


_LENGTH: Final = {True: "LENGTH(CAST({0} AS BLOB))", False: "OCTET_LENGTH({0})"}
_HINT: Final = {True: "", False: "FORCE INDEX (uq_job_info_tenant_id) "}
_UNNAMED: Final = {
    sqlite: text(
        f"SELECT id, {_LENGTH[sqlite].format('params')} AS bytes FROM job_info {_HINT[sqlite]}"
        "WHERE tenant_id = :tenant AND client_request_id IS NULL AND id > :after "
        "ORDER BY id LIMIT :limit"
    )
    for sqlite in (True, False)
}
_NAMED: Final = {
    sqlite: text(
        f"SELECT id, client_request_id, {_LENGTH[sqlite].format('params')} AS bytes "
        f"FROM job_info {_HINT[sqlite]}WHERE tenant_id = :tenant AND client_request_id > :after "
        "ORDER BY client_request_id LIMIT :limit"
    )
    for sqlite in (True, False)
}
_OF_JOBS: Final = {
    sqlite: text(
        f"SELECT COALESCE(SUM(COALESCE(byte_count, {_LENGTH[sqlite].format('body')})), 0) "
        "FROM job_payload WHERE job_id IN :ids "
        f"UNION ALL SELECT COALESCE(SUM({_LENGTH[sqlite].format('result')}), 0) "
        "FROM job_log WHERE job_id IN :ids "
        "UNION ALL SELECT COALESCE(SUM(c.byte_count), 0) FROM job_log AS l "
        f"{'CROSS JOIN' if sqlite else 'STRAIGHT_JOIN'} log_chunk AS c ON c.log_id = l.id "
        "WHERE l.job_id IN :ids"
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite in (True, False)
}
_TELL: Final = {
    sqlite: text(
        "INSERT INTO tenant_stored (tenant_id, bytes, counted_from) "
        "VALUES (:tenant, :bytes, :counted_from) "
        + (
            "ON CONFLICT (tenant_id) DO UPDATE SET bytes = excluded.bytes, "
            "counted_from = excluded.counted_from"
            if sqlite
            else "ON DUPLICATE KEY UPDATE bytes = VALUES(bytes), "
            "counted_from = VALUES(counted_from)"
        )
    )
    for sqlite in (True, False)
}
_FORGET: Final = text(
    "DELETE FROM tenant_stored WHERE tenant_id NOT IN "
    "(SELECT tenant_id FROM tenant_limits WHERE stored_bytes IS NOT NULL)"
)


async def sum_slice(
    connection: AsyncConnection, tenant_id: int, place: Place, *, limit: int = JOBS_A_SLICE
) -> Slice:
    """Sum up what the next `limit` jobs of a tenant have stored."""
    sqlite = connection.dialect.name == "sqlite"
    after = place.job_id if place.request_id is None else place.request_id
    query = _UNNAMED if place.request_id is None else _NAMED
    rows = (
        await connection.execute(
            query[sqlite], {"tenant": tenant_id, "after": after, "limit": limit}
        )
    ).all()
    total = sum(row.bytes or 0 for row in rows)
    total += await _of_jobs(connection, [row.id for row in rows], sqlite=sqlite)
    if len(rows) < limit:
        # No clientRequestId is empty.
        return Slice(total, Place(request_id="") if place.request_id is None else None)
    last = rows[-1]
    if place.request_id is None:
        return Slice(total, Place(job_id=last.id))
    return Slice(total, Place(request_id=last.client_request_id))


async def _of_jobs(connection: AsyncConnection, ids: Sequence[int], *, sqlite: bool) -> int:
    if not ids:
        return 0
    return sum(int(row[0]) for row in await connection.execute(_OF_JOBS[sqlite], {"ids": ids}))


async def tell_stored(connection: AsyncConnection, tenant_id: int, stored: Stored) -> None:
    """Keep what was counted; what is known of tenants without the quota is forgotten."""
    await connection.execute(
        _TELL[connection.dialect.name == "sqlite"],
        {"tenant": tenant_id, "bytes": stored.bytes, "counted_from": stored.counted_from},
    )
    await connection.execute(_FORGET)
