"""Errors of the worker's interface as `application/problem+json` (RFC 9457), each with a code."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from worker.held import StaleTerm
from worker.lease import LeaseUnavailable
from worker.run import OtherWorker, RunsTooOld

MEDIA_TYPE: Final = "application/problem+json"
RETRY_AFTER_SECONDS: Final = "1"

log = structlog.get_logger(__name__)

PROBLEM_SCHEMA: Final[dict[str, Any]] = {
    "title": "Problem",
    "type": "object",
    "required": ["type", "title", "status", "code"],
    "properties": {
        "type": {"type": "string", "default": "about:blank"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string", "description": "Stable, for programs."},
        "detail": {"type": "string", "description": "One sentence, for people."},
    },
}

CODES: Final = {
    400: "bad_request",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    409: "stale_term",
    413: "body_too_large",
    415: "unsupported_media_type",
    421: "other_worker",
    422: "invalid_request",
    500: "internal_error",
    503: "lease_unavailable",
}


def problem(
    status: int, detail: str, *, code: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Build the answer for one error."""
    fields = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "code": code or CODES.get(status, f"http_{status}"),
        "detail": detail,
    }
    return JSONResponse(fields, status, headers=headers, media_type=MEDIA_TYPE)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe problem answers for the OpenAPI document, under their own media type."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {
            "description": f"{HTTPStatus(status).phrase} (`{CODES[status]}`)",
            "content": {MEDIA_TYPE: {"schema": schema}},
        }
        for status in statuses
    }


REFUSALS: Final = (StaleTerm, OtherWorker, LeaseUnavailable, RunsTooOld, HTTPException)
"""What is raised of a request that can be read, and says itself what is wrong."""


def answer_refusal(error: Exception) -> JSONResponse:
    """Build the answer for one of `REFUSALS`."""
    match error:
        case StaleTerm():
            return problem(409, f"{error}; the sender is no longer the dispatcher")
        case OtherWorker():
            return problem(421, f"{error}; nothing was started")
        case LeaseUnavailable():
            detail = f"{error}; nothing was started, send the same request to this worker again"
            return problem(503, detail, headers={"retry-after": RETRY_AFTER_SECONDS})
        case RunsTooOld():
            detail = f"{error}; nothing was started, send the runs to this worker anew"
            return problem(503, detail, code="runs_too_old")
        case HTTPException():
            headers = dict(error.headers) if error.headers else None
            return problem(error.status_code, str(error.detail), headers=headers)
    raise TypeError(f"{type(error).__name__} is no refusal")


def install_problems(app: FastAPI) -> None:
    """Make every error of `app` a problem document."""

    async def refused(_: Request, error: Exception) -> JSONResponse:
        return answer_refusal(error)

    for kind in REFUSALS:
        app.add_exception_handler(kind, refused)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return problem(422, f"{where}: {first['msg']}")

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("a request failed", path=request.url.path, exc_info=error)
        return problem(500, "the worker failed, its log says why")
