"""Asking workers who they are: only its own boot id, at its address, proves that one lives."""

from __future__ import annotations

import time
from enum import Enum
from http import HTTPStatus
from typing import Final

import structlog

from app.dispatch.seats import Seats
from app.fleet.roster import Roster
from app.ground import Ground
from app.lifecycle.nodes import Node
from app.lifecycle.term import FIRST
from app.plumbing.bus import LOAD
from app.plumbing.http import NoAnswer
from app.plumbing.loops import Tasks
from oncue.protocol import RUN_PATH, RunRequest, Seat

log = structlog.get_logger(__name__)

PROBE_SECONDS: Final = 3.0
AGAIN_SECONDS: Final = 1.0


class Probe(Enum):
    """What a worker's `/healthz` said."""

    ALIVE = "alive"
    FAILED = "failed"
    STALLED = "stalled"


class Prober:
    """Probes workers, and takes back the doubt about those that answer."""

    def __init__(self, ground: Ground, roster: Roster, seats: Seats) -> None:
        self._client = ground.client
        self._seats = seats
        self._bus = ground.bus
        self._roster = roster
        self._asked_at: dict[str, float] = {}
        self._tasks = Tasks()

    async def stop(self) -> None:
        """Stop asking."""
        await self._tasks.stop()

    async def probe(self, node: Node) -> Probe:
        """Ask one worker.

        Refused, reset, closed, or answered by another boot or a proxy's error is failed;
        accepted but silent is stalled.
        """
        try:
            reply = await self._client.get(
                f"{node.url}/healthz", seconds=PROBE_SECONDS, call_token=node.call_token
            )
        except NoAnswer as error:
            return Probe.STALLED if error.connected else Probe.FAILED
        if isinstance(reply.body, dict) and reply.body.get("bootId") == node.boot_id:
            return Probe.ALIVE
        return Probe.FAILED

    def clear_suspects(self, partition: int, term: int) -> None:
        """Ask in the background those that beat but have not answered, once a second each.

        They are asked the way work is sent, by a `/run` without runs: an address that answers
        `/healthz` may still refuse this dispatcher's token, or be unable to take a lease.
        """
        now = time.monotonic()
        suspects = self._roster.suspects()
        self._asked_at = {
            node.worker_id: self._asked_at[node.worker_id]
            for node in suspects
            if node.worker_id in self._asked_at
        }
        for node in suspects:
            if now - self._asked_at.get(node.worker_id, float("-inf")) >= AGAIN_SECONDS:
                self._asked_at[node.worker_id] = now
                self._tasks.start(
                    self._clear(node, partition, term), name=f"probe {node.worker_id}"
                )

    async def _clear(self, node: Node, partition: int, term: int) -> None:
        request = RunRequest(worker_id=node.worker_id, term=term, runs=[])
        if partition != FIRST:
            seat = Seat(partition=partition, term=term)
            request = request.model_copy(update={"term": 0, "seat": seat})
        try:
            reply = await self._client.post(
                node.url + RUN_PATH,
                request.model_dump_json(by_alias=True).encode(),
                seconds=PROBE_SECONDS,
                call_token=node.call_token,
            )
        except NoAnswer as error:
            log.debug("suspect_silent", worker_id=node.worker_id, error=str(error))
            return
        body = reply.body if isinstance(reply.body, dict) else {}
        if body.get("code") == "stale_term" and self._tells_terms_apart(node, partition):
            # The database has lost terms, as by a failover: a new one is begun until it is enough.
            self._seats.give_up(partition, term, "a worker knows a higher term")
            return
        own = body.get("workerId") == node.worker_id
        if reply.status == HTTPStatus.OK and own:
            self._roster.trust(node.worker_id)
            self._roster.note_waits(node.worker_id, body.get("waits") is True)
            self._roster.note_seats(node.worker_id, body.get("seats") is True)
            self._bus.publish(LOAD, [node.worker_id, node.load_seq, node.active], here_only=True)

    def _tells_terms_apart(self, node: Node, partition: int) -> bool:
        """One that knows no partitions takes the term of any but the first for a low one."""
        worker = self._roster.get(node.worker_id)
        return partition == FIRST or (worker is not None and worker.seats)
