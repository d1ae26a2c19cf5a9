"""The `http` handler: calls a URL by the guarded client and returns what it answered."""

from __future__ import annotations

import json
import re
import time
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from oncue import __version__
from oncue.handlers import NOT_TOLD, Context, Fail, Retry
from worker.deliver import wait_asked
from worker.egress import (
    RUN_NETWORKS,
    Egress,
    EgressFailed,
    EgressRefused,
    EgressReply,
    read_networks,
)

LONGEST_CALL_SECONDS: Final = 3600.0
"""The job's own timeout ends a call; this is for jobs that have a longer one."""
ANSWER_BYTES: Final = 64 * 1024
AROUND_THE_BODY_BYTES: Final = 256
"""Of a result: the status, the names, and what marks a body that was cut."""
RETURNED_HEADERS: Final = ("content-type", "content-length", "location", "etag", "retry-after")
RESERVED_HEADERS: Final = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "upgrade", "accept-encoding"}
)
HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A token of RFC 9110: no space before the colon, where some receivers read another header."""


class UnexpectedStatus(Exception):
    """The answer has another status than the job expects."""


class HttpCall(BaseModel):
    """The params of an `http` job."""

    model_config = ConfigDict(extra="forbid")

    method: str = Field("GET", pattern=r"^(?i:GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS)$")
    url: str = Field(min_length=1, max_length=8192)
    headers: dict[str, str] = Field(default_factory=dict, max_length=64)
    body: Any = None
    expectStatus: int | list[int] | None = None  # noqa: N815 (as callers write it)

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if name.lower() in RESERVED_HEADERS:
                raise ValueError(f"the header {name} is set by the worker")
            if not HEADER_NAME.fullmatch(name):
                raise ValueError("the name of a header is of letters, digits and !#$%&'*+-.^_`|~")
            if not value.replace("\t", "").isprintable():
                raise ValueError("headers have one line each")
        return {name.lower(): value for name, value in headers.items()}

    def expects(self, status: int) -> bool:
        """Tell whether the call succeeded: by default any 2xx."""
        if self.expectStatus is None:
            return 200 <= status < 300
        wanted = self.expectStatus
        return status in wanted if isinstance(wanted, list) else status == wanted

    def encode(self) -> tuple[bytes | None, dict[str, str]]:
        """The body to send (text as it is, anything else as JSON), and the headers."""
        headers = {"user-agent": f"oncue/{__version__}", **self.headers}
        if self.body is None:
            return None, headers
        if isinstance(self.body, str):
            headers.setdefault("content-type", "text/plain; charset=utf-8")
            return self.body.encode(), headers
        headers.setdefault("content-type", "application/json")
        return json.dumps(self.body).encode(), headers


class UrlCaller:
    """The handler, with the client it calls by."""

    def __init__(self, egress: Egress) -> None:
        self._egress = egress

    async def call(self, params: Any, ctx: Context) -> dict[str, Any]:
        """Call the URL; an unexpected status fails the attempt, a refused address the job."""
        call = _read(params, ctx)
        body, headers = call.encode()
        headers.setdefault("idempotency-key", ctx.idempotency_key)
        try:
            reply = await self._egress.request(
                call.method.upper(),
                call.url,
                headers=headers,
                body=body,
                timeout_seconds=LONGEST_CALL_SECONDS,
                most_bytes=ANSWER_BYTES,
                within=read_networks(RUN_NETWORKS.get()),
            )
        except EgressRefused as refusal:
            raise Fail(str(refusal), code="egress_refused") from None
        if reply.broken:
            raise EgressFailed("the answer broke off")
        if call.expects(reply.status):
            return _describe(reply)
        after_ms = wait_asked(reply.headers, time.time())
        # "At once" says nothing: the job's own interval is what keeps its attempts apart.
        if after_ms:
            raise Retry(f"the URL answered {reply.status}", after=after_ms / 1000)
        raise UnexpectedStatus(f"the URL answered {reply.status}")


def _read(params: Any, ctx: Context) -> HttpCall:
    try:
        return HttpCall.model_validate(params)
    except ValidationError as error:
        if ctx.secret_params:
            raise Fail(NOT_TOLD, code="invalid_params") from None
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "params"
        raise Fail(f"{where}: {first['msg']}", code="invalid_params") from None


def _describe(reply: EgressReply) -> dict[str, Any]:
    headers = {
        name: _readable(reply.headers[name]) for name in RETURNED_HEADERS if name in reply.headers
    }
    text = reply.body.decode("utf-8", "replace")
    body: Any = text
    if "json" in reply.headers.get("content-type", "") and not reply.truncated:
        body = _parse(text)
    answer: dict[str, Any] = {"status": reply.status, "headers": headers, "body": body}
    size = len(json.dumps(answer, ensure_ascii=False).encode())
    if reply.truncated or size > ANSWER_BYTES:
        around = AROUND_THE_BODY_BYTES + len(json.dumps(headers, ensure_ascii=False).encode())
        answer["body"] = _cut(text, ANSWER_BYTES - around)
        answer["truncated"] = True
    return answer


def _readable(header: str) -> str:
    """Replace the bytes of a header that are no UTF-8: in a result they have no place."""
    return header.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _parse(text: str) -> Any:
    """The JSON value of `text`, or `text` where the value could not be stored as a result."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return value


def _cut(text: str, most_bytes: int) -> str:
    """Shorten text until its JSON fits; each character may need up to six bytes there."""
    while text and len(json.dumps(text, ensure_ascii=False).encode()) > most_bytes:
        text = text[: len(text) * 3 // 4]
    return text
