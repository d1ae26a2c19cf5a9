"""Heartbeats: written before they are answered, and answered with what is no longer wanted."""

from __future__ import annotations

import time
from hashlib import sha256
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from app.fleet.groups import require_group
from app.ground import Ground
from app.lifecycle.handler_schemas import see_schemas, store_schemas
from app.lifecycle.moves.deliver import extend_leases
from app.lifecycle.nodes import GroupKey, groups_of, record_beat
from app.lifecycle.reads import read_now
from app.lifecycle.running import read_unwanted
from app.lifecycle.term import read_term
from app.plumbing.bus import BEAT, LOAD
from oncue.protocol import MAX_SCHEMA_BYTES, Heartbeat, HeartbeatResponse

log = structlog.get_logger(__name__)

SEEN_SECONDS: Final = 3600.0
"""How long a schema is taken to be stored: far less than an unused one is kept."""
MAX_SEEN: Final = 10_000


class Heartbeats:
    """Takes the beats of workers; an answer means that the beat is committed."""

    def __init__(self, ground: Ground) -> None:
        self._database = ground.database
        self._bus = ground.bus
        self._groups_deliver = ground.settings.group_workers_deliver
        self._known: dict[str, tuple[object, ...]] = {}
        self._seen_schemas: dict[str, float] = {}

    async def take(self, beat: Heartbeat, by_key: GroupKey | None = None) -> HeartbeatResponse:
        """Write a beat and tell which of the executions it lists are to be stopped.

        A worker that was declared dead comes back once it holds nothing that was given away.

        Raises:
            Problem: `not_your_run`, the worker is of another group than the key.
            DatabaseUnavailable: the beat is not known to be written.
        """
        if by_key is not None and not self._groups_deliver:
            beat = beat.model_copy(update={"delivers": False})
        sent = _checked_schemas(beat)
        offered = {one.params_digest for one in beat.handlers if one.params_digest is not None}
        unseen = {one for one in offered if not self._has_seen(one)}

        async def write(connection: AsyncConnection) -> tuple[HeartbeatResponse, set[str]]:
            if by_key is not None:
                groups = await groups_of(connection, [beat.worker_id])
                require_group(
                    by_key, beat.worker_id, groups.get(beat.worker_id, by_key.worker_group)
                )
            unwanted = await read_unwanted(
                connection, [(one.job_id, one.execution_id) for one in beat.held]
            )
            await record_beat(connection, self._database, beat, revive=not unwanted, by_key=by_key)
            await extend_leases(connection, self._database, beat.worker_id, beat.held_deliveries)
            await store_schemas(connection, self._database, sent)
            stored = await see_schemas(connection, self._database, unseen) if unseen else set()
            answer = HeartbeatResponse(
                term=await read_term(connection),
                now=await read_now(connection, self._database),
                unwanted=unwanted,
                wanted_schemas=sorted(unseen - stored),
            )
            return answer, stored

        response, stored = await self._database.write(write)
        self._see(stored)
        self._tell(beat, new_schemas=bool(sent))
        return response

    def _tell(self, beat: Heartbeat, *, new_schemas: bool) -> None:
        """Let dispatch know at once of a worker that is new or changed what it takes."""
        self._bus.publish(LOAD, [beat.worker_id, beat.load.seq, beat.load.active])
        described = (beat.state, beat.capacity, tuple(beat.handlers), beat.url, beat.delivers)
        if self._known.get(beat.worker_id) != described or new_schemas:
            if len(self._known) > 10_000:
                self._known.clear()
            self._known[beat.worker_id] = described
            self._bus.publish(BEAT, [beat.worker_id])

    def _has_seen(self, digest: str) -> bool:
        return time.monotonic() - self._seen_schemas.get(digest, float("-inf")) < SEEN_SECONDS

    def _see(self, digests: set[str]) -> None:
        if len(self._seen_schemas) + len(digests) > MAX_SEEN:
            self._seen_schemas.clear()
        self._seen_schemas |= dict.fromkeys(digests, time.monotonic())


def _checked_schemas(beat: Heartbeat) -> dict[str, str]:
    """Return the schemas of a beat that are what they are called, by digest."""
    found: dict[str, str] = {}
    for one in beat.schemas:
        body = one.body.encode()
        if len(body) <= MAX_SCHEMA_BYTES and sha256(body).hexdigest() == one.digest:
            found[one.digest] = one.body
        else:
            log.warning("schema_refused", worker_id=beat.worker_id, digest=one.digest)
    return found
