"""The handler registry and what a handler is given: `@handler`, `Context`, `Fail`, `Retry`."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

if TYPE_CHECKING:
    from oncue.params import FieldError, ParamsType

from oncue.output import LogOutput, Output, check_log, check_progress

Isolation = Literal["none", "process"]
HandlerFunction = TypeVar("HandlerFunction", bound=Callable[..., Any])


LONGEST_AFTER_SECONDS: Final = 31_536_000


class Fail(Exception):
    """Raised by a handler to end its job as FAILED without another attempt.

    A subclass may say its own `code`, and need not call this `__init__`.
    """

    code: str = "handler_failed"

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class Retry(Exception):
    """Raised by a handler to ask for another attempt, `after` so long from now or by the policy.

    `after` is in seconds, or a timedelta.
    """

    after_seconds: float | None = None

    def __init__(self, message: str = "", *, after: float | timedelta | None = None) -> None:
        seconds = after.total_seconds() if isinstance(after, timedelta) else after
        if seconds is not None and not 0 <= seconds <= LONGEST_AFTER_SECONDS:
            raise ValueError(f"after must be between 0 and {LONGEST_AFTER_SECONDS} seconds")
        super().__init__(message)
        self.after_seconds = seconds


class ParamsInvalid(Fail):
    """The job's params do not fit the annotation of its handler; `errors` name each field."""

    def __init__(self, message: str, errors: tuple[FieldError, ...] = ()) -> None:
        super().__init__(message, code="params_invalid")
        self.errors = errors


NOT_TOLD: Final = "the params do not fit; they are secret, so it is not told what is wrong"


class HandlerNameTaken(ValueError):
    """Two functions were registered under one handler name."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a handler may know of its run. `attempt` counts from 1; times are epoch milliseconds.

    `idempotency_key` is the same over all attempts of a task and different for each fire of a
    schedule: hand it to whatever the handler calls to make its effects idempotent.
    `secret_params` tells that the params are secret: what a handler logs, or raises, is kept in
    clear.

    `nominal_time` (UTC) is the time of its schedule that the run stands for, the same over all
    attempts and however late they are, also in a backfill; None for a job that no schedule made.
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
    nominal_time: datetime | None = None
    cancel_event: threading.Event = field(default_factory=threading.Event, repr=False)
    logger: logging.Logger = field(default=logging.getLogger("oncue.handler"), repr=False)
    output: Output = field(default=LogOutput(), repr=False, compare=False)
    secret_params: bool = False

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
    """A named function that a worker can offer; untyped params have no `params_type`."""

    name: str
    function: Callable[..., Any]
    isolation: Isolation
    description: str
    takes_context: bool
    is_async: bool
    params_type: ParamsType | None = None
    secret_result: bool = False

    def call(self, params: Any, context: Callable[[], Context]) -> Any:
        """Call the function with params as it wants them; a coroutine is returned unawaited.

        Raises:
            ParamsInvalid: they do not fit the annotation, and the function was not called.
        """
        try:
            converted = convert_params(self.params_type, params)
        except ParamsInvalid:
            if context().secret_params:
                raise ParamsInvalid(NOT_TOLD) from None
            raise
        if self.takes_context:
            return self.function(converted, context())
        return self.function(converted)


REGISTRY: dict[str, RegisteredHandler] = {}
"""All handlers registered by modules imported so far, by name."""


def handler(
    name: str, *, isolation: Isolation = "none", secret_result: bool = False
) -> Callable[[HandlerFunction], HandlerFunction]:
    """Register `def f(params)` or `def f(params, ctx)`, plain or async, under `name`.

    `isolation="process"` runs each execution in a child process, which can be killed on a
    timeout. The return value, which must be JSON, is the job's result. An annotation of `params`
    (a pydantic model, a dataclass, a TypedDict, `list[int]`...) makes it a value of that type;
    `dict`, `Any` or none leave it as it was submitted. With `secret_result` its results are kept
    encrypted and never shown: only callbacks tell them. This needs ONCUE_SECRET_KEYS at the
    dispatchers; what the handler logs, or says in its errors, is not hidden.

    Raises:
        ValueError: the name is empty, longer than 128 characters or has control characters,
            or the function takes neither one nor two positional arguments.
        TypeError: the annotation of `params` cannot be resolved, or has no JSON Schema.
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
        # A handler that is defined inside a function may be annotated with its local names.
        scope = sys._getframe(1).f_locals  # noqa: SLF001
        REGISTRY[name] = describe_handler(
            name, function, isolation, scope, secret_result=secret_result
        )
        return function

    return register


def params_type_of(
    name: str, function: Callable[..., Any], scope: Mapping[str, Any]
) -> ParamsType | None:
    """Read the annotation of a handler's params; None when they are untyped.

    Raises:
        TypeError: it cannot be resolved, or has no JSON Schema.
    """
    if not _may_be_typed(function):
        return None
    # Loaded only here: a child process with untyped handlers starts in half the time without.
    from oncue.params import UnusableAnnotation, params_type  # noqa: PLC0415

    try:
        return params_type(function, scope)
    except UnusableAnnotation as error:
        raise UnusableAnnotation(f"the params of handler {name!r}: {error}") from error


def convert_params(params_type: ParamsType | None, params: Any) -> Any:
    """Return what the handler is given for the params of a job.

    Raises:
        ParamsInvalid: they do not fit.
    """
    if params_type is None:
        return params
    from oncue.params import BadParams  # noqa: PLC0415 (loaded already: there is a type)

    try:
        return params_type.convert(params)
    except BadParams as error:
        raise ParamsInvalid(str(error), error.errors) from None


_UNTYPED_WORDS: Final = frozenset({"Any", "dict", "object", "typing.Any", "t.Any"})


def _may_be_typed(function: Callable[..., Any]) -> bool:
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except NameError:
        return True
    annotation = inspect.Parameter.empty if first is None else first.annotation
    if isinstance(annotation, str):
        return annotation not in _UNTYPED_WORDS
    return annotation is not inspect.Parameter.empty and annotation not in (Any, dict, object)


def describe_handler(
    name: str,
    function: Callable[..., Any],
    isolation: Isolation = "none",
    scope: Mapping[str, Any] | None = None,
    *,
    secret_result: bool = False,
) -> RegisteredHandler:
    """Return what a worker needs to offer `function` under `name`, registering nothing.

    `scope` has the local names that its annotations may use.

    Raises:
        ValueError: it takes neither one nor two positional arguments.
        TypeError: the annotation of its params cannot be resolved, or has no JSON Schema.
    """
    return RegisteredHandler(
        name=name,
        function=function,
        isolation=isolation,
        description=(inspect.getdoc(function) or "").split("\n", 1)[0][:200],
        takes_context=takes_context(name, function),
        is_async=inspect.iscoroutinefunction(function),
        params_type=params_type_of(name, function, scope or {}),
        secret_result=secret_result,
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
