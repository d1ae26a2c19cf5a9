"""Reports of workers: each is stored for itself, so that a bad one blocks no other."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Final

import structlog
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from sqlalchemy.ext.asyncio import AsyncConnection

from app.edge.problems import Problem
from app.fleet.dress import Dresser
from app.fleet.groups import read_fence
from app.fleet.settler import Settler, unstorable
from app.ground import Ground
from app.lifecycle.moves.deliver import note_tries
from app.lifecycle.moves.ending import MAX_REASON_LENGTH, Ending, Settlement
from app.lifecycle.moves.release import release_stopped
from app.lifecycle.nodes import GroupKey
from app.lifecycle.states import ExecutionStatus
from app.plumbing.bus import LOAD, OWED, WAKE
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.json_text import Unencodable, is_longer, plain_json
from app.plumbing.sealed import CannotOpen, Sealer
from oncue.protocol import (
    MAX_NAME_LENGTH,
    MAX_REPORTS_PER_REQUEST,
    MAX_RESULT_BYTES,
    Delivery,
    DeliveryResult,
    Load,
    Outcome,
    OutcomeStatus,
    ReportsResponse,
)

log = structlog.get_logger(__name__)

_STATUS: Final = {
    OutcomeStatus.SUCCEEDED: ExecutionStatus.SUCCEEDED,
    OutcomeStatus.FAILED: ExecutionStatus.FAILED,
    OutcomeStatus.TIMED_OUT: ExecutionStatus.TIMED_OUT,
    OutcomeStatus.CANCELLED: ExecutionStatus.CANCELLED,
    OutcomeStatus.RETURNED: ExecutionStatus.RETURNED,
}


@dataclass(frozen=True, slots=True)
class _Foreign:
    """Ids of what a worker reported that was never its group's."""

    endings: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    tries: list[str] = field(default_factory=list)


class Reports:
    """Takes what workers report, and says what is stored and what is to be delivered."""

    def __init__(
        self,
        ground: Ground,
        settler: Settler,
        dresser: Dresser,
    ) -> None:
        self._database = ground.database
        self._bus = ground.bus
        self._settler = settler
        self._dresser = dresser
        self._metrics = ground.metrics
        self._schedule = ground.settings.callback_schedule_seconds
        self._sealer = ground.sealer
        self._groups_deliver = ground.settings.group_workers_deliver

    async def take(self, body: bytes, by_key: GroupKey | None = None) -> ReportsResponse:
        """Store a batch of reports and acknowledge each that is stored.

        Raises:
            Problem: the envelope itself cannot be read, or `not_your_run`.
            DatabaseUnavailable: the worker must report again.
        """
        envelope, load = _envelope(body)
        worker_id = str(envelope["workerId"])
        # The callback is left to others if this worker says that it delivers none.
        may_deliver = by_key is None or self._groups_deliver
        deliver_by = worker_id if may_deliver and envelope.get("delivers", True) else None
        endings = _read_endings(envelope.get("outcomes", []), deliver_by, self._sealer)
        stopped = [str(one) for one in envelope.get("stopped", [])]
        tries = _read_tries(envelope.get("tries", []))
        foreign = _Foreign()
        if by_key is not None:
            endings, stopped, tries, foreign = await self._fence(
                by_key, worker_id, endings, stopped, tries
            )
        # The run's slot is free whether or not its end can be stored now. Only after the fence: a
        # group tells the load of its own workers alone.
        self._bus.publish(LOAD, [worker_id, load.seq, load.active])
        stored, released, tried = await asyncio.gather(
            self._settle(endings), self._release(stopped), self._note(worker_id, tries)
        )
        return ReportsResponse(
            acknowledged=[*stored, *foreign.endings],
            acknowledged_stopped=[*released, *foreign.stopped],
            acknowledged_tries=[*tried, *foreign.tries],
            deliveries=await self._deliveries(list(stored.values())),
        )

    async def _fence(
        self,
        by_key: GroupKey,
        worker_id: str,
        endings: list[Ending],
        stopped: list[str],
        tries: list[DeliveryResult],
    ) -> tuple[list[Ending], list[str], list[DeliveryResult], _Foreign]:
        """Part what a group may report from what it may not.

        The latter is acknowledged as a stale report is, so that nobody sends it for ever.
        """
        ended = [one.execution_id for one in endings]
        tried = [one.delivery_id for one in tries]
        fence = await read_fence(self._database, by_key, worker_id, {*ended, *stopped}, set(tried))
        own, own_tries = set(fence.own_executions(ended)), set(fence.own_deliveries(tried))
        own_stopped = fence.own_executions(stopped)
        self._metrics.foreign_reports.inc(fence.dropped)
        return (
            [one for one in endings if one.execution_id in own],
            own_stopped,
            [one for one in tries if one.delivery_id in own_tries],
            _Foreign(
                [one for one in ended if one not in own],
                [one for one in stopped if one not in own_stopped],
                [one for one in tried if one not in own_tries],
            ),
        )

    async def _settle(self, endings: list[Ending]) -> dict[str, Settlement]:
        """Settle each ending for itself, and return those that are stored, by execution id."""
        results = await self._settler.settle_each(endings)
        stored: dict[str, Settlement] = {}
        for ending, result in zip(endings, results, strict=True):
            if isinstance(result, Settlement):
                stored[ending.execution_id] = result
            elif isinstance(result, DatabaseUnavailable):
                raise result
            else:
                # Not acknowledged: the worker keeps it, and reports it again.
                log.error(
                    "report_not_stored",
                    job_id=ending.job_id,
                    execution_id=ending.execution_id,
                    exc_info=result,
                )
        return stored

    async def _release(self, stopped: list[str]) -> list[str]:
        if stopped:
            released = await self._database.write(
                lambda connection: release_stopped(connection, stopped)
            )
            wakes = [
                [one.queue_id, one.priority, one.due_ms]
                for one in released
                if one.due_ms is not None
            ]
            if wakes:
                self._bus.publish(WAKE, wakes)
        return stopped

    async def _deliveries(self, settlements: list[Settlement]) -> list[Delivery]:
        """Return what the worker is to deliver at once; what is left is handed over later."""
        owed = [one.delivery for one in settlements if one.delivery is not None]
        if not owed:
            return []
        try:
            made, _ = await self._dresser.dress(owed)
        except DatabaseUnavailable:
            # The outcomes are stored, and must be acknowledged.
            return []
        return made

    async def _note(self, worker_id: str, results: list[DeliveryResult]) -> list[str]:
        if not results:
            return []
        results = [_storable(result) for result in results]

        async def write(connection: AsyncConnection) -> int | None:
            return await note_tries(
                connection,
                self._database,
                results,
                worker_id=worker_id,
                schedule_seconds=self._schedule,
            )

        next_try_at = await self._database.write(write)
        for outcome, count in Counter(map(_outcome_of, results)).items():
            self._metrics.callback_tries.labels(outcome).inc(count)
        if next_try_at is not None:
            self._bus.publish(OWED, [next_try_at])
        return [result.delivery_id for result in results]


def _outcome_of(result: DeliveryResult) -> str:
    if result.not_tried:
        return "not_tried"
    return "delivered" if result.delivered else "gone" if result.gone else "failed"


_TRIES: Final = TypeAdapter(list[DeliveryResult])
_OUTCOMES: Final = TypeAdapter(list[Outcome])


def _read_tries(raw: list[Any]) -> list[DeliveryResult]:
    try:
        return _TRIES.validate_python(raw)
    except ValidationError:
        return [one for one in map(_read_try, raw) if one is not None]


def _read_try(raw: Any) -> DeliveryResult | None:
    try:
        return DeliveryResult.model_validate(raw)
    except ValidationError as error:
        log.warning("bad_delivery_result", errors=error.error_count())
        return None


def _read_endings(reports: list[Any], deliver_by: str | None, sealer: Sealer) -> list[Ending]:
    outcomes: list[Outcome | None]
    try:
        outcomes = [*_OUTCOMES.validate_python(reports)]
    except ValidationError:
        # Each is then read for itself.
        outcomes = [None] * len(reports)
    found = [
        _read_ending(report, outcome, deliver_by, sealer)
        for report, outcome in zip(reports, outcomes, strict=True)
    ]
    return [ending for ending in found if ending is not None]


def _read_ending(
    report: Any, outcome: Outcome | None, deliver_by: str | None, sealer: Sealer
) -> Ending | None:
    """Read one report; an unreadable one of a known execution becomes `result_unstorable`.

    `outcome` is the report if it could be read with the others. None is one that is not
    acknowledged: nobody can tell whose it is, or the key of its secret result is not here, but
    may come.
    """
    if not isinstance(report, dict):
        return None
    execution_id, job_id = report.get("executionId"), report.get("jobId")
    if not isinstance(execution_id, str) or not isinstance(job_id, int):
        log.warning("report_without_ids")
        return None
    if not execution_id.isascii() or len(execution_id) > 64 or not 0 < job_id < 2**63:
        log.warning("report_with_impossible_ids")
        return None
    try:
        return ending_of(outcome or Outcome.model_validate(report), deliver_by, sealer)
    except CannotOpen:
        log.warning("result_cannot_be_opened", job_id=job_id, execution_id=execution_id)
        return None
    except (ValidationError, Unencodable):
        bare = Ending(
            execution_id,
            job_id,
            ExecutionStatus.FAILED,
            # Whatever else cannot be read: a run that goes on must not be taken for one that is
            # over.
            stopping=report.get("stopping") is True,
            deliver_by=deliver_by,
        )
        return unstorable(bare)


def ending_of(outcome: Outcome, deliver_by: str | None, sealer: Sealer) -> Ending:
    """Turn a worker's outcome into the ending to settle.

    Raises:
        Unencodable: the result has no JSON form.
        CannotOpen: it is sealed with a key that is not here.
    """
    result = None
    code = None if outcome.error is None else _text(outcome.error.code)
    message = None if outcome.error is None else _text(outcome.error.message)
    if outcome.status is OutcomeStatus.SUCCEEDED:
        result = _result_text(outcome, sealer)
        if is_longer(result, MAX_RESULT_BYTES):
            return replace(
                unstorable(
                    Ending(
                        outcome.execution_id,
                        outcome.job_id,
                        ExecutionStatus.FAILED,
                        deliver_by=deliver_by,
                    )
                ),
                error_code="result_too_large",
                error_message=f"The result is longer than {MAX_RESULT_BYTES} bytes of JSON.",
            )
    elif code is None:
        code, message = str(outcome.status), ""
    return Ending(
        execution_id=outcome.execution_id,
        job_id=outcome.job_id,
        status=_STATUS[outcome.status],
        result=result,
        error_code=code,
        error_message=message,
        retryable=outcome.retryable,
        retry_after_ms=outcome.retry_after_ms,
        stopping=outcome.stopping,
        accepted_at=outcome.accepted_at,
        started_at=outcome.started_at,
        finished_at=outcome.finished_at,
        reason=_reason(outcome.status, code, message),
        deliver_by=deliver_by,
        secret=outcome.result_sealed,
    )


def _reason(status: OutcomeStatus, code: str | None, message: str | None) -> str | None:
    """Say why the platform ended a run, as its worker tells it; a handler's own end has none."""
    if status in (OutcomeStatus.SUCCEEDED, OutcomeStatus.FAILED):
        return None
    return ": ".join(part for part in (code, message) if part)[:MAX_REASON_LENGTH] or None


def _result_text(outcome: Outcome, sealer: Sealer) -> str:
    if not outcome.result_sealed:
        return plain_json(outcome.result)
    if not isinstance(outcome.result, str):
        raise Unencodable("what is sealed is text")
    opened = sealer.open_result(outcome.execution_id, outcome.result)
    try:
        return plain_json(json.loads(opened))
    except (ValueError, RecursionError):
        raise Unencodable("what was sealed is not JSON") from None


def _envelope(body: bytes) -> tuple[dict[str, Any], Load]:
    try:
        envelope = _parse(body)
        load = Load.model_validate(envelope["load"])
        lists = [envelope.get(name, []) for name in ("outcomes", "stopped", "tries")]
        worker_id = envelope["workerId"]
        # What is not printable has no place in a signal: a lone surrogate cannot be written.
        named = isinstance(worker_id, str) and worker_id.isprintable()
        if not (named and 0 < len(worker_id) <= MAX_NAME_LENGTH) or not all(
            isinstance(one, list) and len(one) <= MAX_REPORTS_PER_REQUEST for one in lists
        ):
            raise ValueError("workerId, or a list")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Problem(
            "validation_failed",
            f"A report needs workerId, load and lists of at most {MAX_REPORTS_PER_REQUEST} "
            f"({type(error).__name__}).",
        ) from None
    return dict(envelope), load


def _parse(body: bytes) -> Any:
    """Read JSON with integers exact."""
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError:
        # The standard parser is half as fast, but lets a lone surrogate through, a NaN and
        # what is deeply nested, so that only its own report suffers.
        return json.loads(body)


def _storable(result: DeliveryResult) -> DeliveryResult:
    error = None if result.error is None else _text(result.error)
    answer = None if result.answer is None else _text(result.answer)
    if error == result.error and answer == result.answer:
        return result
    return result.model_copy(update={"error": error, "answer": answer})


def _text(value: str) -> str:
    """Replace what no database takes as text: NUL and lone surrogates."""
    if value.isascii() and "\0" not in value:
        return value
    return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
