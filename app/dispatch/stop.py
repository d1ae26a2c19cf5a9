"""Stopping runs whose job was cancelled: their workers are asked until it is known to be over."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Final

import structlog
from pydantic import ValidationError

from app.dispatch.lock import DispatchLock
from app.fleet.roster import Roster
from app.ground import Ground
from app.lifecycle.moves.release import read_stopping, release_stopped
from app.plumbing.bus import CANCEL, WAKE, Signal
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.http import NoAnswer
from app.plumbing.loops import Loop
from oncue.protocol import (
    CANCEL_PATH,
    MAX_RUNS_PER_REQUEST,
    CancelRequest,
    CancelResponse,
)

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 1.0
AGAIN_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 3.0


class Stopper:
    """The lock holder's loop over the runs that may go on after their end.

    A worker that does not know such a run (it never came, or is forgotten) refuses it from then
    on, so it is over. One that reports its end is believed too; a dead one is recovery's.
    """

    def __init__(self, ground: Ground, lock: DispatchLock, roster: Roster) -> None:
        self._database = ground.database
        self._bus = ground.bus
        self._client = ground.client
        self._lock = lock
        self._roster = roster
        self._cancelled = asyncio.Event()
        self._asked: dict[str, float] = {}
        self._loop = Loop("stopper", self._step, expected=(DatabaseUnavailable,))
        ground.bus.subscribe(CANCEL, self._on_cancel)

    def start(self) -> None:
        """Start asking while the lock is held."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop asking."""
        await self._loop.stop()

    async def _step(self) -> None:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await self._cancelled.wait()
        except TimeoutError:
            pass
        self._cancelled.clear()
        term = self._lock.term
        if term is not None:
            await self._look(term)

    async def _look(self, term: int) -> None:
        now = time.monotonic()
        runs = await self._database.read(read_stopping)
        present = {run.execution_id for run in runs}
        self._asked = {one: at for one, at in self._asked.items() if one in present}
        by_worker: dict[str, list[str]] = defaultdict(list)
        for run in runs:
            asked_at = self._asked.get(run.execution_id, float("-inf"))
            ids = by_worker[run.worker_id]
            if now - asked_at >= AGAIN_SECONDS and len(ids) < MAX_RUNS_PER_REQUEST:
                ids.append(run.execution_id)
                self._asked[run.execution_id] = now
        answers = await asyncio.gather(
            *(self._ask(worker_id, ids, term) for worker_id, ids in by_worker.items() if ids)
        )
        over = sorted(one for answer in answers for one in answer)
        if over:
            released = await self._database.write(
                lambda connection: release_stopped(connection, over)
            )
            wakes = [
                [one.queue_id, one.priority, one.due_ms]
                for one in released
                if one.due_ms is not None
            ]
            if wakes:
                self._bus.publish(WAKE, wakes)

    async def _ask(self, worker_id: str, execution_ids: list[str], term: int) -> list[str]:
        """Ask a worker to stop runs, and return those that it does not have."""
        worker = self._roster.get(worker_id)
        if worker is None:
            return []
        body = CancelRequest(term=term, execution_ids=execution_ids).model_dump_json(by_alias=True)
        url = worker.node.url + CANCEL_PATH
        try:
            reply = await self._client.post(
                url,
                body.encode(),
                seconds=ANSWER_SECONDS,
                call_token=worker.node.call_token,
            )
            if reply.status != 200:
                log.info("cancel_refused", worker_id=worker_id, status=reply.status)
                return []
            answer = CancelResponse.model_validate(reply.body)
        except (NoAnswer, ValidationError) as error:
            log.info("cancel_unanswered", worker_id=worker_id, error=type(error).__name__)
            return []
        # Another boot at the same address knows nothing of this worker's runs.
        return (
            list(set(answer.unknown) & set(execution_ids)) if answer.worker_id == worker_id else []
        )

    def _on_cancel(self, _signal: Signal) -> None:
        self._cancelled.set()
