"""What a connection may cost before a request of it is served: bytes, time, and their number.

The dispatcher has the same file: neither service imports the other, and a test holds them together.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any, ClassVar, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

ANSWER_HEADERS: Final = [
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
]
"""Of every answer, those of the server itself included."""


class _Refused(Exception):
    """The head of a request is longer than it may be."""


class Corked:
    """A transport that sends an answer's head together with its body, as one segment.

    The server writes them one after the other, and each write is a call of the system that wakes
    the receiver. A head whose body does not follow goes out in the next turn of the loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""
        self._alone: asyncio.Handle | None = None

    def __getattr__(self, name: str) -> Any:
        """All else is the transport's."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send what is written, and the head that waits for it before it."""
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None
            head, self._head = self._head, b""
            self._transport.write(head + data)
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n"):
            self._head = data
            self._alone = self._loop.call_soon(self._send_alone)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Send what waits, and close."""
        self._send_alone()
        self._transport.close()

    def _send_alone(self) -> None:
        """Send a head that waits, unless the connection was lost meanwhile."""
        if self._alone is not None and not self._transport.is_closing():
            self.write(b"")


class Doorway(HttpToolsProtocol):
    """A connection that is refused when its request is too long, or too long under way.

    431 for a head of too many bytes or lines, 408 for a head or a body that does not come to its
    end in time. A connection above the most is closed without an answer.
    """

    most_head_bytes: ClassVar = 32 * 1024
    most_header_lines: ClassVar = 100
    idle_seconds: ClassVar = 75.0
    head_seconds: ClassVar = 10.0
    body_seconds: ClassVar = 60.0
    most_connections: ClassVar = 5000

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._begun = False
        self._in_head = True
        self._head_bytes = 0
        self._last_bytes = 0
        self._request = 0
        self._waits_for = 0, True
        self._late: asyncio.TimerHandle | None = None
        self._refusal = HTTPStatus.BAD_REQUEST, "bad_request", "This is no HTTP request."

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(cast(asyncio.Transport, Corked(transport, self.loop)))
        if len(self.connections) > self.most_connections:
            self.logger.warning("too many connections: one is closed")
            transport.abort()
            return
        self._expect(self.idle_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, and wait for what is missing of a request; one that came whole arms no timer."""
        self._last_bytes = len(data)
        super().data_received(data)
        if not self._begun:
            if self._late is not None:
                self._disarm()
            return
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.most_head_bytes:
                self._set_head_refusal()
                self.send_400_response("")
                return
        if self._waits_for != (phase := (self._request, self._in_head)):
            self._waits_for = phase
            self._expect(self.head_seconds if self._in_head else self.body_seconds)

    def on_message_begin(self) -> None:
        """Note that a request has begun."""
        super().on_message_begin()
        self._begun = self._in_head = True
        self._request += 1
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """Serve the request, unless its head is too long."""
        if len(self.headers) > self.most_header_lines or self._is_long():
            self._set_head_refusal()
            raise _Refused
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that the request is there."""
        self._begun = False
        super().on_message_complete()

    def send_400_response(self, _message: str) -> None:
        """Answer what cannot be served as a problem document, and close."""
        status, code, detail = self._refusal
        body = json.dumps(
            {"type": "about:blank", "title": status.phrase, "status": status.value}
            | {"code": code, "detail": detail}
        ).encode()
        lines = [
            f"HTTP/1.1 {status.value} {status.phrase}",
            "content-type: application/problem+json",
            f"content-length: {len(body)}",
            "connection: close",
            *(f"{name}: {value}" for name, value in ANSWER_HEADERS),
        ]
        self._disarm()
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        self.transport.close()

    def _is_long(self) -> bool:
        # It cannot be longer than what has come: nearly never it has to be counted.
        if self._head_bytes + self._last_bytes <= self.most_head_bytes:
            return False
        told = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        return told > self.most_head_bytes

    def _set_head_refusal(self) -> None:
        self._refusal = (
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            "headers_too_large",
            f"Send at most {self.most_head_bytes} bytes of URL and headers, in at most "
            f"{self.most_header_lines} lines.",
        )

    def _expect(self, seconds: float) -> None:
        self._disarm()
        self._late = self.loop.call_later(seconds, self._give_up)

    def _disarm(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        """Close a connection whose request does not come, with 408 where an answer can be given."""
        self._late = None
        if self.pipeline:
            # It is not read on while another request of this connection is served.
            self._expect(self.body_seconds)
            return
        if self.transport.is_closing():
            return
        served = self.cycle if self._begun and not self._in_head else None
        if not self._begun or (served is not None and served.response_started):
            self.transport.close()
            return
        if served is not None:
            served.disconnected = True
            served.message_event.set()
        self._refusal = (
            HTTPStatus.REQUEST_TIMEOUT,
            "request_timeout",
            "The request did not come to its end in time: send it again, faster.",
        )
        self.send_400_response("")
