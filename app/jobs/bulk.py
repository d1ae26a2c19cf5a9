"""Bulk operations for callers: one action for all jobs that match a filter.

What is asked for is only stored here; `app.jobs.sweeper` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import uuid_utils
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.access.caller import Caller
from app.edge.bodies import parse_object
from app.edge.paging import decode_cursor, encode_cursor
from app.edge.problems import Problem, invalid, validation_problem
from app.ground import Ground
from app.jobs.bulk_schemas import BulkFilter, SubmitBulk
from app.jobs.digest import differing_fields, request_digest
from app.lifecycle.lists import JobFilter, id_range, next_matching
from app.lifecycle.operations import (
    NewOperation,
    Operation,
    OperationStatus,
    TooManyOpen,
    end_operation,
    find_by_request,
    insert_operation,
    list_operations,
    read_operation,
)
from app.lifecycle.states import TERMINAL_JOBS, JobStatus, verb_sources
from app.plumbing.bus import BULK
from app.plumbing.json_text import Unencodable
from app.plumbing.times import epoch_ms, rfc3339

EMPTY_FILTER: Final = (
    "send at least one of status, handler, namePrefix, label and a range of times; "
    "a bulk action without a filter would meet every job."
)
REDELIVER: Final = "redeliver"
MOST_COUNTED: Final = 10_000
"""A count ends here, or after so many pages of a walk, and says that there may be more."""
MOST_PAGES: Final = 40
PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class Asked:
    """The answer to a request: its document, and whether an operation is new or only counted."""

    document: dict[str, Any]
    status: int
    operation_id: str | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """What an action may change: the filter, and the states that allow the action."""

    wanted: JobFilter
    statuses: frozenset[JobStatus]


def scope_of(action: str, narrowed: BulkFilter) -> Scope:
    """Return what a checked request means."""
    status = None if narrowed.status is None else JobStatus[narrowed.status]
    statuses = states_of(action) if status is None else frozenset({status})
    label = None if narrowed.label is None else narrowed.label.partition("=")
    wanted = JobFilter(
        handler=narrowed.handler,
        name_prefix=narrowed.name_prefix,
        label=None if label is None else (label[0], label[2]),
        created_from=_ms(narrowed.created_from),
        created_to=_ms(narrowed.created_to),
        finished_from=_ms(narrowed.finished_from),
        finished_to=_ms(narrowed.finished_to),
        failed_callbacks=action == REDELIVER,
    )
    return Scope(wanted, statuses & TERMINAL_JOBS if wanted.by_finish else statuses)


def states_of(action: str) -> frozenset[JobStatus]:
    """Return the states that allow an action; callbacks are sent again whatever the job does."""
    return frozenset(JobStatus) if action == REDELIVER else verb_sources(action)


class BulkDesk:
    """Takes bulk actions of callers, tells how they stand, and calls them off."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._database = ground.database
        self._most = ground.settings.bulk_max_rate
        self._default = min(ground.settings.bulk_rate, self._most)

    async def ask(self, caller: Caller, body: bytes) -> Asked:
        """Store an operation, or count what it would change; a repeat is the same operation.

        Raises:
            Problem: `invalid_json`, `validation_failed`, `empty_filter`, `request_conflict` or
                `too_many_operations`.
        """
        sent = parse_object(body)
        request = self._checked(sent)
        digest = _digest(sent)
        if request.client_request_id is not None and not request.dry_run:
            known = await self._earlier(caller, request.client_request_id)
            if known is not None:
                return _repeat(known, digest)
        scope = scope_of(request.action, request.filter)
        ids, matched, minimum = await self._count(caller, scope)
        if request.dry_run:
            document = {
                "dryRun": True,
                "action": request.action,
                "filter": _filter_view(request.filter),
                "matched": matched,
                "matchedIsMinimum": minimum,
            }
            return Asked(document, 200)
        new = NewOperation(
            operation_id=str(uuid_utils.uuid7()),
            tenant_id=caller.tenant_id,
            client_request_id=request.client_request_id,
            request_digest=digest,
            action=request.action,
            filter=_filter_view(request.filter),
            rate=request.rate_per_second or self._default,
            ids=ids,
            finished_from=scope.wanted.finished_from or 0,
            matched=matched,
            matched_is_minimum=minimum,
            deed=caller.doing(f"bulk.{request.action}"),
        )
        return await self._store(new)

    async def look(self, caller: Caller, operation_id: str) -> dict[str, Any]:
        """Return an operation as it is now.

        Raises:
            Problem: `operation_not_found`.
        """
        return operation_view(await self._find(caller, operation_id))

    async def list_page(self, caller: Caller, *, limit: int, cursor: str | None) -> dict[str, Any]:
        """Return a page of operations, newest first.

        Raises:
            Problem: `validation_failed`, for a foreign cursor.
        """
        before = decode_cursor(cursor)
        found = await self._database.read(
            lambda connection: list_operations(
                connection, tenant_id=caller.tenant_id, before=before, limit=limit + 1
            )
        )
        page = found[:limit]
        return {
            "items": [operation_view(one) for one in page],
            "nextCursor": encode_cursor(page[-1].key) if len(found) > limit else None,
        }

    async def cancel(self, caller: Caller, operation_id: str) -> dict[str, Any]:
        """End an operation; what it has changed stays so. A repeat returns it as it is.

        Raises:
            Problem: `operation_not_found` or `operation_ended`.
        """
        found = await self._find(caller, operation_id)
        ended = await self._database.write(
            lambda connection: end_operation(
                connection,
                self._database,
                found.key,
                OperationStatus.CANCELLED,
                of=(found, caller.doing("bulk.cancelOperation")),
            )
        )
        if ended:
            self._ground.metrics.bulk_ended.labels(OperationStatus.CANCELLED.name).inc()
        now = await self._find(caller, operation_id)
        if now.status is not OperationStatus.CANCELLED:
            raise Problem(
                "operation_ended",
                f"Bulk operation {operation_id} has ended as {now.status.name}: look at it.",
            )
        return operation_view(now)

    def _checked(self, sent: dict[str, Any]) -> SubmitBulk:
        given = sent.get("filter")
        if given is None or (
            isinstance(given, dict) and not any(value is not None for value in given.values())
        ):
            raise Problem(
                "empty_filter",
                f"filter: {EMPTY_FILTER}",
                errors=[{"pointer": "/filter", "detail": EMPTY_FILTER}],
            )
        try:
            request = SubmitBulk.model_validate(sent)
        except ValidationError as error:
            raise validation_problem(list(error.errors(include_url=False)), SubmitBulk) from None
        if request.rate_per_second is not None and request.rate_per_second > self._most:
            raise invalid(f"at most {self._most:g}", "/ratePerSecond")
        possible = states_of(request.action)
        status = request.filter.status
        words = ", ".join(one.name for one in sorted(possible))
        if status is not None and JobStatus[status] not in possible:
            raise invalid(
                f"{request.action} is not possible for a {status} job; it is for {words}",
                "/filter/status",
            )
        if request.filter.by_finish and not scope_of(request.action, request.filter).statuses:
            raise invalid(
                f"a job that has finished allows no {request.action}, so a range of finishing "
                "goes with retry and redeliver alone",
                "/filter",
            )
        return request

    async def _count(self, caller: Caller, scope: Scope) -> tuple[tuple[int, int], int, bool]:
        """Return the ids between which the jobs are, how many match, and if that is a minimum."""

        async def count(connection: AsyncConnection) -> tuple[tuple[int, int], int, bool]:
            low, high = await id_range(connection, scope.wanted, None)
            after = (scope.wanted.finished_from or 0, max(0, low - 1))
            matched = 0
            for _ in range(MOST_PAGES):
                found = await next_matching(
                    connection,
                    self._database,
                    tenant_id=caller.tenant_id,
                    wanted=scope.wanted,
                    statuses=scope.statuses,
                    after=after,
                    until_id=high - 1,
                    limit=min(PAGE, MOST_COUNTED - matched),
                )
                matched += len(found.turns)
                if found.onward is None:
                    return (low, high), matched, False
                if matched >= MOST_COUNTED:
                    break
                after = found.onward
            return (low, high), matched, True

        return await self._database.read(count)

    async def _store(self, new: NewOperation) -> Asked:
        try:
            stored = await self._database.write(
                lambda connection: insert_operation(connection, self._database, new)
            )
        except TooManyOpen:
            raise Problem(
                "too_many_operations", "Wait until one of your bulk operations ends, or cancel one."
            ) from None
        if stored.operation_id != new.operation_id:
            return _repeat(stored, new.request_digest)
        self._ground.bus.publish(BULK, [])
        return Asked(operation_view(stored), 202, stored.operation_id)

    async def _earlier(self, caller: Caller, client_request_id: str) -> Operation | None:
        return await self._database.read(
            lambda connection: find_by_request(
                connection, client_request_id, tenant_id=caller.tenant_id
            )
        )

    async def _find(self, caller: Caller, operation_id: str) -> Operation:
        found = await self._database.read(
            lambda connection: read_operation(connection, operation_id, tenant_id=caller.tenant_id)
        )
        if found is None:
            raise Problem(
                "operation_not_found", "No bulk operation has this operationId, or it has left."
            )
        return found


def operation_view(operation: Operation) -> dict[str, Any]:
    """Show an operation."""
    error = operation.error
    return {
        "operationId": operation.operation_id,
        "clientRequestId": operation.client_request_id,
        "action": operation.action,
        "filter": operation.filter,
        "status": operation.status.name,
        "ratePerSecond": operation.rate,
        "matched": operation.matched,
        "matchedIsMinimum": operation.matched_is_minimum,
        "examined": operation.changed + sum(operation.refused.values()),
        "changed": operation.changed,
        "refused": operation.refused,
        "error": None if error is None else {"code": error[0], "message": error[1]},
        "createdAt": rfc3339(operation.created_at),
        "updatedAt": rfc3339(operation.updated_at),
        "startedAt": _time(operation.started_at),
        "finishedAt": _time(operation.finished_at),
    }


def _repeat(known: Operation, digest: str) -> Asked:
    fields = differing_fields(known.request_digest, digest)
    if fields:
        raise Problem(
            "request_conflict",
            f"This clientRequestId belongs to bulk operation {known.operation_id}, which was sent "
            f"with other values of: {', '.join(fields)}. Use a new clientRequestId for a new one.",
            fields=fields,
        )
    return Asked(operation_view(known), 200, known.operation_id)


def _digest(sent: dict[str, Any]) -> str:
    try:
        return request_digest(sent)
    except Unencodable:
        raise invalid("text must be Unicode", "") from None


def _filter_view(narrowed: BulkFilter) -> dict[str, str]:
    view: dict[str, str] = narrowed.model_dump(mode="json", by_alias=True, exclude_none=True)
    return view


def _ms(moment: datetime | None) -> int | None:
    return None if moment is None else epoch_ms(moment)


def _time(moment: int | None) -> str | None:
    return None if moment is None else rfc3339(moment)
