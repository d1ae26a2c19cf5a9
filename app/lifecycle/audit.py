"""The audit log: who changed what, written in the transaction of the change.

What it keeps are names, numbers and times: no secret, and of params only that they changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.states import JobStatus
from app.plumbing.times import rfc3339

WALK_ROWS: Final = 5000
"""How many entries one page may look through."""
CHANGED: Final = "(changed)"
"""Stands for a value that is not kept."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who changes something: a key, by its name and id, in a request from an address."""

    name: str
    tenant_id: int = 0
    key_id: int | None = None
    address: str = ""
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Deed:
    """What an actor does, as `job.cancel`."""

    actor: Actor
    action: str


_INSERT: Final = text(
    "INSERT INTO audit_log (at, tenant_id, actor, actor_key_id, actor_tenant_id, action, target, "
    "old_values, new_values, address, request_id) VALUES (:at, :tenant, :actor, :key, "
    ":actor_tenant, :action, :target, :old, :new, :address, :request)"
)


async def record_deed(
    connection: AsyncConnection,
    deed: Deed,
    target: str,
    *,
    tenant_id: int,
    now_ms: int,
    old: Mapping[str, Any] | None = None,
    new: Mapping[str, Any] | None = None,
) -> None:
    """Write one entry; `target` is `kind:id` and belongs to the tenant."""
    actor = deed.actor
    await connection.execute(
        _INSERT,
        {
            "at": now_ms,
            "tenant": tenant_id,
            "actor": actor.name[:128],
            "key": actor.key_id,
            "actor_tenant": actor.tenant_id,
            "action": deed.action,
            "target": target,
            "old": _json(old),
            "new": _json(new),
            "address": actor.address[:64],
            "request": actor.request_id[:128],
        },
    )


def _json(values: Mapping[str, Any] | None) -> str | None:
    return None if not values else json.dumps(values, ensure_ascii=False, separators=(",", ":"))


def job_target(job_id: int) -> str:
    """Name a job as a target."""
    return f"job:{job_id}"


_TIMES: Final = frozenset({"next_trigger_time", "expires_at", "start_at", "end_at"})
JOB_COLUMNS: Final = (
    *("priority", "max_retry", "retry_backoff", "retry_interval_ms", "timeout_ms"),
    *("callback_url", "callback_events", "expires_at", "next_trigger_time"),
    *("cron_expr", "cron_dialect", "timezone", "dst_gap", "dst_fold"),
    *("interval_ms", "interval_mode", "start_at", "end_at", "max_fires", "jitter_ms"),
    *("misfire_policy", "misfire_cap", "misfire_spacing_ms", "catch_up_ms"),
    *("overlap_policy", "concurrency_key", "concurrency_limit", "rate_key", "rate_per_second"),
)
"""The columns of a job whose change is told, beside its status."""


def job_change(
    job: RowMapping, target: JobStatus, changes: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what of a job is another value now, before and after, by the names callers know."""
    old: dict[str, Any] = {}
    new: dict[str, Any] = {}
    if job["status"] != target:
        old["status"], new["status"] = JobStatus(job["status"]).name, target.name
    for column in JOB_COLUMNS:
        if column in changes and changes[column] != job[column]:
            name = wire_name(column)
            old[name], new[name] = _shown(column, job[column]), _shown(column, changes[column])
    if "params_in_payload" in changes:
        new["params"] = CHANGED
    if changes.get("callback_headers", job["callback_headers"]) != job["callback_headers"]:
        new["callbackHeaders"] = CHANGED  # their values may be secrets of the receiver
    return old, new


def wire_name(column: str) -> str:
    """Return the name that callers know a column by."""
    first, *rest = column.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _shown(column: str, value: Any) -> Any:
    if value is None:
        return None
    if column in _TIMES:
        return rfc3339(value)
    if column == "callback_events":
        return value.split(",")
    return without_secrets(value) if column == "callback_url" else value


def without_secrets(url: str) -> str:
    """Show where a URL leads, without what may be secret in it: its user and its query."""
    parts = urlsplit(url)
    query = "?..." if parts.query else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{query}"


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which entries are wanted; times are epoch ms, `to` excluded. No tenant: those of all."""

    tenant_id: int | None = None
    actor: str | None = None
    action: str | None = None
    target: str | None = None
    from_ms: int | None = None
    to_ms: int | None = None


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Entries, newest first, and where to go on."""

    entries: Sequence[RowMapping]
    onward: tuple[int, int] | None


async def list_audit(
    connection: AsyncConnection,
    wanted: AuditFilter,
    *,
    before: tuple[int, int] | None,
    limit: int,
) -> AuditPage:
    """Return up to `limit` entries behind `before`, having looked through a bounded number."""
    ranges: list[str] = []
    values: dict[str, Any] = {}
    for condition, name, value in (
        ("tenant_id = :tenant", "tenant", wanted.tenant_id),
        ("target = :target", "target", wanted.target),
        ("at >= :from_ms", "from_ms", wanted.from_ms),
        ("at < :to_ms", "to_ms", wanted.to_ms),
    ):
        if value is not None:
            ranges.append(condition)
            values[name] = value
    if before is not None:
        ranges.append("at <= :at AND (at < :at OR id < :id)")
        values |= {"at": before[0], "id": before[1]}
    within = " AND ".join(ranges) or "1 = 1"
    order = "ORDER BY at DESC, id DESC"
    edge = (
        await connection.execute(
            text(f"SELECT at, id FROM audit_log WHERE {within} {order} LIMIT 1 OFFSET :walked"),
            values | {"walked": WALK_ROWS - 1},
        )
    ).one_or_none()
    conditions = [within]
    if edge is not None:
        conditions.append("at >= :edge_at AND (at > :edge_at OR id >= :edge_id)")
        values |= {"edge_at": edge.at, "edge_id": edge.id}
    for condition, name, value in (
        ("actor = :actor", "actor", wanted.actor),
        ("action = :action", "action", wanted.action),
    ):
        if value is not None:
            conditions.append(condition)
            values[name] = value
    rows = (
        (
            await connection.execute(
                text(
                    f"SELECT * FROM audit_log WHERE {' AND '.join(conditions)} {order} LIMIT :limit"
                ),
                values | {"limit": limit + 1},
            )
        )
        .mappings()
        .all()
    )
    if len(rows) > limit:
        return AuditPage(rows[:limit], (rows[limit - 1]["at"], rows[limit - 1]["id"]))
    return AuditPage(rows, None if edge is None else (edge.at, edge.id))


async def prune_audit(connection: AsyncConnection, *, before_ms: int, limit: int) -> int:
    """Delete the oldest entries that were written before `before_ms`; return how many."""
    rows = await connection.execute(
        text("SELECT id FROM audit_log WHERE at < :before ORDER BY at, id LIMIT :limit"),
        {"before": before_ms, "limit": limit},
    )
    last = sorted(row.id for row in rows)
    if not last:
        return 0
    done = await connection.execute(
        text("DELETE FROM audit_log WHERE id >= :first AND id <= :last AND at < :before"),
        {"first": last[0], "last": last[-1], "before": before_ms},
    )
    return done.rowcount
