"""Handing owed callbacks to workers that deliver: first tries nobody took, and every later try.

Receivers (`host:port`) take turns: each round has as many callbacks of each host that has some
due, so that a host with a long backlog delays only itself. A host that a worker calls no more for
a while is left out until then, and its callbacks keep their tries.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final

import structlog
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.dispatch.lock import DispatchLock
from app.fleet.dress import CANNOT_OPEN, Dresser
from app.fleet.roster import Roster
from app.ground import Ground
from app.lifecycle.moves.deliver import (
    HandedOver,
    OwedHosts,
    give_back,
    note_tries,
    read_owed_hosts,
    take_due,
)
from app.lifecycle.moves.ending import OwedDelivery
from app.lifecycle.nodes import Node
from app.plumbing.bus import OWED
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.http import NoAnswer
from app.plumbing.loops import Loop, Tasks
from oncue.addresses import callback_host
from oncue.protocol import (
    DELIVER_PATH,
    MAX_INTERNAL_BODY_BYTES,
    DeliverRequest,
    DeliverResponse,
    Delivery,
    DeliveryResult,
)

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 1.0
BATCH_LIMIT: Final = 200
HOSTS_AT_ONCE: Final = 500
"""How many hosts one look reads; further ones have the next look."""
HOSTS_IN_A_ROUND: Final = 50
REFUSED_PAUSE_MS: Final = 1000
MOST_SHARES: Final = 10_000
LONGEST_PAUSE_MS: Final = 3600 * 1000
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
        dresser: Dresser,
    ) -> None:
        self._database = ground.database
        self._clock = ground.clock
        self._lock = lock
        self._roster = roster
        self._client = ground.client
        self._metrics = ground.metrics
        self._schedule = ground.settings.callback_schedule_seconds
        self._dresser = dresser
        self._owed = asyncio.Event()
        self._busy: set[str] = set()
        self._paused: dict[tuple[str, str], float] = {}
        self._shares: dict[str, int] = {}
        self._last_host: str | None = None
        self._oldest_ms: float = 0
        self._hosts_due = 0
        self._look_again: float = 0
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
        if term is None:
            self._forget()
            await self._wait(LOOK_SECONDS / 2)
            return
        workers = [
            node.worker_id for node in self._roster.delivering() if node.worker_id not in self._busy
        ]
        if not workers and self._last_host is None and time.monotonic() < self._look_again:
            # Nobody to hand over to: one look in a while tells how long what is owed waits.
            await self._wait(LOOK_SECONDS / 2)
            return
        owed = await self._look()
        dealt = self._deal(owed, workers)
        if dealt:
            await self._hand_over(term, dealt)
        elif self._last_host is None:
            await self._wait(self._pause(owed))

    def _forget(self) -> None:
        """Let whoever has the lock now tell what is owed."""
        self._paused.clear()
        self._shares.clear()
        self._last_host = None
        self._metrics.callback_backlog_age.set(0)
        self._metrics.callback_hosts_due.set(0)
        self._metrics.callback_hosts_paused.set(0)

    async def _look(self) -> OwedHosts:
        """Read the next page of hosts; `_last_host` is None at its end."""
        after = self._last_host
        owed = await self._database.read(
            lambda connection: read_owed_hosts(
                connection, self._database, after=after, limit=HOSTS_AT_ONCE
            )
        )
        self._last_host = max(owed.due_ms) if len(owed.due_ms) >= HOSTS_AT_ONCE else None
        late = [owed.now_ms - due for due in owed.due_ms.values() if due <= owed.now_ms]
        self._oldest_ms = max([0.0 if after is None else self._oldest_ms, *late])
        self._hosts_due = len(late) + (0 if after is None else self._hosts_due)
        if self._last_host is None:
            self._metrics.callback_backlog_age.set(self._oldest_ms / 1000)
            self._metrics.callback_hosts_due.set(self._hosts_due)
            self._look_again = time.monotonic() + LOOK_SECONDS
        return owed

    def _deal(self, owed: OwedHosts, workers: Sequence[str]) -> dict[str, list[str]]:
        """Choose which hosts have their turn, and which of the workers may call each of them."""
        now = time.monotonic()
        self._paused = {pair: until for pair, until in self._paused.items() if until > now}
        self._metrics.callback_hosts_paused.set(len({host for _, host in self._paused}))
        due = [host for host, due_ms in owed.due_ms.items() if due_ms <= owed.now_ms]
        dealt = {
            host: free
            for host in due
            if (free := [one for one in workers if (one, host) not in self._paused])
        }
        if len(dealt) > HOSTS_IN_A_ROUND:
            dealt = {host: dealt[host] for host in random.sample(list(dealt), HOSTS_IN_A_ROUND)}
        return dealt

    def _pause(self, owed: OwedHosts) -> float:
        """Return how long nothing can be due that may be handed over, seconds."""
        waits = [LOOK_SECONDS]
        waits += [until - time.monotonic() for until in self._paused.values()]
        waits += [
            (due_ms - owed.now_ms) / 1000 for due_ms in owed.due_ms.values() if due_ms > owed.now_ms
        ]
        return max(min(waits), LOCKED_PAUSE_SECONDS)

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._owed.wait()
        except TimeoutError:
            return

    async def _hand_over(self, term: int, dealt: Mapping[str, Sequence[str]]) -> None:
        async def take(connection: AsyncConnection) -> list[HandedOver]:
            return await take_due(
                connection, self._database, dealt, limit=BATCH_LIMIT, most=self._shares
            )

        taken = await self._database.write(take)
        if not taken:
            # Another transaction holds the rows: they are looked at again shortly.
            await asyncio.sleep(LOCKED_PAUSE_SECONDS)
            return
        by_worker: dict[str, list[OwedDelivery]] = defaultdict(list)
        for one in taken:
            by_worker[one.worker_id].append(one.delivery)
        for worker_id, own in by_worker.items():
            self._busy.add(worker_id)
            self._tasks.start(self._offer_alone(worker_id, own, term), name=f"offer {worker_id}")

    async def _offer_alone(self, worker_id: str, own: list[OwedDelivery], term: int) -> None:
        """Make one offer to a worker at a time, so that a silent one delays only its own."""
        try:
            made, closed = await self._dresser.dress(own)
            await self._fail(worker_id, closed)
            await self._offer(worker_id, made, term)
        finally:
            self._busy.discard(worker_id)
            self._owed.set()

    async def _fail(self, worker_id: str, closed: Sequence[OwedDelivery]) -> None:
        """Put on record that a callback cannot be sent; it has its next try like any other."""
        results = [
            DeliveryResult(
                delivery_id=one.delivery_id,
                try_number=one.try_number,
                delivered=False,
                error=CANNOT_OPEN,
            )
            for one in closed
        ]
        if results:
            await self._database.write(
                lambda connection: note_tries(
                    connection,
                    self._database,
                    results,
                    worker_id=worker_id,
                    schedule_seconds=self._schedule,
                )
            )

    async def _offer(self, worker_id: str, own: list[Delivery], term: int) -> None:
        """Send deliveries to a worker; what it refuses is due again, what is unclear waits."""
        worker = self._roster.get(worker_id)
        refused: dict[int, list[str]] = defaultdict(list)
        uncalled: list[DeliveryResult] = []
        for batch in _batches(own):
            if worker is None:
                refused[REFUSED_PAUSE_MS] += [one.delivery_id for one in batch]
                continue
            answer = await self._post(worker.node, batch, term)
            if answer is None:
                # It may have them: their leases decide when somebody else may try.
                self._roster.doubt(worker_id)
                continue
            accepted = set(answer.accepted)
            for one in batch:
                if one.delivery_id in accepted:
                    continue
                host = callback_host(one.url)
                pause_ms = min(answer.paused.get(host, 0), LONGEST_PAUSE_MS)
                if pause_ms:
                    uncalled.append(_uncalled(one, pause_ms))
                else:
                    refused[REFUSED_PAUSE_MS].append(one.delivery_id)
                self._hold_back(worker_id, host, pause_ms or REFUSED_PAUSE_MS)
            self._adjust(batch, accepted)
        await self._return(worker_id, refused, uncalled)

    def _hold_back(self, worker_id: str, host: str, pause_ms: int) -> None:
        until = time.monotonic() + pause_ms / 1000
        self._paused[worker_id, host] = max(until, self._paused.get((worker_id, host), until))

    def _adjust(self, batch: Sequence[Delivery], accepted: set[str]) -> None:
        """Offer a host that refused some only as many as it took, and twice as many as it takes."""
        offered = Counter(callback_host(one.url) for one in batch)
        taken = Counter(callback_host(one.url) for one in batch if one.delivery_id in accepted)
        for host, count in offered.items():
            if taken[host] < count:
                self._shares[host] = max(1, taken[host])
            elif host in self._shares:
                self._shares[host] *= 2
                if self._shares[host] >= BATCH_LIMIT:
                    del self._shares[host]
        while len(self._shares) > MOST_SHARES:
            del self._shares[next(iter(self._shares))]

    async def _return(
        self,
        worker_id: str,
        refused: Mapping[int, Sequence[str]],
        uncalled: Sequence[DeliveryResult],
    ) -> None:
        """Make due again what the worker did not take, uncounted."""

        async def write(connection: AsyncConnection) -> None:
            for pause_ms, ids in refused.items():
                await give_back(connection, self._database, worker_id, ids, pause_ms=pause_ms)
            if uncalled:
                await note_tries(
                    connection,
                    self._database,
                    uncalled,
                    worker_id=worker_id,
                    schedule_seconds=self._schedule,
                )

        if refused or uncalled:
            await self._database.write(write)

    async def _post(self, node: Node, batch: list[Delivery], term: int) -> DeliverResponse | None:
        """Return what the worker says, or None when it cannot be known what it took."""
        request = DeliverRequest(term=term, deliveries=batch)
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
            refused = 400 <= reply.status < 500
            return DeliverResponse(worker_id="", accepted=[]) if refused else None
        try:
            answer = DeliverResponse.model_validate(reply.body)
        except ValidationError:
            return None
        if answer.worker_id != node.worker_id:
            # Another boot at its address: what it took is not its own by our books.
            log.info("handover_to_another_boot", url=url, worker_id=node.worker_id)
            return None
        return answer


def _uncalled(delivery: Delivery, pause_ms: int) -> DeliveryResult:
    """Say of a delivery that its host is not called for a while; spread out what comes back."""
    return DeliveryResult(
        delivery_id=delivery.delivery_id,
        try_number=delivery.try_number,
        delivered=False,
        not_tried=True,
        error="not tried: its host gave no answer lately",
        retry_after_ms=round(pause_ms * random.uniform(1.0, 1.2)),
    )


def _batches(own: list[Delivery]) -> list[list[Delivery]]:
    """Split deliveries so that no request is too long for its worker."""
    batches: list[list[Delivery]] = [[]]
    size = 0
    for one in own:
        length = 2 * len(one.body.encode()) + 8192
        if batches[-1] and size + length > MAX_REQUEST_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(one)
        size += length
    return batches
