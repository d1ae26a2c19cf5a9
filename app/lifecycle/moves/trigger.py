"""The move `trigger`: a task that waits for its time, or for its retry, is due now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.moves.guard import (
    Asked,
    Changed,
    NotPossible,
    OfSchedule,
    Stale,
    Unknown,
    WrongKind,
    lock_job,
    move_job,
    target_of,
    tasks_alone,
)
from app.lifecycle.moves.revise import kept_params, store_params
from app.lifecycle.moves.submit import PARAMS_SLOT
from app.lifecycle.reads import read_payloads
from app.lifecycle.states import JobKind
from app.plumbing.database import Database
from app.plumbing.sealed import CannotOpen, Sealer, is_sealed

_NO_KEYS: Final = Sealer("")
_PARAMS: Final = text("SELECT params, params_in_payload FROM job_info WHERE id = :id")


@dataclass(frozen=True, slots=True)
class OtherParams:
    """What the task is to run with from now on, as JSON text (None: null)."""

    params: str | None = field(repr=False)
    sealer: Sealer = _NO_KEYS
    """Seals them where those of the job are secret."""


async def trigger_job(
    connection: AsyncConnection,
    database: Database,
    asked: Asked,
    other: OtherParams | None,
    *,
    revisions: frozenset[int] | None,
    trigger_schedule: OfSchedule = tasks_alone,
    of_schedules: tuple[str, ...] = (),
) -> Changed | NotPossible | Unknown | Stale | WrongKind:
    """Make a waiting task due now, if it still has one of the revisions (None: whatever it has).

    One that is due already, with these params, stays as it is: a repeat changes nothing. It
    keeps its place in the line when it was due before. `trigger_ts` goes on growing by itself.

    Raises:
        NoSecretKeys: its params are secret, and nothing can be sealed.
    """
    job = await lock_job(connection, database, asked, "trigger")
    if not isinstance(job, RowMapping):
        return job
    if revisions is not None and job["revision"] not in revisions:
        return Stale(job["revision"])
    if job["kind"] == JobKind.SCHEDULE:
        return await trigger_schedule(connection, job)
    if of_schedules:
        return WrongKind(of_schedules)
    if other is not None and await _has_params(connection, job["id"], other):
        other = None
    due = min(job["next_trigger_time"], job["now_ms"])
    if other is not None or due < job["next_trigger_time"]:
        changes = {"next_trigger_time": due}
        if other is not None:
            params = kept_params(job, other.params, other.sealer)
            changes |= await store_params(connection, database, job["id"], params)
        await move_job(connection, job, asked, target_of("trigger", job), changes)
    return Changed(job["queue_id"], job["priority"], due)


async def _has_params(connection: AsyncConnection, job_id: int, other: OtherParams) -> bool:
    """Tell whether the locked job has these very params already."""
    row = (await connection.execute(_PARAMS, {"id": job_id})).one()
    stored = row.params
    if row.params_in_payload:
        key = (job_id, PARAMS_SLOT)
        stored = (await read_payloads(connection, [key])).get(key)
    if not is_sealed(stored):
        return bool(stored == other.params)
    try:
        return other.sealer.open_body(stored) == (other.params or "null")
    except CannotOpen:
        return False
