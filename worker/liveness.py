"""The rule of death: a worker that nobody hears stops its own runs before others may start them.

Dispatchers may declare a worker dead 15 s after its last beat, once its leases are gone. The
worker counts from when its last acknowledged beat or renewal was sent, and acts 3 s earlier.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

from oncue.protocol import LEASE_SECONDS
from worker.clock import boot_seconds
from worker.held import Execution, Held

MARGIN_SECONDS: Final = 3.0
SILENCE_SECONDS: Final = LEASE_SECONDS - MARGIN_SECONDS
SAY_SECONDS: Final = 0.2
STOP_SECONDS: Final = 1.5
"""How long runs have to end after the rule fired, well inside the margin."""
TICK_SECONDS: Final = 0.2
EXIT_CODE: Final = 70

log = structlog.get_logger(__name__)


class Liveness:
    """When each of the two channels was last known to work."""

    def __init__(
        self,
        has_runs: Callable[[], bool],
        *,
        clock: Callable[[], float] = boot_seconds,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._has_runs = has_runs
        self._clock = clock
        self._limit = silence_seconds
        self._lock = threading.Lock()
        self._beat_at: float | None = None
        self._contact_at = clock()
        self._gap_seen = False

    def beat_acknowledged(self, sent_at: float) -> None:
        """A dispatcher has committed the beat that was sent at `sent_at`."""
        with self._lock:
            self._hear(sent_at)
            self._beat_at = max(sent_at, self._beat_at or sent_at)

    def renewed(self, sent_at: float) -> None:
        """Redis has renewed the leases by a request sent at `sent_at`."""
        with self._lock:
            self._hear(sent_at)

    def beat_age_seconds(self) -> float | None:
        """Age of the last acknowledged beat, None before the first."""
        return None if self._beat_at is None else self._clock() - self._beat_at

    def may_begin(self) -> bool:
        """True while nobody can have given this worker up: its last beat is young enough.

        A worker whose first beat is on its way is not known to anybody who could.
        """
        age = self.beat_age_seconds()
        return age is None or age <= self._limit

    def must_stop(self) -> bool:
        """True when both channels are silent for too long, or were while runs went on.

        The second happens to a process that was paused: its first call after the pause may
        succeed, but its runs may have been given to others meanwhile.
        """
        with self._lock:
            seen, self._gap_seen = self._gap_seen, False
            return seen or self._clock() - self._contact_at > self._limit

    def _hear(self, sent_at: float) -> None:
        if self._clock() - self._contact_at > self._limit and self._has_runs():
            self._gap_seen = True
        self._contact_at = max(self._contact_at, sent_at)


class Watchdog(threading.Thread):
    """Stops all runs when the rule fires, and the process when a run cannot be stopped."""

    def __init__(
        self,
        held: Held,
        liveness: Liveness,
        *,
        stop_runs: Callable[[list[Execution]], None],
        kill_children: Callable[[], None],
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        super().__init__(name="oncue-watchdog", daemon=True)
        self._held = held
        self._liveness = liveness
        self._stop_runs = stop_runs
        self._kill_children = kill_children
        self._exit_process = exit_process
        self._end = threading.Event()

    def run(self) -> None:
        """Watch until told to end."""
        due = False
        while not self._end.wait(TICK_SECONDS):
            try:
                due = self._liveness.must_stop() or due
                if due:
                    self._act(self._held.running())
                due = False
            except Exception as error:  # noqa: BLE001 (nobody else would stop the runs)
                _say(log.error, "the watchdog failed", exc_info=error)

    def end(self) -> None:
        """Stop watching."""
        self._end.set()

    def _act(self, runs: list[Execution]) -> None:
        if not runs:
            return
        for execution in runs:
            execution.cancel_event.set()
        # Twice: a child may be born between the first sweep and the loop's own stop.
        self._kill_children()
        self._stop_runs(runs)
        _say(
            log.error,
            "neither Redis nor a dispatcher has answered in time, all runs are stopped",
            runs=len(runs),
        )
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline:
            if not self._still_running(runs):
                return
            time.sleep(0.02)
        self._kill_children()
        if left := self._still_running(runs):
            _say(
                log.critical,
                "runs cannot be stopped, the process exits before others may start them",
                executions=[execution.id for execution in left],
            )
            self._exit_process(EXIT_CODE)

    def _still_running(self, runs: list[Execution]) -> list[Execution]:
        return [execution for execution in runs if execution.id in self._held.live]


def _say(write: Callable[..., object], event: str, **fields: object) -> None:
    """Log for a moment at most: whoever reads the log may be away, and would hold us up."""
    writer = threading.Thread(target=write, args=(event,), kwargs=fields, daemon=True)
    # Without a thread to be had it is not said: what comes next is worth more.
    with contextlib.suppress(RuntimeError):
        writer.start()
        writer.join(SAY_SECONDS)
