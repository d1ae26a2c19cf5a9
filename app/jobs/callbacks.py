"""The callbacks of a job, and sending one again."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from app.access.caller import Caller
from app.edge.paging import decode_cursor, encode_cursor
from app.edge.problems import Problem
from app.ground import Ground
from app.jobs.look import no_such_job
from app.jobs.views import callback_view
from app.lifecycle.callbacks import read_callbacks, read_tries
from app.lifecycle.moves.guard import Asked, Changed, Unknown
from app.lifecycle.moves.redeliver import redeliver, redeliver_failed
from app.lifecycle.reads import job_exists
from app.lifecycle.token import new_token
from app.plumbing.bus import OWED
from app.plumbing.database import Database


async def list_callbacks(
    database: Database, caller: Caller, job_id: int, *, limit: int, cursor: str | None
) -> dict[str, Any]:
    """Return a page of a job's callbacks, newest first.

    Raises:
        Problem: `job_not_found`, or `validation_failed` for a foreign cursor.
    """
    before = decode_cursor(cursor)

    async def read(connection: AsyncConnection) -> dict[str, Any]:
        if not await job_exists(connection, job_id, tenant_id=caller.tenant_id):
            raise no_such_job(job_id)
        rows = await read_callbacks(connection, job_id, before=before, limit=limit + 1)
        page = rows[:limit]
        tries = await read_tries(connection, job_id, page)
        return {
            "items": [callback_view(row, tries.get(row["id"], ())) for row in page],
            "nextCursor": encode_cursor(page[-1]["id"]) if len(rows) > limit else None,
        }

    return await database.read(read)


async def deliver_again(ground: Ground, caller: Caller, delivery_id: str) -> dict[str, Any]:
    """Make a callback due now, with the same `webhook-id`.

    Raises:
        Problem: `callback_not_found`.
    """
    row = await ground.database.write(
        lambda connection: redeliver(
            connection,
            ground.database,
            delivery_id,
            tenant_id=caller.tenant_id,
            deed=caller.doing("callback.redeliver"),
        )
    )
    if row is None:
        raise Problem("callback_not_found", "No callback has this deliveryId, or it has left.")
    ground.bus.publish(OWED, [row["next_try_at"]])
    return callback_view(row)


async def deliver_failed_again(ground: Ground, caller: Caller, job_id: int) -> dict[str, Any]:
    """Make the callbacks of a job that have failed due now, each with its `webhook-id`.

    Raises:
        Problem: `job_not_found`.
    """
    asked = Asked(job_id, caller.tenant_id, new_token(), caller.doing("job.redeliver_callbacks"))
    answer, count = await ground.database.write(
        lambda connection: redeliver_failed(connection, ground.database, asked)
    )
    if isinstance(answer, Unknown):
        raise no_such_job(job_id)
    if isinstance(answer, Changed):
        ground.bus.publish(OWED, [])
    return {"redelivered": count}
