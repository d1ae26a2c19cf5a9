"""Sending runs to workers: in batches, and an ambiguous send again to the same worker only."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import orjson
import structlog
import uuid_utils
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.dispatch.queues import QueueBook
from app.dispatch.seats import Seats
from app.fleet.balance import choose
from app.fleet.dress import Dresser
from app.fleet.reports import ending_of
from app.fleet.roster import Roster
from app.fleet.settler import Settler
from app.ground import Ground
from app.lifecycle.callback_body import wants
from app.lifecycle.moves.assign import Reassignment, note_running, reassign
from app.lifecycle.moves.claim import Claimed
from app.lifecycle.moves.ending import MAX_REASON_LENGTH, Ending
from app.lifecycle.moves.tell_start import tell_starts
from app.lifecycle.nodes import Node
from app.lifecycle.running import read_unwanted
from app.lifecycle.secret_marks import SECRET_PARAMS, SECRET_RESULT
from app.lifecycle.states import ExecutionStatus, JobStatus
from app.lifecycle.term import FIRST
from app.lifecycle.token import new_token
from app.plumbing.bus import ENDED, LOAD, OWED, Signal
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.http import NoAnswer, Reply
from app.plumbing.json_text import Unencodable
from app.plumbing.loops import Loop, Tasks
from app.plumbing.sealed import CannotOpen, is_sealed
from oncue.protocol import (
    MAX_RUNS_PER_REQUEST,
    PROTOCOL_VERSION,
    RUN_PATH,
    Answer,
    RejectReason,
    RunAnswer,
    RunResponse,
)

log = structlog.get_logger(__name__)

FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 2.0
NOTE_AFTER_SECONDS: Final = 1.0
WANTED_SECONDS: Final = 30.0
"""After so long a send is repeated only while its runs are those of their jobs. A worker remembers
much longer that a run has ended: once it has forgotten, it would take the run for a new one."""
CALLS_URLS: Final = "http"
"""The built-in handler that calls what its params name: within the networks of their tenant."""
TIMER_SECONDS: Final = 0.001
"""By so much a timer may end too soon."""
MAX_SEND_BYTES: Final = 4 * 1024 * 1024


class Fence(NamedTuple):
    """A partition, and the term in which its runs are sent."""

    partition: int
    term: int

    def document(self) -> dict[str, Any]:
        """Return what a worker is told: a seat only of other partitions than the first."""
        if self.partition == FIRST:
            return {"term": self.term}
        return {"term": 0, "seat": self._asdict()}


class Sender:
    """Delivers claimed runs to their workers until each is answered, or its worker is dead.

    What a worker refuses is given to another one, committed before it is sent, or back to the
    queue. "Never sent" cannot be known, so nothing that was not answered goes elsewhere.
    """

    def __init__(
        self,
        ground: Ground,
        seats: Seats,
        roster: Roster,
        queues: QueueBook,
        settler: Settler,
        dresser: Dresser,
    ) -> None:
        self._database = ground.database
        self._clock = ground.clock
        self._seats = seats
        self._roster = roster
        self._queues = queues
        self._settler = settler
        self._dresser = dresser
        self._sealer = ground.sealer
        self._client = ground.client
        self._bus = ground.bus
        self._metrics = ground.metrics
        self._default_timeout_ms = round(ground.settings.default_timeout_seconds * 1000)
        self._policy = ground.settings.balance
        self._unanswered: dict[str, Sequence[Claimed]] = {}
        self._accepted: dict[str, tuple[float, int]] = {}
        self._tasks = Tasks()
        self._notes = Loop("note-running", self._note, expected=(DatabaseUnavailable,))
        ground.bus.subscribe(ENDED, self._on_ended)

    def start(self) -> None:
        """Start noting the runs that go on for more than a second."""
        self._notes.start()

    async def stop(self) -> None:
        """Stop sending; the next holder sends again what was not answered."""
        await self._notes.stop()
        await self._tasks.stop()

    def reset(self) -> None:
        """Forget what an earlier term of this process had on the way."""
        self._roster.forget_sent()
        self._unanswered.clear()
        self._accepted.clear()
        self._metrics.in_flight.set(0)

    def knows(self, execution_id: str) -> bool:
        """Tell whether a run is on the way, or was accepted and is not noted yet."""
        return execution_id in self._unanswered or execution_id in self._accepted

    def send(self, runs: Sequence[Claimed], *, again: bool = False) -> None:
        """Send runs to their workers in the background."""
        by_worker: dict[tuple[str, int], list[Claimed]] = defaultdict(list)
        for run in runs:
            by_worker[run.worker_id, self._partition(run)].append(run)
            self._roster.sent(run.worker_id, run.execution_id)
        for (worker_id, partition), own in by_worker.items():
            for batch in _batches(own):
                self._unanswered.update((run.execution_id, batch) for run in batch)
                self._tasks.start(
                    self._send_batch(worker_id, partition, batch, again), name=f"send {worker_id}"
                )
        self._metrics.in_flight.set(len(self._unanswered))

    def _partition(self, run: Claimed) -> int:
        return self._queues.partition_of(run.queue_id) or FIRST

    async def _send_batch(
        self, worker_id: str, partition: int, runs: list[Claimed], ambiguous: bool
    ) -> None:
        pause, began = FIRST_PAUSE_SECONDS, time.monotonic()
        sent = runs
        term = self._seats.term_of(partition)
        try:
            runs = await self._readable(runs, ambiguous)
            # A later term of this process sends again by itself what was not answered.
            while runs and term is not None and self._seats.term_of(partition) == term:
                fence = Fence(partition, term)
                if ambiguous and time.monotonic() - began > WANTED_SECONDS:
                    runs = await self._still_wanted(runs)
                    if not runs:
                        return
                worker = self._roster.get(worker_id)
                if worker is None:
                    # Dead or gone: recovery decides, it has the proof.
                    return
                if not worker.waits:
                    await self._wait_for_their_time(runs)
                reply = await self._post(worker.node, fence, runs)
                response = _parsed(reply, worker_id)
                if response is not None:
                    self._roster.trust(worker_id)
                    self._roster.note_waits(worker_id, response.waits)
                    self._roster.note_seats(worker_id, response.seats)
                    await self._take_answers(worker_id, runs, response, fence)
                    return
                if reply is not None and reply.status == HTTPStatus.CONFLICT:
                    # The next term sends again what it finds unanswered, whatever came of this.
                    self._seats.give_up(partition, term, "a worker knows a higher term")
                    return
                if reply is not None and _refused_whole(reply) and not ambiguous:
                    self._roster.doubt(worker_id)
                    await self._replace(
                        runs, dict.fromkeys(_ids(runs), f"http_{reply.status}"), fence
                    )
                    return
                ambiguous = True
                self._roster.doubt(worker_id)
                log.warning(
                    "send_unanswered",
                    worker_id=worker_id,
                    runs=len(runs),
                    status=None if reply is None else reply.status,
                )
                await asyncio.sleep(pause * random.uniform(0.5, 1))
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
        finally:
            for run in sent:
                # One of a later term may be on the way by now.
                if self._unanswered.get(run.execution_id) is sent:
                    del self._unanswered[run.execution_id]
                    self._roster.answered(worker_id, run.execution_id)
            self._metrics.in_flight.set(len(self._unanswered))

    async def _still_wanted(self, runs: list[Claimed]) -> list[Claimed]:
        """Return the runs that have not ended: their worker may have told so by a report.

        While that cannot be known nothing is sent.
        """
        held = [(run.job_id, run.execution_id) for run in runs]
        while True:
            try:
                over = set(
                    await self._database.read(lambda connection: read_unwanted(connection, held))
                )
            except DatabaseUnavailable as error:
                log.info("sends_wait", runs=len(runs), error=str(error))
                await asyncio.sleep(LONGEST_PAUSE_SECONDS)
            else:
                return [run for run in runs if run.execution_id not in over]

    async def _post(self, node: Node, fence: Fence, runs: Sequence[Claimed]) -> Reply | None:
        url = node.url + RUN_PATH
        try:
            networks = await self._networks(runs)
        except DatabaseUnavailable:
            return None
        body = orjson.dumps(
            {
                "protocol": PROTOCOL_VERSION,
                "workerId": node.worker_id,
                **fence.document(),
                "sentAt": int(self._clock.now_ms()),
                "runs": [
                    self._run_document(run, node, networks.get(run.execution_id)) for run in runs
                ],
            }
        )
        try:
            reply = await self._client.post(url, body, call_token=node.call_token)
        except NoAnswer as error:
            self._metrics.sends.labels("no_answer").inc()
            log.debug("send_failed", url=url, error=str(error))
            return None
        self._metrics.sends.labels(str(reply.status)).inc()
        return reply

    async def _networks(self, runs: Sequence[Claimed]) -> dict[str, list[str]]:
        """Return what tenants have said of the networks that their `http` runs may call."""
        return {
            run.execution_id: list(allowed)
            for run in runs
            if run.job_handler == CALLS_URLS
            and (allowed := (await self._dresser.wishes(run.tenant_id)).egress_allow) is not None
        }

    async def _readable(self, runs: list[Claimed], ambiguous: bool) -> list[Claimed]:
        """Return the runs whose secrets can be opened here; the others fail for now.

        What may have been sent before is left alone: its worker tells how it ends.
        """
        closed = [run for run in runs if not self._opens(run)]
        if not closed:
            return runs
        log.error("secrets_cannot_be_opened", executions=_ids(closed))
        if not ambiguous:
            await asyncio.gather(*(self._settler.settle(self._closed(run)) for run in closed))
        return [run for run in runs if run not in closed]

    def _opens(self, run: Claimed) -> bool:
        if run.secret & SECRET_RESULT and not self._sealer.has_keys:
            return False
        if not is_sealed(run.params):
            return True
        try:
            self._sealer.open_body(run.params or "")
        except CannotOpen:
            return False
        return True

    def _closed(self, run: Claimed) -> Ending:
        return Ending(
            execution_id=run.execution_id,
            job_id=run.job_id,
            status=ExecutionStatus.FAILED,
            error_code="secret_keys_missing",
            error_message="ONCUE_SECRET_KEYS of the dispatcher lacks the key of this job's secrets",
            in_term=self._seats.term_of(self._partition(run)) or 0,
            in_partition=self._partition(run),
        )

    def _secrets(self, run: Claimed, node: Node) -> dict[str, Any]:
        """Say of secret params that they are; give the key that a secret result is sealed with."""
        said: dict[str, Any] = {"secretParams": True} if run.secret & SECRET_PARAMS else {}
        if run.secret & SECRET_RESULT or (
            run.job_handler in node.secret_handlers and self._sealer.has_keys
        ):
            said["resultKey"] = self._sealer.result_key(run.execution_id)
        return said

    def _run_document(self, run: Claimed, node: Node, networks: list[str] | None) -> dict[str, Any]:
        params = run.params
        if params is not None:
            params = self._sealer.open_body(params)
        return {
            "jobId": run.job_id,
            "executionId": run.execution_id,
            "triggerTs": run.trigger_ts,
            "attempt": run.attempt,
            "maxAttempts": run.max_retry + 1,
            "jobName": run.job_name,
            "jobHandler": run.job_handler,
            "clientRequestId": run.client_request_id,
            "params": None if params is None else orjson.Fragment(params),
            "timeoutMs": run.timeout_ms or self._default_timeout_ms,
            "shardIndex": run.shard_index,
            "shardTotal": run.shard_total,
            **({} if run.nominal_time is None else {"nominalTime": run.nominal_time}),
            **self._start(run),
            **self._secrets(run, node),
            **({} if networks is None else {"egressAllow": networks}),
        }

    def _start(self, run: Claimed) -> dict[str, float | int]:
        """Tell when to begin what was claimed a moment before its time.

        A pause, so that no clock but the dispatcher's counts: that is never ahead of the
        database's, so the run is never early. And a time, for workers that have a bound of their
        own: on the way of this request the pause has begun already.
        """
        left = run.due_ms - self._clock.now_ms()
        return {"startInMs": round(left, 1), "dueAt": run.due_ms} if left > 0 else {}

    async def _wait_for_their_time(self, runs: Sequence[Claimed]) -> None:
        """Keep runs that are for a worker which would begin them at once."""
        left = max(run.due_ms for run in runs) - self._clock.now_ms()
        if left > 0:
            await asyncio.sleep(left / 1000 + TIMER_SECONDS)

    async def _take_answers(
        self, worker_id: str, runs: Sequence[Claimed], response: RunResponse, fence: Fence
    ) -> None:
        by_id = {run.execution_id: run for run in runs}
        refused: dict[str, str] = {}
        endings: list[Ending] = []
        stuck: list[Claimed] = []
        begun: dict[int, str] = {}
        now = time.monotonic()
        for answer in response.answers:
            run = by_id.pop(answer.execution_id, None)
            if run is None:
                continue
            self._roster.answered(worker_id, answer.execution_id)
            if answer.answer is Answer.REJECTED:
                # Known as on the way until its return is committed: recovery must not send it.
                refused[answer.execution_id] = str(answer.reason)
                if answer.reason == "draining":
                    self._roster.mark_draining(worker_id)
            elif (ending := self._stored_outcome(answer, worker_id)) is not None:
                endings.append(ending)
            elif answer.owner_execution_id in (None, answer.execution_id):
                self._accepted[answer.execution_id] = (now, int(self._clock.now_ms()))
                if run.callback_events and wants(run.callback_events, JobStatus.RUNNING):
                    begun[run.job_id] = run.execution_id
            else:
                # An earlier execution of the same attempt holds the run key: a new attempt, with
                # a key of its own, is the way out.
                stuck.append(run)
                log.warning(
                    "attempt_run_under_another_execution",
                    job_id=run.job_id,
                    execution_id=answer.execution_id,
                    owner=answer.owner_execution_id,
                )
        # Slots may have come free without the worker's count falling: let the loop look. Others
        # that send to the same worker must know what it holds now.
        self._bus.publish(
            LOAD,
            [worker_id, response.load.seq, response.load.active],
            here_only=self._roster.portion is None,
        )
        if begun:
            self._tasks.start(self._tell_starts(begun), name=f"tell starts {worker_id}")
        if endings:
            await asyncio.gather(*(self._settler.settle(ending) for ending in endings))
        if refused:
            await self._replace(
                [run for run in runs if run.execution_id in refused], refused, fence
            )
        await self._give_back(stuck, dict.fromkeys(_ids(stuck), "its run key is taken"), fence)

    async def _tell_starts(self, begun: dict[int, str]) -> None:
        """Owe the callbacks of begun attempts; what cannot be written now is owed by their ends."""
        try:
            owed = await self._database.write(
                lambda connection: tell_starts(connection, self._database, begun)
            )
        except DatabaseUnavailable as error:
            log.info("starts_not_told", runs=len(begun), error=str(error))
            return
        if owed:
            self._bus.publish(OWED, [])

    async def _replace(
        self, runs: Sequence[Claimed], reasons: dict[str, str], fence: Fence
    ) -> None:
        """Give refused runs to other workers, or back to their queue."""
        moves: list[Reassignment] = []
        for run in runs:
            self._roster.over(run.execution_id)
            other = choose(
                [
                    slots
                    for slots in self._roster.slots_for(
                        run.job_handler,
                        self._queues.requirement(run.queue_id),
                        seated=fence.partition != FIRST,
                    )
                    if slots.worker_id != run.worker_id
                ],
                self._policy,
                draw=random.random(),
                turn=run.job_id,
                key=str(run.job_id),
            )
            if other is not None:
                moves.append(
                    Reassignment(
                        job_id=run.job_id,
                        refused_execution_id=run.execution_id,
                        worker_id=other.worker_id,
                        execution_id=str(uuid_utils.uuid7()),
                        reason=f"refused by {run.worker_id}: {reasons[run.execution_id]}",
                        counts=self._counts(reasons[run.execution_id]),
                    )
                )
                self._roster.sent(other.worker_id, moves[-1].execution_id)
        token = new_token()

        async def write(connection: AsyncConnection) -> list[Claimed]:
            return await reassign(
                connection,
                self._database,
                moves,
                token=token,
                term=fence.term,
                partition=fence.partition,
            )

        try:
            moved = await self._database.write(write) if moves else []
        finally:
            for move in moves:
                self._roster.answered(move.worker_id, move.execution_id)
                self._roster.over(move.execution_id)
        self.send(moved)
        elsewhere = {run.job_id for run in moved}
        await self._give_back([run for run in runs if run.job_id not in elsewhere], reasons, fence)

    def _counts(self, reason: str) -> bool:
        """Tell whether a refusal counts: not where others may have filled the worker meanwhile."""
        return reason != RejectReason.FULL or not self._seats.are_many

    def _stored_outcome(self, answer: RunAnswer, worker_id: str) -> Ending | None:
        """Return the end that a duplicate brought; what cannot be read here is reported yet."""
        if answer.outcome is None or answer.outcome.execution_id != answer.execution_id:
            return None
        try:
            return ending_of(answer.outcome, worker_id, self._sealer)
        except (Unencodable, CannotOpen):
            return None

    async def _give_back(
        self, runs: Sequence[Claimed], reasons: dict[str, str], fence: Fence
    ) -> None:
        """Return runs that no worker has to their queues."""
        await asyncio.gather(
            *(
                self._settler.settle(
                    Ending(
                        execution_id=run.execution_id,
                        job_id=run.job_id,
                        status=ExecutionStatus.RETURNED,
                        error_code="refused",
                        error_message=f"The worker refused the run: {reasons[run.execution_id]}.",
                        reason=(f"refused by {run.worker_id}: {reasons[run.execution_id]}")[
                            :MAX_REASON_LENGTH
                        ],
                        in_term=fence.term,
                        in_partition=fence.partition,
                        counts=self._counts(reasons[run.execution_id]),
                    )
                )
                for run in runs
            )
        )

    async def _note(self) -> None:
        """Write the acceptance of runs that go on, a second's worth in one statement."""
        await asyncio.sleep(NOTE_AFTER_SECONDS / 2)
        before = time.monotonic() - NOTE_AFTER_SECONDS
        still = [
            (execution_id, accepted_at)
            for execution_id, (noted_at, accepted_at) in self._accepted.items()
            if noted_at <= before
        ][:MAX_RUNS_PER_REQUEST]
        if still:
            await self._database.write(
                lambda connection: note_running(connection, self._database, still)
            )
            for execution_id, _ in still:
                self._accepted.pop(execution_id, None)

    def _on_ended(self, signal: Signal) -> None:
        for _job_id, execution_id in signal:
            self._accepted.pop(execution_id, None)


def _ids(runs: Sequence[Claimed]) -> list[str]:
    return [run.execution_id for run in runs]


def _batches(runs: list[Claimed]) -> list[list[Claimed]]:
    """Split runs so that no request is too long for its worker."""
    batches: list[list[Claimed]] = [[]]
    size = 0
    for run in runs:
        length = len(run.params or "") * 3 + 1024
        if batches[-1] and (
            len(batches[-1]) >= MAX_RUNS_PER_REQUEST or size + length > MAX_SEND_BYTES
        ):
            batches.append([])
            size = 0
        batches[-1].append(run)
        size += length
    return batches


def _parsed(reply: Reply | None, worker_id: str) -> RunResponse | None:
    """Return the answer if it is one of this worker: a proxy's page or another boot's is none."""
    if reply is None or reply.status != 200:
        return None
    try:
        response = RunResponse.model_validate(reply.body)
    except ValidationError:
        return None
    return response if response.worker_id == worker_id else None


def _refused_whole(reply: Reply) -> bool:
    """A 4xx says that nothing of the request was taken; 408, 425 and 429 ask to send it again."""
    return 400 <= reply.status < 500 and reply.status not in (404, 408, 421, 425, 429)
