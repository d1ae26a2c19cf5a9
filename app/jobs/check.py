"""A submission before it is stored: its shape, what is refused of it, and its queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple
from zlib import crc32

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.access.caller import Caller
from app.edge.problems import Problem, invalid, validation_problem
from app.fleet.live import LiveFleet
from app.ground import Ground
from app.jobs.callback_fields import (
    Receivers,
    kept_events,
    kept_headers,
    no_secret_keys,
)
from app.jobs.check_params import refused_params
from app.jobs.digest import kept_digest, request_digest, secret_fields
from app.jobs.requests import MAX_PARAMS_BYTES, SubmitJob
from app.jobs.schedule_fields import schedule_of
from app.lifecycle.moves.submit import NewJob
from app.lifecycle.reads import ensure_queue
from app.lifecycle.requirement import RequirementTooLong, requirement_of
from app.lifecycle.secret_marks import marks
from app.lifecycle.term import FIRST, open_partitions
from app.lifecycle.token import new_token
from app.plumbing.json_text import Unencodable, plain_bytes
from app.plumbing.sealed import NoSecretKeys
from app.plumbing.times import epoch_ms

MAX_KNOWN_QUEUES: Final = 10_000
QUEUES_AT_ONCE: Final = 100
"""So many new queues one transaction may hold up all others for."""


class QueueKey(NamedTuple):
    """What makes two jobs wait in different queues."""

    tenant_id: int
    job_handler: str
    requirement: str
    partition: int


class Checked(NamedTuple):
    """A job whose shape is right. `refusal` holds for a new job; a repeat is answered all the same.

    A refused job is looked up by its clientRequestId and never inserted.
    """

    new: NewJob
    refusal: Problem | None = None
    digest: str = ""
    """Of the request as it came; the stored one may be keyed."""
    unknown_queue: QueueKey | None = None
    """The queue that it needs and that is not known here: see `Checker.place`."""


class Checker:
    """Checks jobs that are submitted, and knows the queues that were in use."""

    def __init__(self, ground: Ground, fleet: LiveFleet, receivers: Receivers) -> None:
        self._database = ground.database
        self._clock = ground.clock
        self._sealer = ground.sealer
        self._min_interval_ms = ground.settings.min_interval_ms
        self._fleet = fleet
        self._receivers = receivers
        self._partitions = ground.settings.dispatch_partitions
        self._queues: dict[QueueKey, int] = {}

    async def check(self, caller: Caller, sent: dict[str, Any]) -> Checked:
        """Check one job's shape and params, and look for its queue; nothing is stored yet.

        Raises:
            Problem: `validation_failed`.
            DatabaseUnavailable: what its handler takes is not known.
        """
        try:
            request = SubmitJob.model_validate(sent)
        except ValidationError as error:
            raise validation_problem(list(error.errors(include_url=False)), SubmitJob) from None
        params = params_text(request.params)
        try:
            digest = request_digest(sent)
        except Unencodable:
            raise _not_json() from None
        try:
            requirement = requirement_of(request.labels)
        except RequirementTooLong as error:
            raise invalid(str(error), "/labels") from None
        headers, kept, closed = None, params, None
        try:
            headers = kept_headers(request.callback_headers, self._sealer)
            kept = self._kept_params(request, params)
        except Problem as problem:
            closed = problem
        schedule, refusal = schedule_of(
            request,
            caller.tenant_id,
            now_ms=int(self._clock.now_ms()),
            min_interval_ms=self._min_interval_ms,
        )
        if refusal is None:
            refusal = await refused_params(self._fleet, request.job_handler, request.params, params)
        refusal = refusal or closed
        if refusal is None:
            refusal = await self._receivers.refused(caller.tenant_id, request.callback_url)
        queue_id, unknown = 0, None
        if refusal is None:
            partition = partition_of(caller.tenant_id, request.client_request_id, self._partitions)
            queue = QueueKey(caller.tenant_id, request.job_handler, requirement, partition)
            queue_id = self._queues.get(queue, 0)
            unknown = None if queue_id else queue
        new = NewJob(
            tenant_id=caller.tenant_id,
            client_request_id=request.client_request_id,
            request_digest=self._kept_digest(sent, digest, caller.tenant_id),
            submit_token=new_token(),
            job_name=request.job_name,
            job_handler=request.job_handler,
            queue_id=queue_id,
            priority=request.priority,
            max_retry=request.max_retry,
            retry_interval_ms=round(request.retry_interval_seconds * 1000),
            retry_backoff=request.retry_backoff,
            due_ms=None if request.run_at is None else epoch_ms(request.run_at),
            delay_ms=request.delay_ms or 0,
            timeout_ms=request.timeout_ms,
            callback_url=request.callback_url,
            callback_events=kept_events(request.callback_events),
            callback_headers=headers,
            expires_at=None if request.expires_at is None else epoch_ms(request.expires_at),
            params=kept,
            concurrency_key=request.concurrency_key,
            concurrency_limit=request.concurrency_limit,
            rate_key=request.rate_key,
            rate_per_second=request.rate_per_second,
            secret=marks(
                handler=request.job_handler,
                params=request.secret_params,
                result=request.secret_result,
            ),
            labels=request.labels,
            schedule=schedule,
        )
        return Checked(new, refusal, digest, unknown)

    async def place(self, checked: Sequence[Checked]) -> list[Checked]:
        """Find, or make, the queues that are not known of these; a transaction for many of them.

        Raises:
            DatabaseUnavailable: they cannot be stored.
        """
        # In an order that all who make queues at once keep to.
        keys = sorted({one.unknown_queue for one in checked if one.unknown_queue is not None})
        found: dict[QueueKey, int] = {}
        for start in range(0, len(keys), QUEUES_AT_ONCE):
            some = keys[start : start + QUEUES_AT_ONCE]
            ids = await self._database.write(partial(self._ensure, keys=some))
            found.update(zip(some, ids, strict=True))
        if len(self._queues) + len(found) > MAX_KNOWN_QUEUES * self._partitions:
            self._queues.clear()
        self._queues |= found
        return [
            one
            if one.unknown_queue is None
            else one._replace(
                new=replace(one.new, queue_id=found[one.unknown_queue]),
                unknown_queue=None,
            )
            for one in checked
        ]

    def _kept_params(self, request: SubmitJob, params: str | None) -> str | None:
        """Return params as they are stored.

        Raises:
            Problem: `secret_keys_missing`.
        """
        if request.secret_result and not self._sealer.has_keys:
            raise no_secret_keys("/secretResult")
        if not request.secret_params:
            return params
        try:
            return self._sealer.seal_body("null" if params is None else params)
        except NoSecretKeys:
            raise no_secret_keys("/secretParams") from None

    def _kept_digest(self, sent: dict[str, Any], digest: str, tenant_id: int) -> str:
        secret = secret_fields(sent)
        if not secret:
            return digest
        owner = owner_of(tenant_id, sent["clientRequestId"])
        return kept_digest(digest, secret, owner, self._sealer)

    async def _ensure(self, connection: AsyncConnection, keys: Sequence[QueueKey]) -> list[int]:
        await open_partitions(connection, self._database, {key.partition for key in keys})
        return [await ensure_queue(connection, self._database, **key._asdict()) for key in keys]


def partition_of(tenant_id: int, request_id: str, partitions: int) -> int:
    """Return the partition of a new job: the same for a repeat, while their number stays."""
    if partitions == 1:
        return FIRST
    return crc32(f"{tenant_id}:{request_id}".encode()) % partitions


def owner_of(tenant_id: int, request_id: str) -> str:
    """Name whose digest it is: equal secrets of two requests have different ones."""
    return f"{tenant_id}:{request_id}"


def params_text(params: Any) -> str | None:
    """Return params as JSON text, None for null.

    Raises:
        Problem: `validation_failed`, they have no JSON form or are too long.
    """
    if params is None:
        return None
    try:
        written = plain_bytes(params)
    except Unencodable:
        raise _not_json() from None
    if len(written) > MAX_PARAMS_BYTES:
        raise invalid(
            f"{len(written)} bytes of JSON are more than {MAX_PARAMS_BYTES}; "
            "store the data elsewhere and pass a reference",
            "/params",
        )
    return written.decode()


def _not_json() -> Problem:
    return invalid("numbers must be finite and text must be Unicode", "/params")
