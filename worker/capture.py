"""Catches what handlers print and log, and gives it to the log of the run that said it.

The worker and the child process of an isolated handler both use it. In the worker a context
variable tells whose run the code belongs to, so that runs that print at once do not mix. What
is caught goes on to where it went before, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final, Protocol, TextIO

from oncue.output import MAX_FIELDS_BYTES

_OWN_LOGGERS: Final = ("worker", "aiohttp", "uvicorn")
_ORDINARY: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_FORMATTER: Final = logging.Formatter()


class Caught(Protocol):
    """Takes what was caught of one run."""

    def add(
        self, level: str, source: str, message: str, fields: dict[str, Any] | None = None
    ) -> None:
        """Take a line."""

    def write(self, source: str, text: str, *, by: int = 0) -> None:
        """Take what was written to a stream."""


CURRENT: Final[ContextVar[Caught | None]] = ContextVar("oncue_run_log", default=None)
"""The log of the run whose code runs in this context."""

Current = Callable[[], Caught | None]


class RoutedStream:
    """A standard stream of which the run that writes gets a copy; else it is the original."""

    def __init__(self, original: TextIO, source: str, current: Current) -> None:
        self.original = original
        self._source = source
        self._current = current

    def write(self, text: str) -> int:
        """Write text, and give it to the run."""
        log = self._current()
        if log is not None and isinstance(text, str):
            log.write(self._source, text, by=threading.get_ident())
        return self.original.write(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class LogCatcher(logging.Handler):
    """Gives the records of Python's logging to the run that logs; not those of the worker itself.

    Attributes that were given as `extra` become fields, if they fit.
    """

    def __init__(self, current: Current) -> None:
        super().__init__()
        self._current = current

    def emit(self, record: logging.LogRecord) -> None:
        """Take one record."""
        log = self._current()
        if log is None or record.name.partition(".")[0] in _OWN_LOGGERS:
            return
        try:
            message, fields = _read(record)
            log.add(_level(record.levelno), "log", message, fields)
        except Exception:  # noqa: BLE001 - what a handler logs may fail in any way; logging says so
            self.handleError(record)


@contextlib.contextmanager
def catching(current: Current = CURRENT.get) -> Iterator[None]:
    """Catch standard output, standard error and Python's logging until the block ends."""
    catcher = LogCatcher(current)
    before = sys.stdout, sys.stderr
    if sys.stdout is not None:
        sys.stdout = RoutedStream(sys.stdout, "stdout", current)
    if sys.stderr is not None:
        sys.stderr = RoutedStream(sys.stderr, "stderr", current)
    logging.getLogger().addHandler(catcher)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(catcher)
        sys.stdout, sys.stderr = before


def _read(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    fields: dict[str, Any] = {"logger": record.name}
    extra = {name: one for name, one in vars(record).items() if name not in _ORDINARY}
    if isinstance(record.msg, dict):
        # structlog's event, on its way to the formatter of the worker's own output.
        event = {**record.msg}
        message = str(event.pop("event", ""))
        extra = {name: one for name, one in event.items() if name not in ("exc_info", "level")}
    else:
        message = record.getMessage()
    if record.exc_info and record.exc_info[0] is not None:
        message = f"{message}\n{_FORMATTER.formatException(record.exc_info)}"
    for name, value in extra.items():
        if not name.startswith("_"):
            fields[name] = _plain(value)
    size = len(json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace"))
    if size > MAX_FIELDS_BYTES:
        return message, {"logger": record.name, "omittedFieldsBytes": size}
    return message, fields


def _plain(value: Any) -> Any:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return str(value).encode("utf-8", "replace").decode()
    return json.loads(text.encode("utf-8", "replace"))


def _level(number: int) -> str:
    for name in ("critical", "error", "warning", "info"):
        if number >= getattr(logging, name.upper()):
            return name
    return "debug"
