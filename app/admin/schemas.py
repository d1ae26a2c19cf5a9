"""What admins send and get: keys, tenants, the audit log."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from app.access.roles import Role
from app.edge.wire import Int64, Moment, Timestamp, Wire

DEFAULT_ROLES = (Role.SUBMIT, Role.READ)
DEFAULT_OVERLAP_SECONDS = 24 * 3600
MAX_OVERLAP_SECONDS = 90 * 24 * 3600
MAX_TENANT_ID = 2**31 - 1
MIN_WEIGHT, MAX_WEIGHT = 0.01, 1000.0
MIN_RATE, MAX_RATE = 0.01, 1_000_000.0
MAX_WAITING = 1_000_000
MAX_RUNNING = 1_000_000
MAX_STORED = 2**50

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
KeyState = Literal["ACTIVE", "EXPIRED", "REVOKED"]


class CreateKey(Wire):
    """A key to make: of callers of a tenant, or of the workers of a group."""

    name: Name = Field(description="Whose it is: it stands in the audit log.")
    roles: list[Role] | None = Field(
        None, min_length=1, max_length=4, description="submit and read, if left out."
    )
    tenant_id: int | None = Field(
        None, ge=0, le=MAX_TENANT_ID, strict=True, description="Your own, if left out."
    )
    worker_group: Name | None = Field(
        None, description="Makes a key for workers; it has no roles and no tenant."
    )
    expires_at: Moment | None = Field(None, description="It works until then.")

    @model_validator(mode="after")
    def _for_callers_or_workers(self) -> Self:
        if self.worker_group is not None and (self.roles or self.tenant_id is not None):
            raise ValueError("a key of a workerGroup has no roles and no tenantId")
        if self.roles is not None and len(set(self.roles)) != len(self.roles):
            raise ValueError("send each role once")
        return self


class RotateKey(Wire):
    """A new secret for a key."""

    overlap_seconds: int = Field(
        DEFAULT_OVERLAP_SECONDS,
        ge=0,
        le=MAX_OVERLAP_SECONDS,
        strict=True,
        description="How long the secret before goes on working.",
    )


class ApiKey(Wire):
    """A key, without its secret."""

    key_id: Int64
    prefix: str = Field(description="How the key begins; it is no secret.")
    name: str
    tenant_id: Int64
    roles: list[Role]
    worker_group: str | None
    state: KeyState
    created_at: Timestamp
    created_by: str
    rotated_at: Timestamp | None
    old_works_until: Timestamp | None = Field(
        description="While set, the secret before the last rotation works, too."
    )
    expires_at: Timestamp | None
    revoked_at: Timestamp | None
    last_used_at: Timestamp | None = Field(description="To within about a minute.")


class NewApiKey(ApiKey):
    """A key and its secret, which is never shown again."""

    key: str = Field(description="What is sent as `Authorization: Bearer KEY`.")


class ApiKeyList(Wire):
    """A page of keys, newest first."""

    items: list[ApiKey]
    next_cursor: str | None


class CreateTenant(Wire):
    """A tenant to make."""

    name: Name


class ChangeLimits(Wire):
    """The limits that change; null takes one away. None of them refuses a repeat."""

    weight: float | None = Field(
        None,
        ge=MIN_WEIGHT,
        le=MAX_WEIGHT,
        strict=True,
        description="Its share of the slots beside others' weights, when all of them have work; "
        "1 by default.",
    )
    submissions_per_second: float | None = Field(
        None,
        ge=MIN_RATE,
        le=MAX_RATE,
        strict=True,
        description="New jobs a second, with a burst of one second's; more is 429.",
    )
    waiting_jobs: int | None = Field(
        None,
        ge=1,
        le=MAX_WAITING,
        strict=True,
        description="New jobs are 429 while so many wait (WAITING and BLOCKED, due or not).",
    )
    running_jobs: int | None = Field(
        None,
        ge=1,
        le=MAX_RUNNING,
        strict=True,
        description="So many runs at once are its own; more only if mayBorrow.",
    )
    may_borrow: bool | None = Field(
        None,
        strict=True,
        description="true, the default: beyond runningJobs it gets the slots that no other "
        "tenant wants; false: never more than runningJobs.",
    )
    stored_bytes: int | None = Field(
        None,
        ge=1,
        le=MAX_STORED,
        strict=True,
        description="New jobs are 429 while their params, and the params, results and logs of the "
        "jobs that are kept, are more bytes than that; counted in the background.",
    )

    def changes(self) -> dict[str, Any]:
        """Return the fields that were sent, null as what it means."""
        defaults = {"weight": 1.0, "may_borrow": True}
        sent = {name: getattr(self, name) for name in self.model_fields_set}
        return {
            name: defaults.get(name) if value is None else value for name, value in sent.items()
        }


class TenantLimits(Wire):
    """What a tenant may use; null is no limit."""

    weight: float
    submissions_per_second: float | None
    waiting_jobs: Int64 | None
    running_jobs: Int64 | None
    may_borrow: bool
    stored_bytes: Int64 | None


class ChangeTenant(Wire):
    """What to change of a tenant."""

    name: Name | None = None
    disabled: bool | None = Field(
        None, strict=True, description="true: its callers are refused; its jobs go on."
    )
    limits: ChangeLimits | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.name is None and self.disabled is None and self.limits is None:
            raise ValueError("send a name, disabled, or limits")
        return self


class Tenant(Wire):
    """Who has jobs of its own: nobody else sees them."""

    tenant_id: Int64
    name: str
    disabled: bool
    created_at: Timestamp
    disabled_at: Timestamp | None
    limits: TenantLimits


class TenantList(Wire):
    """A page of tenants, by id."""

    items: list[Tenant]
    next_cursor: str | None


class Draining(Wire):
    """A worker that takes no more runs, and what it still holds."""

    worker_id: str
    name: str
    state: Literal["UP", "DRAINING", "DOWN"]
    active: Int64
    unreported: Int64 = Field(description="Outcomes that no dispatcher has acknowledged.")
    deliveries: Int64 = Field(description="Callbacks that it delivers or has to report.")


class AuditEntry(Wire):
    """Who changed what."""

    entry_id: Int64
    at: Timestamp
    tenant_id: Int64 = Field(description="Whose thing was changed.")
    actor: str = Field(description="The name of the key; `(open)` where there are no keys.")
    actor_key_id: Int64 | None = Field(description="null: of ONCUE_API_KEYS, or the command line.")
    actor_tenant_id: Int64
    action: str = Field(description="As `job.cancel` or `key.create`.")
    target: str = Field(description="What was changed, as `job:17`.")
    before: dict[str, Any] | None = Field(description="The values that changed; no secrets.")
    after: dict[str, Any] | None
    address: str = Field(description="From where.")
    request_id: str


class AuditList(Wire):
    """A page of the audit log, newest first."""

    items: list[AuditEntry]
    next_cursor: str | None
