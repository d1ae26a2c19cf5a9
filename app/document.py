"""The OpenAPI 3.1 document of the dispatcher: what FastAPI derives, plus what it cannot know."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from app.access.roles import NEEDED
from app.admin.schemas import ChangeTenant, CreateKey, CreateTenant, RotateKey
from app.callbacks.schemas import RotateWebhookSecret, SetEgressAllow, SetWebhookSecret
from app.edge.problems import TITLE_OF, problem_schema
from app.jobs.bulk_schemas import SubmitBulk
from app.jobs.keeping import KeepJobs
from app.jobs.requests import BackfillJobs, ChangeJob, ResumeJob, SubmitBatch, SubmitJob, TriggerJob
from oncue.protocol import Heartbeat, LogsRequest, ReportsRequest

TITLE: Final = "Oncue"
VERSION: Final = "0.1.0"
DESCRIPTION: Final = """\
An asynchronous job platform. Submit a job and get its id at once; a worker runs it at the right
moment, once; poll, long-poll, or receive a signed webhook when it has ended.

Keys are sent as `Authorization: Bearer KEY`. Errors are problem details (RFC 9457) with a stable
`code`. Times are RFC 3339 in UTC with milliseconds.
"""


# Bodies that the routes read themselves.
_REQUESTS: Final[tuple[type[BaseModel], ...]] = (
    SubmitJob,
    SubmitBatch,
    ChangeJob,
    TriggerJob,
    ResumeJob,
    BackfillJobs,
    SubmitBulk,
    ChangeTenant,
    CreateKey,
    CreateTenant,
    KeepJobs,
    RotateKey,
    RotateWebhookSecret,
    SetEgressAllow,
    SetWebhookSecret,
    Heartbeat,
    ReportsRequest,
    LogsRequest,
)


EXAMPLES: Final[dict[str, Any]] = {
    "SubmitBatch": {
        "jobs": [
            {"clientRequestId": "order-1001", "jobName": "close order 1001", "jobHandler": "echo"},
            {"clientRequestId": "order-1002", "jobName": "close order 1002", "jobHandler": "echo"},
        ]
    },
    "ChangeJob": {"priority": 9, "delayMs": 60_000},
    "TriggerJob": {"params": {"orderId": 1001}},
    "ResumeJob": {"missed": "skip"},
    "BackfillJobs": {"from": "2026-01-01T00:00:00Z", "to": "2026-01-31T23:59:59Z", "dryRun": True},
    "SubmitBulk": {
        "action": "retry",
        "filter": {"status": "FAILED", "handler": "echo"},
        "dryRun": True,
    },
    "CreateKey": {"name": "invoices", "roles": ["submit", "read"]},
    "RotateKey": {"overlapSeconds": 3600},
    "CreateTenant": {"name": "billing"},
    "ChangeTenant": {"limits": {"weight": 3, "submissionsPerSecond": 50, "waitingJobs": 10_000}},
    "KeepJobs": {"succeededDays": 7, "failedDays": 90},
    "SetWebhookSecret": {"kind": "symmetric"},
    "RotateWebhookSecret": {"overlapSeconds": 86_400},
    "SetEgressAllow": {"networks": ["10.1.0.0/16"]},
}
"""A body for each schema: one that is made up of the schema sends every field, and is refused."""

_OF_A_JOB: Final = {
    "ETag": "The job's `revision`, for `If-Match`.",
    "Retry-After": "Seconds after which to look again; not of a job that has ended.",
}
_RATES: Final = {
    "RateLimit": "What is left, where the tenant has `submissionsPerSecond`.",
    "RateLimit-Policy": "The limit, where there is one.",
}
_LOCATED: Final = frozenset(("create_key", "create_tenant", "submit_bulk", "submit_job"))


def operation_id(route: APIRoute) -> str:
    """Name an operation after its function: stable, whatever its path."""
    return route.name


def install_document(app: FastAPI) -> None:
    """Make the application serve the completed document."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _build(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=TITLE,
        version=VERSION,
        openapi_version="3.1.0",
        description=DESCRIPTION,
        routes=app.routes,
        tags=[
            {"name": "jobs", "description": "Submit jobs and look at them."},
            {"name": "bulk", "description": "Change all jobs that match a filter."},
            {"name": "webhooks", "description": "What signs callbacks, and where they may go."},
            {"name": "schedules", "description": "When schedules fire."},
            {"name": "fleet", "description": "Workers and the handlers they offer."},
            {"name": "access", "description": "Keys, tenants, and who changed what."},
            {"name": "operations", "description": "Health and metrics."},
            {"name": "internal", "description": "For workers, with the internal token."},
        ],
    )
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    _, definitions = models_json_schema(
        [(model, "validation") for model in _REQUESTS],
        ref_template="#/components/schemas/{model}",
    )
    for name, schema in definitions["$defs"].items():
        schemas.setdefault(name, schema)
    schemas["Problem"] = problem_schema()
    schemas["JobEnded"] = _job_ended_schema()
    schemas["JobAttempted"] = _job_attempted_schema()
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["securitySchemes"] = {
        "apiKey": {"type": "http", "scheme": "bearer", "description": "A caller's key."},
        "internalToken": {"type": "http", "scheme": "bearer", "description": "Workers' token."},
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete(path, operation)
            _tell_example(operation)
            _tell_headers(operation)
    _widen_integers(document)
    _part_unions(document)
    return document


def _part_unions(node: Any) -> None:
    """Say that a union of objects is one of them: for `anyOf` generators mix all into one type."""
    if isinstance(node, dict):
        options = node.get("anyOf")
        if options and all("$ref" in option for option in options):
            node["oneOf"] = node.pop("anyOf")
        for child in node.values():
            _part_unions(child)
    elif isinstance(node, list):
        for child in node:
            _part_unions(child)


def _widen_integers(node: Any) -> None:
    """Give every integer the 64 bits it has: generated clients take 32 for a plain one."""
    if isinstance(node, dict):
        if node.get("type") == "integer":
            node.setdefault("format", "int64")
            for limit in node.keys() & {"minimum", "maximum"}:
                node[limit] = int(node[limit])  # FastAPI writes 1.0
                if abs(node[limit]) >= 2**63 - 1:
                    del node[limit]  # the format says it
        for child in node.values():
            _widen_integers(child)
    elif isinstance(node, list):
        for child in node:
            _widen_integers(child)


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Add security, and the answer that every route of callers may give in trouble."""
    answers = operation["responses"]
    if "callbacks" in operation:
        operation["callbacks"] = _callbacks()
    if answers.get("422", {}).get("content", {}).get("application/json"):
        del answers["422"]
    if path.startswith("/openapi/"):
        operation["security"] = [{"apiKey": []}]
    elif path.startswith("/internal/"):
        operation["security"] = [{"internalToken": []}]
    else:
        return
    trouble = [("500", "An error of the platform"), ("503", "Repeat it later")]
    if path.startswith("/openapi/"):
        needed = NEEDED[operation["operationId"]]
        operation["description"] += f"\n\nNeeds the role `{needed}`."
        trouble += [
            ("403", TITLE_OF["forbidden"]),
            ("422", TITLE_OF["validation_failed"]),
            ("429", TITLE_OF["too_many_failures"]),
        ]
    for status, sentence in trouble:
        answers.setdefault(
            status,
            {
                "description": sentence,
                "content": {
                    "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
                },
            },
        )


def _tell_example(operation: dict[str, Any]) -> None:
    for body in operation.get("requestBody", {}).get("content", {}).values():
        name = body["schema"].get("$ref", "").rpartition("/")[2]
        if name in EXAMPLES:
            body["example"] = EXAMPLES[name]


def _tell_headers(operation: dict[str, Any]) -> None:
    """Declare what an answer says beside its body."""
    name = operation.get("operationId")
    for status, answer in operation["responses"].items():
        told: dict[str, str] = {}
        if status == "401":
            told["WWW-Authenticate"] = "How to send a key."
        if status in ("429", "503"):
            told["Retry-After"] = "Seconds after which another try may help."
        if status in ("200", "201", "202"):
            if _schema_of(answer) == "#/components/schemas/Job":
                told |= _OF_A_JOB
            if name in _LOCATED:
                told["Location"] = "Where it is."
        if name == "submit_job" and status in ("200", "202", "429"):
            told |= _RATES
        if told:
            answer["headers"] = {
                header: {"description": sentence, "schema": {"type": "string"}}
                for header, sentence in told.items()
            }


def _schema_of(answer: dict[str, Any]) -> str:
    schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
    return str(schema.get("$ref", ""))


def _callback(operation: str, summary: str, when: str, schema: str) -> dict[str, Any]:
    """Return a callback whole: openapi-python-client takes no reference to one."""
    header = {"required": True, "in": "header", "schema": {"type": "string"}}
    return {
        "{$request.body#/callbackUrl}": {
            "post": {
                "operationId": operation,
                "summary": summary,
                "description": (
                    f"Sent {when}, signed by Standard Webhooks 1.0, repeated until a 2xx answer. "
                    "The same `webhook-id` is the same event: process it once."
                ),
                "parameters": [
                    {"name": "webhook-id", "description": "The same in every try.", **header},
                    {"name": "webhook-timestamp", "description": "Epoch seconds.", **header},
                    {
                        "name": "webhook-signature",
                        "description": "`v1,...` or `v1a,...`; two while a secret is rotated",
                        **header,
                    },
                ],
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}
                    },
                },
                "responses": {
                    "2XX": {"description": "Received"},
                    "410": {"description": "Not wanted: no further try"},
                },
            }
        }
    }


def _callbacks() -> dict[str, Any]:
    return {
        "jobEnded": _callback(
            "on_job_ended", "A job has ended", "when a job of this submission ends", "JobEnded"
        ),
        "jobAttempted": _callback(
            "on_job_attempted",
            "An attempt has begun, or another one follows",
            "when an attempt begins or is to be repeated, if `callbackEvents` names that",
            "JobAttempted",
        ),
    }


def _job_ended_schema() -> dict[str, Any]:
    ends = ["job.succeeded", "job.failed", "job.cancelled"]
    return _event_schema(ends, ["SUCCEEDED", "FAILED", "CANCELLED"], finished=True, more={})


def _job_attempted_schema() -> dict[str, Any]:
    following = {
        "nextTriggerTime": {
            "type": "string",
            "format": "date-time",
            "description": "Of `job.retrying` alone: when the next attempt is due.",
        }
    }
    events = ["job.started", "job.retrying"]
    return _event_schema(events, ["RUNNING", "WAITING"], finished=False, more=following)


def _event_schema(
    events: list[str], statuses: list[str], *, finished: bool, more: dict[str, Any]
) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "string"}
    maybe_text: dict[str, Any] = {"type": ["string", "null"]}
    time: dict[str, Any] = {"type": "string", "format": "date-time"}
    maybe_time: dict[str, Any] = {"type": ["string", "null"], "format": "date-time"}
    data = {
        "jobId": {"type": "integer", "format": "int64"},
        "clientRequestId": maybe_text,
        "executionId": maybe_text,
        "runId": {**text, "description": "jobId:triggerTs, the attempt that it is about"},
        "jobName": text,
        "status": {"type": "string", "enum": statuses},
        "attempt": {"type": "integer", "format": "int32"},
        "triggerTime": time,
        "startedAt": maybe_time,
        "finishedAt": time if finished else maybe_time,
        "sequence": {
            "type": "integer",
            "format": "int64",
            "description": "Grows from each callback of a job to the next: order is not kept.",
        },
        "result": {"description": "What the handler returned."},
        "error": {"anyOf": [{"$ref": "#/components/schemas/JobError"}, {"type": "null"}]},
    }
    more = {
        "nominalTime": {
            **time,
            "description": "Of a schedule's job alone: the time that it stands for.",
        },
        **more,
    }
    return {
        "type": "object",
        "required": ["type", "timestamp", "data"],
        "properties": {
            "type": {"type": "string", "enum": events},
            "timestamp": time,
            "data": {"type": "object", "required": sorted(data), "properties": data | more},
        },
    }
