"""One HTTP/1.1 connection to a receiver: a request at a time, and no answer without bounds."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, cast

from httptools import HttpParserError, HttpResponseParser

MOST_HEAD_BYTES: Final = 32 * 1024
"""Of the head of an answer, of its trailers, and of what stands between two parts of its body."""
MOST_HEADER_LINES: Final = 128
MOST_INTERIM_ANSWERS: Final = 16
"""So many at once, and one more for each second: a long call may be kept alive by them."""
LONG_BYTES: Final = 16 * 1024
"""A request of so many bytes may be answered before it has been read."""
OWN_HEADERS: Final = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "upgrade"}
)
"""Where a request ends and whom it is for is said once, by this file."""
IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
"""Methods whose request may be sent once more if nobody has answered it."""
BODILESS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Methods of which nobody expects a body: without one they name no length."""

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NO_TOKEN: Final = re.compile(r"[^!#$%&'*+.^_`|~0-9A-Za-z-]")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")

Fields = list[tuple[bytes, bytes]]


class BrokeOff(Exception):
    """The exchange came to no answer."""


class ServerDisconnected(BrokeOff):
    """The connection ended before the head of an answer was there."""


class BadAnswer(BrokeOff):
    """What came is no answer, or more than an answer may be."""


class _Enough(Exception):
    """Nothing more is to be read."""


class Headers(Mapping[str, str]):
    """The headers of an answer, by names in any case; of a repeated one the first counts.

    Most are never read, so a name is looked for when it is asked for. Bytes that are no UTF-8
    become lone surrogates.
    """

    __slots__ = ("_fields",)

    def __init__(self, fields: Fields) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> str:
        wanted = name.lower().encode()
        for one, value in self._fields:
            if one.lower() == wanted:
                return value.rstrip(b" \t").decode("utf-8", "surrogateescape")
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name.lower().decode() for name, _ in self._fields))

    def __len__(self) -> int:
        return len({name.lower() for name, _ in self._fields})


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, its body cut to the cap; `broken` when the connection ended within the body."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    truncated: bool
    broken: bool


class Request:
    """A request as it is sent, and what its answer may be.

    Raises:
        ValueError: the method or a header would be read as something else, or is not for callers.
    """

    __slots__ = ("ends_with_head", "is_idempotent", "keep", "most_bytes", "sent")

    def __init__(
        self,
        method: str,
        path: str,
        authority: str,
        headers: Mapping[str, str],
        body: bytes | None,
        *,
        most_bytes: int,
        keep: bool,
    ) -> None:
        self.ends_with_head = method == "HEAD"
        self.is_idempotent = method in IDEMPOTENT
        self.most_bytes = most_bytes
        self.keep = keep
        names = {name.lower() for name in headers}
        if (
            not _TOKEN.fullmatch(method)
            or "" in names
            or _NO_TOKEN.search("".join(headers))
            or _CONTROL.search("".join(headers.values()))
            or not names.isdisjoint(OWN_HEADERS)
        ):
            raise ValueError("this request would not be read as it is meant")
        lines = [f"{method} {path} HTTP/1.1\r\nhost: {authority}"]
        if "accept" not in names:
            lines.append("accept: */*")
        if "accept-encoding" not in names:
            lines.append("accept-encoding: identity")
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None or method not in BODILESS:
            lines.append(f"content-length: {len(body or b'')}")
        if not keep:
            lines.append("connection: close")
        head = "\r\n".join(lines).encode() + b"\r\n\r\n"
        # In one piece, so that it leaves in one packet where it fits.
        self.sent = head + body if body else head


class Connection(asyncio.Protocol):
    """An open connection: `opened` and `lost` are told of it.

    It is for another request only if the last answer was whole, nothing came behind it, and
    neither side wants to close. Bytes that nobody asked for end it: else the next caller, who may
    be a stranger to the one before, would get them for an answer.
    """

    def __init__(
        self, opened: Callable[[Connection], None], lost: Callable[[Connection], None]
    ) -> None:
        self._opened = opened
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._parser: HttpResponseParser | None = None
        self.usable = False
        """It may be given a request."""
        self.has_answered = False
        """Something of an answer to the latest request has come."""
        self._answer: asyncio.Future[Answer] | None = None
        self._keep = self._is_long = False
        self._ends_with_head = False
        self._most_bytes = 0
        self._asked_at = 0.0
        self._interim = 0
        self._unread = 0
        """Bytes since the last that belong to a body or end an answer."""
        self._status = 0
        """Of the answer itself; 0 until its head is there."""
        self._headers: Fields = []
        self._fields: Fields = []
        self._body = bytearray()

    async def exchange(self, request: Request, deadline: float) -> Answer:
        """Send a request and read the answer, as much of its body as was asked for.

        A status that has arrived counts even if the body never ends. `deadline` is by the loop's
        clock. Whatever ends the wait other than a whole answer ends the connection.

        Raises:
            TimeoutError: no status came in time.
            BrokeOff: none will come.
        """
        loop = asyncio.get_running_loop()
        if self._transport is None or self._transport.is_closing():
            raise ServerDisconnected
        self.usable = self.has_answered = False
        self._keep = request.keep
        self._is_long = len(request.sent) > LONG_BYTES
        self._ends_with_head = request.ends_with_head
        self._most_bytes = request.most_bytes
        self._asked_at = loop.time()
        self._interim = self._unread = self._status = 0
        self._answer = loop.create_future()
        late = loop.call_at(deadline, self._break, TimeoutError())
        try:
            self._transport.write(request.sent)
            return await self._answer
        except BaseException:
            # Cancelled after the answer was there: nobody would put the connection back.
            self.usable = False
            raise
        finally:
            late.cancel()
            self._answer = None
            self._body.clear()
            if not self.usable:
                self.abort()

    def abort(self) -> None:
        """End the connection at once: a peer that does not say good-bye is not waited for."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._parser = HttpResponseParser(self)
        # Heads are read as generously as by browsers; where an answer ends is never guessed.
        self._parser.set_dangerous_leniencies(
            lenient_headers=True,
            lenient_optional_cr_before_lf=True,
            lenient_spaces_after_chunk_size=True,
        )
        self.usable = True
        self._opened(self)

    def data_received(self, data: bytes) -> None:
        """Read on."""
        if self._answer is None or self._answer.done() or self._parser is None:
            self.abort()
            return
        self.has_answered = True
        self._unread += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserError:
            self._break(BadAnswer())
            return
        if self._unread > MOST_HEAD_BYTES:
            self._break(BadAnswer())

    def eof_received(self) -> None:
        """Take the end for the end of an answer that has no other."""
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything."""
        if exc is None:
            self._end()
        else:
            self._break(ServerDisconnected())
        self._parser = self._transport = None
        self._lost(self)

    def on_message_begin(self) -> None:
        """Refuse what comes behind an answer."""
        if self._status:
            raise BadAnswer
        self._fields = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header, or a trailer."""
        # A name with a space behind it frames the body, and is found by nobody.
        if len(self._fields) >= MOST_HEADER_LINES or b"\0" in value or name[-1:].isspace():
            raise BadAnswer
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """Note the status, unless it is that of an interim answer: those are read over."""
        assert self._parser is not None
        if sum(len(name) + len(value) for name, value in self._fields) > MOST_HEAD_BYTES:
            raise BadAnswer
        status = self._parser.get_status_code()
        if status < HTTPStatus.OK:
            self._read_over(status)
            return
        self._status = status
        # What comes from now on are trailers.
        self._headers, self._fields = self._fields, []
        if self._ends_with_head:
            self._settle()
            raise _Enough

    def on_body(self, part: bytes) -> None:
        """Keep what there is room for; the first byte too many ends it."""
        if not self._status:
            # Of an interim answer, which has none.
            raise BadAnswer
        self._unread = 0
        self._body += part
        if len(self._body) > self._most_bytes:
            del self._body[self._most_bytes :]
            self._settle(truncated=True)
            raise _Enough

    def on_message_complete(self) -> None:
        """Hand over the answer, unless it is an interim one."""
        self._unread = 0
        if not self._status:
            return
        assert self._parser is not None
        assert self._transport is not None
        # After an answer to half a request the other half would be read as the next one.
        self.usable = (
            self._keep
            and self._parser.should_keep_alive()
            and not self._transport.get_write_buffer_size()
            and not self._may_go_on()
        )
        self._settle()

    def _read_over(self, status: int) -> None:
        self._interim += 1
        seconds = asyncio.get_running_loop().time() - self._asked_at
        if (
            status < HTTPStatus.CONTINUE
            or status == HTTPStatus.SWITCHING_PROTOCOLS
            or self._interim > MOST_INTERIM_ANSWERS + seconds
        ):
            raise BadAnswer

    def _may_go_on(self) -> bool:
        """Tell whether either side may have more to say than it has said, or than is known."""
        if self._is_long and not HTTPStatus.OK <= self._status < HTTPStatus.MULTIPLE_CHOICES:
            # Refused before all of it was read, perhaps: how much was, no transport tells.
            return True
        # A receiver that names a length where there is no body may send one all the same.
        return self._status in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED) and any(
            name.lower() in (b"content-length", b"transfer-encoding") for name, _ in self._headers
        )

    def _settle(self, *, truncated: bool = False, broken: bool = False) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(
                Answer(self._status, Headers(self._headers), bytes(self._body), truncated, broken)
            )

    def _end(self) -> None:
        if self._status and self._ends_with_connection():
            self._settle()
        self._break(ServerDisconnected())

    def _break(self, error: Exception) -> None:
        """End the exchange, and the connection; a status that has come is an answer."""
        if self._status:
            self._settle(broken=True)
        elif self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.abort()

    def _ends_with_connection(self) -> bool:
        """Tell whether an answer names no end of its own."""
        fields = [(name.lower(), value) for name, value in self._headers]
        codings = b",".join(value for name, value in fields if name == b"transfer-encoding")
        chunked = codings.lower().rpartition(b",")[2].strip() == b"chunked"
        return not chunked and all(name != b"content-length" for name, _ in fields)
