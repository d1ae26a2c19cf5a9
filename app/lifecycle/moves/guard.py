"""What the moves that callers ask for share: the row under its lock, and the guarded UPDATE.

Each is safe to repeat after a commit of unknown outcome: the token of the request stands in the
row, and tells its own move from others'.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.audit import JOB_COLUMNS, Deed, job_change, job_target, record_deed
from app.lifecycle.moves.follow import NOTHING, Followed
from app.lifecycle.states import JobKind, JobStatus, possible_verbs, verb_target
from app.plumbing.database import NOW_MS, Database


@dataclass(frozen=True, slots=True)
class Asked:
    """A caller's verb for one job; `token` is drawn anew for each request.

    `deed` is who does what, for the audit log; None where that stands on record elsewhere.
    """

    job_id: int
    tenant_id: int
    token: str
    deed: Deed | None = None


@dataclass(frozen=True, slots=True)
class Changed:
    """The job is as the caller asked. `due_ms` is set if it waits to be claimed.

    `stopped` is the (worker, execution) that is to be stopped, `owed` tells of a callback,
    `goes_on` of a run that is not known to be over: this one, or one before it.
    `followed` is what the end of a schedule's child, or of what held a key, brought about.
    """

    queue_id: int
    priority: int
    due_ms: int | None = None
    stopped: tuple[str, str] | None = None
    owed: bool = False
    repeated: bool = False
    goes_on: bool = False
    followed: Followed = NOTHING


@dataclass(frozen=True, slots=True)
class NotPossible:
    """The job's state does not allow the verb; these would be possible."""

    status: JobStatus
    possible: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unknown:
    """The tenant has no such job."""


@dataclass(frozen=True, slots=True)
class Stale:
    """The job has changed since the caller looked: it has this revision now."""

    revision: int


@dataclass(frozen=True, slots=True)
class WouldLeak:
    """Refused: the callback would bear what is secret to another receiver than it was given for."""

    what: Literal["callbackHeaders", "result"]


@dataclass(frozen=True, slots=True)
class TooFew:
    """So many attempts have begun: a `maxRetry` below that would be broken already."""

    attempts: int


@dataclass(frozen=True, slots=True)
class WrongKind:
    """These fields are for jobs of another kind."""

    fields: tuple[str, ...]


OfSchedule = Callable[[AsyncConnection, RowMapping], Awaitable[Changed | NotPossible | Unknown]]
"""What a verb does to a schedule whose row is locked and whose state allows it."""


async def tasks_alone(_connection: AsyncConnection, job: RowMapping) -> Changed:
    """Stand for what a verb does to a schedule where its caller knows that it has tasks alone."""
    raise RuntimeError(f"job {job['id']} is a schedule")


_TOLD: Final = ", ".join(
    one
    for one in JOB_COLUMNS
    if one
    not in (
        *("priority", "callback_url", "callback_events", "expires_at", "next_trigger_time"),
        "concurrency_key",
    )
)
_LOCK: Final = {
    sqlite: text(
        f"SELECT {NOW_MS[sqlite]} AS now_ms, id, tenant_id, client_request_id, parent_id, kind, "
        "job_name, job_handler, queue_id, priority, status, owner_worker_id, execution_id, "
        "stopping_execution_id, claim_token, trigger_ts, attempt, callback_url, callback_events, "
        "callback_headers, expires_at, secret, concurrency_key, nominal_time, "
        f"next_trigger_time, version, revision, {_TOLD} FROM job_info {hint}"
        f"WHERE id = :id AND tenant_id = :tenant{lock}"
    )
    for sqlite, hint, lock in (
        (True, "", ""),
        (False, "FORCE INDEX (PRIMARY) ", " FOR UPDATE"),
    )
}


async def lock_job(
    connection: AsyncConnection, database: Database, asked: Asked, verb: str
) -> RowMapping | Changed | NotPossible | Unknown:
    """Return the job's row, locked, if its state allows the verb; else the answer."""
    found = await connection.execute(
        _LOCK[database.is_sqlite], {"id": asked.job_id, "tenant": asked.tenant_id}
    )
    job = found.mappings().one_or_none()
    if job is None:
        return Unknown()
    kind, status = JobKind(job["kind"]), JobStatus(job["status"])
    own = job["claim_token"] == asked.token
    if own or (verb == "cancel" and status is JobStatus.CANCELLED):
        due = job["next_trigger_time"] if status is JobStatus.WAITING else None
        return Changed(job["queue_id"], job["priority"], due, repeated=True)
    if verb_target(verb, kind, status) is None:
        return NotPossible(status, possible_verbs(kind, status))
    return job


async def move_job(
    connection: AsyncConnection,
    job: RowMapping,
    asked: Asked,
    target: JobStatus,
    changes: Mapping[str, Any],
) -> None:
    """Move a locked job, guarded by its status and version; `changes` are other columns.

    With a deed, the audit log tells of it in the same transaction.
    """
    columns = "".join(f"{name} = :{name}, " for name in changes)
    moved = await connection.execute(
        text(
            f"UPDATE job_info SET {columns}status = :to_status, claim_token = :to_token, "
            "version = version + 1, revision = revision + 1, updated_at = :moved_at "
            "WHERE id = :of_id AND status = :of_status AND version = :of_version"
        ),
        {
            **changes,
            "to_status": int(target),
            "to_token": asked.token,
            "moved_at": job["now_ms"],
            "of_id": job["id"],
            "of_status": job["status"],
            "of_version": job["version"],
        },
    )
    if moved.rowcount != 1:
        raise RuntimeError("a locked job changed under a caller's verb")
    if asked.deed is not None:
        old, new = job_change(job, target, changes)
        await record_deed(
            connection,
            asked.deed,
            job_target(job["id"]),
            tenant_id=job["tenant_id"],
            now_ms=job["now_ms"],
            old=old,
            new=new,
        )


def target_of(verb: str, job: RowMapping) -> JobStatus:
    """Return where a verb that is possible leads."""
    target = verb_target(verb, JobKind(job["kind"]), JobStatus(job["status"]))
    if target is None:
        raise ValueError(f"{verb} is not possible")
    return target
