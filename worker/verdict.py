"""What a handler's return value or exception means for its job.

A child process imports this file too, so it stays free of pydantic: that would double the
time a child needs to start.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from oncue.handlers import LONGEST_AFTER_SECONDS, Fail, Retry

MAX_RESULT_BYTES = 64 * 1024
MAX_MESSAGE_LENGTH = 2000
MAX_CODE_LENGTH = 64

_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run ended: a status of the wire protocol, and what goes with it."""

    status: str
    result_json: bytes | None = field(default=None, repr=False)
    code: str | None = None
    message: str = ""
    retryable: bool = True
    retry_after_ms: int | None = None


def judge_value(value: Any) -> Verdict:
    """SUCCEEDED with the value as JSON text, or FAILED when it cannot be stored."""
    try:
        encoded = _to_json(value).encode()
    except Exception as error:  # noqa: BLE001 (objects of handlers may raise anything here)
        return unstorable(f"the result is not JSON: {describe(error)}")
    if len(encoded) > MAX_RESULT_BYTES:
        return Verdict(
            "failed",
            code="result_too_large",
            message=f"the result has {len(encoded)} bytes of JSON, {MAX_RESULT_BYTES} are allowed",
            retryable=False,
        )
    return Verdict("succeeded", result_json=encoded)


def judge_error(error: BaseException) -> Verdict:
    """FAILED, retried unless the handler raised `Fail`."""
    if isinstance(error, Fail):
        code = clean(error.code or "", MAX_CODE_LENGTH) or Fail.code
        return Verdict("failed", code=code, message=_text_of(error), retryable=False)
    if isinstance(error, Retry):
        after = error.after_seconds
        if after is not None and not 0 <= after <= LONGEST_AFTER_SECONDS:
            # A class of a handler's own may have set anything.
            after = None
        return Verdict(
            "failed",
            code="retry_requested",
            message=_text_of(error),
            retry_after_ms=None if after is None else round(after * 1000),
        )
    return Verdict("failed", code="handler_error", message=describe(error))


def unstorable(message: str) -> Verdict:
    """FAILED for good, because nobody can store what the run returned."""
    return Verdict(
        "failed",
        code="result_unstorable",
        message=clean(message, MAX_MESSAGE_LENGTH),
        retryable=False,
    )


def describe(error: BaseException) -> str:
    """`TypeName: text`, cut to what an error message may have."""
    text = _text_of(error)
    name = type(error).__name__
    return clean(f"{name}: {text}" if text else name, MAX_MESSAGE_LENGTH)


def clean(text: str, limit: int) -> str:
    """Text that can be sent as UTF-8, at most `limit` characters, with `...` where it was cut."""
    storable = str(text).encode("utf-8", "replace").decode()
    return storable if len(storable) <= limit else storable[: limit - 3] + "..."


def _text_of(error: BaseException) -> str:
    try:
        return clean(str(error), MAX_MESSAGE_LENGTH)
    except Exception:  # noqa: BLE001 (a broken __str__ must not hide that the handler failed)
        return ""
