"""What an isolated handler says, as frames in a pipe to its worker: one line of JSON each.

A frame is written as soon as something is said, so that the last words of a child that is
killed are not lost. The worker cuts written text into lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from typing import Any, Final

MOST_CHARACTERS: Final = 8 * 1024
"""In one frame: a longer text is several, so that the reader's memory stays small."""


class ChildOutput:
    """Writes frames to a file descriptor; any thread may. It never raises for a lost worker."""

    def __init__(self, frames_fd: int) -> None:
        self._fd = frames_fd
        self._lock = threading.Lock()
        # A fork may come while another thread holds the lock: its copy would never be free.
        os.register_at_fork(after_in_child=self._renew_lock)

    def log(self, message: str, level: str, fields: dict[str, Any] | None) -> None:
        """Send what a handler gave to `ctx.log`."""
        self.add(level, "ctx", message, fields)

    def progress(self, fraction: float, text: str) -> None:
        """Send a progress."""
        self._send({"k": "p", "v": fraction, "m": text})

    def add(
        self, level: str, source: str, message: str, fields: dict[str, Any] | None = None
    ) -> None:
        """Send a line."""
        self._send({"k": "l", "l": level, "s": source, "m": message, "f": fields})

    def write(self, source: str, text: str, *, by: int = 0) -> None:
        """Send what was written to a stream."""
        for start in range(0, len(text), MOST_CHARACTERS):
            piece = text[start : start + MOST_CHARACTERS]
            self._send({"k": "w", "s": source, "b": by, "m": piece})

    def _send(self, frame: dict[str, Any]) -> None:
        frame["t"] = time.time_ns() // 1_000_000
        data = json.dumps(frame).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._fd, data) :]

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()
