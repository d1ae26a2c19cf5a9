"""The rows of bulk operations: what was asked, how far it is, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from sqlalchemy import RowMapping, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.audit import Deed, record_deed
from app.lifecycle.reads import read_now
from app.plumbing.database import Database


class OperationStatus(IntEnum):
    """Stored as the number, shown as the word."""

    QUEUED = 0
    RUNNING = 1
    SUCCEEDED = 2
    CANCELLED = 3
    FAILED = 4


OPEN_OPERATIONS: Final = (OperationStatus.QUEUED, OperationStatus.RUNNING)
MOST_OPEN: Final = 20
"""How many operations of one tenant may wait or run at once."""

COLUMNS: Final = (
    "id, operation_id, tenant_id, client_request_id, request_digest, action, filter, rate, "
    "status, until_id, after_id, after_finished, resume_at, matched, matched_is_minimum, changed, "
    "refused, error_code, error_message, created_at, updated_at, started_at, finished_at"
)
_OPEN: Final = f"status IN ({', '.join(str(int(one)) for one in OPEN_OPERATIONS)})"


@dataclass(frozen=True, slots=True)
class Operation:
    """A bulk operation as its row tells it. `filter` is as the caller sent it; times epoch ms.

    `after` is (finished at, id) of the last job that had its turn, `resume_at` the moment before
    which the rate allows no further one.
    """

    key: int
    operation_id: str
    tenant_id: int
    client_request_id: str | None
    request_digest: str
    action: str
    filter: dict[str, str]
    rate: float
    status: OperationStatus
    until_id: int
    after: tuple[int, int]
    resume_at: int
    matched: int
    matched_is_minimum: bool
    changed: int
    refused: dict[str, int]
    error: tuple[str, str] | None
    created_at: int
    updated_at: int
    started_at: int | None
    finished_at: int | None


def operation_of(row: RowMapping) -> Operation:
    """Read a row."""
    error = row["error_code"]
    return Operation(
        key=row["id"],
        operation_id=row["operation_id"],
        tenant_id=row["tenant_id"],
        client_request_id=row["client_request_id"],
        request_digest=row["request_digest"],
        action=row["action"],
        filter=json.loads(row["filter"]),
        rate=row["rate"],
        status=OperationStatus(row["status"]),
        until_id=row["until_id"],
        after=(row["after_finished"], row["after_id"]),
        resume_at=row["resume_at"],
        matched=row["matched"],
        matched_is_minimum=bool(row["matched_is_minimum"]),
        changed=row["changed"],
        refused=json.loads(row["refused"]),
        error=None if error is None else (error, row["error_message"] or ""),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
    )


@dataclass(frozen=True, slots=True)
class NewOperation:
    """An operation to insert; `operation_id` is drawn by this request, so it tells its own row.

    `ids` are those (first, behind the last) between which all jobs of the filter are;
    `finished_from` is where a walk by finished times begins.
    """

    operation_id: str
    tenant_id: int
    client_request_id: str | None
    request_digest: str
    action: str
    filter: dict[str, str]
    rate: float
    ids: tuple[int, int]
    finished_from: int
    matched: int
    matched_is_minimum: bool
    deed: Deed | None = None


class TooManyOpen(Exception):
    """The tenant has as many open operations as it may."""


_INSERT: Final = (
    "INSERT INTO bulk_operation (operation_id, tenant_id, client_request_id, request_digest, "
    "action, filter, rate, status, until_id, after_id, after_finished, resume_at, matched, "
    "matched_is_minimum, refused, created_at, updated_at) VALUES (:operation, :tenant, :request, "
    f":digest, :action, :filter, :rate, {int(OperationStatus.QUEUED)}, :until, :after_id, "
    ":after_finished, :now, :matched, :minimum, '{{}}', :now, :now) {keep}"
)
_BY_REQUEST: Final = text(
    f"SELECT {COLUMNS} FROM bulk_operation "
    "WHERE tenant_id = :tenant AND client_request_id = :request"
)
_BY_ID: Final = f"SELECT {COLUMNS} FROM bulk_operation WHERE operation_id = :operation"
_COUNT_OPEN: Final = text(
    "SELECT COUNT(*) FROM (SELECT id FROM bulk_operation "
    f"WHERE {_OPEN} AND tenant_id = :tenant LIMIT {MOST_OPEN}) AS open_ones"
)


async def insert_operation(
    connection: AsyncConnection, database: Database, new: NewOperation
) -> Operation:
    """Insert an operation; return it, or the one that has its client_request_id already.

    Raises:
        TooManyOpen: nothing was inserted.
    """
    known = await _own_or_earlier(connection, new)
    if known is not None:
        return known
    counted = await connection.execute(_COUNT_OPEN, {"tenant": new.tenant_id})
    if counted.scalar_one() >= MOST_OPEN:
        raise TooManyOpen
    last = (await connection.execute(text("SELECT MAX(id) FROM job_info"))).scalar_one()
    low, high = new.ids
    await connection.execute(
        text(_INSERT.format(keep=database.keep_first("created_at"))),
        {
            "operation": new.operation_id,
            "tenant": new.tenant_id,
            "request": new.client_request_id,
            "digest": new.request_digest,
            "action": new.action,
            "filter": json.dumps(new.filter, ensure_ascii=False),
            "rate": new.rate,
            "until": min(last or 0, high - 1),
            "after_id": max(0, low - 1),
            "after_finished": new.finished_from,
            "now": await read_now(connection, database),
            "matched": new.matched,
            "minimum": int(new.matched_is_minimum),
        },
    )
    stored = await _own_or_earlier(connection, new)
    if stored is None:
        raise RuntimeError("an operation that was inserted is not there")
    if new.deed is not None and stored.operation_id == new.operation_id:
        await record_deed(
            connection,
            new.deed,
            f"bulk:{stored.operation_id}",
            tenant_id=stored.tenant_id,
            now_ms=stored.created_at,
            new={"action": stored.action, "filter": stored.filter, "matched": stored.matched},
        )
    return stored


async def _own_or_earlier(connection: AsyncConnection, new: NewOperation) -> Operation | None:
    if new.client_request_id is not None:
        found = await connection.execute(
            _BY_REQUEST, {"tenant": new.tenant_id, "request": new.client_request_id}
        )
    else:
        found = await connection.execute(text(_BY_ID), {"operation": new.operation_id})
    row = found.mappings().one_or_none()
    return None if row is None else operation_of(row)


async def find_by_request(
    connection: AsyncConnection, client_request_id: str, *, tenant_id: int
) -> Operation | None:
    """Return the operation of a request that came before."""
    found = await connection.execute(
        _BY_REQUEST, {"tenant": tenant_id, "request": client_request_id}
    )
    row = found.mappings().one_or_none()
    return None if row is None else operation_of(row)


async def read_operation(
    connection: AsyncConnection, operation_id: str, *, tenant_id: int
) -> Operation | None:
    """Return an operation of the tenant."""
    found = await connection.execute(
        text(f"{_BY_ID} AND tenant_id = :tenant"),
        {"operation": operation_id, "tenant": tenant_id},
    )
    row = found.mappings().one_or_none()
    return None if row is None else operation_of(row)


async def list_operations(
    connection: AsyncConnection, *, tenant_id: int, before: int | None, limit: int
) -> list[Operation]:
    """Return operations of the tenant, newest first, older than the key `before`."""
    older = "" if before is None else "AND id < :before "
    rows = await connection.execute(
        text(
            f"SELECT {COLUMNS} FROM bulk_operation WHERE tenant_id = :tenant {older}"
            "ORDER BY id DESC LIMIT :limit"
        ),
        {"tenant": tenant_id, "limit": limit} | ({} if before is None else {"before": before}),
    )
    return [operation_of(row) for row in rows.mappings()]


async def open_operations(
    connection: AsyncConnection, database: Database, *, limit: int, after: int = 0
) -> tuple[list[Operation], int]:
    """Return open operations of all tenants behind one, in order, and the time, epoch ms."""
    # Of each status by itself, in the order of the index.
    one = (
        f"SELECT {COLUMNS}, {database.now_ms} AS now_ms FROM bulk_operation "
        "WHERE status = {status} AND id > {after} ORDER BY id LIMIT {limit}"
    )
    found: list[RowMapping] = []
    for status in OPEN_OPERATIONS:
        rows = await connection.exec_driver_sql(
            one.format(status=int(status), after=int(after), limit=int(limit))
        )
        found += rows.mappings().all()
    oldest = sorted(found, key=lambda row: int(row["id"]))[:limit]
    return [operation_of(row) for row in oldest], int(found[0]["now_ms"]) if found else 0


async def end_operation(
    connection: AsyncConnection,
    database: Database,
    key: int,
    status: OperationStatus,
    error: tuple[str, str] | None = None,
    *,
    of: tuple[Operation, Deed] | None = None,
) -> bool:
    """End an operation that is open; tell whether it was. What has been changed stays so."""
    now = await read_now(connection, database)
    done = await connection.execute(
        text(
            "UPDATE bulk_operation SET status = :status, error_code = :code, "
            "error_message = :message, finished_at = :now, updated_at = :now "
            f"WHERE id = :id AND {_OPEN}"
        ),
        {
            "status": int(status),
            "code": None if error is None else error[0],
            "message": None if error is None else error[1][:2000],
            "now": now,
            "id": key,
        },
    )
    if of is not None and done.rowcount == 1:
        operation, deed = of
        await record_deed(
            connection,
            deed,
            f"bulk:{operation.operation_id}",
            tenant_id=operation.tenant_id,
            now_ms=now,
            old={"status": operation.status.name},
            new={"status": status.name},
        )
    return done.rowcount == 1


async def prune_operations(connection: AsyncConnection, *, before_ms: int, limit: int) -> int:
    """Delete the oldest operations that ended before `before_ms`; return how many."""
    rows: Sequence[Any] = (
        await connection.execute(
            text(
                "SELECT id, finished_at FROM bulk_operation WHERE created_at < :before "
                f"AND NOT {_OPEN} AND finished_at < :before ORDER BY id LIMIT :limit"
            ),
            {"before": before_ms, "limit": limit},
        )
    ).all()
    if not rows:
        return 0
    statement = text("DELETE FROM bulk_operation WHERE id IN :ids").bindparams(
        bindparam("ids", expanding=True)
    )
    return (await connection.execute(statement, {"ids": [row.id for row in rows]})).rowcount
