"""What the routes of callers share: their parameters, and how they read and answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import orjson
from fastapi import Path, Query, Request, Response

from app.edge.heads import header_of
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
    given = header_of(request.scope, b"content-type", "application/json")
    media_type = given.split(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise Problem("unsupported_media_type", "Send the body as application/json.")


def job_headers(job: dict[str, Any]) -> dict[str, str]:
    """Return the headers of a job's document: its revision, and when to look again."""
    headers = {"ETag": f'"{job["revision"]}"'}
    if job["status"] not in _TERMINAL_WORDS:
        headers["Retry-After"] = str(POLL_AFTER_SECONDS)
    return headers


class _JsonAnswer(Response):
    """A document whose length and type are its own: nobody gives them among its headers."""

    media_type = "application/json"

    def __init__(self, body: bytes, status: int, headers: Mapping[str, str]) -> None:
        # As the framework would, which looks for these two first, and for other media types.
        self.status_code = status
        self.background = None
        self.body = body
        self.raw_headers = [
            (name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()
        ]
        self.raw_headers.append((b"content-length", b"%d" % len(body)))
        self.raw_headers.append((b"content-type", b"application/json"))


def json_answer(
    document: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Answer with a JSON document."""
    return _JsonAnswer(orjson.dumps(document), status, headers or {})
