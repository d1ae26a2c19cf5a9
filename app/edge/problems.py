"""Errors as RFC 9457 problem details: every code and its HTTP status, written once."""

from __future__ import annotations

import re
from typing import Any, Final

import orjson
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from app.edge.nearest import did_you_mean, names_at
from app.plumbing.database import DatabaseUnavailable

log = structlog.get_logger(__name__)

MEDIA_TYPE: Final = "application/problem+json"
RETRY_SECONDS: Final = 1
TEXT_KIND: Final = "[text]"
SEALED_KIND: Final = "[secret]"
"""Of the values that a field may have in two kinds."""
_PYDANTICS: Final = frozenset(("[key]", TEXT_KIND, SEALED_KIND))
"""What pydantic puts among the names of the fields that lead to a fault: it is not in the body."""

STATUS_OF: Final = {
    "bad_request": 400,
    "invalid_json": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "tenant_disabled": 403,
    "not_your_run": 403,
    "not_found": 404,
    "job_not_found": 404,
    "execution_not_found": 404,
    "method_not_allowed": 405,
    "callback_not_found": 404,
    "operation_not_found": 404,
    "worker_not_found": 404,
    "key_not_found": 404,
    "tenant_not_found": 404,
    "request_timeout": 408,
    "request_conflict": 409,
    "operation_ended": 409,
    "too_many_operations": 409,
    "tenant_name_taken": 409,
    "too_many_tenants": 409,
    "key_revoked": 409,
    "worker_down": 409,
    "verb_not_possible": 409,
    "precondition_failed": 412,
    "precondition_required": 428,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "validation_failed": 422,
    "empty_filter": 422,
    "cron_invalid": 422,
    "schedule_never_fires": 422,
    "params_invalid": 422,
    "secret_keys_missing": 422,
    "too_many_streams": 429,
    "too_many_failures": 429,
    "too_many_submissions": 429,
    "too_many_waiting": 429,
    "too_much_stored": 429,
    "headers_too_large": 431,
    "internal_error": 500,
    "overloaded": 503,
    "database_unavailable": 503,
    "not_ready": 503,
    "worker_unreachable": 503,
}
TITLE_OF: Final = {
    "bad_request": "The request cannot be understood",
    "invalid_json": "The body is not JSON",
    "unauthorized": "A valid key is required",
    "forbidden": "The key may not do this",
    "tenant_disabled": "The tenant is disabled",
    "not_your_run": "The worker is not one of this key's group",
    "not_found": "There is nothing at this address",
    "job_not_found": "There is no such job",
    "execution_not_found": "There is no such execution",
    "method_not_allowed": "This address does not take this method",
    "callback_not_found": "There is no such callback",
    "operation_not_found": "There is no such bulk operation",
    "worker_not_found": "There is no such worker",
    "worker_down": "The worker is DOWN",
    "key_not_found": "There is no such key",
    "tenant_not_found": "There is no such tenant",
    "tenant_name_taken": "Another tenant has this name",
    "too_many_tenants": "There are as many tenants as there may be",
    "key_revoked": "The key was revoked",
    "operation_ended": "The bulk operation has ended",
    "too_many_operations": "Too many bulk operations go on",
    "empty_filter": "A bulk action needs a filter",
    "verb_not_possible": "The job's state does not allow this",
    "precondition_failed": "The job has changed",
    "precondition_required": "If-Match is required",
    "request_timeout": "The request did not come to its end in time",
    "request_conflict": "The clientRequestId belongs to another request",
    "body_too_large": "The body is too large",
    "unsupported_media_type": "The body must be application/json",
    "validation_failed": "The request is not valid",
    "cron_invalid": "The cron expression is not valid",
    "schedule_never_fires": "The schedule would never fire",
    "params_invalid": "The params do not fit the handler",
    "secret_keys_missing": "This server has no key to keep secrets with",
    "too_many_streams": "Too many streams are open",
    "too_many_failures": "Too many wrong keys",
    "too_many_submissions": "The tenant submits too fast",
    "too_many_waiting": "Too many jobs of the tenant wait",
    "too_much_stored": "The tenant has too much stored",
    "headers_too_large": "The URL and headers are too large",
    "internal_error": "An error of the platform",
    "overloaded": "Too many requests wait",
    "database_unavailable": "The database cannot be reached",
    "not_ready": "The process is not ready",
    "worker_unreachable": "The worker cannot be reached",
}
_CODE_OF_STATUS: Final = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
}


class Problem(Exception):
    """An error that the caller can act on. `detail` says what to change; extras are its fields."""

    def __init__(
        self, code: str, detail: str, *, retry_after_seconds: int | None = None, **extras: Any
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.retry_after_seconds = retry_after_seconds
        self.extras = extras
        self.headers: dict[str, str] = {}
        """Of the answer, beside those of its status."""
        self.body_was_read = False
        """Whether the connection may serve another request: nothing of this one is on the way."""

    @property
    def status(self) -> int:
        """The HTTP status that belongs to the code."""
        return STATUS_OF[self.code]

    def document(self) -> dict[str, Any]:
        """Return the problem details object; what points at no field of a 422 is of the whole."""
        whole = {"errors": [{"pointer": "", "detail": self.detail}]} if self.status == 422 else {}
        return {
            "type": f"urn:oncue:problem:{self.code}",
            "title": TITLE_OF[self.code],
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            **whole,
            **self.extras,
        }


def problem_response(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    """Write a problem as an HTTP answer, with Retry-After where another try may help."""
    all_headers = {**problem.headers, **(headers or {})}
    if problem.status in (429, 503):
        all_headers.setdefault("Retry-After", str(problem.retry_after_seconds or RETRY_SECONDS))
    if problem.status == 401:
        all_headers.setdefault("WWW-Authenticate", "Bearer")
    return Response(
        orjson.dumps(problem.document()),
        status_code=problem.status,
        media_type=MEDIA_TYPE,
        headers=all_headers,
    )


def validation_problem(errors: list[Any], model: type[BaseModel] | None = None) -> Problem:
    """Turn pydantic's errors into one problem with a pointer and a sentence for each.

    A field that is none of the `model` is told with the nearest that is.
    """
    found = []
    for error in errors[:20]:
        where = [part for part in error["loc"] if part not in _PYDANTICS]
        detail = _sentence(error)
        if error["type"] == "extra_forbidden" and model is not None:
            detail += did_you_mean(str(where[-1]), names_at(model, where[:-1]))
        found.append({"pointer": pointer_to(*where), "detail": detail})
    first = found[0] if found else {"pointer": "", "detail": "the request is not valid"}
    detail = f"{_named(first['pointer'])}: {first['detail']}{and_more(len(errors))}"
    return Problem("validation_failed", detail, errors=found)


def invalid(detail: str, *pointers: str) -> Problem:
    """Return the `validation_failed` of what the pointers name; an empty one is the whole body."""
    named = " and ".join(_named(pointer) for pointer in pointers)
    errors = [{"pointer": pointer, "detail": detail} for pointer in pointers]
    return Problem("validation_failed", f"{named}: {detail}", errors=errors)


def pointer_to(*parts: object) -> str:
    """Write where a field is as a JSON pointer (RFC 6901); without parts: the whole body."""
    return "".join(f"/{_escape(str(part))}" for part in parts)


def and_more(faults: int) -> str:
    """End a sentence that names the first of several faults."""
    return f" and {faults - 1} more: see errors" if faults > 1 else ""


def install_problems(app: FastAPI) -> None:
    """Make every error of the application, known or not, a problem details answer."""

    @app.exception_handler(Problem)
    async def on_problem(request: Request, problem: Problem) -> Response:
        return _misread(app, request, problem) or problem_response(problem)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        # The framework says first which part of the request it is: the query, the path.
        faults = [{**fault, "loc": fault["loc"][1:]} for fault in error.errors()]
        problem = validation_problem(faults)
        return _misread(app, request, problem) or problem_response(problem)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        code = _CODE_OF_STATUS.get(error.status_code, "bad_request")
        headers = dict(error.headers or {})
        if code == "method_not_allowed":
            # What the router says names the methods of one route alone.
            allowed = _allowed_at(app, request.url.path) or headers.get("Allow", "")
            return problem_response(*_method_problem(request, allowed))
        detail = str(error.detail)
        if code == "not_found":
            path = request.url.path
            advice = "try it without the slash at its end" if path.endswith("/") else "see /docs"
            detail = f"Nothing is at {_printable(path)}: {advice}."
        return problem_response(Problem(code, detail), headers)

    @app.exception_handler(DatabaseUnavailable)
    async def on_database(request: Request, error: DatabaseUnavailable) -> Response:
        return problem_response(problem_of(error, request.url.path))

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> Response:
        return problem_response(problem_of(error, request.url.path))


def problem_of(error: Exception, path: str) -> Problem:
    """Return the problem that an error of a request at `path` is to its caller; log a fault."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, DatabaseUnavailable):
        return Problem(
            "database_unavailable",
            "It is not known whether anything was stored: repeat the same request later.",
        )
    log.error("request_fault", path=path, exc_info=error)
    return Problem(
        "internal_error",
        "The platform failed. Repeat the request, a submission with the same clientRequestId; if "
        "it fails again, tell the operator its X-Request-Id.",
    )


def _misread(app: FastAPI, request: Request, problem: Problem) -> Response | None:
    """Answer 405 where an address that stands for itself was read as another: `batch` as an id."""
    if problem.status != 422:
        return None
    named = app.openapi()["paths"].get(request.url.path)
    if named is None or request.method.lower() in named:
        return None
    return problem_response(*_method_problem(request, _methods(named)))


def _method_problem(request: Request, allowed: str) -> tuple[Problem, dict[str, str]]:
    detail = f"Use {allowed or 'another method'}, not {request.method}."
    return Problem("method_not_allowed", detail), {"Allow": allowed}


def _allowed_at(app: FastAPI, path: str) -> str:
    """Name the methods that the document knows at a path; of two templates the more literal one."""
    paths: dict[str, Any] = app.openapi()["paths"]
    for template in sorted(paths, key=lambda one: one.count("{")):
        if re.fullmatch(re.sub(r"\\{[^}]*\\}", "[^/]+", re.escape(template)), path):
            return _methods(paths[template])
    return ""


def _methods(operations: dict[str, Any]) -> str:
    return ", ".join(sorted(method.upper() for method in operations))


def problem_schema() -> dict[str, Any]:
    """Return the JSON schema of a problem, for the OpenAPI document."""
    return {
        "type": "object",
        "required": ["type", "title", "status", "code", "detail"],
        "properties": {
            "type": {"type": "string", "description": "a URN that ends with the code"},
            "title": {"type": "string"},
            "status": {"type": "integer", "format": "int32"},
            "code": {"type": "string", "description": "stable, for programs"},
            "detail": {"type": "string", "description": "what to change, for people"},
            "errors": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["pointer", "detail"],
                    "properties": {
                        "pointer": {"type": "string", "description": "RFC 6901"},
                        "detail": {"type": "string"},
                    },
                },
            },
            "jobId": {"type": "integer", "format": "int64"},
            "fields": {"type": "array", "items": {"type": "string"}},
            "field": {"type": "string", "description": "of a cron expression: the one at fault"},
            "position": {
                "type": "integer",
                "format": "int32",
                "description": "of that field in the expression, from 1",
            },
            "allowed": {"type": "string", "description": "what may stand in that field"},
            "needs": {"type": "string", "description": "the role that the key would need"},
            "jobStatus": {"type": "string", "description": "of a job whose state is in the way"},
            "possible": {
                "type": "array",
                "items": {"type": "string"},
                "description": "the verbs that this state allows",
            },
        },
    }


def problem_answers(*codes: str) -> dict[int | str, dict[str, Any]]:
    """Declare problems of a route, without a model: generated clients then parse them by status."""
    answers: dict[int | str, dict[str, Any]] = {}
    for code in codes:
        status = STATUS_OF[code]
        answers[status] = {
            "description": TITLE_OF[code],
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
    return answers


_SENTENCES: Final = {
    "dict_type": "must be an object",
    "extra_forbidden": "is not a field of this request",
    "missing": "is required",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "too_long": "must have at most {max_length}",
    "too_short": "must have at least {min_length}",
}


def _sentence(error: Any) -> str:
    known = _SENTENCES.get(error["type"])
    if known is None:
        return _printable(error["msg"].removeprefix("Value error, "))
    return known.format_map(error.get("ctx", {}))


def _named(pointer: str) -> str:
    return pointer.strip("/") or "the body"


def _escape(part: str) -> str:
    return _printable(part.replace("~", "~0").replace("/", "~1"))


def _printable(text: str) -> str:
    """A lone surrogate in the input must not break the answer that complains about it."""
    return text.encode("utf-8", "backslashreplace").decode()[:300]
