"""Which handlers live workers offer, and with which params, for callers; at most a second old."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

from app.fleet.params_check import ParamsCheck, is_object
from app.fleet.params_faults import Fault
from app.fleet.schema_cost import UnusableSchema
from app.ground import Ground
from app.lifecycle.handler_schemas import read_schemas
from app.lifecycle.nodes import Node, read_nodes
from app.plumbing.bus import BEAT
from app.plumbing.single_flight import SingleFlight
from oncue.addresses import Network
from oncue.protocol import LEASE_SECONDS, WorkerState

log = structlog.get_logger(__name__)

FRESH_SECONDS: Final = 1.0
ASK_AGAIN_SECONDS: Final = 10.0
"""How long a schema that is offered but not stored is not looked for again, but for a signal."""
MAX_SCHEMAS: Final = 2000


@dataclass(frozen=True, slots=True)
class Schema:
    """A published schema, and its check; one that cannot be used is not shown or checks nothing."""

    body: str | None
    check: ParamsCheck | None


@dataclass(frozen=True, slots=True)
class HandlerOffer:
    """A handler as the live workers offer it, perhaps in several versions.

    `schemas` are those of its params, the most common first. Submissions are `checked` while
    all of the workers publish one that can be used.
    """

    name: str
    description: str
    isolation: str
    workers: int
    schemas: tuple[Schema, ...]
    checked: bool

    def faults(self, params: Any, size_bytes: int) -> list[Fault]:
        """Return what is wrong with params, nothing if the schema of any worker takes them.

        `size_bytes` is the length of their JSON text.
        """
        found: list[Fault] = []
        for schema in self.schemas if self.checked else ():
            faults = [] if schema.check is None else schema.check.faults(params, size_bytes)
            if not faults:
                return []
            found = found or faults
        return found


class LiveFleet:
    """The workers that beat within the last 15 s, read at most once a second for all askers."""

    def __init__(self, ground: Ground) -> None:
        self._database = ground.database
        self._clock = ground.clock
        self._nodes: list[Node] = []
        self._handlers: Mapping[str, HandlerOffer] = {}
        self._egress_lists: list[tuple[Network, ...]] | None = None
        self._schemas: dict[str, Schema] = {}
        self._not_stored: dict[str, float] = {}
        self._read_at = float("-inf")
        self._signals = 0
        self._reads: SingleFlight[int, None] = SingleFlight()
        ground.bus.subscribe(BEAT, lambda _signal: self._expire())

    async def nodes(self) -> list[Node]:
        """Return the live workers that take runs.

        Raises:
            DatabaseUnavailable: they are not known. So for all methods here.
        """
        await self._refresh()
        return self._nodes

    async def handlers(self) -> Mapping[str, HandlerOffer]:
        """Return what live workers offer, by the handler's name."""
        await self._refresh()
        return self._handlers

    async def offers(self, handler: str) -> bool:
        """Tell whether a live worker offers a handler."""
        return handler in await self.handlers()

    async def egress_lists(self) -> list[tuple[Network, ...]] | None:
        """Return what each live worker that delivers may call besides public addresses.

        None: there is no such worker, or one does not say. It is the same object until the
        workers are read again.
        """
        await self._refresh()
        return self._egress_lists

    async def _refresh(self) -> None:
        if time.monotonic() - self._read_at > FRESH_SECONDS:
            # Who comes after a signal needs a read that was begun after it.
            await self._reads.call(self._signals, self._read)

    async def _read(self) -> None:
        signals = self._signals
        oldest = self._clock.now_ms() - LEASE_SECONDS * 1000
        nodes = [
            node
            for node in await self._database.read(read_nodes)
            if node.state is WorkerState.UP and node.last_heartbeat >= oldest
        ]
        await self._load({digest for node in nodes for digest in _digests(node)})
        self._nodes, self._handlers = nodes, self._offered(nodes)
        self._egress_lists = _egress_lists(nodes)
        # A signal that came meanwhile may be about what was not read yet.
        self._read_at = time.monotonic() if signals == self._signals else float("-inf")

    async def _load(self, digests: set[str]) -> None:
        """Read and compile the schemas that are new here: a statement when workers change."""
        now = time.monotonic()
        missing = {
            one
            for one in digests - self._schemas.keys()
            if now - self._not_stored.get(one, float("-inf")) > ASK_AGAIN_SECONDS
        }
        if not missing:
            return
        bodies = await self._database.read(lambda connection: read_schemas(connection, missing))
        # In a thread: the largest schema may take a while.
        compiled = await asyncio.to_thread(lambda: {one: _compiled(bodies[one]) for one in bodies})
        if len(self._schemas) + len(compiled) > MAX_SCHEMAS:
            self._schemas = {one: self._schemas[one] for one in digests & self._schemas.keys()}
            self._not_stored.clear()
        self._schemas |= compiled
        self._not_stored |= dict.fromkeys(missing - compiled.keys(), now)

    def _offered(self, nodes: Iterable[Node]) -> dict[str, HandlerOffer]:
        entries: dict[str, list[Mapping[str, str]]] = {}
        for node in nodes:
            for entry in node.handlers:
                entries.setdefault(entry["name"], []).append(entry)
        return {name: self._offer(name, found) for name, found in entries.items()}

    def _offer(self, name: str, entries: list[Mapping[str, str]]) -> HandlerOffer:
        digests = Counter(entry.get("params_digest") for entry in entries)
        # Counted, then by digest: two dispatchers show the same one.
        ordered = sorted(digests, key=lambda one: (-digests[one], one or ""))
        schemas = [
            self._schemas[one] for one in ordered if one is not None and one in self._schemas
        ]
        return HandlerOffer(
            name=name,
            description=entries[0]["description"],
            isolation=entries[0]["isolation"],
            workers=len(entries),
            schemas=tuple(schemas),
            checked=len(schemas) == len(digests) and all(one.check is not None for one in schemas),
        )

    def _expire(self) -> None:
        self._signals += 1
        self._read_at = float("-inf")
        self._not_stored.clear()


def _egress_lists(nodes: Iterable[Node]) -> list[tuple[Network, ...]] | None:
    lists = [node.egress_allow for node in nodes if node.delivers]
    if not lists or any(one is None for one in lists):
        return None
    return [one for one in lists if one is not None]


def _digests(node: Node) -> set[str]:
    return {entry["params_digest"] for entry in node.handlers if "params_digest" in entry}


def _compiled(body: str) -> Schema:
    try:
        return Schema(body, ParamsCheck(body))
    except UnusableSchema as error:
        log.warning("schema_not_usable", reason=str(error))
        return Schema(body if is_object(body) else None, None)
