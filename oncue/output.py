"""Where a handler's log lines and progress go, and what they may be.

Without pydantic: the child process of an isolated handler imports this.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final, Protocol

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
MAX_MESSAGE_BYTES: Final = 16 * 1024
MAX_FIELDS_BYTES: Final = 4 * 1024
MAX_PROGRESS_TEXT_LENGTH: Final = 200
HEAD_BYTES: Final = 512 * 1024
"""Of one execution the first lines up to this size are kept for good."""
TAIL_BYTES: Final = 512 * 1024
"""After the head, only the last lines up to this size are kept: they slide."""
LINE_OVERHEAD_BYTES: Final = 64
"""What a line counts beside the UTF-8 bytes of its message and of its fields' JSON."""


class Output(Protocol):
    """Takes what a handler says. It never raises for what it does with it, and never waits."""

    def log(self, message: str, level: str, fields: dict[str, Any] | None) -> None:
        """Take a line whose arguments were checked."""

    def progress(self, fraction: float, text: str) -> None:
        """Take a progress whose arguments were checked."""


class LogOutput:
    """Of a context that no worker made: lines go to the logger, progress nowhere."""

    def log(self, message: str, level: str, fields: dict[str, Any] | None) -> None:
        """Log the line."""
        beside = f" {json.dumps(fields, ensure_ascii=False)}" if fields else ""
        logging.getLogger("oncue.handler").log(LEVELS[level], "%s%s", message, beside)

    def progress(self, fraction: float, text: str) -> None:
        """Do nothing."""


def dropped_message(lines: int, size: int) -> str:
    """Say, as a line in their place, how many lines and bytes were dropped."""
    return f"{lines} lines ({size} bytes) were dropped here"


def check_log(message: object, level: str, fields: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields as JSON would give them back, None without any.

    Raises:
        TypeError: the message is no text.
        ValueError: an unknown level, or fields that are not JSON of at most 4 KiB.
    """
    if not isinstance(message, str):
        raise TypeError(f"the message of ctx.log is text, not {type(message).__name__}")
    if level not in LEVELS:
        raise ValueError(f"level is one of {', '.join(LEVELS)}, not {level!r}")
    if not fields:
        return None
    try:
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the fields of ctx.log are not JSON: {error}") from None
    if size > MAX_FIELDS_BYTES:
        raise ValueError(
            f"the fields of ctx.log have {size} bytes of JSON, {MAX_FIELDS_BYTES} are allowed"
        )
    # A copy: what the handler changes later is not what it logged.
    copy: dict[str, Any] = json.loads(text)
    return copy


def check_progress(fraction: object, text: object) -> None:
    """Return if `ctx.progress` may be told this.

    Raises:
        TypeError: the fraction is no number, or the text no text.
        ValueError: the fraction is not between 0 and 1, or the text is too long.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, int | float):
        raise TypeError(f"the fraction is a number, not {type(fraction).__name__}")
    if not 0 <= fraction <= 1:
        raise ValueError(f"the fraction is between 0 and 1, not {fraction}")
    if not isinstance(text, str):
        raise TypeError(f"the text of ctx.progress is text, not {type(text).__name__}")
    if len(text) > MAX_PROGRESS_TEXT_LENGTH:
        raise ValueError(
            f"the text of ctx.progress has {len(text)} characters, "
            f"{MAX_PROGRESS_TEXT_LENGTH} are allowed"
        )
