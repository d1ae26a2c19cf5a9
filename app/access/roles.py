"""What each role may do: the one table of the routes of callers and the role that each needs."""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import Final


class Role(StrEnum):
    """What a key may do; a key has one or more."""

    SUBMIT = "submit"
    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"


INCLUDES: Final = {
    Role.SUBMIT: frozenset({Role.SUBMIT}),
    Role.READ: frozenset({Role.READ}),
    Role.OPERATE: frozenset({Role.OPERATE, Role.READ}),
    Role.ADMIN: frozenset(Role),
}
"""What each role may do beside its own."""

NEEDED: Final = {
    "submit_job": Role.SUBMIT,
    "submit_jobs": Role.SUBMIT,
    "get_job": Role.READ,
    "list_jobs": Role.READ,
    "get_job_executions": Role.READ,
    "get_job_children": Role.READ,
    "get_job_skips": Role.READ,
    "get_job_backfills": Role.READ,
    "get_job_callbacks": Role.READ,
    "get_job_events": Role.READ,
    "get_execution_logs": Role.READ,
    "explain_job": Role.READ,
    "get_workers": Role.READ,
    "get_handlers": Role.READ,
    "preview_cron": Role.READ,
    "list_bulk_operations": Role.READ,
    "get_bulk_operation": Role.READ,
    "cancel_job": Role.OPERATE,
    "pause_job": Role.OPERATE,
    "resume_job": Role.OPERATE,
    "trigger_job": Role.OPERATE,
    "retry_job": Role.OPERATE,
    "change_job": Role.OPERATE,
    "backfill_jobs": Role.OPERATE,
    "redeliver_callback": Role.OPERATE,
    "redeliver_callbacks": Role.OPERATE,
    "drain_worker": Role.OPERATE,
    "submit_bulk": Role.OPERATE,
    "cancel_bulk_operation": Role.OPERATE,
    "create_key": Role.ADMIN,
    "list_keys": Role.ADMIN,
    "get_key": Role.ADMIN,
    "rotate_key": Role.ADMIN,
    "revoke_key": Role.ADMIN,
    "create_tenant": Role.ADMIN,
    "list_tenants": Role.ADMIN,
    "get_tenant": Role.ADMIN,
    "change_tenant": Role.ADMIN,
    "list_audit": Role.ADMIN,
    "get_counts": Role.READ,
    "get_retention": Role.READ,
    "put_retention": Role.ADMIN,
    "get_webhook_secret": Role.ADMIN,
    "set_webhook_secret": Role.ADMIN,
    "rotate_webhook_secret": Role.ADMIN,
    "forget_webhook_secret": Role.ADMIN,
    "get_egress_allow": Role.READ,
    "set_egress_allow": Role.ADMIN,
}
"""The role that each route under `/openapi` needs, by its operationId."""


class RouteWithoutRole(RuntimeError):
    """A route under `/openapi` has no line in `NEEDED`: nobody may call it."""


@cache
def allowed(roles: tuple[str, ...]) -> frozenset[Role]:
    """Return all that these roles may do together."""
    return frozenset().union(*(INCLUDES[Role(role)] for role in roles))
