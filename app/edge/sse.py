"""Server-sent events: how they are written, and where a reader wants to go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final, TypeVar

import orjson
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

MEDIA_TYPE: Final = "text/event-stream"
KEEP_ALIVE_SECONDS: Final = 15.0
_unwatched: Final[set[asyncio.Future[Any]]] = set()
Value = TypeVar("Value")
KEEP_ALIVE: Final = b": keep-alive\n\n"
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would hold lines back
}


def sse_event(name: str, data: Any, *, event_id: str) -> bytes:
    """Write one event; JSON has no line breaks, so its data is one line."""
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (
        event_id.encode(),
        name.encode(),
        orjson.dumps(data),
    )


class EventStream(StreamingResponse):
    """Answers with a stream of events; tells `closed` when it is over, however it ended."""

    def __init__(self, events: AsyncGenerator[bytes, None], *, closed: Callable[[], None]) -> None:
        super().__init__(events, media_type=MEDIA_TYPE, headers=_HEADERS)
        self._events = events
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._closed()
            await self._events.aclose()


def wants_stream(request: Request) -> bool:
    """Tell whether the caller accepts a stream of events."""
    return MEDIA_TYPE in request.headers.get("accept", "").lower()


async def news_or_silence(news: asyncio.Event, seconds: float) -> bool:
    """Wait for news, at most so many seconds; tell whether it came."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await news.wait()
    return news.is_set()


async def finished(work: Coroutine[Any, Any, Value]) -> Value:
    """Await `work`, which goes on to its end when the reader of a stream leaves meanwhile.

    A query that is cancelled costs its connection.
    """
    task = asyncio.ensure_future(work)
    _unwatched.add(task)
    task.add_done_callback(_note_done)
    return await asyncio.shield(task)


def _note_done(task: asyncio.Future[Any]) -> None:
    _unwatched.discard(task)
    if not task.cancelled():
        task.exception()  # whoever still waits gets it, and nobody else misses it


def sse_content() -> dict[str, Any]:
    """Declare a stream in an OpenAPI 3.1 document, which knows no events: as text."""
    # No type: a whole stream is text, while some readers of the document check each event by it.
    return {MEDIA_TYPE: {"schema": {"description": "Server-sent events, until the last one."}}}
