"""Oncue: jobs, on cue. What handler authors and callers import.

The client is loaded when it is first asked for: a worker and its child processes never do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from oncue.handlers import Context, Fail, HandlerNameTaken, ParamsInvalid, Retry, handler
from oncue.version import __version__
from oncue.webhooks import WebhookVerificationError, sign_webhook, verify_webhook

if TYPE_CHECKING:
    from oncue._access import LimitChanges
    from oncue.async_client import AsyncClient
    from oncue.client import Client
    from oncue.errors import (
        ApiError,
        BulkTimeout,
        Conflict,
        Invalid,
        JobFailed,
        NotFound,
        OncueError,
        Unauthorized,
        Unavailable,
        WaitTimeout,
    )
    from oncue.results import (
        ApiKey,
        AuditEntry,
        Backfill,
        BulkCount,
        BulkOperation,
        Callback,
        CallbackTry,
        ClockChange,
        Counts,
        CronFire,
        CronPreview,
        Draining,
        Execution,
        ExplainedAttempt,
        Explanation,
        Job,
        JobError,
        JobEvent,
        JobWarning,
        LogLine,
        NewApiKey,
        OfferedHandler,
        Progress,
        Reason,
        Schedule,
        Skipped,
        Tenant,
        TenantLimits,
        Worker,
    )
    from oncue.retries import Retries
    from oncue.submission import NewJob

_LOADED_WHEN_ASKED_FOR = {
    "AsyncClient": "async_client",
    "Client": "client",
    "Retries": "retries",
    "ApiError": "errors",
    "BulkTimeout": "errors",
    "Conflict": "errors",
    "Invalid": "errors",
    "JobFailed": "errors",
    "NotFound": "errors",
    "OncueError": "errors",
    "Unauthorized": "errors",
    "Unavailable": "errors",
    "WaitTimeout": "errors",
    "ApiKey": "results",
    "AuditEntry": "results",
    "Draining": "results",
    "NewApiKey": "results",
    "LimitChanges": "_access",
    "Tenant": "results",
    "TenantLimits": "results",
    "Backfill": "results",
    "BulkCount": "results",
    "BulkOperation": "results",
    "ClockChange": "results",
    "Counts": "results",
    "CronFire": "results",
    "CronPreview": "results",
    "Callback": "results",
    "Execution": "results",
    "ExplainedAttempt": "results",
    "Explanation": "results",
    "Job": "results",
    "JobError": "results",
    "JobEvent": "results",
    "JobWarning": "results",
    "LogLine": "results",
    "OfferedHandler": "results",
    "Reason": "results",
    "Progress": "results",
    "Schedule": "results",
    "Skipped": "results",
    "CallbackTry": "results",
    "EgressAllow": "results",
    "Redelivered": "results",
    "WebhookSecret": "results",
    "WebhookSecrets": "results",
    "Worker": "results",
    "NewJob": "submission",
}

__all__ = [
    "ApiError",
    "ApiKey",
    "AsyncClient",
    "AuditEntry",
    "Backfill",
    "BulkCount",
    "BulkOperation",
    "BulkTimeout",
    "Callback",
    "CallbackTry",
    "Client",
    "ClockChange",
    "Conflict",
    "Context",
    "Counts",
    "CronFire",
    "CronPreview",
    "Draining",
    "EgressAllow",
    "Execution",
    "ExplainedAttempt",
    "Explanation",
    "Fail",
    "HandlerNameTaken",
    "Invalid",
    "Job",
    "JobError",
    "JobEvent",
    "JobFailed",
    "JobWarning",
    "LimitChanges",
    "LogLine",
    "NewApiKey",
    "NewJob",
    "NotFound",
    "OfferedHandler",
    "OncueError",
    "ParamsInvalid",
    "Progress",
    "Reason",
    "Redelivered",
    "Retries",
    "Retry",
    "Schedule",
    "Skipped",
    "Tenant",
    "TenantLimits",
    "Unauthorized",
    "Unavailable",
    "WaitTimeout",
    "WebhookSecret",
    "WebhookSecrets",
    "WebhookVerificationError",
    "Worker",
    "__version__",
    "handler",
    "sign_webhook",
    "verify_webhook",
]


def __getattr__(name: str) -> Any:
    module = _LOADED_WHEN_ASKED_FOR.get(name)
    if module is None:
        raise AttributeError(f"module 'oncue' has no attribute {name!r}")
    return getattr(importlib.import_module(f"oncue.{module}"), name)


def __dir__() -> list[str]:
    return __all__
