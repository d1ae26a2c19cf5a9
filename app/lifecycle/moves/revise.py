"""The move `change`: a caller changes what a job that waits is to do, and when."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.moves.follow import NOTHING, Followed
from app.lifecycle.moves.free_keys import free_keys
from app.lifecycle.moves.guard import (
    Asked,
    Changed,
    NotPossible,
    OfSchedule,
    Stale,
    TooFew,
    Unknown,
    WouldLeak,
    WrongKind,
    lock_job,
    move_job,
    target_of,
    tasks_alone,
)
from app.lifecycle.moves.limit_keys import concurrency_key
from app.lifecycle.moves.submit import (
    PARAMS_SLOT,
    forget_expiries,
    insert_expiries,
    insert_payloads,
)
from app.lifecycle.secret_marks import SECRET_PARAMS, SECRET_RESULT
from app.lifecycle.states import JobKind, JobStatus
from app.lifecycle.tables import INLINE_BYTES
from app.plumbing.database import Database
from app.plumbing.sealed import Sealer

_NO_KEYS: Final = Sealer("")


@dataclass(frozen=True, slots=True)
class NewValues:
    """What changes. `columns` are plain ones of `job_info`; `params` is JSON text or None.

    `sealer` seals them where those of the job are secret.

    `of_schedules` names the fields that only a schedule has.

    `due_ms` is absolute, `delay_ms` counts from the commit. `trusted` is a caller who may send a
    secret result to another receiver; `secret_handlers` are those that mark theirs as secret.
    """

    columns: Mapping[str, Any]
    due_ms: int | None = None
    delay_ms: int | None = None
    new_params: bool = False
    params: str | None = field(default=None, repr=False)
    sealer: Sealer = _NO_KEYS
    trusted: bool = False
    secret_handlers: frozenset[str] = frozenset()
    of_schedules: tuple[str, ...] = ()


_FORGET_PARAMS: Final = text("DELETE FROM job_payload WHERE job_id = :job AND slot = :slot")


async def revise_job(
    connection: AsyncConnection,
    database: Database,
    asked: Asked,
    values: NewValues,
    *,
    revisions: frozenset[int] | None,
    revise_schedule: OfSchedule = tasks_alone,
) -> Changed | NotPossible | Unknown | Stale | TooFew | WouldLeak | WrongKind:
    """Change a job if it still has one of the revisions (None: whatever it has).

    Raises:
        NoSecretKeys: its params are secret, and nothing can be sealed.
    """
    job = await lock_job(connection, database, asked, "change")
    if not isinstance(job, RowMapping):
        return job
    if (refused := _refused(job, values, revisions)) is not None:
        return refused
    if job["kind"] == JobKind.SCHEDULE:
        return await revise_schedule(connection, job)
    if values.of_schedules:
        return WrongKind(values.of_schedules)
    if values.columns.get("max_retry", job["attempt"]) < job["attempt"]:
        return TooFew(job["attempt"])
    due = job["next_trigger_time"]
    if values.delay_ms is not None:
        due = job["now_ms"] + values.delay_ms
    elif values.due_ms is not None:
        due = values.due_ms
    changes = {**values.columns, "next_trigger_time": due}
    if "expires_at" in values.columns and job["expires_at"] is not None:
        await forget_expiries(connection, [(job["expires_at"], job["id"])])
    if (expires_at := values.columns.get("expires_at")) is not None:
        await insert_expiries(connection, database, [(expires_at, job["id"])])
    if values.new_params:
        params = kept_params(job, values.params, values.sealer)
        changes |= await store_params(connection, database, job["id"], params)
    target = target_of("change", job)
    await move_job(connection, job, asked, target, changes)
    return Changed(
        job["queue_id"],
        values.columns.get("priority", job["priority"]),
        due if target is JobStatus.WAITING else None,
        followed=await _leave_key(connection, job, values),
    )


def _refused(
    job: RowMapping, values: NewValues, revisions: frozenset[int] | None
) -> Stale | WouldLeak | None:
    if revisions is not None and job["revision"] not in revisions:
        return Stale(job["revision"])
    return _leak(job, values)


def _leak(job: RowMapping, values: NewValues) -> WouldLeak | None:
    """Tell what a receiver would learn that it was not given for; a verb is no way to read it."""
    url = values.columns.get("callback_url")
    if url is None or _receiver(url) == _receiver(job["callback_url"]):
        return None
    if "callback_headers" not in values.columns and _hold_a_secret(job["callback_headers"]):
        return WouldLeak("callbackHeaders")
    is_secret = job["secret"] & SECRET_RESULT or job["job_handler"] in values.secret_handlers
    if is_secret and not values.trusted:
        return WouldLeak("result")
    return None


def _hold_a_secret(headers: str | None) -> bool:
    return headers is not None and any(
        not isinstance(value, str) for value in json.loads(headers).values()
    )


def _receiver(url: str | None) -> tuple[str, str | None, int | None] | None:
    if url is None:
        return None
    parts = urlsplit(url)
    return parts.scheme.lower(), parts.hostname, parts.port


async def _leave_key(connection: AsyncConnection, job: RowMapping, values: NewValues) -> Followed:
    """Let others begin where the job has left a key that had let it go."""
    key = concurrency_key(job)
    if key is None or values.columns.get("concurrency_key", key.name) == key.name:
        return NOTHING
    return Followed(tuple(await free_keys(connection, [key])))


def kept_params(job: RowMapping, params: str | None, sealer: Sealer) -> str | None:
    """Return new params of a locked job as they are stored: sealed if its params are secret.

    Raises:
        NoSecretKeys: nothing can be sealed.
    """
    if not job["secret"] & SECRET_PARAMS:
        return params
    return sealer.seal_body("null" if params is None else params)


async def store_params(
    connection: AsyncConnection, database: Database, job_id: int, params: str | None
) -> dict[str, Any]:
    """Replace the params (JSON text) of a locked job, and return the columns that then change."""
    long = params is not None and len(params.encode()) > INLINE_BYTES
    await connection.execute(_FORGET_PARAMS, {"job": job_id, "slot": PARAMS_SLOT})
    if long:
        await insert_payloads(
            connection, database, [{"job_id": job_id, "slot": PARAMS_SLOT, "body": params}]
        )
    return {"params": None if long else params, "params_in_payload": long}
