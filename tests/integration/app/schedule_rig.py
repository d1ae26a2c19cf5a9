"""Schedules for tests: made, moved back in time, fired, and what became of them."""

from __future__ import annotations

from typing import Any

from app.lifecycle.states import ExecutionStatus
from app.plumbing.database import Database
from tests.integration.app.rig import (
    Door,
    change,
    claimed,
    ending,
    new_term,
    rows_of,
    settled,
)

HOUR = 3_600_000
MINUTE = 60_000


async def schedule_of(api: Door, **fields: Any) -> int:
    """Submit a schedule; hourly unless told otherwise."""
    given = (
        fields
        if "cronExpr" in fields or "intervalMs" in fields
        else {
            "intervalMs": HOUR,
            **fields,
        }
    )
    return await api.submitted(**given)


async def fired(api: Door, *, back_ms: int | None = None, schedule: int | None = None) -> int:
    """Fire what is due as the holder of the lock would; first move a schedule back in time."""
    if back_ms is not None:
        await moved_back(api.database, schedule or 0, back_ms)
    term = await new_term(api.database)
    found = 0
    while count := await api.parts.spawner.fire_due(term):
        found += count
    return found


async def moved_back(database: Database, schedule: int, by_ms: int) -> None:
    """Let so much time have passed since a schedule was last looked at."""
    await change(
        database,
        "UPDATE job_info SET trigger_ts = trigger_ts - :by, anchor_at = anchor_at - :by, "
        "next_trigger_time = next_trigger_time - :by, start_at = start_at - :by, "
        "skip_from = skip_from - :by WHERE id = :id",
        by=by_ms,
        id=schedule,
    )
    # Each moves to where the one before it has left: MySQL looks at every row by itself.
    in_order = "" if database.is_sqlite else " ORDER BY nominal_time"
    await change(
        database,
        f"UPDATE job_info SET nominal_time = nominal_time - :by WHERE parent_id = :id{in_order}",
        by=by_ms,
        id=schedule,
    )
    await change(
        database,
        "UPDATE schedule_skip SET from_time = from_time - :by, to_time = to_time - :by "
        "WHERE schedule_id = :id",
        by=by_ms,
        id=schedule,
    )


async def children(database: Database, schedule: int) -> list[dict[str, Any]]:
    return await rows_of(
        database,
        "SELECT * FROM job_info WHERE parent_id = :id ORDER BY nominal_time, child_key",
        id=schedule,
    )


async def skips(database: Database, schedule: int) -> list[dict[str, Any]]:
    return await rows_of(
        database,
        "SELECT * FROM schedule_skip WHERE schedule_id = :id ORDER BY from_time",
        id=schedule,
    )


async def end_child(database: Database, child: int, **fields: Any) -> None:
    term = await new_term(database)
    (run,) = await claimed(database, [child], term=term)
    await settled(database, ending(run, ExecutionStatus.SUCCEEDED, **fields))


async def job(api: Door, job_id: int) -> dict[str, Any]:
    answer = await api.client.get(f"/openapi/jobs/{job_id}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def patch(api: Door, job_id: int, **fields: Any) -> Any:
    shown = await job(api, job_id)
    return await api.client.patch(
        f"/openapi/jobs/{job_id}", json=fields, headers={"If-Match": f'"{shown["revision"]}"'}
    )
