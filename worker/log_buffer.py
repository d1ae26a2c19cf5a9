"""The lines of runs until a dispatcher has them: bounded for each run, and for the whole worker.

Any thread adds lines; the event loop takes them. One lock guards all buffers of a worker: what
is done under it is short, and never waits.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from oncue.output import (
    HEAD_BYTES,
    LINE_OVERHEAD_BYTES,
    MAX_MESSAGE_BYTES,
    TAIL_BYTES,
    dropped_message,
)

MEMORY_BYTES: Final = 64 * 1024 * 1024
"""All that the buffers of one worker may hold, by their own count."""
LINE_MEMORY_BYTES: Final = 256
LOG_MEMORY_BYTES: Final = 1024
SMALL_BYTES: Final = 4096
MOST_WRITERS: Final = 64
"""Of one run, whose last line has not ended yet."""
LEVEL_OF_STREAM: Final = {"stdout": "info", "stderr": "warning"}


@dataclass(frozen=True, slots=True)
class Line:
    """A line to be sent. `size` is what it counts; `fields` is JSON text."""

    seq: int
    time: int
    level: str
    source: str
    message: str
    fields: str | None
    size: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The newest word of a handler on how far it has come."""

    value: float
    text: str
    at: int


@dataclass(frozen=True, slots=True)
class Taken:
    """What goes into one part of a request: lines in order, and the newest progress if it is new.

    `complete` says that nothing of the run is left to come.
    """

    lines: list[Line]
    progress: Progress | None
    complete: bool


class RunLog:
    """The lines of one run that are not sent: its first 512 KiB, and after them the last 512 KiB.

    What is dropped between the two becomes a line in its place. It is an `oncue.output.Output`.
    """

    def __init__(self, execution_id: str, buffers: LogBuffers) -> None:
        self.execution_id = execution_id
        self._buffers = buffers
        self._head: deque[Line] = deque()
        self._tail: deque[Line] = deque()
        self._head_left = HEAD_BYTES
        self._head_bytes = 0
        self._tail_bytes = 0
        self._gap_lines = 0
        self._gap_bytes = 0
        self._next_seq = 1
        self._progress: Progress | None = None
        self._progress_at = 0
        self._unended: dict[tuple[str, int], tuple[str, int]] = {}
        self._told_complete = False
        self.memory = 0
        self.closed = False
        self.refused = False

    def log(self, message: str, level: str, fields: dict[str, Any] | None) -> None:
        """Add what a handler gave to `ctx.log`."""
        self.add(level, "ctx", message, fields)

    def progress(self, fraction: float, text: str) -> None:
        """Keep the newest progress."""
        with self._buffers.lock:
            if not self._deaf:
                # Dispatchers keep the newest: the clock may be set back, the order may not.
                self._progress_at = max(self._buffers.now_ms(), self._progress_at + 1)
                self._progress = Progress(fraction, _storable(text), self._progress_at)
                self._recount()
                self._buffers.note(self)

    def add(
        self,
        level: str,
        source: str,
        message: str,
        fields: dict[str, Any] | None = None,
        *,
        at: int | None = None,
    ) -> None:
        """Add a line; a message over 16 KiB becomes several, which say so in their fields."""
        with self._buffers.lock:
            if self._deaf:
                return
            moment = self._buffers.now_ms() if at is None else at
            self._append_pieces(moment, level, source, _pieces(_storable(message)), fields=fields)
            self._buffers.note(self)

    def write(self, source: str, text: str, *, by: int = 0, at: int | None = None) -> None:
        """Take what is written to a stream: each line of it, once it has ended.

        `by` names the writer (a thread, say), so that lines written at once do not mix.
        """
        with self._buffers.lock:
            if self._deaf:
                return
            moment = self._buffers.now_ms() if at is None else at
            rest, done = self._unended.pop((source, by), ("", 0))
            *lines, rest = (rest + _storable(text)).split("\n")
            level = LEVEL_OF_STREAM[source]
            for line in lines:
                pieces = _pieces(line.removesuffix("\r"))
                self._append_pieces(moment, level, source, pieces, done=done)
                done = 0
            *whole, rest = _pieces(rest)
            if whole:
                self._append_pieces(moment, level, source, whole, done=done, ended=False)
                done += len(whole)
            if rest or done:
                self._unended[source, by] = rest, done
            if len(self._unended) > MOST_WRITERS:
                # Threads that left without ending their line.
                (other, _), (begun, pieces_done) = next(iter(self._unended.items()))
                self._append_pieces(
                    moment, LEVEL_OF_STREAM[other], other, [begun], done=pieces_done
                )
                del self._unended[next(iter(self._unended))]
                whole = [begun]
            if lines or whole:
                self._buffers.note(self)

    def close(self) -> None:
        """Take no more; lines that did not end are lines now. Closing twice does nothing more."""
        with self._buffers.lock:
            if self.closed:
                return
            moment = self._buffers.now_ms()
            for (source, _), (rest, done) in self._unended.items():
                self._append_pieces(moment, LEVEL_OF_STREAM[source], source, [rest], done=done)
            self._unended.clear()
            self.closed = True
            if self.has_news:
                self._buffers.note(self, urgent=True)

    def refuse(self) -> None:
        """Drop everything, now and later: no dispatcher wants it."""
        with self._buffers.lock:
            self.refused = True
            self._head.clear()
            self._tail.clear()
            self._progress = None
            self._gap_lines = self._gap_bytes = self._head_bytes = self._tail_bytes = 0
            self._unended.clear()
            self._buffers.count_memory(self, 0)

    @property
    def said(self) -> int:
        """How many lines there were so far, dropped ones included."""
        return self._next_seq - 1

    @property
    def has_news(self) -> bool:
        """Whether something is there to be sent."""
        if self.refused:
            return False
        return bool(
            self._head
            or self._tail
            or self._gap_lines
            or self._progress is not None
            or (self.closed and self._next_seq > 1 and not self._told_complete)
        )

    def take(self, most_bytes: int, most_lines: int) -> Taken:
        """Remove what is to be sent next, up to so many bytes and lines."""
        with self._buffers.lock:
            lines: list[Line] = []
            size = 0
            while len(lines) < most_lines and (line := self._first()) is not None:
                if lines and size + line.size > most_bytes:
                    break
                self._remove_first(line)
                lines.append(line)
                size += line.size
            progress, self._progress = self._progress, None
            complete = self.closed and self._first() is None
            self._told_complete = complete
            self._recount()
            return Taken(lines, progress, complete)

    def drop_half(self) -> int:
        """Drop about half of what is held, to make room; return how many lines went."""
        lines = self._tail or self._head
        count = (len(lines) + 1) // 2
        for _ in range(count):
            if self._tail:
                self._slide()
            else:
                # From the end of the head, so that what is missing is one piece.
                line = self._head.pop()
                self._head_bytes -= line.size
                self._head_left = 0
                self._gap_lines += 1
                self._gap_bytes += line.size
        self._buffers.dropped(count)
        self._recount()
        return count

    @property
    def _deaf(self) -> bool:
        return self.closed or self.refused

    def _append_pieces(
        self,
        moment: int,
        level: str,
        source: str,
        pieces: list[str],
        *,
        fields: dict[str, Any] | None = None,
        done: int = 0,
        ended: bool = True,
    ) -> None:
        """Append a line that was cut, of which `done` pieces are there already, or a whole one."""
        if ended and not done and len(pieces) == 1:
            self._append(moment, level, source, pieces[0], fields)
            return
        last = done + len(pieces) if ended else 0
        for number, piece in enumerate(pieces, start=done + 1):
            own = {"part": number, "more": number != last}
            self._append(moment, level, source, piece, own | (fields or {}) if number == 1 else own)

    def _append(
        self, moment: int, level: str, source: str, message: str, fields: dict[str, Any] | None
    ) -> None:
        beside = None
        if fields:
            beside = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        size = LINE_OVERHEAD_BYTES + _size(message) + (_size(beside) if beside else 0)
        line = Line(self._next_seq, moment, level, source, message, beside, size)
        self._next_seq += 1
        if self._head_left >= size:
            self._head_left -= size
            self._head_bytes += size
            self._head.append(line)
        else:
            self._head_left = 0
            self._tail.append(line)
            self._tail_bytes += size
            dropped = 0
            while self._tail_bytes > TAIL_BYTES:
                self._slide()
                dropped += 1
            if dropped:
                self._buffers.dropped(dropped)
        self._recount()

    def _slide(self) -> None:
        line = self._tail.popleft()
        self._tail_bytes -= line.size
        self._gap_lines += 1
        self._gap_bytes += line.size

    def _first(self) -> Line | None:
        if self._head:
            return self._head[0]
        if self._gap_lines:
            seq = self._tail[0].seq - 1 if self._tail else self._next_seq - 1
            message = dropped_message(self._gap_lines, self._gap_bytes)
            fields = json.dumps(
                {"droppedLines": self._gap_lines, "droppedBytes": self._gap_bytes},
                separators=(",", ":"),
            )
            size = LINE_OVERHEAD_BYTES + len(message) + len(fields)
            moment = self._tail[0].time if self._tail else self._buffers.now_ms()
            return Line(seq, moment, "warning", "oncue", message, fields, size)
        return self._tail[0] if self._tail else None

    def _remove_first(self, line: Line) -> None:
        if self._head:
            self._head.popleft()
            self._head_bytes -= line.size
        elif self._gap_lines:
            self._gap_lines = self._gap_bytes = 0
        else:
            self._tail.popleft()
            self._tail_bytes -= line.size

    def _recount(self) -> None:
        held = len(self._head) + len(self._tail)
        memory = LOG_MEMORY_BYTES + self._head_bytes + self._tail_bytes + held * LINE_MEMORY_BYTES
        waits = held or self._gap_lines or self._progress is not None
        self._buffers.count_memory(self, memory if waits else 0)


class LogBuffers:
    """The logs of all runs of a worker that have something to send, and the bound over all.

    When they hold more than `memory_bytes`, the largest loses half, again and again.
    """

    def __init__(
        self,
        now_ms: Callable[[], int],
        *,
        changed: Callable[[bool], None],
        dropped: Callable[[int], None],
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self.lock = threading.RLock()
        self.now_ms = now_ms
        self.dropped = dropped
        self._changed = changed
        self._memory_bytes = memory_bytes
        self._memory = 0
        self._waiting: dict[RunLog, None] = {}

    def open(self, execution_id: str) -> RunLog:
        """Make the log of a run; one that says nothing costs nothing more."""
        return RunLog(execution_id, self)

    def note(self, log: RunLog, *, urgent: bool = False) -> None:
        """Remember that a log has something to send."""
        if log not in self._waiting:
            self._waiting[log] = None
            self._changed(urgent)
        elif urgent:
            self._changed(urgent)
        while self._memory > self._memory_bytes and self._make_room():
            pass

    def count_memory(self, log: RunLog, memory: int) -> None:
        """Note how much a log holds now."""
        self._memory += memory - log.memory
        log.memory = memory

    @property
    def memory(self) -> int:
        """Bytes held over all runs, by our own count."""
        return self._memory

    @property
    def waiting(self) -> int:
        """How many runs have something to send."""
        return len(self._waiting)

    def next(self) -> RunLog | None:
        """Return a log that has something to send; the one asked for longest ago comes first."""
        with self.lock:
            log = next(iter(self._waiting), None)
            if log is not None:
                del self._waiting[log]
            return log

    def put_back(self, log: RunLog) -> None:
        """Let a log wait again if it still has something to send."""
        with self.lock:
            if log.has_news:
                self._waiting[log] = None

    def _make_room(self) -> bool:
        """Drop half of the largest log; of very many small ones, the oldest that have ended."""
        largest = max(self._waiting, key=lambda log: log.memory, default=None)
        if largest is None or largest.memory == 0:
            return False
        if largest.memory > SMALL_BYTES:
            return largest.drop_half() > 0
        oldest = next((log for log in self._waiting if log.closed), largest)
        del self._waiting[oldest]
        self.dropped(oldest.said)
        oldest.refuse()
        return True


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _storable(text: str) -> str:
    """Text that can be sent as UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _pieces(text: str) -> list[str]:
    """Cut a message into pieces of at most 16 KiB of UTF-8, between characters."""
    if len(text) <= MAX_MESSAGE_BYTES // 4:
        return [text]
    encoded = text.encode()
    pieces = []
    while len(encoded) > MAX_MESSAGE_BYTES:
        piece = encoded[:MAX_MESSAGE_BYTES].decode(errors="ignore")
        pieces.append(piece)
        encoded = encoded[len(piece.encode()) :]
    return [*pieces, encoded.decode()]
