"""Beats from a thread of its own, which a handler that burns the processor cannot silence."""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import structlog
from pydantic import ValidationError

from oncue import __version__
from oncue.addresses import Network
from oncue.protocol import (
    HEARTBEAT_PATH,
    MAX_EGRESS_NETWORKS,
    Heartbeat,
    HeartbeatResponse,
    OfferedHandler,
    ParamsSchema,
    WorkerState,
)
from oncue.protocol import Held as HeldExecution
from worker.clock import DatabaseClock, boot_seconds
from worker.cost import RecentCost
from worker.held import Held, Terms
from worker.liveness import Liveness
from worker.offered import Offer

BEAT_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 1.0
REQUEST_TIMEOUT_SECONDS: Final = 3.0
SCHEMAS_AGAIN_SECONDS: Final = 60.0
"""How long beats stay plain after one with schemas failed: it may be too much for a proxy."""
SKEW_WARN_MS: Final = 1000
RIGHT_AGAIN_MS: Final = 500
"""A clock that was off is right again only below this: the log must not flutter."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this worker is, for as long as its process lives."""

    name: str
    boot_id: str
    url: str
    weight: float
    labels: dict[str, str]
    delivers: bool
    offer: Offer
    egress_allow: tuple[Network, ...] = ()

    @property
    def worker_id(self) -> str:
        """Name and boot id: a restarted worker is another worker."""
        return f"{self.name}#{self.boot_id}"

    @property
    def handlers(self) -> tuple[OfferedHandler, ...]:
        """What it offers."""
        return self.offer.handlers


def _listed(networks: tuple[Network, ...]) -> list[str] | None:
    """Return what dispatchers are told of the networks: a longer list is not told at all."""
    return [str(one) for one in networks] if len(networks) <= MAX_EGRESS_NETWORKS else None


class BeatFailed(Exception):
    """No dispatcher acknowledged the beat."""


class BeatSender:
    """A blocking client with one connection, to the first dispatcher that answers 200."""

    def __init__(
        self,
        urls: Sequence[str],
        token: str | None,
        connect: Callable[[str], http.client.HTTPConnection] | None = None,
    ) -> None:
        self._urls = urls
        self._connect = connect or _connection_to
        self._current = 0
        self._connection: http.client.HTTPConnection | None = None
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"

    def send(self, body: bytes) -> bytes:
        """Send one beat and return the answer.

        Raises:
            BeatFailed: no dispatcher answered 200.
        """
        reason = "no address"
        for _ in self._urls:
            url = self._urls[self._current]
            try:
                status, answer = self._post(url, body)
                if status == 200:
                    return answer
                reason = f"{url} answered {status}"
            except (OSError, http.client.HTTPException) as error:
                reason = f"{url} failed with {type(error).__name__}"
            self.close()
            self._current = (self._current + 1) % len(self._urls)
        raise BeatFailed(reason)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _post(self, url: str, body: bytes) -> tuple[int, bytes]:
        kept_open = self._connection is not None
        try:
            return self._exchange(url, body)
        except (OSError, http.client.HTTPException) as error:
            # A connection that was kept open may have been closed by the other side meanwhile.
            if not kept_open or isinstance(error, TimeoutError):
                raise
            self.close()
            return self._exchange(url, body)

    def _exchange(self, url: str, body: bytes) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = self._connect(url)
        path = urlsplit(url).path.rstrip("/") + HEARTBEAT_PATH
        self._connection.request("POST", path, body, self._headers)
        response = self._connection.getresponse()
        return response.status, response.read()


def _connection_to(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "https":
        return http.client.HTTPSConnection(
            host,
            parts.port,
            timeout=REQUEST_TIMEOUT_SECONDS,
            context=ssl.create_default_context(),
        )
    return http.client.HTTPConnection(host, parts.port, timeout=REQUEST_TIMEOUT_SECONDS)


class Beats(threading.Thread):
    """Tells dispatchers every 5 s, and at once after a change, what this worker is and holds."""

    def __init__(
        self,
        identity: Identity,
        sender: BeatSender,
        held: Held,
        *,
        liveness: Liveness,
        terms: Terms,
        clock: DatabaseClock,
        cost: RecentCost,
        cpu_idle_percent: Callable[[], float],
        held_deliveries: Callable[[], list[str]],
        unwanted: Callable[[list[str]], None],
        failed: Callable[[], None],
        again: Callable[[], None],
    ) -> None:
        super().__init__(name="oncue-beats", daemon=True)
        self._identity = identity
        self._sender = sender
        self._held = held
        self._liveness = liveness
        self._terms = terms
        self._clock = clock
        self._cost = cost
        self._held_deliveries = held_deliveries
        self._unwanted = unwanted
        self._failed = failed
        self._again = again
        self._cpu_idle_percent = cpu_idle_percent
        self._was_off = False
        self._now = threading.Event()
        self._last = threading.Event()
        self._silent = False
        self._wanted: list[str] = []
        self._plain_until = float("-inf")

    def run(self) -> None:
        """Beat until the last one."""
        while not self._last.is_set():
            self._now.clear()
            wait = BEAT_SECONDS if self._beat_guarded() else RETRY_SECONDS
            if not self._last.is_set():
                self._now.wait(wait)
        self._beat_guarded()
        self._sender.close()

    def beat_now(self) -> None:
        """Ask for a beat at once: something changed that dispatchers should know."""
        self._now.set()

    def finish(self) -> None:
        """Ask for one last beat, which offers nothing any more."""
        self._last.set()
        self._now.set()

    def _beat_guarded(self) -> bool:
        try:
            self._beat()
        except BeatFailed as error:
            self._failed()
            if not self._silent:
                log.warning("no dispatcher acknowledges beats", reason=str(error))
            self._silent = True
            return False
        except Exception:
            # The thread must outlive any surprise: without beats the worker would be given up.
            log.exception("a beat failed")
            self._failed()
            return False
        if self._silent:
            log.info("beats are acknowledged again")
            self._again()
        self._silent = False
        return True

    def _beat(self) -> None:
        beat = self._describe()
        body = beat.model_dump_json(by_alias=True).encode()
        sent_at, asked_at = boot_seconds(), time.monotonic()
        try:
            answer = self._sender.send(body)
        except BeatFailed:
            if beat.schemas:
                self._wanted = []
                self._plain_until = boot_seconds() + SCHEMAS_AGAIN_SECONDS
            raise
        received_at, now = boot_seconds(), time.monotonic()
        try:
            response = HeartbeatResponse.model_validate_json(answer)
        except ValidationError:
            raise BeatFailed("the answer is not one of a dispatcher") from None
        if response.unwanted:
            # First: once the beat counts, what waits for its time may begin.
            self._unwanted(response.unwanted)
        self._liveness.beat_acknowledged(sent_at)
        self._terms.learn(response.term)
        self._clock.learn(response.now, sent_at, received_at)
        self._clock.lower_bound.hear(response.now, now, asked_at=asked_at)
        self._tell_skew()
        self._want(response.wanted_schemas)

    def _tell_skew(self) -> None:
        skew_ms = -self._clock.offset_ms
        is_off = abs(skew_ms) > (RIGHT_AGAIN_MS if self._was_off else SKEW_WARN_MS)
        if is_off and not self._was_off:
            log.warning("the clock is off", skew_ms=round(skew_ms), limit_ms=SKEW_WARN_MS)
        elif self._was_off and not is_off:
            log.info("the clock is right again")
        self._was_off = is_off

    def _want(self, digests: list[str]) -> None:
        """Send the schemas that a dispatcher does not know with a beat that comes at once."""
        asked_before, self._wanted = self._wanted, []
        if boot_seconds() < self._plain_until:
            return
        self._wanted = [one for one in digests if one in self._identity.offer.schemas]
        if self._wanted and self._wanted != asked_before:
            self._now.set()

    def _describe(self) -> Heartbeat:
        # First, because the first measurement takes a while: the counts below must be fresh.
        cpu_idle_percent = self._cpu_idle_percent()
        identity, held, last = self._identity, self._held, self._last.is_set()
        return Heartbeat(
            worker_id=identity.worker_id,
            name=identity.name,
            boot_id=identity.boot_id,
            url=identity.url,
            version=__version__,
            state=WorkerState.DRAINING if held.draining or last else WorkerState.UP,
            handlers=list(identity.handlers),
            capacity=0 if last else held.capacity,
            weight=identity.weight,
            labels=identity.labels,
            delivers=identity.delivers and not held.draining,
            load=held.load(),
            avg_cost_ms=round(self._cost.mean_ms(time.monotonic()), 3),
            cpu_idle_percent=cpu_idle_percent,
            term_seen=self._terms.highest,
            held=[
                HeldExecution(job_id=one.run.job_id, execution_id=one.id) for one in held.snapshot()
            ],
            held_deliveries=self._held_deliveries(),
            egress_allow=_listed(identity.egress_allow),
            schemas=[
                ParamsSchema(digest=one, body=identity.offer.schemas[one]) for one in self._wanted
            ],
        )
