"""For tests of one's own: run a handler without a worker, or a whole platform in the process.

from oncue.testing import Platform, run_handler

def test_greeting():
    assert run_handler("greet", {"name": "Ada"}, attempt=2)["attempt"] == 2

def test_greeting_on_a_platform():
    with Platform() as platform:
        job = platform.client.submit("greet", {"name": "Ada"})
        assert platform.client.wait(job, timeout=10).succeeded
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from oncue._platform import AsyncPlatform, Handlers, Platform, PlatformUnavailable
from oncue._receiver import Delivery, Webhooks
from oncue.handlers import REGISTRY, Context, convert_params, params_type_of, takes_context

if TYPE_CHECKING:
    from oncue.params import ParamsType

__all__ = [
    "AsyncPlatform",
    "Delivery",
    "HandlerNotFound",
    "Handlers",
    "NotStorable",
    "Platform",
    "PlatformUnavailable",
    "Webhooks",
    "run_handler",
    "run_handler_async",
]

MAX_BYTES: Final = 64 * 1024
"""The most that params and a result may have, as JSON."""


class HandlerNotFound(LookupError):
    """No handler of this name is registered: its module was not imported."""


class NotStorable(ValueError):
    """The params or the result are not JSON, or too large; a worker would fail the job."""


@dataclass(frozen=True, slots=True)
class LoggedLine:
    """A line that a handler gave to `ctx.log`."""

    message: str
    level: str
    fields: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Recorder:
    """Collects what a handler says: `run_handler("greet", params, output=Recorder())`.

    `lines` are those of `ctx.log`, `steps` all of `ctx.progress` as (fraction, text); what a
    handler prints or logs otherwise is seen by the test's own means (`capsys`, `caplog`).
    """

    lines: list[LoggedLine] = field(default_factory=list)
    steps: list[tuple[float, str]] = field(default_factory=list)

    def log(self, message: str, level: str, fields: dict[str, Any] | None) -> None:
        """Keep a line."""
        self.lines.append(LoggedLine(message, level, fields))

    def progress(self, fraction: float, text: str) -> None:
        """Keep a step."""
        self.steps.append((fraction, text))


def run_handler(
    name_or_function: str | Callable[..., Any], params: Any = None, **context: Any
) -> Any:
    """Run a handler, plain or async, and return its value as the job's `result` would show it.

    `context` sets fields of the `Context` that the handler is given (`attempt=2`, `shard_index=1`,
    `client_request_id="order-1"`, `nominal_time=datetime(2026, 1, 31, 2, tzinfo=UTC)` as of a
    schedule's run); the others have values that are plain for a first attempt.
    With `output=Recorder()` the test sees what the handler told `ctx.log` and `ctx.progress`.
    What the handler raises is passed on. Params go through JSON, as they do on their way to a
    worker, and are converted to what the handler's annotation says. `isolation` is ignored: the
    handler runs here.

    Raises:
        HandlerNotFound: there is no handler of this name.
        ParamsInvalid: the params do not fit the annotation; a worker would fail the job.
        NotStorable: params or result are not JSON of at most 64 KiB.
        RuntimeError: an async handler, called where a loop runs: await `run_handler_async`.
    """
    tested = _found(name_or_function, sys._getframe(1).f_locals)  # noqa: SLF001 (its local names)
    if inspect.iscoroutinefunction(tested.function):
        if _in_a_loop():
            raise RuntimeError("a loop runs here: use `await run_handler_async(...)`")
        return asyncio.run(_run(tested, params, context))
    return _as_json("the result", tested.function(*_arguments(tested, params, context)))


async def run_handler_async(
    name_or_function: str | Callable[..., Any], params: Any = None, **context: Any
) -> Any:
    """Like `run_handler`, inside a running loop; a plain handler runs in a thread."""
    tested = _found(name_or_function, sys._getframe(1).f_locals)  # noqa: SLF001 (its local names)
    return await _run(tested, params, context)


class _Tested(NamedTuple):
    name: str
    function: Callable[..., Any]
    params_type: ParamsType | None


async def _run(tested: _Tested, params: Any, context: dict[str, Any]) -> Any:
    arguments = _arguments(tested, params, context)
    if inspect.iscoroutinefunction(tested.function):
        value = await tested.function(*arguments)
    else:
        value = await asyncio.to_thread(tested.function, *arguments)
    return _as_json("the result", value)


def _found(name_or_function: str | Callable[..., Any], scope: Mapping[str, Any]) -> _Tested:
    if isinstance(name_or_function, str):
        registered = REGISTRY.get(name_or_function)
        if registered is None:
            known = ", ".join(sorted(REGISTRY)) or "none"
            raise HandlerNotFound(
                f"no handler {name_or_function!r} is registered (known: {known}); "
                "import the module that has it"
            )
        return _Tested(registered.name, registered.function, registered.params_type)
    for registered in REGISTRY.values():
        if registered.function is name_or_function:
            return _Tested(registered.name, registered.function, registered.params_type)
    name = getattr(name_or_function, "__name__", "handler")
    return _Tested(name, name_or_function, params_type_of(name, name_or_function, scope))


def _arguments(tested: _Tested, params: Any, context: dict[str, Any]) -> tuple[Any, ...]:
    sent = convert_params(tested.params_type, _as_json("params", params))
    name = tested.name
    if not takes_context(name, tested.function):
        return (sent,)
    now = time.time_ns() // 1_000_000
    defaults: dict[str, Any] = {
        "job_id": 1,
        "execution_id": str(uuid.uuid4()),
        "handler": name,
        "job_name": name,
        "attempt": 1,
        "max_attempts": max(4, context.get("attempt", 1)),
        "trigger_ts": now,
        "deadline_ms": now + 3_600_000,
        "client_request_id": "test",
        "cancel_event": threading.Event(),
    }
    return sent, Context(**{**defaults, **context})


def _as_json(what: str, value: Any) -> Any:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise NotStorable(f"{what} is not JSON: {error}") from error
    if size > MAX_BYTES:
        raise NotStorable(f"{what} has {size} bytes of JSON, {MAX_BYTES} are allowed")
    return json.loads(text)


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
