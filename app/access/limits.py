"""The limits of tenants in memory, so that a request costs no statement for them."""

from __future__ import annotations

import asyncio
from typing import Final

from app.lifecycle.limits import NO_LIMITS, Stored, TenantLimits, read_all_limits
from app.plumbing.bus import LIMITS, Bus, Signal
from app.plumbing.database import Database, DatabaseUnavailable
from app.plumbing.loops import Loop

FRESH_SECONDS: Final = 5.0
"""How long a change may go unseen whose announcement was lost."""


class LimitBook:
    """Knows the limits of all tenants that have any, as they were at most `FRESH_SECONDS` ago.

    Before they are first read there are none: what cannot be known refuses nobody.
    """

    def __init__(self, database: Database, bus: Bus) -> None:
        self._database = database
        self._limits: dict[int, TenantLimits] = {}
        self._stored: dict[int, Stored] = {}
        self._changed = asyncio.Event()
        self._loop = Loop("limits", self._step, expected=(DatabaseUnavailable,))
        self.any_running = False
        """Whether any tenant has a quota of runs."""
        bus.subscribe(LIMITS, self._on_change)

    def start(self) -> None:
        """Start reading."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop reading."""
        await self._loop.stop()

    async def refresh(self) -> None:
        """Read all limits now.

        Raises:
            DatabaseUnavailable: they stay as they are known.
        """
        self._changed.clear()
        found = await self._database.read(read_all_limits)
        self._limits = {tenant_id: limits for tenant_id, (limits, _) in found.items()}
        self._stored = {
            tenant_id: stored for tenant_id, (_, stored) in found.items() if stored is not None
        }
        self.any_running = any(one.running_jobs is not None for one in self._limits.values())

    def of(self, tenant_id: int) -> TenantLimits:
        """Return the limits of a tenant."""
        return self._limits.get(tenant_id, NO_LIMITS)

    def stored_by(self, tenant_id: int) -> Stored | None:
        """Return what a tenant with a quota of bytes has stored, if that was counted."""
        return self._stored.get(tenant_id)

    def with_stored_bytes(self) -> list[int]:
        """Return the tenants that have a quota of bytes."""
        return [one for one, limits in self._limits.items() if limits.stored_bytes is not None]

    def weight_of(self, tenant_id: int) -> float:
        """Return the share of a tenant beside the others' weights."""
        return self.of(tenant_id).weight

    async def _step(self) -> None:
        await self.refresh()
        try:
            async with asyncio.timeout(FRESH_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            return

    def _on_change(self, _signal: Signal) -> None:
        self._changed.set()
