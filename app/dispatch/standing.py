"""What each dispatcher says of itself in Redis, for whoever is asked why a job does not run.

It is a hint with a short life, never a fact: nothing is decided by it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
import structlog

from app.dispatch.lock import DispatchLock, lock_key
from app.fleet.roster import Roster
from app.ground import Ground
from app.lifecycle.term import FIRST
from app.plumbing.loops import Loop
from app.plumbing.redis import REDIS_ERRORS
from oncue.protocol import run_key

log = structlog.get_logger(__name__)

WRITE_SECONDS: Final = 2.0
READ_SECONDS: Final = 2.0
"""A Redis that is not reached by then counts as away."""
BELIEVED_MS: Final = 10_000
"""How old, by the database's clock, a note may be that is believed."""
FORGOTTEN_MS: Final = 60_000
WORKERS_NOTED: Final = 1000


@dataclass(frozen=True, slots=True)
class DispatcherNote:
    """One dispatcher as it described itself; `name` is host:pid."""

    name: str
    dispatches: bool
    term: int | None
    skew_ms: int
    at: int


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as the lock holder sees it between its beats."""

    active: int
    suspect: bool
    draining: bool


@dataclass(frozen=True, slots=True)
class LeaseView:
    """What stands under the run key of an attempt: a lease, or once it `ended` its outcome."""

    execution_id: str
    ended: bool
    left_ms: int


@dataclass(frozen=True, slots=True)
class Standings:
    """What Redis tells of dispatch. `reachable` is False when this process cannot ask it.

    `lock_held` and `holder` are of the lock of `partition`; `workers` is the view of the holder of
    partition 0's, empty when there is none or it is old.
    `lease` is what stands under the run key that was asked after.
    """

    reachable: bool
    lock_held: bool = False
    dispatchers: tuple[DispatcherNote, ...] = ()
    workers: Mapping[str, WorkerView] = field(default_factory=dict)
    holder: DispatcherNote | None = None
    lease: LeaseView | None = None
    partition: int = FIRST


class Standing:
    """Notes every 2 s who this dispatcher is and, while it holds the lock, how it sees the workers.

    One small pipeline each time, whatever the number of jobs.
    """

    def __init__(self, ground: Ground, lock: DispatchLock, roster: Roster) -> None:
        self._redis = ground.redis
        self._clock = ground.clock
        self._lock = lock
        self._roster = roster
        self._dispatches = not ground.settings.no_dispatch
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        """What distinguishes this process: host:pid."""
        self._processes, self._view = _keys(ground.settings.redis_prefix)
        self._loop = Loop("standing", self._step, expected=REDIS_ERRORS)

    def start(self) -> None:
        """Start noting."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop, and take the note away."""
        await self._loop.stop()
        try:
            async with asyncio.timeout(READ_SECONDS):
                await self._redis.hdel(self._processes, self._lock.token)
        except REDIS_ERRORS as error:
            log.debug("standing_left", error=str(error))

    def note(self) -> DispatcherNote:
        """Describe this dispatcher as it is now."""
        return DispatcherNote(
            name=self.name,
            dispatches=self._dispatches,
            term=self._lock.term,
            skew_ms=round(self._clock.skew_ms),
            at=int(self._clock.now_ms()),
        )

    async def write(self) -> None:
        """Write the notes now, and remove those of dispatchers that are long silent."""
        own = self.note()
        term, now = own.term, own.at
        note = {
            "name": own.name,
            "dispatches": own.dispatches,
            "term": term,
            "skewMs": own.skew_ms,
            "at": now,
        }
        async with self._redis.pipeline(transaction=False) as pipe:
            _ = pipe.hset(self._processes, self._lock.token, orjson.dumps(note))
            _ = pipe.pexpire(self._processes, FORGOTTEN_MS)
            if term is not None:
                view = {"token": self._lock.token, "at": now, "workers": self._workers()}
                _ = pipe.set(self._view, orjson.dumps(view), px=BELIEVED_MS)
            _ = pipe.hgetall(self._processes)
            notes = (await pipe.execute())[-1]
        old = [token for token, one in notes.items() if now - _at(one) > FORGOTTEN_MS]
        if old:
            await self._redis.hdel(self._processes, *old)

    async def _step(self) -> None:
        await self.write()
        await asyncio.sleep(WRITE_SECONDS)

    def _workers(self) -> dict[str, list[int]]:
        seen = self._roster.workers()[:WORKERS_NOTED]
        return {
            one.node.worker_id: [one.live_active, int(one.suspect), int(one.draining)]
            for one in seen
        }


async def read_standings(
    ground: Ground, now_ms: int, run: tuple[int, int] | None = None, *, partition: int = FIRST
) -> Standings:
    """Read what dispatchers noted, and the lease of a run (job id, triggerTs): one round trip."""
    settings = ground.settings
    processes, view_key = _keys(settings.redis_prefix)
    try:
        async with (
            asyncio.timeout(READ_SECONDS),
            ground.redis.pipeline(transaction=False) as pipe,
        ):
            _ = pipe.get(lock_key(settings.redis_prefix))
            _ = pipe.get(lock_key(settings.redis_prefix, partition))
            _ = pipe.hgetall(processes)
            _ = pipe.get(view_key)
            if run is not None:
                _ = pipe.get(key := run_key(settings.redis_prefix, *run))
                _ = pipe.pttl(key)
            first, holder, notes, view, *lease = await pipe.execute()
    except REDIS_ERRORS as error:
        log.info("standings_unreadable", error=str(error))
        return Standings(reachable=False)
    read = {token: _dispatcher(one) for token, one in notes.items()}
    fresh = {
        token: one
        for token, one in read.items()
        if one is not None and now_ms - one.at <= BELIEVED_MS
    }
    return Standings(
        reachable=True,
        lock_held=holder is not None,
        dispatchers=tuple(sorted(fresh.values(), key=lambda one: one.name)),
        workers={} if first is None else _views(view, first, now_ms),
        holder=fresh.get(str(holder)),
        lease=_lease(*lease) if lease else None,
        partition=partition,
    )


def _lease(value: str | None, left_ms: int) -> LeaseView | None:
    if value is None:
        return None
    _boot_id, execution_id, outcome = value.split(" ", 2)
    return LeaseView(execution_id, bool(outcome), max(0, left_ms))


def _keys(prefix: str) -> tuple[str, str]:
    return f"{prefix}:dispatch:processes", f"{prefix}:dispatch:workers"


def _at(note: str) -> int:
    read = _dispatcher(note)
    return 0 if read is None else read.at


def _dispatcher(note: str) -> DispatcherNote | None:
    """Read a note; one of a version that writes it otherwise is none."""
    try:
        read = orjson.loads(note)
        return DispatcherNote(
            name=str(read["name"]),
            dispatches=bool(read["dispatches"]),
            term=None if read["term"] is None else int(read["term"]),
            skew_ms=int(read["skewMs"]),
            at=int(read["at"]),
        )
    except (ValueError, TypeError, KeyError):
        return None


def _views(text: str | None, holder: str, now_ms: int) -> dict[str, WorkerView]:
    try:
        view: dict[str, Any] = orjson.loads(text or "")
        if view["token"] != holder or now_ms - int(view["at"]) > BELIEVED_MS:
            return {}
        return {worker_id: _worker(seen) for worker_id, seen in view["workers"].items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def _worker(seen: Sequence[Any]) -> WorkerView:
    active, suspect, draining = seen
    return WorkerView(int(active), bool(suspect), bool(draining))
