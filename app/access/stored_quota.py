"""How many new jobs of a tenant fit into its quota of stored bytes.

What it has stored is counted from the rows by the holder of the lock, in the background. Added is
what this process has let in since that count began, so that a burst cannot outrun it; what other
processes have let in, and results and logs since then, are in the next count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from app.access.limits import LimitBook
from app.edge.problems import Problem
from app.plumbing.clock import DatabaseClock

SPAN_MS: Final = 1000
MOST_SPANS: Final = 600
MOST_KNOWN: Final = 10_000
WAIT_SECONDS: Final = 60


class LetIn:
    """The bytes that were let in, by the second; what is older than is asked for is forgotten."""

    def __init__(self) -> None:
        self._spans: deque[list[int]] = deque()
        self._total = 0

    def add(self, size: int, now_ms: int) -> None:
        """Note bytes that were let in now."""
        if not self._spans or now_ms >= self._spans[-1][0] + SPAN_MS:
            self._spans.append([now_ms, 0])
        if len(self._spans) > MOST_SPANS:
            # Nobody has asked for long: the oldest two become one, which counts as the later.
            _, older = self._spans.popleft()
            self._spans[0][1] += older
        self._spans[-1][1] += size
        self._total += size

    def since(self, from_ms: int) -> int:
        """Return the bytes that were let in since then, give or take a second's."""
        while self._spans and self._spans[0][0] + SPAN_MS <= from_ms:
            self._total -= self._spans.popleft()[1]
        return self._total


class StoredQuota:
    """Says how many of some new jobs fit; a tenant without the quota costs nothing."""

    def __init__(self, clock: DatabaseClock, limits: LimitBook) -> None:
        self._clock = clock
        self._limits = limits
        self._let_in: dict[int, LetIn] = {}

    def fitting(self, tenant_id: int, params: Sequence[str | None]) -> tuple[int, Problem | None]:
        """Return how many of these jobs, in their order, fit, and why the others do not."""
        most = self._limits.of(tenant_id).stored_bytes
        if most is None:
            return len(params), None
        held = self._held(tenant_id)
        for number, one in enumerate(params):
            size = size_of(one)
            if held >= most or held + size > most:
                return number, _too_much(held, size, most)
            held += size
        return len(params), None

    def note(self, tenant_id: int, params: Sequence[str | None]) -> None:
        """Count jobs that were let in."""
        if self._limits.of(tenant_id).stored_bytes is None:
            return
        if tenant_id not in self._let_in and len(self._let_in) >= MOST_KNOWN:
            self._let_in.clear()
        let_in = self._let_in.setdefault(tenant_id, LetIn())
        let_in.add(sum(map(size_of, params)), int(self._clock.now_ms()))

    def _held(self, tenant_id: int) -> int:
        stored = self._limits.stored_by(tenant_id)
        let_in = self._let_in.get(tenant_id)
        since = 0 if stored is None else stored.counted_from
        return (0 if stored is None else stored.bytes) + (
            0 if let_in is None else let_in.since(since)
        )


def size_of(params: str | None) -> int:
    """Return the bytes of params as they are stored."""
    return 0 if params is None else len(params.encode())


def _too_much(held: int, size: int, most: int) -> Problem:
    return Problem(
        "too_much_stored",
        f"The jobs of the tenant have {held} bytes of params, results and logs, and this one "
        f"{size} of params; {most} are its limit: keep finished "
        "jobs for fewer days (PUT /openapi/retention), send less, or have the limit raised.",
        retry_after_seconds=WAIT_SECONDS,
    )
