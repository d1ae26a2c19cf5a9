"""Heartbeats: written before they are answered, and answered with what is no longer wanted."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from app.ground import Ground
from app.lifecycle.moves.deliver import extend_leases
from app.lifecycle.nodes import record_beat
from app.lifecycle.reads import read_now
from app.lifecycle.running import read_unwanted
from app.lifecycle.term import read_term
from app.plumbing.bus import BEAT, LOAD
from oncue.protocol import Heartbeat, HeartbeatResponse


class Heartbeats:
    """Takes the beats of workers; an answer means that the beat is committed."""

    def __init__(self, ground: Ground) -> None:
        self._database = ground.database
        self._bus = ground.bus
        self._known: dict[str, tuple[object, ...]] = {}

    async def take(self, beat: Heartbeat) -> HeartbeatResponse:
        """Write a beat and tell which of the executions it lists are to be stopped.

        A worker that was declared dead comes back once it holds nothing that was given away.

        Raises:
            DatabaseUnavailable: the beat is not known to be written.
        """

        async def write(connection: AsyncConnection) -> HeartbeatResponse:
            unwanted = await read_unwanted(
                connection, [(one.job_id, one.execution_id) for one in beat.held]
            )
            await record_beat(connection, self._database, beat, revive=not unwanted)
            await extend_leases(connection, self._database, beat.worker_id, beat.held_deliveries)
            return HeartbeatResponse(
                term=await read_term(connection),
                now=await read_now(connection, self._database),
                unwanted=unwanted,
            )

        response = await self._database.write(write)
        self._tell(beat)
        return response

    def _tell(self, beat: Heartbeat) -> None:
        """Let dispatch know at once of a worker that is new or changed what it takes."""
        self._bus.publish(LOAD, [beat.worker_id, beat.load.seq, beat.load.active])
        described = (beat.state, beat.capacity, tuple(beat.handlers), beat.url, beat.delivers)
        if self._known.get(beat.worker_id) != described:
            if len(self._known) > 10_000:
                self._known.clear()
            self._known[beat.worker_id] = described
            self._bus.publish(BEAT, [beat.worker_id])
