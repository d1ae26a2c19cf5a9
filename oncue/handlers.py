"""The handler registry and what a handler is given: `@handler`, `Context`, `Fail`, `Retry`."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

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

    @property
    def idempotency_key(self) -> str:
        """The task's id as text."""
        return str(self.job_id)

    @property
    def cancelled(self) -> bool:
        """True once the run must stop: a thread cannot be stopped from outside, so look."""
        return self.cancel_event.is_set()


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
        REGISTRY[name] = describe_handler(name, function, isolation)
        return function

    return register


def describe_handler(
    name: str, function: Callable[..., Any], isolation: Isolation = "none"
) -> RegisteredHandler:
    """Return what a worker needs to offer `function` under `name`, registering nothing.

    Raises:
        ValueError: it takes neither one nor two positional arguments.
    """
    return RegisteredHandler(
        name=name,
        function=function,
        isolation=isolation,
        description=(inspect.getdoc(function) or "").split("\n", 1)[0][:200],
        takes_context=takes_context(name, function),
        is_async=inspect.iscoroutinefunction(function),
    )


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
