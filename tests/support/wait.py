"""Wait for facts, not for time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar, overload

Fact = TypeVar("Fact")

_SHORTEST, _LONGEST = 0.005, 0.1


def until(fact: Callable[[], Fact | None], timeout: float = 60, *, what: str = "") -> Fact:
    """Return the first truthy value of `fact()`, asked again for up to `timeout` seconds.

    A connection that fails (OSError) counts as not yet; other errors, failed asserts among
    them, are passed on at once.

    Raises:
        TimeoutError: names what was waited for and the last value or error.
    """
    last: object = None
    for pause in _pauses(timeout):
        try:
            value = fact()
        except OSError as error:
            last = error
        else:
            if value:
                return value
            last = value
        time.sleep(pause)
    raise TimeoutError(_unmet(fact, timeout, what, last))


@overload
async def until_async(
    fact: Callable[[], Awaitable[Fact | None]], timeout: float = 60, *, what: str = ""
) -> Fact: ...
@overload
async def until_async(
    fact: Callable[[], Fact | None], timeout: float = 60, *, what: str = ""
) -> Fact: ...
async def until_async(
    fact: Callable[[], Awaitable[Fact | None] | Fact | None], timeout: float = 60, *, what: str = ""
) -> Fact:
    """Like `until`, for a plain or async `fact`, without blocking the event loop."""
    last: object = None
    for pause in _pauses(timeout):
        try:
            answer = fact()
            value = await answer if inspect.isawaitable(answer) else answer
        except OSError as error:
            last = error
        else:
            if value:
                return value
            last = value
        await asyncio.sleep(pause)
    raise TimeoutError(_unmet(fact, timeout, what, last))


def _pauses(timeout: float) -> Iterator[float]:
    """Yield growing pauses until the time is up; the fact is asked once more after the last."""
    end = time.monotonic() + timeout
    pause = _SHORTEST
    while (left := end - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(pause * 1.5, _LONGEST)
    yield 0.0


def _unmet(fact: Callable[[], object], timeout: float, what: str, last: object) -> str:
    name = what or getattr(fact, "__qualname__", repr(fact))
    return f"waited {timeout} s in vain for {name}; last seen: {last!r}"
