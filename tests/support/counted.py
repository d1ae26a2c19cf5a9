"""Counts what the platform inside this process asks of others: SQL, Redis, HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from redis.asyncio.connection import AbstractConnection
from sqlalchemy import Connection, event
from sqlalchemy.engine import Engine as SyncEngine
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.plumbing.database import Database
from app.plumbing.loops import Loop
from oncue.protocol import HEARTBEAT_PATH

ROUTINE = frozenset(
    {
        *("bulk", "clock", "dispatch-lock", "expiry", "handover"),
        *("recovery", "retention", "spawner", "standing", "stopper"),
    }
)
"""Loops that ask the same however many jobs there are: on a slow machine they ask more a job."""
_loop: ContextVar[str] = ContextVar("loop", default="")


@dataclass
class Asked:
    """What was asked since the last `clear`; commits of transactions are no statements."""

    statements: list[str] = field(default_factory=list)
    commits: int = 0
    round_trips: list[str] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        """Begin anew."""
        self.statements.clear()
        self.commits = 0
        self.round_trips.clear()
        self.requests.clear()


@contextmanager
def counted(*, but_not: Database) -> Iterator[Asked]:
    """Count all that this process asks, except of one `Database`: the one that a test reads by.

    A pipeline or script is one round trip of Redis. HTTP is what the servers in this process
    are asked. What `ROUTINE` loops ask, and beats, are not counted.
    """
    asked = Asked()
    apart = {but_not._writers.sync_engine, but_not._readers.sync_engine}
    send = AbstractConnection.send_packed_command
    parsed = HttpToolsProtocol.on_headers_complete
    run = Loop._run

    async def run_named(self: Loop) -> None:
        _loop.set(self.name)
        await run(self)

    def counts(connection: Connection) -> bool:
        return connection.engine not in apart and _loop.get() not in ROUTINE

    def note_statement(connection: Connection, _cursor: Any, statement: str, *_rest: Any) -> None:
        if counts(connection) and not statement.startswith("BEGIN"):
            asked.statements.append(statement)

    def note_commit(connection: Connection) -> None:
        if counts(connection):
            asked.commits += 1

    async def note_round_trip(self: Any, command: Any, *rest: Any, **named: Any) -> None:
        if _loop.get() not in ROUTINE:
            asked.round_trips.append(repr(command)[:200])
        await send(self, command, *rest, **named)

    def note_request(self: Any) -> None:
        parsed(self)
        if self.scope["path"] != HEARTBEAT_PATH:
            asked.requests[self.scope["path"]] += 1

    event.listen(SyncEngine, "before_cursor_execute", note_statement)
    event.listen(SyncEngine, "commit", note_commit)
    try:
        with (
            patch.object(Loop, "_run", run_named),
            patch.object(AbstractConnection, "send_packed_command", note_round_trip),
            patch.object(HttpToolsProtocol, "on_headers_complete", note_request),
        ):
            yield asked
    finally:
        event.remove(SyncEngine, "before_cursor_execute", note_statement)
        event.remove(SyncEngine, "commit", note_commit)
