"""The handler registry and what a handler is given: `@handler`, `Context`, `Fail`, `Retry`."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from oncue.output import LogOutput, Output, check_log, check_progress

Isolation = Literal["none", "process"]
HandlerFunction = TypeVar("HandlerFunction", bound=Callable[..., Any])


class Fail(Exception):
    """Raised by a handler to end its job as FAILED without another attempt."""

    def __init__(self, message: str = "", *, code: str = "handler_failed") -> None:
        super().__init__(message)
        self.code = code


class Retry(Exception):
    """Raised by a handler to ask for another attempt, `after` seconds from now or by the policy."""

    def __init__(self, message: str = "", *, after: float | None = None) -> None:
        if after is not None and not 0 <= after <= 31_536_000:
            raise ValueError("after must be between 0 and 31536000 seconds")
        super().__init__(message)
        self.after_seconds = after


class HandlerNameTaken(ValueError):
    """Two functions were registered under one handler name."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a handler may know of its run. `attempt` counts from 1; times are epoch milliseconds.

    `idempotency_key` is the same over all attempts of a task and different for each fire of a
    schedule: hand it to whatever the handler calls to make its effects idempotent.
    """

    job_id: int
    execution_id: str
    handler: str
    job_name: str
    attempt: int
    max_attempts: int
    trigger_ts: int
    deadline_ms: int
    client_request_id: str | None = None
    shard_index: int = 0
    shard_total: int = 1
    cancel_event: threading.Event = field(default_factory=threading.Event, repr=False)
    logger: logging.Logger = field(default=logging.getLogger("oncue.handler"), repr=False)
    output: Output = field(default=LogOutput(), repr=False, compare=False)

    @property
    def idempotency_key(self) -> str:
        """The task's id as text."""
        return str(self.job_id)

    @property
    def cancelled(self) -> bool:
        """True once the run must stop: a thread cannot be stopped from outside, so look."""
        return self.cancel_event.is_set()

    def log(self, message: str, level: str = "info", **fields: Any) -> None:
        """Add a line to the run's log, with `fields` as JSON beside it; any thread may.

        It returns at once; whether and when the line reaches the platform is not its concern.

        Raises:
            TypeError: the message is no text.
            ValueError: the level is not debug, info, warning, error or critical, or the fields
                are not JSON of at most 4 KiB.
        """
        self.output.log(message, level, check_log(message, level, fields))

    def progress(self, fraction: float, text: str = "") -> None:
        """Say how far the run has come, from 0 to 1; only the newest word counts.

        It may be called as often as one likes, from any thread: about two a second are sent.

        Raises:
            TypeError: the fraction is no number, or the text no text.
            ValueError: the fraction is not between 0 and 1, or the text is longer than 200.
        """
        check_progress(fraction, text)
        self.output.progress(float(fraction), text)


@dataclass(frozen=True, slots=True)
class RegisteredHandler:
    """A named function that a worker can offer."""

    name: str
    function: Callable[..., Any]
    isolation: Isolation
    description: str
    takes_context: bool
    is_async: bool


REGISTRY: dict[str, RegisteredHandler] = {}
"""All handlers registered by modules imported so far, by name."""


def handler(
    name: str, *, isolation: Isolation = "none"
) -> Callable[[HandlerFunction], HandlerFunction]:
    """Register `def f(params)` or `def f(params, ctx)`, plain or async, under `name`.

    `isolation="process"` runs each execution in a child process, which can be killed on a
    timeout. The return value, which must be JSON, is the job's result.

    Raises:
        ValueError: the name is empty, longer than 128 characters or has control characters,
            or the function takes neither one nor two positional arguments.
        HandlerNameTaken: another function has this name.
    """
    if not 1 <= len(name) <= 128 or not name.isprintable():
        raise ValueError(f"a handler name has 1 to 128 printable characters, not {name!r}")
    if isolation not in ("none", "process"):
        raise ValueError(f"isolation is 'none' or 'process', not {isolation!r}")

    def register(function: HandlerFunction) -> HandlerFunction:
        known = REGISTRY.get(name)
        if known is not None and not _same_function(known.function, function):
            raise HandlerNameTaken(f"handler {name!r} is registered by {known.function.__module__}")
        REGISTRY[name] = RegisteredHandler(
            name=name,
            function=function,
            isolation=isolation,
            description=(inspect.getdoc(function) or "").split("\n", 1)[0][:200],
            takes_context=takes_context(name, function),
            is_async=inspect.iscoroutinefunction(function),
        )
        return function

    return register


def _same_function(known: Callable[..., Any], new: Callable[..., Any]) -> bool:
    """A module that is imported again (as `__main__`, say) may register its own handlers again."""
    return known.__qualname__ == new.__qualname__ and inspect.getsourcefile(
        known
    ) == inspect.getsourcefile(new)


def takes_context(name: str, function: Callable[..., Any]) -> bool:
    """Whether a handler function wants the context beside its params.

    Raises:
        ValueError: it takes neither one nor two positional arguments.
    """
    positional = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    required = [parameter for parameter in positional if parameter.default is parameter.empty]
    if not positional or len(required) > 2:
        raise ValueError(f"handler {name!r} must take (params) or (params, ctx)")
    return len(positional) >= 2
