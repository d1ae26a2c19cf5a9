"""How documents travel: camelCase, unknown fields refused, and the values that they share."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
)
from pydantic.alias_generators import to_camel

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def printable(value: str) -> str:
    """Refuse control characters."""
    if _CONTROL.search(value):
        raise ValueError("control characters are not allowed")
    return value


def _key(value: str) -> str:
    """MySQL compares text without its trailing spaces: `x` and `x ` would be one key."""
    printable(value)
    if value != value.strip(" "):
        raise ValueError("must not begin or end with a space")
    return value


def _rfc3339(value: object) -> object:
    if not (isinstance(value, str) and RFC3339.fullmatch(value)):
        raise ValueError("must be RFC 3339 text with an offset, as 2026-01-31T09:00:00Z")
    return value


def _sane_year(value: datetime) -> datetime:
    # Near the ends of the calendar a moment may have no UTC time at all.
    if not (1970 <= value.year <= 2200 and 1970 <= value.astimezone(UTC).year <= 2200):
        raise ValueError("must be between the years 1970 and 2200")
    return value


@lru_cache(maxsize=1024)
def _http_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        raise ValueError("is not a URL") from None
    if parts.scheme.lower() not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an absolute http or https URL")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not carry a user name or password")
    if port == 0:
        raise ValueError("has port 0, to which nothing can be sent")
    if not value.isprintable() or " " in value or "\\" in value:
        raise ValueError("must not have spaces, backslashes or control characters")
    return value


Name = Annotated[str, StringConstraints(min_length=1, max_length=128), AfterValidator(printable)]
Key = Annotated[str, StringConstraints(min_length=1, max_length=128), AfterValidator(_key)]
Moment = Annotated[AwareDatetime, BeforeValidator(_rfc3339), AfterValidator(_sane_year)]
CallbackUrl = Annotated[
    str, StringConstraints(min_length=1, max_length=2048), AfterValidator(_http_url)
]
Int64 = Annotated[int, Field(json_schema_extra={"format": "int64"})]
Timestamp = Annotated[
    str, Field(json_schema_extra={"format": "date-time"}, examples=["2026-01-31T09:00:00.000Z"])
]
StatusWord = Literal[
    "WAITING", "RUNNING", "SUCCEEDED", "FAILED", "PAUSED", "CANCELLED", "BLOCKED", "SCHEDULED"
]
ExecutionWord = Literal[
    "CLAIMED", "RUNNING", "SUCCEEDED", "FAILED", "TIMED_OUT", "LOST", "CANCELLED", "RETURNED"
]


class Wire(BaseModel):
    """A document of the API."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=False, extra="forbid", frozen=True
    )
