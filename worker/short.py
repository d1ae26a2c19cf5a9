"""The short way of `POST /run`: past the framework's layers, to the same function.

The framework looks through its routes and their dependencies for each request, and reads the body
twice; for a batch of runs that costs as much as to lease them.
"""

from __future__ import annotations

from typing import Final

from fastapi.responses import Response
from pydantic import ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oncue.protocol import RUN_PATH
from worker.parts import Parts
from worker.problems import REFUSALS, answer_refusal
from worker.run import ReceivedRuns

JSON: Final = b"application/json"


class ShortRun:
    """ASGI middleware: takes the runs of a request that is in order.

    All else goes on to the framework, with its body: what it answers there is right.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; a dispatcher that left before its body had come gets no answer."""
        if not _is_plain_run(scope):
            await self._app(scope, receive, send)
            return
        try:
            body = await _read(receive)
            if body is None:
                return
            try:
                request = ReceivedRuns.model_validate_json(body)
            except ValidationError:
                await self._app(scope, _Again(body, receive), send)
                return
            parts: Parts = scope["app"].state.parts
            answer = Response(await parts.intake.take(request), media_type="application/json")
        except REFUSALS as error:
            answer = answer_refusal(error)
        await answer(scope, receive, send)


def _is_plain_run(scope: Scope) -> bool:
    return (
        scope["type"] == "http"
        and scope["path"] == RUN_PATH
        and scope["method"] == "POST"
        and (b"content-type", JSON) in scope["headers"]
    )


async def _read(receive: Receive) -> bytes | None:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


class _Again:
    """Receives a body that was read, and then what comes after it."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        """Return the next message."""
        body, self._body = self._body, None
        if body is None:
            return await self._receive()
        return {"type": "http.request", "body": body, "more_body": False}
