"""What the clients ask about keys, tenants and the audit log: requests, not sent yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypedDict
from urllib.parse import quote

from oncue._talk import Send
from oncue.results import ApiKey, Tenant, Worker, given_moment
from oncue.submission import json_body

KEYS = "/openapi/keys"
TENANTS = "/openapi/tenants"
AUDIT = "/openapi/audit"


class KeyOptions(TypedDict, total=False):
    """What a key may be told: `roles` of submit, read, operate and admin, or a `worker_group`.

    `tenant_id` is whose it is, `expires_at` until when it works.
    """

    roles: Sequence[str]
    tenant_id: int
    worker_group: str
    expires_at: datetime


class AuditFilter(TypedDict, total=False):
    """Which entries: of an `actor`, an `action` as `job.cancel`, a `target` as `job:17`.

    `since` is included, `until` is not.
    """

    actor: str
    action: str
    target: str
    since: datetime
    until: datetime
    tenant_id: int


def create_key(name: str, options: KeyOptions) -> Send:
    """Make a key: a second try would make a second one."""
    body: dict[str, Any] = {"name": name}
    for option, field in (
        ("roles", "roles"),
        ("tenant_id", "tenantId"),
        ("worker_group", "workerGroup"),
    ):
        if (value := options.get(option)) is not None:
            body[field] = list(value) if option == "roles" else value  # type: ignore[call-overload]
    if (expires_at := options.get("expires_at")) is not None:
        body["expiresAt"] = given_moment("expires_at", expires_at)
    return Send("POST", KEYS, body=json_body(body), repeatable=False)


def rotate_key(key: int | ApiKey, overlap_seconds: int | None) -> Send:
    """Give a key a new secret: a second try would end the one before."""
    body = {} if overlap_seconds is None else {"overlapSeconds": overlap_seconds}
    path = f"{_key_path(key)}/rotate"
    return Send("POST", path, body=json_body(body), repeatable=False)


def revoke_key(key: int | ApiKey) -> Send:
    """End a key; to do so twice is to do so once."""
    return Send("DELETE", _key_path(key))


def look_at_key(key: int | ApiKey) -> Send:
    """Look at a key."""
    return Send("GET", _key_path(key))


def create_tenant(name: str) -> Send:
    """Make a tenant."""
    return Send("POST", TENANTS, body=json_body({"name": name}), repeatable=False)


class LimitChanges(TypedDict, total=False):
    """Limits of a tenant that change; None takes one away."""

    weight: float | None
    submissions_per_second: float | None
    waiting_jobs: int | None
    running_jobs: int | None
    stored_bytes: int | None
    may_borrow: bool | None


_LIMITS: Final = {
    "weight": "weight",
    "submissions_per_second": "submissionsPerSecond",
    "waiting_jobs": "waitingJobs",
    "running_jobs": "runningJobs",
    "stored_bytes": "storedBytes",
    "may_borrow": "mayBorrow",
}


def change_tenant(
    tenant: int | Tenant,
    name: str | None,
    disabled: bool | None,
    limits: LimitChanges | None = None,
) -> Send:
    """Rename a tenant, refuse its callers, let them in again, or limit it."""
    if unknown := set(limits or ()) - _LIMITS.keys():
        raise TypeError(f"a tenant has no limit {min(unknown)!r}")
    changed = {_LIMITS[field]: value for field, value in (limits or {}).items()}
    changes: dict[str, Any] = {"name": name, "disabled": disabled, "limits": changed or None}
    given = {field: value for field, value in changes.items() if value is not None}
    if not given:
        raise ValueError("give a name, disabled, or limits")
    tenant_id = tenant.tenant_id if isinstance(tenant, Tenant) else tenant
    return Send("PATCH", f"{TENANTS}/{tenant_id}", body=json_body(given))


def drain(worker: str | Worker) -> Send:
    """Drain a worker; to do so twice is to do so once."""
    worker_id = worker.worker_id if isinstance(worker, Worker) else worker
    return Send("POST", f"/openapi/workers/{quote(worker_id, safe='')}/drain")


def keys_query(prefix: str | None, tenant_id: int | None) -> Mapping[str, str]:
    """Narrow a list of keys."""
    given = {"prefix": prefix, "tenantId": None if tenant_id is None else str(tenant_id)}
    return {name: value for name, value in given.items() if value is not None}


def audit_query(narrowed: AuditFilter) -> Mapping[str, str]:
    """Narrow the audit log."""
    if unknown := narrowed.keys() - AuditFilter.__annotations__.keys():
        raise TypeError(f"audit() has no filter {min(unknown)!r}")
    query = {}
    for name, value in narrowed.items():
        if value is not None:
            wire = {"since": "from", "until": "to", "tenant_id": "tenantId"}.get(name, name)
            instant = name in ("since", "until")
            query[wire] = given_moment(name, value) if instant else str(value)
    return query


def _key_path(key: int | ApiKey) -> str:
    return f"{KEYS}/{key.key_id if isinstance(key, ApiKey) else key}"
