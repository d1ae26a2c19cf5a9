"""What a worker needs beside the rendered body to deliver a callback: secrets, headers, networks.

All of it goes over the authenticated channel between dispatchers and workers, and is never logged.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from app.ground import Ground
from app.lifecycle.egress_lists import read_networks
from app.lifecycle.moves.ending import OwedDelivery
from app.lifecycle.webhook_secrets import WORKERS_OWN, read_secrets
from app.plumbing.sealed import CannotOpen, Sealer
from app.plumbing.single_flight import SingleFlight
from oncue.protocol import Delivery

log = structlog.get_logger(__name__)

FRESH_SECONDS: Final = 5.0
MOST_TENANTS: Final = 10_000
CANNOT_OPEN: Final = (
    "a secret of this callback cannot be opened: ONCUE_SECRET_KEYS lacks the key it was sealed with"
)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a tenant has said of its callbacks; None is what it has not said.

    `signing` are secrets in clear; `cannot_open` that one of them is sealed with a lost key.
    """

    signing: tuple[str, ...] | None
    egress_allow: tuple[str, ...] | None
    cannot_open: bool
    read_at: float


class Dresser:
    """Completes deliveries; what it knows of a tenant is at most 5 s old."""

    def __init__(self, ground: Ground) -> None:
        self._database = ground.database
        self._sealer = ground.sealer
        self._known: dict[int, Wishes] = {}
        self._reads: SingleFlight[tuple[int, int], Wishes] = SingleFlight()
        self._changes = 0

    async def dress(
        self, owed: Sequence[OwedDelivery]
    ) -> tuple[list[Delivery], list[OwedDelivery]]:
        """Return the deliveries that can be made, and those of which a secret cannot be opened.

        Raises:
            DatabaseUnavailable: what their tenants want is not known.
        """
        tenants = sorted({each.tenant_id for each in owed})
        found = await asyncio.gather(*(self.wishes(one) for one in tenants))
        wishes = dict(zip(tenants, found, strict=True))
        made: list[Delivery] = []
        closed: list[OwedDelivery] = []
        for one in owed:
            try:
                made.append(_delivery(one, wishes[one.tenant_id], self._sealer))
            except CannotOpen:
                log.warning("callback_secret_cannot_be_opened", delivery_id=one.delivery_id)
                closed.append(one)
        return made, closed

    async def wishes(self, tenant_id: int) -> Wishes:
        """Return what a tenant has said: a statement or two, at most once in 5 s for all askers."""
        known = self._fresh(tenant_id)
        if known is None:
            # Who comes after a change needs a read that was begun after it.
            key = tenant_id, self._changes
            known = await self._reads.call(key, lambda: self._read(tenant_id))
        return known

    def forget(self, tenant_id: int) -> None:
        """Read anew what a tenant has said: it has just said something else."""
        self._changes += 1
        self._known.pop(tenant_id, None)

    def _fresh(self, tenant_id: int) -> Wishes | None:
        known = self._known.get(tenant_id)
        if known is None or time.monotonic() - known.read_at > FRESH_SECONDS:
            return None
        return known

    async def _read(self, tenant_id: int) -> Wishes:
        read_at, changes = time.monotonic(), self._changes

        async def read(
            connection: AsyncConnection,
        ) -> tuple[list[str], tuple[str, ...] | None]:
            rows = await read_secrets(connection, self._database, tenant_id)
            return [row["sealed"] for row in rows], await read_networks(connection, tenant_id)

        sealed, networks = await self._database.read(read)
        signing: tuple[str, ...] | None = None
        cannot_open = False
        try:
            if sealed:
                signing = tuple(
                    one if one == WORKERS_OWN else self._sealer.open(one) for one in sealed
                )
        except CannotOpen:
            cannot_open = True
        found = Wishes(signing, networks, cannot_open, read_at)
        if changes == self._changes:
            if len(self._known) >= MOST_TENANTS:
                self._known.clear()
            self._known[tenant_id] = found
        return found


def _delivery(owed: OwedDelivery, wishes: Wishes, sealer: Sealer) -> Delivery:
    if wishes.cannot_open:
        raise CannotOpen
    return Delivery(
        delivery_id=owed.delivery_id,
        try_number=owed.try_number,
        url=owed.url,
        body=sealer.open_body(owed.body),
        headers={} if owed.headers is None else open_headers(json.loads(owed.headers), sealer),
        signing=None if wishes.signing is None else list(wishes.signing),
        egress_allow=None if wishes.egress_allow is None else list(wishes.egress_allow),
    )


def open_headers(kept: Mapping[str, str | Mapping[str, str]], sealer: Sealer) -> dict[str, str]:
    """Return headers as they are sent.

    Raises:
        CannotOpen: a secret one was sealed with a key that is not there.
    """
    return {
        name: value if isinstance(value, str) else sealer.open(value["sealed"])
        for name, value in kept.items()
    }
