"""Keys in memory for a few seconds, so that a request costs no statement for its key."""

from __future__ import annotations

import time
from typing import Final, TypeVar

from app.lifecycle.api_keys import KeyKind, KeyRow, any_key, find_key
from app.plumbing.bus import KEYS, Bus, Signal
from app.plumbing.database import Database, DatabaseUnavailable
from app.plumbing.single_flight import SingleFlight

FRESH_SECONDS: Final = 5.0
"""How long a revoked key may go on where the announcement of its end was lost."""
MOST_KEYS: Final = 10_000
MOST_UNKNOWN: Final = 10_000

Value = TypeVar("Value")


class KeyCache:
    """Finds keys by their prefix; what was looked up lately, there or not, is not asked again.

    The memory is bounded: the oldest leave. A change that is announced is seen at once.
    """

    def __init__(self, database: Database, bus: Bus) -> None:
        self._database = database
        self._keys: dict[str, tuple[KeyRow, float]] = {}
        self._unknown: dict[str, float] = {}
        self._asks: SingleFlight[tuple[str, int], KeyRow | None] = SingleFlight()
        self._any: dict[KeyKind, tuple[bool, float]] = {}
        self._looks: SingleFlight[tuple[KeyKind, int], bool] = SingleFlight()
        self._changes = 0
        bus.subscribe(KEYS, self._on_change)

    async def find(self, prefix: str) -> KeyRow | None:
        """Return the key as it was at most `FRESH_SECONDS` ago.

        Raises:
            DatabaseUnavailable: it is not in memory, and cannot be looked up.
        """
        now = time.monotonic()
        known = self._keys.get(prefix)
        if known is not None and now < known[1]:
            return known[0]
        if now < self._unknown.get(prefix, 0.0):
            return None
        # Who comes after a change needs a look that was begun after it.
        return await self._asks.call((prefix, self._changes), lambda: self._ask(prefix))

    async def any(self, kind: KeyKind) -> bool:
        """Tell whether there is a key of the kind at all; once there is, there always is.

        Raises:
            DatabaseUnavailable: it is not known.
        """
        found, until = self._any.get(kind, (False, 0.0))
        if found or time.monotonic() < until:
            return found
        return await self._looks.call((kind, self._changes), lambda: self._look(kind))

    @property
    def size(self) -> int:
        """How much is remembered."""
        return len(self._keys) + len(self._unknown)

    async def _look(self, kind: KeyKind) -> bool:
        changes = self._changes
        try:
            found = await self._database.read(lambda connection: any_key(connection, kind))
        except DatabaseUnavailable:
            if kind not in self._any:
                raise
            # As it was: whoever is let in by that meets the same database.
            found = self._any[kind][0]
        if found or changes == self._changes:
            self._any[kind] = (found, time.monotonic() + FRESH_SECONDS)
        return found

    async def _ask(self, prefix: str) -> KeyRow | None:
        changes = self._changes
        key = await self._database.read(lambda connection: find_key(connection, prefix))
        until = time.monotonic() + FRESH_SECONDS
        if changes != self._changes:
            return key  # it may be what was before the change: not for keeping
        if key is None:
            _keep(self._unknown, prefix, until, MOST_UNKNOWN)
        else:
            _keep(self._keys, prefix, (key, until), MOST_KEYS)
        return key

    def _on_change(self, signal: Signal) -> None:
        self._changes += 1
        # What is known stays known for an outage, but is looked at again before it is used.
        self._any = {kind: (found, 0.0) for kind, (found, _) in self._any.items()}
        if not signal:
            self._keys.clear()
            self._unknown.clear()
        for prefix in signal:
            self._keys.pop(prefix, None)
            self._unknown.pop(prefix, None)


def _keep(kept: dict[str, Value], key: str, value: Value, most: int) -> None:
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        del kept[next(iter(kept))]
