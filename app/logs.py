"""Structured logs: a line a fact, JSON unless a person is watching."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logs(level: str, *, as_json: bool | None) -> None:
    """Send structlog and the standard library's loggers to stderr in one form.

    `as_json` None means JSON unless stderr is a terminal.
    """
    json_lines = not sys.stderr.isatty() if as_json is None else as_json
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if json_lines
        # Plain: the richer form shows local variables, and with them callers' data.
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    if json_lines:
        shared.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "uvicorn", "aiosqlite", "aiohttp", "alembic"):
        logging.getLogger(noisy).setLevel("WARNING")
    # Every fault of a request is logged by its handler; uvicorn would log it again.
    logging.getLogger("uvicorn.error").addFilter(_not_a_request_fault)


def _not_a_request_fault(record: logging.LogRecord) -> bool:
    return "Exception in ASGI application" not in record.getMessage()
