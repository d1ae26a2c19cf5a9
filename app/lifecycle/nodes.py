"""The rows of workers: their beats, and the mark of a proven death."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Final, NamedTuple

import orjson
from sqlalchemy import RowMapping, TextClause, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.plumbing.database import NOW_MS, Database
from oncue.addresses import Network
from oncue.protocol import Heartbeat, WorkerState, call_token


@dataclass(frozen=True, slots=True)
class Node:
    """A worker as its last committed beat described it."""

    worker_id: str
    name: str
    boot_id: str
    url: str
    version: str
    state: WorkerState
    handlers: tuple[dict[str, str], ...]
    labels: dict[str, str]
    capacity: int
    weight: float
    delivers: bool
    load_seq: int
    active: int
    queued: int
    avg_cost_ms: float
    cpu_idle_percent: float
    held: frozenset[str]
    beats: int
    last_heartbeat: int

    handler_names: frozenset[str]
    secret_handlers: frozenset[str] = frozenset()
    """Those whose results are secret, whatever a job says."""
    egress_allow: tuple[Network, ...] | None = None
    """What it may call besides public addresses; None: it does not say."""
    worker_group: str | None = None
    """The group of the key by which it beats; None for the internal token."""
    key_digest: str | None = field(default=None, repr=False)
    """The SHA-256 of that key."""

    @property
    def call_token(self) -> str | None:
        """What calls to it carry; None: the internal token, which no other worker may learn."""
        return None if self.key_digest is None else call_token(self.key_digest)


@dataclass(frozen=True, slots=True)
class GroupKey:
    """By which key of which group a worker beats."""

    worker_group: str
    digest: str = field(repr=False)


_COLUMNS: Final = (
    "id, name, boot_id, url, version, state, handlers, labels, capacity, weight, delivers, "
    "load_seq, active, queued, avg_cost_ms, cpu_idle_percent, held, beats, last_heartbeat, "
    "egress_allow, worker_group, key_digest"
)
_VALUES: Final = (
    ":id, :name, :boot_id, :url, :version, :state, :handlers, :labels, :capacity, :weight, "
    ":delivers, :load_seq, :active, :queued, :avg_cost_ms, :cpu_idle_percent, :held"
)
_CHANGING: Final = (
    "url",
    "version",
    "handlers",
    "labels",
    "capacity",
    "weight",
    "delivers",
    "load_seq",
    "active",
    "queued",
    "avg_cost_ms",
    "cpu_idle_percent",
    "held",
    "last_heartbeat",
    "egress_allow",
)


@cache
def _upsert(*, sqlite: bool, revive: bool, by_key: bool) -> TextClause:
    """A worker that was declared DOWN stays so while it holds runs that were given away."""
    changing = (*_CHANGING, "key_digest") if by_key else _CHANGING
    new = "excluded.{0}" if sqlite else "VALUES({0})"
    changes = ", ".join(f"{name} = {new.format(name)}" for name in changing)
    state = new.format("state")
    if not revive:
        down = f"'{WorkerState.DOWN}'"
        state = f"CASE WHEN worker_node.state = {down} THEN {down} ELSE {state} END"
    head = "ON CONFLICT (id) DO UPDATE SET" if sqlite else "ON DUPLICATE KEY UPDATE"
    return text(
        f"INSERT INTO worker_node ({_COLUMNS}, first_heartbeat) "
        f"VALUES ({_VALUES}, 1, {NOW_MS[sqlite]}, :egress_allow, :worker_group, :key_digest, "
        f"{NOW_MS[sqlite]}) "
        f"{head} {changes}, state = {state}, beats = worker_node.beats + 1"
    )


async def record_beat(
    connection: AsyncConnection,
    database: Database,
    beat: Heartbeat,
    *,
    revive: bool,
    by_key: GroupKey | None = None,
) -> None:
    """Write what a worker says of itself, at the database's time."""
    await connection.execute(
        _upsert(sqlite=database.is_sqlite, revive=revive, by_key=by_key is not None),
        {
            "id": beat.worker_id,
            "name": beat.name,
            "boot_id": beat.boot_id,
            "url": beat.url.rstrip("/"),
            "version": beat.version,
            "state": str(beat.state),
            "handlers": orjson.dumps(
                [one.model_dump(exclude_none=True) for one in beat.handlers]
            ).decode(),
            "labels": orjson.dumps(beat.labels).decode(),
            "capacity": beat.capacity,
            "weight": beat.weight,
            "delivers": beat.delivers,
            "load_seq": beat.load.seq,
            "active": beat.load.active,
            "queued": beat.load.queued,
            "avg_cost_ms": beat.avg_cost_ms,
            "cpu_idle_percent": beat.cpu_idle_percent,
            "egress_allow": None
            if beat.egress_allow is None
            else orjson.dumps(beat.egress_allow).decode(),
            "held": orjson.dumps([one.execution_id for one in beat.held]).decode(),
            "worker_group": None if by_key is None else by_key.worker_group,
            "key_digest": None if by_key is None else by_key.digest,
        },
    )


_GROUP_OF: Final = text("SELECT id, worker_group FROM worker_node WHERE id IN :ids").bindparams(
    bindparam("ids", expanding=True)
)


async def groups_of(
    connection: AsyncConnection, worker_ids: Sequence[str]
) -> dict[str, str | None]:
    """Return the group of each of these workers that is known."""
    rows = await connection.execute(_GROUP_OF, {"ids": sorted(worker_ids)})
    return {row.id: row.worker_group for row in rows}


_SENT_TO: Final = text(
    "SELECT l.execution_id FROM job_log AS l JOIN worker_node AS n ON n.id = l.worker_id "
    "WHERE l.execution_id IN :ids AND n.worker_group = :of_group"
).bindparams(bindparam("ids", expanding=True))
_OWED_BY: Final = text(
    "SELECT c.delivery_id FROM callback_delivery AS c "
    "JOIN worker_node AS n ON n.id = c.owner_worker_id "
    "WHERE c.delivery_id IN :ids AND n.worker_group = :of_group"
).bindparams(bindparam("ids", expanding=True))


async def executions_of_group(
    connection: AsyncConnection, execution_ids: Sequence[str], worker_group: str
) -> set[str]:
    """Return those of the executions that were sent to a worker of the group."""
    return await _of_group(connection, _SENT_TO, execution_ids, worker_group)


async def deliveries_of_group(
    connection: AsyncConnection, delivery_ids: Sequence[str], worker_group: str
) -> set[str]:
    """Return those of the deliveries that a worker of the group has in hand."""
    return await _of_group(connection, _OWED_BY, delivery_ids, worker_group)


async def _of_group(
    connection: AsyncConnection, statement: TextClause, ids: Sequence[str], worker_group: str
) -> set[str]:
    if not ids:
        return set()
    rows = await connection.execute(statement, {"ids": sorted(ids), "of_group": worker_group})
    return {row[0] for row in rows}


async def read_nodes(
    connection: AsyncConnection, *, include_down: bool = False, limit: int | None = None
) -> list[Node]:
    """Return the workers that are not DOWN (or all), newest beat first."""
    where = "" if include_down else f"WHERE state <> '{WorkerState.DOWN}' "
    bound = "" if limit is None else f" LIMIT {int(limit)}"
    rows = await connection.execute(
        text(f"SELECT {_COLUMNS} FROM worker_node {where}ORDER BY last_heartbeat DESC, id{bound}")
    )
    return [_node(row) for row in rows.mappings()]


async def read_node(connection: AsyncConnection, worker_id: str) -> Node | None:
    """Return one worker, whatever its state."""
    rows = await connection.execute(
        text(f"SELECT {_COLUMNS} FROM worker_node WHERE id = :id"), {"id": worker_id}
    )
    row = rows.mappings().one_or_none()
    return None if row is None else _node(row)


class _Handlers(NamedTuple):
    entries: tuple[dict[str, str], ...]
    names: frozenset[str]
    secret: frozenset[str]


@lru_cache(maxsize=256)
def _handlers(kept: str) -> _Handlers:
    """Nodes are read again and again, and say the same: nobody may change what is returned."""
    entries = tuple(orjson.loads(kept))
    return _Handlers(
        entries,
        frozenset(entry["name"] for entry in entries),
        frozenset(entry["name"] for entry in entries if entry.get("secret_result")),
    )


def _node(row: RowMapping) -> Node:
    handlers = _handlers(row["handlers"])
    return Node(
        worker_id=row["id"],
        name=row["name"],
        boot_id=row["boot_id"],
        url=row["url"],
        version=row["version"],
        state=WorkerState(row["state"]),
        handlers=handlers.entries,
        handler_names=handlers.names,
        secret_handlers=handlers.secret,
        labels=orjson.loads(row["labels"]),
        capacity=row["capacity"],
        weight=row["weight"],
        delivers=bool(row["delivers"]),
        load_seq=row["load_seq"],
        active=row["active"],
        queued=row["queued"],
        avg_cost_ms=row["avg_cost_ms"],
        cpu_idle_percent=row["cpu_idle_percent"],
        held=frozenset(orjson.loads(row["held"])),
        beats=row["beats"],
        last_heartbeat=row["last_heartbeat"],
        worker_group=row["worker_group"],
        key_digest=row["key_digest"],
        egress_allow=_networks(row["egress_allow"]),
    )


@lru_cache(maxsize=256)
def _networks(kept: str | None) -> tuple[Network, ...] | None:
    if kept is None:
        return None
    try:
        return tuple(ipaddress.ip_network(one) for one in orjson.loads(kept))
    except ValueError:
        # A worker of another make wrote something else: what it may call is not known.
        return None


async def mark_down(connection: AsyncConnection, worker_id: str, *, last_heartbeat: int) -> bool:
    """Declare a worker dead unless it has beaten since; the row count tells."""
    done = await connection.execute(
        text(
            f"UPDATE worker_node SET state = '{WorkerState.DOWN}' WHERE id = :id "
            f"AND last_heartbeat = :seen AND state <> '{WorkerState.DOWN}'"
        ),
        {"id": worker_id, "seen": last_heartbeat},
    )
    return bool(done.rowcount)


async def mark_draining(connection: AsyncConnection, worker_id: str) -> bool:
    """Deal nothing more to a worker that is UP, until it says otherwise; tell whether it was."""
    done = await connection.execute(
        text(
            f"UPDATE worker_node SET state = '{WorkerState.DRAINING}' "
            f"WHERE id = :id AND state = '{WorkerState.UP}'"
        ),
        {"id": worker_id},
    )
    return done.rowcount == 1


_FORGET: Final = text(
    f"DELETE FROM worker_node WHERE id IN :ids AND state = '{WorkerState.DOWN}'"
).bindparams(bindparam("ids", expanding=True))


async def forget_nodes(connection: AsyncConnection, worker_ids: Sequence[str]) -> None:
    """Remove workers that have long been DOWN."""
    if worker_ids:
        await connection.execute(_FORGET, {"ids": sorted(worker_ids)})
