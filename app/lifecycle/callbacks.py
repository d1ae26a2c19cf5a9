"""Reads of callbacks and their tries, by the keys of their job and of their delivery id."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from sqlalchemy import RowMapping, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.states import DeliveryStatus

CALLBACK_COLUMNS: Final = (
    "id, delivery_id, job_id, event_type, url, status, tries, last_status_code, last_error, "
    "owner_worker_id, next_try_at, created_at, ended_at"
)
MOST_TRIES: Final = 20
"""How many tries of a callback are shown, the newest."""


def failed_sql(now: str, row: str = "") -> str:
    """Build the condition of a callback that has failed so far and that nobody tries now.

    It was given up, also by a 410, or it waits for its next try after one that did not deliver it;
    what is due already is about to be tried. `now` is SQL for the time, epoch ms; `row` names the
    table, with its dot.
    """
    # `+status`: as in `moves/deliver.py`.
    return (
        f"(+{row}status IN ({int(DeliveryStatus.EXHAUSTED)}, {int(DeliveryStatus.GONE)}) "
        f"OR (+{row}status = {int(DeliveryStatus.PENDING)} AND {row}owner_worker_id IS NULL "
        f"AND {row}tries > 0 AND {row}next_try_at > {now}))"
    )


async def read_callbacks(
    connection: AsyncConnection, job_id: int, *, before: int | None, limit: int
) -> Sequence[RowMapping]:
    """Return up to `limit` callbacks of a job, newest first, older than the row `before`."""
    older = "" if before is None else "AND id < :before "
    rows = await connection.execute(
        text(
            f"SELECT {CALLBACK_COLUMNS} FROM callback_delivery WHERE job_id = :job {older}"
            "ORDER BY id DESC LIMIT :limit"
        ),
        {"job": job_id, "limit": limit} | ({} if before is None else {"before": before}),
    )
    return rows.mappings().all()


async def read_callback(
    connection: AsyncConnection, delivery_id: str, *, tenant_id: int
) -> RowMapping | None:
    """Return one callback of the tenant."""
    rows = await connection.execute(
        text(
            f"SELECT {CALLBACK_COLUMNS} FROM callback_delivery "
            "WHERE delivery_id = :delivery AND tenant_id = :tenant"
        ),
        {"delivery": delivery_id, "tenant": tenant_id},
    )
    return rows.mappings().one_or_none()


# The first success is in the row of its callback, all else in rows of their own.
_TRIES: Final = text(
    "SELECT t.delivery_key, t.try_number, t.tried_at, t.worker_id, t.delivered, t.status_code, "
    "t.latency_ms, t.error, t.answer FROM callback_delivery AS d JOIN callback_try AS t "
    "ON t.job_id = d.job_id AND t.delivery_key = d.id AND t.try_number > d.tries - :most "
    "WHERE d.id IN :ids AND d.job_id = :job "
    "UNION ALL SELECT d.id, d.success_try, d.success_at, d.success_worker_id, 1, "
    "d.success_status_code, d.success_latency_ms, NULL, d.success_answer "
    "FROM callback_delivery AS d "
    "WHERE d.id IN :ids AND d.job_id = :job AND d.success_try > d.tries - :most "
    "ORDER BY delivery_key, try_number DESC"
).bindparams(bindparam("ids", expanding=True))


async def read_tries(
    connection: AsyncConnection, job_id: int, callbacks: Sequence[RowMapping]
) -> Mapping[int, Sequence[RowMapping]]:
    """Return the newest tries of each of a job's callbacks, by its key, newest first."""
    found: dict[int, list[RowMapping]] = defaultdict(list)
    if callbacks:
        rows = await connection.execute(
            _TRIES, {"job": job_id, "ids": [row["id"] for row in callbacks], "most": MOST_TRIES}
        )
        for row in rows.mappings():
            tries = found[row["delivery_key"]]
            # A dispatcher of the version before, told of the success again, gives it a row too.
            if not tries or tries[-1]["try_number"] != row["try_number"]:
                tries.append(row)
    return found
