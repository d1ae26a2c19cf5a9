"""What the routes of callers share: their parameters, and how they read and answer."""

from __future__ import annotations

from typing import Annotated, Any, Final

import orjson
from fastapi import Path, Query, Request, Response

from app.edge.paging import MAX_LIMIT
from app.edge.problems import Problem
from app.lifecycle.states import TERMINAL_JOBS

POLL_AFTER_SECONDS: Final = 1
_TERMINAL_WORDS: Final = frozenset(status.name for status in TERMINAL_JOBS)

JobId = Annotated[
    int,
    Path(
        ge=1,
        le=2**63 - 1,
        json_schema_extra={"format": "int64"},
        alias="jobId",
        description="The `jobId` of a job or schedule.",
    ),
]
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Items a page.")]
Cursor = Annotated[
    str | None, Query(max_length=128, description="The `nextCursor` of the page before.")
]
LongCursor = Annotated[
    str | None, Query(max_length=2048, description="The `nextCursor` of the page before.")
]


def body_of(schema: str, *, required: bool = True) -> dict[str, Any]:
    """Declare the body of a route that reads it itself."""
    return {
        "requestBody": {
            "required": required,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
        }
    }


def require_json(request: Request) -> None:
    """Refuse a body that is not JSON by its type.

    Raises:
        Problem: `unsupported_media_type`.
    """
    media_type = request.headers.get("content-type", "application/json").split(";")[0].strip()
    if media_type.lower() != "application/json" and not media_type.lower().endswith("+json"):
        raise Problem("unsupported_media_type", "Send the body as application/json.")


def job_headers(job: dict[str, Any]) -> dict[str, str]:
    """Return the headers of a job's document: its revision, and when to look again."""
    headers = {"ETag": f'"{job["revision"]}"'}
    if job["status"] not in _TERMINAL_WORDS:
        headers["Retry-After"] = str(POLL_AFTER_SECONDS)
    return headers


def json_answer(
    document: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Answer with a JSON document."""
    return Response(
        orjson.dumps(document), status_code=status, media_type="application/json", headers=headers
    )
