"""Takes runs and cancels: the worker's side of `POST /run` and `POST /cancel`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, NoReturn

import orjson
import structlog
from pydantic import Field

from oncue.handlers import RegisteredHandler
from oncue.protocol import (
    LATEST_RUN_SECONDS,
    LEASE_SECONDS,
    MAX_RUNS_PER_REQUEST,
    Answer,
    CancelRequest,
    CancelResponse,
    Int64,
    Message,
    RejectReason,
    Run,
    RunRequest,
    Seat,
    run_key,
    run_mark,
)
from worker.clock import DatabaseClock, boot_seconds
from worker.execute import Executor, cancelled_as
from worker.held import Execution, Held, Known, Phase, Terms
from worker.lease import Leases, LeaseUnavailable, Wanted

log = structlog.get_logger(__name__)

RunAnswerFields = dict[str, Any]
LATEST_LEASE_SECONDS: Final = LEASE_SECONDS / 3
"""A lease that was asked for longer ago is not begun on."""


class UnreadableRun(Message):
    """A run of which only the id can be read."""

    execution_id: str


class ReceivedRuns(Message):
    """A `RunRequest` in which each run is read for itself, so that a bad one is refused alone."""

    term: Int64
    seat: Seat | None = None
    worker_id: str | None = None
    sent_at: int | None = None
    runs: list[Annotated[Run | UnreadableRun, Field(union_mode="left_to_right")]] = Field(
        max_length=MAX_RUNS_PER_REQUEST
    )


class OtherWorker(Exception):
    """The runs are for another boot of this worker, or for another worker."""


class RunsTooOld(Exception):
    """The request waited for so long that its runs may have been given up meanwhile."""


class Intake:
    """Decides about each run: what is held or finished first, then Redis, then the limits."""

    def __init__(
        self,
        *,
        worker_id: str,
        boot_id: str,
        prefix: str,
        offered: Mapping[str, RegisteredHandler],
        held: Held,
        terms: Terms,
        leases: Leases,
        executor: Executor,
        clock: DatabaseClock,
        may_begin: Callable[[], bool] = lambda: True,
    ) -> None:
        self._worker_id = worker_id
        self._may_begin = may_begin
        self._boot_id = boot_id
        self._prefix = prefix
        self._offered = offered
        self._held = held
        self._terms = terms
        self._leases = leases
        self._executor = executor
        self._clock = clock
        self._background: set[asyncio.Task[None]] = set()

    async def take(self, request: RunRequest | ReceivedRuns) -> bytes:
        """Answer all runs of a request, as the JSON of a `RunResponse`.

        Raises:
            StaleTerm: the sender has lost the dispatch lock.
            RunsTooOld: the request has waited too long, maybe while this process was frozen.
            LeaseUnavailable: Redis did not answer in time; nothing of the request was started.
        """
        if request.worker_id not in (None, self._worker_id):
            raise OtherWorker(f"this is {self._worker_id}, not {request.worker_id}")
        arrived = time.monotonic()
        if request.seat is None:
            self._terms.admit(request.term)
        else:
            self._terms.admit(request.seat.term, request.seat.partition)
        self._refuse_old(request.sent_at)
        if request.sent_at is not None:
            self._clock.lower_bound.hear(request.sent_at, arrived)
        if not request.runs and not await self._leases.is_reachable():
            # A dispatcher asks whether work could be sent: not without leases.
            raise LeaseUnavailable("Redis does not answer")
        answers: dict[int, RunAnswerFields] = {}
        pending: list[tuple[int, Run]] = []
        for index, run in enumerate(request.runs):
            if isinstance(run, Run):
                pending.append((index, run))
            else:
                answers[index] = self._refuse_unreadable(run)
        while pending:
            pending = await self._take_round(pending, answers, arrived)
        return orjson.dumps(
            {
                "workerId": self._worker_id,
                "load": self._held.load().model_dump(by_alias=True),
                "waits": True,
                "seats": True,
                "answers": [answers[index] for index in range(len(request.runs))],
            }
        )

    def cancel(self, request: CancelRequest) -> CancelResponse:
        """Stop what is held of these executions and refuse the others for the future.

        Raises:
            StaleTerm: the sender has lost the dispatch lock.
        """
        self._terms.admit(request.term)
        stopped: list[str] = []
        unknown: list[str] = []
        for execution_id in request.execution_ids:
            execution = self._held.live.get(execution_id)
            if execution is not None and execution.phase is not Phase.RESERVED:
                self._executor.stop(execution, cancelled_as(request.reason.value))
                stopped.append(execution_id)
            elif execution_id in self._held.unacknowledged:
                stopped.append(execution_id)
            else:
                self._held.refuse(execution_id, RejectReason.CANCELLED)
                unknown.append(execution_id)
        return CancelResponse(worker_id=self._worker_id, stopped=stopped, unknown=unknown)

    async def _take_round(
        self,
        pending: Sequence[tuple[int, Run]],
        answers: dict[int, RunAnswerFields],
        arrived: float,
    ) -> list[tuple[int, Run]]:
        """Answer what can be answered now; the rest waits for reservations made by others."""
        reserved: dict[int, Execution] = {}
        looked_at: dict[int, tuple[Run, RejectReason]] = {}
        later: list[tuple[int, Run]] = []
        blockers: list[Execution] = []
        for index, run in pending:
            known = self._held.find_attempt(run)
            blocker = self._held.reservation_of(run)
            if known is not None:
                answers[index] = _duplicate(run.execution_id, known)
            elif refusal := self._held.refusal_of(run.execution_id):
                answers[index] = self._reject(run.execution_id, refusal)
            elif blocker is not None:
                later.append((index, run))
                blockers.append(blocker)
            elif reason := self._limit(run):
                looked_at[index] = run, reason
            else:
                reserved[index] = self._reserve(run, arrived)
        if reserved or looked_at:
            await self._lease(reserved, looked_at, answers)
        for blocker in blockers:
            await blocker.settled.wait()
        return later

    def _refuse_old(self, sent_at: int | None) -> None:
        age_ms = 0 if sent_at is None else self._clock.now_ms() - sent_at
        if age_ms > LATEST_RUN_SECONDS * 1000:
            raise RunsTooOld(f"the request is {age_ms / 1000:.0f} s old")

    def _limit(self, run: Run) -> RejectReason | None:
        if self._held.draining:
            return RejectReason.DRAINING
        if run.job_handler not in self._offered:
            return RejectReason.UNKNOWN_HANDLER
        return RejectReason.FULL if self._held.full else None

    def _reserve(self, run: Run, arrived: float) -> Execution:
        execution = Execution(
            run=run,
            handler=self._offered[run.job_handler],
            key=run_key(self._prefix, run.job_id, run.trigger_ts),
            mark=run_mark(self._boot_id, run.execution_id),
            accepted_at=self._clock.now_ms(),
            start_at=self._start_at(run, arrived),
        )
        self._held.reserve(execution)
        return execution

    def _start_at(self, run: Run, arrived: float) -> float | None:
        """Return when to begin: the first of two moments that are both not too early."""
        if run.start_in_ms is None:
            return None
        over = arrived + run.start_in_ms / 1000
        if run.due_at is None:
            return over
        return min(over, self._clock.lower_bound.reached_at(run.due_at))

    async def _lease(
        self,
        reserved: Mapping[int, Execution],
        looked_at: Mapping[int, tuple[Run, RejectReason]],
        answers: dict[int, RunAnswerFields],
    ) -> None:
        wanted = [Wanted(one.key, one.mark) for one in reserved.values()]
        wanted += [
            Wanted(run_key(self._prefix, run.job_id, run.trigger_ts))
            for run, _ in looked_at.values()
        ]
        try:
            values = await self._take_leases(wanted)
        except BaseException:
            for execution in reserved.values():
                self._held.roll_back(execution)
            raise
        if reserved and not self._may_begin():
            self._refuse_unheard(reserved.values())
        try:
            self._begin_leased(reserved, values, answers)
        except BaseException:
            # Whoever waits for one that is neither begun nor rolled back would wait for ever. The
            # leases stay: what is sent again takes them again.
            for execution in reserved.values():
                if execution.phase is Phase.RESERVED:
                    self._held.roll_back(execution)
            raise
        for (index, (run, reason)), value in zip(
            looked_at.items(), values[len(reserved) :], strict=True
        ):
            known = self._held.find_attempt(run)
            mine = value == run_mark(self._boot_id, run.execution_id).encode()
            if known is not None:
                # Another copy of the request was accepted while Redis was asked.
                answers[index] = _duplicate(run.execution_id, known)
            elif value and not mine:
                answers[index] = _owned_by_another(run, value)
            else:
                answers[index] = self._reject(run.execution_id, reason)

    def _begin_leased(
        self,
        reserved: Mapping[int, Execution],
        values: Sequence[bytes | None],
        answers: dict[int, RunAnswerFields],
    ) -> None:
        """Begin the runs whose leases were taken, and answer for all."""
        given_back: list[Execution] = []
        for (index, execution), value in zip(reserved.items(), values, strict=False):
            refusal = self._second_thought(execution)
            if value:
                self._held.roll_back(execution)
                answers[index] = _owned_by_another(execution.run, value)
            elif refusal is not None:
                self._held.roll_back(execution)
                given_back.append(execution)
                answers[index] = self._reject(execution.id, refusal)
            else:
                self._held.begin(execution)
                self._executor.start(execution)
                answers[index] = _accepted(execution.run)
        if given_back:
            self._spawn(self._give_back(given_back))

    async def _take_leases(self, wanted: Sequence[Wanted]) -> Sequence[bytes | None]:
        asked_at = boot_seconds()
        values = await self._leases.take(wanted)
        if boot_seconds() - asked_at > LATEST_LEASE_SECONDS:
            # This process was frozen meanwhile: the leases may have run out, and more.
            raise LeaseUnavailable("Redis answered, but too long ago")
        return values

    def _refuse_unheard(self, reserved: Iterable[Execution]) -> NoReturn:
        """Begin nothing: this worker may have been given up, and its runs given to others.

        So it is with requests that waited in the socket of a process that was paused.
        """
        given_back = list(reserved)
        for execution in given_back:
            self._held.roll_back(execution)
        self._spawn(self._give_back(given_back))
        raise LeaseUnavailable("no dispatcher has acknowledged a beat for too long")

    def _second_thought(self, execution: Execution) -> RejectReason | None:
        """A refusal or a drain may have come while Redis was asked."""
        if refusal := self._held.refusal_of(execution.id):
            return refusal
        return RejectReason.DRAINING if self._held.draining else None

    def _refuse_unreadable(self, run: UnreadableRun) -> RunAnswerFields:
        log.error("a run cannot be read", execution_id=run.execution_id)
        known = self._held.find(run.execution_id)
        if known is not None:
            return _duplicate(run.execution_id, known)
        return self._reject(run.execution_id, RejectReason.INVALID)

    def _reject(self, execution_id: str, reason: RejectReason) -> RunAnswerFields:
        """Refuse a run for good: an earlier copy of the request may be late, and yet to come."""
        first_reason = self._held.refusal_of(execution_id) or reason
        self._held.refuse(execution_id, first_reason)
        return {
            "executionId": execution_id,
            "answer": Answer.REJECTED.value,
            "reason": first_reason.value,
        }

    async def _give_back(self, executions: list[Execution]) -> None:
        try:
            await self._leases.release(executions)
        except LeaseUnavailable:
            log.warning("leases of refused runs were not given back, they expire by themselves")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _accepted(run: Run) -> RunAnswerFields:
    return {"executionId": run.execution_id, "answer": Answer.ACCEPTED.value}


def _duplicate(execution_id: str, known: Known) -> RunAnswerFields:
    answer: RunAnswerFields = {
        "executionId": execution_id,
        "answer": Answer.DUPLICATE.value,
        "ownerExecutionId": known.execution_id,
    }
    if known.wire is not None:
        answer["outcome"] = orjson.Fragment(known.wire)
    return answer


def _owned_by_another(run: Run, value: bytes) -> RunAnswerFields:
    """Read what stands under a run key: boot id, execution id, and maybe the outcome."""
    _, execution_id, outcome = [*value.split(b" ", 2), b"", b""][:3]
    try:
        if outcome:
            json.loads(outcome)
    except ValueError:
        log.warning("the outcome under a run key is not JSON", job_id=run.job_id)
        outcome = b""
    owner = execution_id.decode(errors="replace")
    return _duplicate(run.execution_id, Known(owner, outcome or None))
