"""The worker's end of an isolated handler's output: frames of the child, and its raw streams.

What a child's Python code prints, logs or gives to `ctx` comes as frames, in the order it was
said. What its libraries and the programs it starts write to file descriptors 1 and 2 comes by
two more pipes.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import os
from collections.abc import Callable, Coroutine
from typing import Any, Final

from oncue.output import LEVELS
from worker.log_buffer import RunLog

READ_BYTES: Final = 64 * 1024
PAUSE_SECONDS: Final = 0.02
"""After a full read: a child that prints in a tight loop is read at some 3 MB/s, and waits."""
LAST_WORDS_SECONDS: Final = 0.5
"""After a child's end, for a pipe that a process which left its group still holds open."""
LONGEST_FRAME_BYTES: Final = 16 * 1024 * 1024
_SOURCES: Final = frozenset({"ctx", "log"})


class ChildPipes:
    """Three pipes whose other ends a child gets, and the tasks that read them into a log."""

    def __init__(self, log: RunLog, clock_offset_ms: Callable[[], float]) -> None:
        self._log = log
        self._clock_offset_ms = clock_offset_ms
        self._transports: list[asyncio.ReadTransport] = []
        self._readers: set[asyncio.Task[None]] = set()
        self._over = False
        self.child_fds: list[int] = []
        """Of the child, in order: frames, standard output, standard error."""

    async def open(self) -> None:
        """Make the pipes and begin to read."""
        try:
            for read in (self._read_frames, self._read_raw("stdout"), self._read_raw("stderr")):
                await self._open_one(read)
        except BaseException:
            self.close_child_ends()
            self._close()
            raise

    def close_child_ends(self) -> None:
        """Close the ends that the child has now."""
        for fd in self.child_fds:
            os.close(fd)
        self.child_fds.clear()

    async def drain(self) -> None:
        """Read what is left after the child's end, then close the log."""
        self._over = True
        self.close_child_ends()
        try:
            if self._readers:
                await asyncio.wait(self._readers, timeout=LAST_WORDS_SECONDS)
        finally:
            self._close()
            self._log.close()

    def _close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        for transport in self._transports:
            transport.close()

    async def _open_one(
        self, read: Callable[[asyncio.StreamReader], Coroutine[Any, Any, None]]
    ) -> None:
        read_fd, write_fd = os.pipe()
        self.child_fds.append(write_fd)
        reader = asyncio.StreamReader(limit=READ_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", buffering=0)
        )
        self._transports.append(transport)
        task = asyncio.get_running_loop().create_task(read(reader))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)

    async def _next(self, reader: asyncio.StreamReader) -> bytes:
        data = await reader.read(READ_BYTES)
        if len(data) >= READ_BYTES and not self._over:
            await asyncio.sleep(PAUSE_SECONDS)
        return data

    async def _read_frames(self, reader: asyncio.StreamReader) -> None:
        rest = b""
        while data := await self._next(reader):
            *frames, rest = (rest + data).split(b"\n")
            for frame in frames:
                self._take(frame)
            if len(rest) > LONGEST_FRAME_BYTES:
                self._take(rest)
                rest = b""
        if rest:
            self._take(rest)

    def _read_raw(self, source: str) -> Callable[[asyncio.StreamReader], Coroutine[Any, Any, None]]:
        async def read(reader: asyncio.StreamReader) -> None:
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            while data := await self._next(reader):
                self._log.write(source, decoder.decode(data))
            self._log.write(source, decoder.decode(b"", final=True))

        return read

    def _take(self, data: bytes) -> None:
        """Take one frame; what is none (processes may write at once) is kept as it stands."""
        frame: Any = None
        with contextlib.suppress(ValueError):
            frame = json.loads(data)
        try:
            at = int(frame["t"] + self._clock_offset_ms())
            said = str(frame["m"])
            match frame["k"]:
                case "l" if frame["l"] in LEVELS and frame["s"] in _SOURCES:
                    self._log.add(frame["l"], frame["s"], said, frame["f"], at=at)
                case "w":
                    self._log.write(frame["s"], said, by=frame["b"], at=at)
                case "p":
                    self._log.progress(min(1.0, max(0.0, float(frame["v"]))), said)
        except (KeyError, TypeError, ValueError):
            self._log.write("stdout", data.decode(errors="replace") + "\n")
