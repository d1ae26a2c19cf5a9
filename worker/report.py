"""Reports outcomes, ended threads and tries until a dispatcher has acknowledged each of them.

What gathers while one request is in flight goes into the next. Outcomes and ended threads are
told at once. Nobody waits for tries: they wait a moment for company, which is most often the next
outcomes.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import orjson
import structlog
from pydantic import ValidationError

from oncue.protocol import PROTOCOL_VERSION, REPORTS_PATH, Delivery, DeliveryResult, ReportsResponse
from worker.clock import DatabaseClock
from worker.dispatchers import Dispatchers, NoDispatcher
from worker.held import Execution, Held
from worker.lease import Leases, LeaseUnavailable
from worker.outcome import EncodedOutcome, RunTimes, encode_outcome, encode_try
from worker.verdict import unstorable

MOST_ITEMS: Final = 200
MOST_BYTES: Final = 2 * 1024 * 1024
GATHER_TRIES_SECONDS: Final = 0.05
"""For so long a try waits for what else is to be told."""
FIRST_BACKOFF_SECONDS: Final = 0.1
LONGEST_BACKOFF_SECONDS: Final = 2.0
TOO_LARGE: Final = 413
PATIENCE: Final = 3
"""After so many failures in a row a 500 may be the fault of one item too."""

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class OutcomeItem:
    """An outcome to report."""

    execution: Execution
    outcome: EncodedOutcome
    failures: int = 0
    replaced: bool = False

    @property
    def size(self) -> int:
        """Bytes in a request."""
        return len(self.outcome.wire)


@dataclass(slots=True, eq=False)
class StoppedItem:
    """A thread that has ended after its run was reported as stopping."""

    execution_id: str
    failures: int = 0
    size: int = 40


@dataclass(slots=True, eq=False)
class TryItem:
    """What became of one try of a callback."""

    result: DeliveryResult
    wire: bytes
    failures: int = 0
    replaced: bool = False

    @property
    def size(self) -> int:
        """Bytes in a request."""
        return len(self.wire)


Item = OutcomeItem | StoppedItem | TryItem


def backoff_seconds(failures: int, chance: float) -> float:
    """0.1 s doubled up to 2 s, of which between half and all is waited; `chance` is in 0 to 1."""
    longest = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(failures, 10))
    return longest * (0.5 + 0.5 * chance)


class Reporter:
    """The queue of what dispatchers must still be told, and the one loop that tells them."""

    def __init__(
        self,
        *,
        worker_id: str,
        held: Held,
        leases: Leases,
        dispatchers: Dispatchers,
        clock: DatabaseClock,
        delivers: bool,
        deliver: Callable[[Sequence[Delivery]], object],
        try_reported: Callable[[DeliveryResult], None],
    ) -> None:
        self._worker_id = worker_id
        self._held = held
        self._leases = leases
        self._dispatchers = dispatchers
        self._clock = clock
        self._delivers = delivers
        self._deliver = deliver
        self._try_reported = try_reported
        self._queue: deque[Item] = deque()
        self._waiting: dict[Item, asyncio.TimerHandle] = {}
        self._outcomes: dict[str, Execution] = {}
        self._others: set[Item] = set()
        self._lingering: set[str] = set()
        self._failures = 0
        self._work = asyncio.Event()
        self._gathering: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self._shrinking: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to report."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="oncue-reports")

    async def close(self) -> None:
        """Stop reporting, whatever is left."""
        self._end_gathering()
        for timer in self._waiting.values():
            timer.cancel()
        # Again and again: `wait_for` of Python 3.11 may swallow a cancellation.
        while self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=0.1)
        for shrinking in self._shrinking:
            shrinking.cancel()
        if self._shrinking:
            await asyncio.wait(self._shrinking)

    def expect(self, execution: Execution) -> None:
        """Count a run's outcome as unreported; `add_outcome` follows when it has been stored."""
        self._outcomes[execution.id] = execution
        self._empty.clear()

    def add_outcome(self, execution: Execution) -> None:
        """Report how a run ended."""
        if execution.outcome is not None and execution.id in self._outcomes:
            self._put(OutcomeItem(execution, execution.outcome))

    def add_stopped(self, execution: Execution) -> None:
        """Report that a stopping run has ended, once its outcome is acknowledged."""
        if execution.acknowledged:
            self._put_other(StoppedItem(execution.id))
        else:
            self._lingering.add(execution.id)

    def add_try(self, result: DeliveryResult) -> None:
        """Report one try of a callback."""
        self._put_other(TryItem(result, encode_try(result)))

    def forget(self, execution_id: str) -> None:
        """Drop an outcome that no dispatcher wants any more."""
        self._acknowledge_outcome(execution_id)
        self._note_empty()

    @property
    def backlog(self) -> int:
        """How many outcomes, ended threads and tries are not acknowledged."""
        return len(self._outcomes) + len(self._others)

    async def wait_empty(self) -> None:
        """Return when everything is acknowledged."""
        await self._empty.wait()

    def _put(self, item: Item) -> None:
        self._queue.append(item)
        if not isinstance(item, TryItem):
            self._work.set()
        elif self._gathering is None:
            loop = asyncio.get_running_loop()
            self._gathering = loop.call_later(GATHER_TRIES_SECONDS, self._work.set)

    def _end_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None

    def _put_other(self, item: StoppedItem | TryItem) -> None:
        self._others.add(item)
        self._empty.clear()
        self._put(item)

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            self._end_gathering()
            # What comes meanwhile says itself when it is to go.
            due = len(self._queue)
            while due > 0:
                batch = self._next_batch()
                due -= len(batch)
                try:
                    await self._report(batch)
                except NoDispatcher as error:
                    await self._back_off(batch, str(error))
                except Exception as error:
                    # The loop must outlive any surprise: without it no outcome would be told.
                    log.exception("a report failed")
                    await self._back_off(batch, type(error).__name__)
                self._note_empty()

    def _note_empty(self) -> None:
        if not self.backlog:
            self._empty.set()

    def _next_batch(self) -> list[Item]:
        batch: list[Item] = []
        size = 0
        while self._queue and len(batch) < MOST_ITEMS:
            item = self._queue[0]
            if batch and size + item.size > MOST_BYTES:
                break
            batch.append(self._queue.popleft())
            size += item.size
        return batch

    async def _back_off(self, batch: list[Item], reason: str) -> None:
        if self._failures == 0:
            log.warning("reports are not acknowledged", reason=reason)
        self._queue.extendleft(item for item in reversed(batch) if self._is_open(item))
        self._failures += 1
        await asyncio.sleep(backoff_seconds(self._failures - 1, random.random()))
        self._work.set()

    async def _report(self, batch: list[Item]) -> None:
        batch = [item for item in batch if self._is_open(item)]
        if not batch:
            return
        reply = await self._dispatchers.post(REPORTS_PATH, self._encode(batch))
        if reply.status == 200:
            try:
                response = ReportsResponse.model_validate_json(reply.body)
            except ValidationError:
                raise NoDispatcher("the answer is not one of a dispatcher") from None
            self._failures = 0
            self._settle(batch, response)
        elif (
            reply.is_about_the_content
            # A proxy may take less at once than a dispatcher does.
            or (reply.status == TOO_LARGE and len(batch) > 1)
            or self._fails_for_long(reply.status)
        ):
            await self._find_offender(batch, reply.status)
        else:
            raise NoDispatcher(f"status {reply.status}")

    def _fails_for_long(self, status: int) -> bool:
        return status == 500 and self._failures >= PATIENCE

    async def _find_offender(self, batch: list[Item], status: int) -> None:
        """Halve a refused batch until the offender stands alone, then say that it is unstorable."""
        if len(batch) > 1:
            middle = len(batch) // 2
            for half in (batch[:middle], batch[middle:]):
                await self._report_part(half)
            return
        item = batch[0]
        if status == 500 or isinstance(item, StoppedItem) or item.replaced:
            log.warning("a report is refused again and again", status=status)
            self._later(item)
        elif isinstance(item, OutcomeItem):
            self._replace_outcome(item, status)
            await self._report_part([item])
        else:
            self._replace_try(item)
            await self._report_part([item])

    async def _report_part(self, part: list[Item]) -> None:
        try:
            await self._report(part)
        except NoDispatcher:
            for item in part:
                self._later(item)

    def _replace_outcome(self, item: OutcomeItem, status: int) -> None:
        execution, old = item.execution, item.outcome
        log.warning("an outcome cannot be stored", execution_id=execution.id, status=status)
        times = RunTimes(execution.accepted_at, execution.started_at, self._clock.now_ms())
        item.outcome = encode_outcome(
            execution.run,
            unstorable(f"the dispatcher refused the outcome with status {status}"),
            times,
            stopping=old.stopping,
        )
        item.replaced = True
        execution.outcome = item.outcome

    def _replace_try(self, item: TryItem) -> None:
        item.result = item.result.model_copy(update={"error": "not storable"})
        item.wire = encode_try(item.result)
        item.replaced = True

    def _encode(self, batch: list[Item]) -> bytes:
        return orjson.dumps(
            {
                "protocol": PROTOCOL_VERSION,
                "workerId": self._worker_id,
                "load": self._held.load().model_dump(by_alias=True),
                "delivers": self._delivers,
                "outcomes": [
                    orjson.Fragment(item.outcome.wire)
                    for item in batch
                    if isinstance(item, OutcomeItem)
                ],
                "stopped": [item.execution_id for item in batch if isinstance(item, StoppedItem)],
                "tries": [
                    orjson.Fragment(item.wire) for item in batch if isinstance(item, TryItem)
                ],
            }
        )

    def _settle(self, batch: list[Item], response: ReportsResponse) -> None:
        outcomes = set(response.acknowledged)
        stopped = set(response.acknowledged_stopped)
        tries = set(response.acknowledged_tries)
        shrinkable: list[Execution] = []
        for item in batch:
            if isinstance(item, OutcomeItem):
                if item.execution.id not in outcomes:
                    self._later(item)
                    continue
                if item.replaced or item.outcome.small is not item.outcome.wire:
                    shrinkable.append(item.execution)
                self._acknowledge_outcome(item.execution.id)
            elif isinstance(item, StoppedItem):
                if item.execution_id in stopped:
                    self._others.discard(item)
                else:
                    self._later(item)
            elif item.result.delivery_id in tries:
                self._others.discard(item)
                self._try_reported(item.result)
            else:
                self._later(item)
        if response.deliveries:
            self._deliver(response.deliveries)
        if shrinkable:
            # Apart: a Redis that stands still must not hold up the reports.
            task = asyncio.get_running_loop().create_task(self._shrink(shrinkable))
            self._shrinking.add(task)
            task.add_done_callback(self._shrinking.discard)

    def _acknowledge_outcome(self, execution_id: str) -> None:
        execution = self._outcomes.pop(execution_id, None)
        if execution is None:
            return
        self._held.acknowledge(execution)
        if execution_id in self._lingering:
            self._lingering.discard(execution_id)
            self._put_other(StoppedItem(execution_id))

    async def _shrink(self, executions: list[Execution]) -> None:
        """Leave only small tombstones of what the database has."""
        try:
            await self._leases.store(executions, small=True)
        except LeaseUnavailable:
            log.info("acknowledged outcomes stay under their keys until they expire")

    def _is_open(self, item: Item) -> bool:
        if isinstance(item, OutcomeItem):
            return item.execution.id in self._outcomes
        return item in self._others

    def _later(self, item: Item) -> None:
        """Repeat one item after a while, so that the others go on meanwhile."""
        if not self._is_open(item):
            return
        delay = backoff_seconds(item.failures, random.random())
        item.failures += 1
        loop = asyncio.get_running_loop()
        self._waiting[item] = loop.call_later(delay, self._again, item)

    def _again(self, item: Item) -> None:
        self._waiting.pop(item, None)
        self._put(item)
