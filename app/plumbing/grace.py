"""The time that a stop may take, and the end of the process a moment before it is over."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import structlog

log = structlog.get_logger(__name__)

LAST_RESORT_SECONDS: Final = 0.3
REST_SECONDS: Final = 5.0
CLOSING_SECONDS: Final = 1.0


class Grace:
    """Counts from the signal on; `held` says what is given up if the process must be ended."""

    def __init__(self, seconds: float, held: Callable[[], Mapping[str, int]]) -> None:
        self._seconds = seconds
        self._held = held
        self._began: float | None = None

    def begin(self) -> None:
        """Begin to count, once: from then on the process ends in time even if its loop is stuck."""
        if self._began is not None:
            return
        self._began = time.monotonic()
        # Where no thread is to be had the loop must do.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._end_at_last, name="oncue-grace", daemon=True).start()

    def left(self) -> float:
        """Seconds until the process is ended; all of them before the count has begun."""
        spent = 0.0 if self._began is None else time.monotonic() - self._began
        return max(0.0, self._seconds - LAST_RESORT_SECONDS - spent)

    def left_for_requests(self) -> float:
        """Of what is left, what requests may take: the rest is for commits, and for closing."""
        return self.left() - min(REST_SECONDS, self._seconds / 4, self.left() / 2)

    def left_for_commits(self) -> float:
        """Of what is left, what commits may take."""
        return max(0.0, self.left() - min(CLOSING_SECONDS, self._seconds / 8))

    def _end_at_last(self) -> None:
        time.sleep(self.left())
        log.error("ended_at_last", **self._held())
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(0)
