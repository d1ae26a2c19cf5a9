"""Handing owed callbacks to workers that deliver: first tries nobody took, and every later try."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from http import HTTPStatus
from typing import Final

import structlog
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.dispatch.lock import DispatchLock
from app.fleet.roster import Roster
from app.ground import Ground
from app.lifecycle.moves.deliver import HandedOver, give_back, read_next_try_at, take_due
from app.lifecycle.nodes import Node
from app.plumbing.bus import OWED
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.http import NoAnswer
from app.plumbing.loops import Loop, Tasks
from oncue.protocol import (
    DELIVER_PATH,
    MAX_INTERNAL_BODY_BYTES,
    DeliverRequest,
    DeliverResponse,
    Delivery,
)

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 1.0
BATCH_LIMIT: Final = 200
REFUSED_PAUSE_MS: Final = 1000
LOCKED_PAUSE_SECONDS: Final = 0.05
OFFER_SECONDS: Final = 5.0
MAX_REQUEST_BYTES: Final = MAX_INTERNAL_BODY_BYTES // 2


class Handover:
    """The lock holder's loop over the outbox; the schedule and the leases are in its rows."""

    def __init__(
        self,
        ground: Ground,
        lock: DispatchLock,
        roster: Roster,
    ) -> None:
        self._database = ground.database
        self._clock = ground.clock
        self._lock = lock
        self._roster = roster
        self._client = ground.client
        self._owed = asyncio.Event()
        self._busy: set[str] = set()
        self._tasks = Tasks()
        self._loop = Loop("handover", self._step, expected=(DatabaseUnavailable,))
        ground.bus.subscribe(OWED, lambda _signal: self._owed.set())

    def start(self) -> None:
        """Start handing over while the lock is held."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop handing over."""
        await self._loop.stop()
        await self._tasks.stop()

    async def _step(self) -> None:
        self._owed.clear()
        term = self._lock.term
        workers = [
            node.worker_id for node in self._roster.delivering() if node.worker_id not in self._busy
        ]
        if term is None or not workers:
            await self._wait(LOOK_SECONDS / 2)
            return
        next_try_at = await self._database.read(read_next_try_at)
        wait = LOOK_SECONDS if next_try_at is None else (next_try_at - self._clock.now_ms()) / 1000
        if wait <= 0:
            await self._hand_over(term, workers)
            return
        await self._wait(min(wait, LOOK_SECONDS))

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._owed.wait()
        except TimeoutError:
            return

    async def _hand_over(self, term: int, workers: list[str]) -> None:
        async def take(connection: AsyncConnection) -> list[HandedOver]:
            return await take_due(connection, self._database, workers, limit=BATCH_LIMIT)

        taken = await self._database.write(take)
        if not taken:
            # Another transaction holds the rows: they are looked at again shortly.
            await asyncio.sleep(LOCKED_PAUSE_SECONDS)
            return
        by_worker: dict[str, list[HandedOver]] = defaultdict(list)
        for one in taken:
            by_worker[one.worker_id].append(one)
        for worker_id, own in by_worker.items():
            self._busy.add(worker_id)
            self._tasks.start(self._offer_alone(worker_id, own, term), name=f"offer {worker_id}")

    async def _offer_alone(self, worker_id: str, own: list[HandedOver], term: int) -> None:
        """Make one offer to a worker at a time, so that a silent one delays only its own."""
        try:
            await self._offer(worker_id, own, term)
        finally:
            self._busy.discard(worker_id)
            self._owed.set()

    async def _offer(self, worker_id: str, own: list[HandedOver], term: int) -> None:
        """Send deliveries to a worker; what it refuses is due again, what is unclear waits."""
        worker = self._roster.get(worker_id)
        refused: list[str] = []
        for batch in _batches(own):
            ids = [one.delivery.delivery_id for one in batch]
            if worker is None:
                refused += ids
                continue
            accepted = await self._post(worker.node, batch, term)
            if accepted is None:
                # It may have them: their leases decide when somebody else may try.
                self._roster.doubt(worker_id)
                continue
            refused += [one for one in ids if one not in accepted]

        async def write(connection: AsyncConnection) -> None:
            await give_back(
                connection, self._database, worker_id, refused, pause_ms=REFUSED_PAUSE_MS
            )

        if refused:
            await self._database.write(write)

    async def _post(self, node: Node, batch: list[HandedOver], term: int) -> set[str] | None:
        """Return the ids that the worker took, or None when that cannot be known."""
        request = DeliverRequest(
            term=term,
            deliveries=[
                Delivery(
                    delivery_id=one.delivery.delivery_id,
                    try_number=one.delivery.try_number,
                    url=one.delivery.url,
                    body=one.delivery.body,
                )
                for one in batch
            ],
        )
        url = node.url + DELIVER_PATH
        try:
            body = request.model_dump_json(by_alias=True).encode()
            reply = await self._client.post(
                url, body, seconds=OFFER_SECONDS, call_token=node.call_token
            )
        except NoAnswer as error:
            log.info("handover_unanswered", url=url, error=str(error))
            return None
        if reply.status != HTTPStatus.OK:
            log.info("handover_refused", url=url, status=reply.status)
            return set() if 400 <= reply.status < 500 else None
        try:
            return set(DeliverResponse.model_validate(reply.body).accepted)
        except ValidationError:
            return None


def _batches(own: list[HandedOver]) -> list[list[HandedOver]]:
    """Split deliveries so that no request is too long for its worker."""
    batches: list[list[HandedOver]] = [[]]
    size = 0
    for one in own:
        length = 2 * len(one.delivery.body.encode()) + 4096
        if batches[-1] and size + length > MAX_REQUEST_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(one)
        size += length
    return batches
