"""What happened, in order: the events for the checker, and a running digest of everything."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import fields

from tests.support.checker import Event


class History:
    """Grows with the simulation; nothing in it depends on the host's clock or memory."""

    def __init__(self, now: Callable[[], float], *, trace: Callable[[str], None] | None) -> None:
        self._now = now
        self._trace = trace
        self._digest = 0
        self.steps = 0
        self.closed = False
        self.events: list[Event] = []
        self.faults: dict[str, int] = {}

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return round(self._now(), 6)

    @property
    def tracing(self) -> bool:
        """True when somebody reads the small steps."""
        return self._trace is not None

    def add(self, event: Event) -> None:
        """Record what the checker judges by."""
        if self.closed:
            return
        self.events.append(event)
        line = line_of(event)
        self._digest = zlib.crc32(line.encode(), self._digest)
        if self._trace is not None:
            self._trace(line)

    def fault(self, kind: str, what: str) -> None:
        """Count a fault, and show it."""
        self.faults[kind] = self.faults.get(kind, 0) + 1
        self.say(f"{kind} {what}", mark="!")

    def say(self, line: str, *, mark: str = " ") -> None:
        """Show something to who reads the trace; it counts for the digest as well."""
        text = f"{self.now:>11.6f} {mark} {line}"
        self._digest = zlib.crc32(text.encode(), self._digest)
        if self._trace is not None:
            self._trace(text)

    def step(self, label: str) -> None:
        """Count one arrival at a point where a process meets the outside."""
        self.steps += 1
        self._digest = zlib.crc32(f"{self._now():.9f} {label}".encode(), self._digest)

    def text(self) -> str:
        """The whole history; the last line stands for every small step."""
        lines = [line_of(event) for event in self.events]
        lines.append(f"steps {self.steps} digest {self._digest:08x}")
        return "\n".join(lines) + "\n"


def line_of(event: Event) -> str:
    """One event as one line."""
    rest = " ".join(
        f"{one.name}={value}"
        for one in fields(event)
        if one.name != "at" and (value := getattr(event, one.name)) not in (None, "")
    )
    return f"{event.at:>11.6f}   {type(event).__name__} {rest}"
