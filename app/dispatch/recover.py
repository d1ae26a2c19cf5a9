"""Recovery: a loop of the holder of the first partition that finds what was left behind.

The others look after their own sends alone.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

import structlog

from app.dispatch.death import Deaths
from app.dispatch.probe import PROBE_SECONDS, Probe, Prober
from app.dispatch.queues import QueueBook
from app.dispatch.seats import Seats
from app.dispatch.send import Sender
from app.ground import Ground
from app.lifecycle.nodes import Node, forget_nodes, read_nodes
from app.lifecycle.running import RunningTask, read_for_sending, read_running
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.http import NoAnswer
from app.plumbing.loops import Loop
from app.plumbing.redis import REDIS_ERRORS
from oncue.protocol import (
    CANCEL_PATH,
    LEASE_SECONDS,
    CancelRequest,
    OutcomeStatus,
    WorkerState,
)

log = structlog.get_logger(__name__)

TICK_SECONDS: Final = 1.0
CANCEL_AGAIN_SECONDS: Final = 30.0
SILENT_AGAIN_SECONDS: Final = 10.0
"""How often a worker that answers, but cannot be heard, is asked what became of its runs."""
MOST_SILENT_RUNS: Final = 500
"""Of so many runs at a look: where many beats are late, the load must not grow by it."""
FORGET_DOWN_MS: Final = 24 * 3600 * 1000


class Recovery:
    """Repeats unanswered sends, has dead workers buried, and asks overdue runs to stop."""

    def __init__(
        self,
        ground: Ground,
        seats: Seats,
        queues: QueueBook,
        sender: Sender,
        prober: Prober,
        deaths: Deaths,
    ) -> None:
        settings = ground.settings
        self._database = ground.database
        self._clock = ground.clock
        self._client = ground.client
        self._metrics = ground.metrics
        self._seats = seats
        self._queues = queues
        self._sender = sender
        self._prober = prober
        self._deaths = deaths
        self._default_timeout_ms = settings.default_timeout_seconds * 1000
        self._overdue_grace_ms = settings.overdue_grace_seconds * 1000
        self._term: int | None = None
        self._missing: dict[str, int] = {}
        self._asked_silent: dict[str, float] = {}
        self._asked_to_stop: dict[str, float] = {}
        self._loop = Loop("recovery", self._step, expected=(DatabaseUnavailable, *REDIS_ERRORS))

    def start(self) -> None:
        """Start looking once a second while the lock is held."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop looking."""
        await self._loop.stop()

    async def _step(self) -> None:
        await asyncio.sleep(TICK_SECONDS)
        term = self._seats.first.term
        if term is None:
            self._term = None
            await self._look_after_own()
            return
        if term != self._term:
            self._term = term
            self._deaths.start_quiet_time()
            self._missing.clear()
            self._asked_to_stop.clear()
        try:
            await self._look(term)
        except DatabaseUnavailable:
            # Beats could not be committed either: nobody is dead because of that.
            self._deaths.start_quiet_time()
            raise

    async def _look_after_own(self) -> None:
        """Send again what is of this holder's partitions: all else is for the first one's."""
        own = self._seats.terms
        if not own:
            self._missing.clear()
            return
        nodes = await self._database.read(read_nodes)
        running = await self._database.read(
            lambda connection: read_running(connection, self._database, of=own)
        )
        await self._send_again({node.worker_id: node for node in nodes}, running)

    async def _look(self, term: int) -> None:
        await self._deaths.watch_redis()
        # In this order: whoever has a run was there when it was claimed. The other way round a
        # worker that is new, or is heard again, would lack a node, and its run be taken for lost.
        running = await self._database.read(
            lambda connection: read_running(connection, self._database)
        )
        nodes = await self._database.read(
            lambda connection: read_nodes(connection, include_down=True)
        )
        await self._deaths.bury(nodes, running, holds=lambda: self._seats.first.term == term)
        reachable = {node.worker_id: node for node in nodes if node.state is not WorkerState.DOWN}
        await self._send_again(reachable, running)
        await self._stop_overdue(reachable, running, term)
        await self._forget_old(nodes)
        for state in WorkerState:
            count = sum(node.state is state for node in nodes)
            self._metrics.workers.labels(str(state)).set(count)
        self._metrics.worker_versions.clear()
        for version, count in Counter(node.version for node in reachable.values()).items():
            self._metrics.worker_versions.labels(version).set(count)

    async def _send_again(self, nodes: dict[str, Node], running: Sequence[RunningTask]) -> None:
        """Send again what no worker answered, and what its worker does not speak of any more.

        That is what two of its beats did not list, and all it has when no beat comes through. Of
        other partitions nothing is sent: their holders know what is on the way.
        """
        own = self._seats.terms
        taken = [
            (task, node)
            for task in running
            if self._queues.partition_of(task.queue_id) in own
            and (node := nodes.get(task.worker_id)) is not None
            and not self._sender.knows(task.execution_id)
        ]
        unlisted = [(task, node) for task, node in taken if task.execution_id not in node.held]
        present = {task.execution_id for task, _ in unlisted}
        self._missing = {one: beat for one, beat in self._missing.items() if one in present}
        again = [
            task
            for task, node in unlisted
            if not task.accepted or self._missed_two_beats(task, node)
        ]
        again += await self._of_silent_workers(taken)
        if not again:
            return
        runs = await self._database.read(lambda connection: read_for_sending(connection, again))
        # Between the two reads a send may have begun.
        runs = [run for run in runs if not self._sender.knows(run.execution_id)]
        for run in runs:
            self._missing.pop(run.execution_id, None)
        if runs:
            self._metrics.recovered.labels("sent_again").inc(len(runs))
            log.info("sent_again", runs=len(runs))
            self._sender.send(runs, again=True)

    async def _of_silent_workers(
        self, taken: Sequence[tuple[RunningTask, Node]]
    ) -> list[RunningTask]:
        """Return the runs of workers that answer a probe, but were not heard of for a whole lease.

        Such a worker cannot report. Its answer to a run that is sent again says how it ended.
        """
        if self._deaths.is_quiet:
            return []
        oldest = self._clock.now_ms() - LEASE_SECONDS * 1000
        silent: dict[str, list[RunningTask]] = defaultdict(list)
        nodes: dict[str, Node] = {}
        for task, node in taken:
            if node.last_heartbeat < oldest:
                silent[node.worker_id].append(task)
                nodes[node.worker_id] = node
        now = time.monotonic()
        self._asked_silent = {
            worker_id: asked
            for worker_id, asked in self._asked_silent.items()
            if now - asked < SILENT_AGAIN_SECONDS
        }
        asked: dict[str, list[RunningTask]] = {}
        room = MOST_SILENT_RUNS
        for worker_id, own in silent.items():
            if worker_id in self._asked_silent:
                continue
            if room <= 0:
                break  # the others come first at the next look
            asked[worker_id] = own if len(own) <= room else random.sample(own, room)
            room -= len(asked[worker_id])
        self._asked_silent.update(dict.fromkeys(asked, now))
        probes = await asyncio.gather(*(self._prober.probe(nodes[one]) for one in asked))
        answers = zip(asked.values(), probes, strict=True)
        return [task for own, probe in answers if probe is Probe.ALIVE for task in own]

    def _missed_two_beats(self, task: RunningTask, node: Node) -> bool:
        if task.claimed_at >= node.last_heartbeat:
            return False
        first = self._missing.setdefault(task.execution_id, node.beats)
        return node.beats > first

    async def _stop_overdue(
        self, nodes: dict[str, Node], running: Sequence[RunningTask], term: int
    ) -> None:
        """Ask workers to stop runs that are long past their timeout and were not reported."""
        now = self._clock.now_ms()
        present = {task.execution_id for task in running}
        self._asked_to_stop = {
            one: asked for one, asked in self._asked_to_stop.items() if one in present
        }
        overdue: dict[str, list[str]] = {}
        for task in running:
            timeout = task.timeout_ms or self._default_timeout_ms
            late = now - (task.started_at or task.claimed_at) - timeout
            asked = self._asked_to_stop.get(task.execution_id, float("-inf"))
            if (
                task.accepted
                and task.worker_id in nodes
                and late > self._overdue_grace_ms
                and time.monotonic() - asked > CANCEL_AGAIN_SECONDS
            ):
                overdue.setdefault(task.worker_id, []).append(task.execution_id)
                self._asked_to_stop[task.execution_id] = time.monotonic()
        await asyncio.gather(
            *(
                self._ask_to_stop(nodes[worker_id], execution_ids, term)
                for worker_id, execution_ids in overdue.items()
            )
        )

    async def _ask_to_stop(self, node: Node, execution_ids: list[str], term: int) -> None:
        request = CancelRequest(
            term=term, execution_ids=execution_ids, reason=OutcomeStatus.TIMED_OUT
        )
        body = request.model_dump_json(by_alias=True).encode()
        try:
            await self._client.post(
                node.url + CANCEL_PATH, body, seconds=PROBE_SECONDS, call_token=node.call_token
            )
        except NoAnswer as error:
            log.info("overdue_not_stopped", worker_id=node.worker_id, error=str(error))
            return
        log.warning("overdue", worker_id=node.worker_id, executions=execution_ids)
        self._metrics.recovered.labels("overdue").inc(len(execution_ids))

    async def _forget_old(self, nodes: Sequence[Node]) -> None:
        oldest = self._clock.now_ms() - FORGET_DOWN_MS
        old = [
            node.worker_id
            for node in nodes
            if node.state is WorkerState.DOWN and node.last_heartbeat < oldest
        ]
        if old:
            await self._database.write(lambda connection: forget_nodes(connection, old))
