"""The built-in handlers `echo`, `sleep`, `fail` and `http`, made with the client they call by."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from oncue.handlers import Context, Fail, RegisteredHandler
from worker.egress import Egress
from worker.handlers.call_url import UrlCaller

LONGEST_SLEEP_MS = 7 * 24 * 3600 * 1000


class ToldToFail(Exception):
    """What the `fail` handler raises."""


def built_in_handlers(egress: Egress) -> dict[str, RegisteredHandler]:
    """All built-in handlers by name."""
    return {
        one.name: one
        for one in (
            _describe("echo", echo, "Returns its params."),
            _describe("sleep", sleep, 'Waits {"ms"} milliseconds.'),
            _describe("fail", fail, 'Fails {"times"} attempts with {"message"}, else all of them.'),
            _describe("http", UrlCaller(egress).call, "Calls a URL and returns the answer."),
        )
    }


async def echo(params: Any, _: Context) -> Any:
    """Return the params."""
    return params


async def sleep(params: Any, _: Context) -> dict[str, float]:
    """Wait `ms` milliseconds."""
    ms = params.get("ms") if isinstance(params, dict) else None
    if isinstance(ms, bool) or not isinstance(ms, int | float) or not 0 <= ms <= LONGEST_SLEEP_MS:
        raise Fail(
            f'sleep takes {{"ms": number}} from 0 to {LONGEST_SLEEP_MS}', code="invalid_params"
        )
    await asyncio.sleep(ms / 1000)
    return {"ms": ms}


async def fail(params: Any, ctx: Context) -> dict[str, int]:
    """Fail the first `times` attempts, or all of them without `times`."""
    given = {} if params is None else params
    times = given.get("times") if isinstance(given, dict) else -1
    if times is not None and (isinstance(times, bool) or not isinstance(times, int) or times < 0):
        raise Fail('fail takes {"message": text, "times": whole number}', code="invalid_params")
    if times is None or ctx.attempt <= times:
        # Where params are secret, so is a message that is one of them.
        told = None if ctx.secret_params else given.get("message")
        raise ToldToFail(str(told or "failed as it was told to"))
    return {"attempt": ctx.attempt}


def _describe(
    name: str, function: Callable[[Any, Context], Awaitable[Any]], description: str
) -> RegisteredHandler:
    return RegisteredHandler(
        name=name,
        function=function,
        isolation="none",
        description=description,
        takes_context=True,
        is_async=True,
    )
