"""Tries callbacks, each once: signed, bounded, fair between hosts.

Dispatchers own the schedule of retries and hand out each try. A host that gives no answer again
and again is not called for a while: what is held for it goes back uncounted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from typing import Final

import structlog

from oncue import __version__
from oncue.addresses import callback_host
from oncue.protocol import MAX_ANSWER_BYTES, Delivery, DeliveryResult
from oncue.webhooks import sign_webhook
from worker.breaker import Breaker
from worker.egress import Egress, EgressFailed, EgressRefused, EgressReply, read_networks

MOST_HELD: Final = 10_000
MOST_HELD_PER_HOST: Final = 500
MOST_HELD_PER_SLOW_HOST: Final = 64
MOST_IN_FLIGHT: Final = 256
MOST_IN_FLIGHT_TO_SLOW_HOSTS: Final = 96
MOST_IN_FLIGHT_TO_NEW_HOSTS: Final = 96
MOST_PER_SLOW_HOST: Final = 2
MOST_WAITING_FOR_OTHERS: Final = MOST_HELD // 2
"""So many wait for hosts that are not known to answer: the rest is for those that are."""
MOST_HELD_CHARACTERS: Final = 128 * 1024 * 1024
"""Of bodies: what is held is bounded whatever they are long."""
LATE_MS: Final = 2000
"""A host whose answers take longer may not fill all places, however many such there are."""
SHORTEST_RETRY_AFTER_MS: Final = 1000
LONGEST_RETRY_AFTER_MS: Final = 24 * 3600 * 1000
REMEMBER_TRIES: Final = 10_000
REMEMBER_HOSTS: Final = 2000
GONE: Final = 410
TRIAL_AGAIN_SECONDS: Final = 5.0
"""When a host is offered again whose one trial is under way."""
NO_ROOM_SECONDS: Final = 1.0
NO_ANSWER_LATELY: Final = "not tried: its host gave no answer lately"
NO_ROOM: Final = "not tried: the worker holds as many as it may"
UNDER_WAY: Final = "not tried: an earlier try is not on record yet"

USER_AGENT: Final = f"oncue/{__version__}"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DeliveryLimits:
    """How receivers are treated: seconds a try, tries at once of a host, and its breaker."""

    try_seconds: float = 15.0
    most_per_host: int = 16
    breaker_failures: int = 5
    breaker_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class Taken:
    """The ids of deliveries that were taken over, and hosts that are not called for so many ms."""

    accepted: list[str]
    paused: dict[str, int]


class _Lane(Enum):
    """Hosts that answer, those whose last try got none or a late answer, and unknown ones."""

    FAST = auto()
    SLOW = auto()
    NEW = auto()


_PLACES: Final = {
    _Lane.SLOW: MOST_IN_FLIGHT_TO_SLOW_HOSTS,
    _Lane.NEW: MOST_IN_FLIGHT_TO_NEW_HOSTS,
    _Lane.FAST: MOST_IN_FLIGHT,
}
"""In the order in which the lanes are looked at."""


@dataclass(slots=True, eq=False)
class _Host:
    """One receiver: its deliveries not yet tried, and what its last try has told of it."""

    name: str
    limits: DeliveryLimits
    breaker: Breaker
    new: bool = True
    """Nothing is known of it: it has a small part of all places until it has answered."""
    waiting: deque[Delivery] = field(default_factory=deque)
    in_flight: int = 0
    slow: bool = False
    lags: bool = False
    """Its last try was answered, but late."""
    queued: bool = False

    @property
    def lane(self) -> _Lane:
        """Which part of all places its tries may have."""
        if self.slow or self.lags:
            return _Lane.SLOW
        return _Lane.NEW if self.new else _Lane.FAST

    @property
    def has_room(self) -> bool:
        """True when it may be given one more delivery."""
        if not self.breaker.is_closed:
            return not self.waiting and not self.in_flight
        most = MOST_HELD_PER_SLOW_HOST if self.slow else MOST_HELD_PER_HOST
        return len(self.waiting) + self.in_flight < most

    @property
    def may_start(self) -> bool:
        """True when it has work and room."""
        most = self.limits.most_per_host
        if self.slow or self.new:
            most = min(MOST_PER_SLOW_HOST, most)
        return bool(self.waiting) and self.in_flight < most


class Deliverer:
    """Holds deliveries until their one try is made and the result acknowledged.

    Hosts take turns, and each may fill only a part of the room. Those that got no answer lately,
    and those that were never called, have a small part of the places together, so that dead
    hosts, however many, delay none that answers.
    """

    def __init__(
        self,
        egress: Egress,
        secrets: Sequence[str],
        *,
        limits: DeliveryLimits | None = None,
        tried: Callable[[DeliveryResult], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._egress = egress
        self._secrets = tuple(secrets)
        self._limits = limits or DeliveryLimits()
        self._tried = tried
        self._now = now
        self._held: dict[str, Delivery] = {}
        self._lately: OrderedDict[tuple[str, int], DeliveryResult] = OrderedDict()
        self._held_characters = 0
        self._hosts: dict[str, _Host] = {}
        self._answering: OrderedDict[str, None] = OrderedDict()
        self._queues: dict[_Lane, deque[_Host]] = {lane: deque() for lane in _Lane}
        self._flying: Counter[_Lane] = Counter()
        self._waiting = 0
        self._waiting_for_others = 0
        self._closing = False
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def take(self, deliveries: Sequence[Delivery]) -> Taken:
        """Take over what fits and say what did; without a secret nothing does."""
        taken = Taken([], {})
        if not self._secrets:
            return taken
        for one in deliveries:
            if self._take_one(one):
                taken.accepted.append(one.delivery_id)
            elif pause := self._pause_ms(one):
                taken.paused[callback_host(one.url)] = pause
        self._pump()
        return taken

    def take_own(self, deliveries: Sequence[Delivery]) -> None:
        """Take over what a report brought; what does not fit goes back at once, uncounted.

        So does one that was asked for again while an earlier try of it is under way.
        """
        taken = self.take(deliveries)
        accepted = set(taken.accepted)
        for one in deliveries:
            if one.delivery_id in accepted:
                continue
            held = self._held.get(one.delivery_id)
            if held is None:
                self._hold(one)
                self._return(one, taken.paused.get(callback_host(one.url)))
            elif held.try_number < one.try_number:
                self._return(one, None, why_not=UNDER_WAY)

    def acknowledged(self, result: DeliveryResult) -> None:
        """Let go of a delivery whose try is on record."""
        held = self._held.get(result.delivery_id)
        if held is not None and held.try_number == result.try_number:
            del self._held[result.delivery_id]
            self._held_characters -= len(held.body)

    def held_ids(self) -> list[str]:
        """The deliveries that this worker answers for; any thread may ask."""
        return list(self._held)

    @property
    def open_breakers(self) -> int:
        """Hosts that are not called, or by a trial only."""
        return sum(not host.breaker.is_closed for host in self._hosts.values())

    @property
    def backlog(self) -> int:
        """Deliveries held."""
        return len(self._held)

    async def wait_idle(self) -> None:
        """Return when no try is waiting or in flight."""
        await self._idle.wait()

    async def close(self) -> None:
        """Give up what is left: its lease at the dispatcher runs out and it is handed out again."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take_one(self, delivery: Delivery) -> bool:
        known = self._held.get(delivery.delivery_id)
        if known is not None:
            return known.try_number == delivery.try_number
        result = self._lately.get((delivery.delivery_id, delivery.try_number))
        if result is not None:
            self._hold(delivery)
            self._tried(result)
            return True
        if len(self._held) >= MOST_HELD or self._held_characters >= MOST_HELD_CHARACTERS:
            return False
        host = self._host(callback_host(delivery.url))
        if not host.has_room or host.breaker.wait_seconds(_now()) > 0:
            return False
        if host.lane is not _Lane.FAST and self._waiting_for_others >= MOST_WAITING_FOR_OTHERS:
            if not host.waiting and not host.in_flight:
                self._forget(host)
            return False
        self._hold(delivery)
        host.waiting.append(delivery)
        self._count_waiting(host, 1)
        self._idle.clear()
        self._enqueue(host)
        return True

    def _hold(self, delivery: Delivery) -> None:
        self._held[delivery.delivery_id] = delivery
        self._held_characters += len(delivery.body)

    def _count_waiting(self, host: _Host, change: int) -> None:
        self._waiting += change
        if host.lane is not _Lane.FAST:
            self._waiting_for_others += change

    def _host(self, name: str) -> _Host:
        host = self._hosts.get(name)
        if host is None:
            breaker = Breaker(self._limits.breaker_failures, self._limits.breaker_seconds)
            new = name not in self._answering
            host = self._hosts[name] = _Host(name, self._limits, breaker, new=new)
        return host

    def _pause_ms(self, delivery: Delivery) -> int:
        """For how long the host of a delivery that was not taken is not called; 0: it is full."""
        host = self._hosts.get(callback_host(delivery.url))
        if host is None or host.breaker.is_closed:
            return 0
        return round((host.breaker.wait_seconds(_now()) or TRIAL_AGAIN_SECONDS) * 1000)

    def _return(
        self, delivery: Delivery, pause_ms: int | None, *, why_not: str | None = None
    ) -> None:
        """Give a delivery back without a try; one that is held is so until that is on record."""
        paused = bool(pause_ms)
        self._tried(
            DeliveryResult(
                delivery_id=delivery.delivery_id,
                try_number=delivery.try_number,
                delivered=False,
                not_tried=True,
                error=why_not or (NO_ANSWER_LATELY if paused else NO_ROOM),
                # Spread, so that what comes back does not come at once.
                retry_after_ms=round((pause_ms or NO_ROOM_SECONDS * 1000) * random.uniform(1, 1.2)),
            )
        )

    def _return_waiting(self, host: _Host) -> None:
        if not host.waiting:
            return
        pause_ms = round(host.breaker.wait_seconds(_now()) * 1000)
        while host.waiting and pause_ms:
            self._count_waiting(host, -1)
            self._return(host.waiting.popleft(), pause_ms)

    def _enqueue(self, host: _Host) -> None:
        if host.may_start and not host.queued:
            host.queued = True
            self._queues[host.lane].append(host)

    def _pump(self) -> None:
        while not self._closing and self._flying.total() < MOST_IN_FLIGHT:
            lane = next(
                (
                    lane
                    for lane, most in _PLACES.items()
                    if self._queues[lane] and self._flying[lane] < most
                ),
                None,
            )
            if lane is None:
                return
            host = self._queues[lane].popleft()
            host.queued = False
            if host.may_start:
                self._begin(host)
            self._enqueue(host)

    def _begin(self, host: _Host) -> None:
        delivery = host.waiting.popleft()
        lane = host.lane
        self._count_waiting(host, -1)
        host.in_flight += 1
        self._flying[lane] += 1
        task = asyncio.get_running_loop().create_task(self._try(host, delivery, lane))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _try(self, host: _Host, delivery: Delivery, lane: _Lane) -> None:
        try:
            result, answered = await self._attempt(delivery)
            self._learn(host, answered=answered, late=result.latency_ms > LATE_MS)
            host.breaker.note(answered=answered, now=_now())
            self._remember(result)
            self._tried(result)
        finally:
            host.in_flight -= 1
            self._flying[lane] -= 1
            self._return_waiting(host)
            self._enqueue(host)
            if not host.waiting and not host.in_flight:
                self._forget(host)
            self._pump()
            if not self._flying.total() and not self._waiting:
                self._idle.set()

    def _learn(self, host: _Host, *, answered: bool, late: bool) -> None:
        """Let a host change its lane by what a try has told; what waits for it goes along."""
        waiting, before = len(host.waiting), host.lane
        self._count_waiting(host, -waiting)
        host.new, host.slow, host.lags = False, not answered, answered and late
        self._count_waiting(host, waiting)
        if host.queued and host.lane is not before:
            self._queues[before].remove(host)
            host.queued = False
        self._answering.pop(host.name, None)
        if host.lane is _Lane.FAST:
            self._answering[host.name] = None
            while len(self._answering) > REMEMBER_HOSTS:
                self._answering.popitem(last=False)

    def _forget(self, host: _Host) -> None:
        """Drop an idle host; slow ones are remembered, as long as they are few."""
        if host.lane is not _Lane.SLOW or len(self._hosts) > REMEMBER_HOSTS:
            self._hosts.pop(host.name, None)

    async def _attempt(self, delivery: Delivery) -> tuple[DeliveryResult, bool]:
        """Make the try; the second value tells whether the host gave any answer."""
        body = delivery.body.encode()
        began = time.monotonic()
        tried_at = int(self._now() * 1000)

        def failed(error: str) -> DeliveryResult:
            return DeliveryResult(
                delivery_id=delivery.delivery_id,
                try_number=delivery.try_number,
                delivered=False,
                error=error,
                latency_ms=_since(began),
                tried_at=tried_at,
            )

        try:
            headers = sign_webhook(
                self._signing(delivery), delivery.delivery_id, int(self._now()), body
            )
            reply = await self._egress.request(
                "POST",
                delivery.url,
                headers={
                    **delivery.headers,
                    **headers,
                    "content-type": "application/json",
                    "user-agent": USER_AGENT,
                },
                body=body,
                timeout_seconds=self._limits.try_seconds,
                most_bytes=MAX_ANSWER_BYTES,
                within=read_networks(delivery.egress_allow),
            )
            return self._judge(delivery, reply, _since(began), tried_at), True
        except EgressRefused as refusal:
            return failed(str(refusal)), True
        except EgressFailed as failure:
            return failed(str(failure)), False
        except Exception as error:
            log.exception("a callback could not be tried", delivery_id=delivery.delivery_id)
            return failed(f"the try failed ({type(error).__name__})"), False

    def _signing(self, delivery: Delivery) -> list[str]:
        """The secrets that sign a delivery: those it came with, else this worker's own."""
        if delivery.signing is None:
            return list(self._secrets)
        return [one for named in delivery.signing for one in ([named] if named else self._secrets)]

    def _judge(
        self, delivery: Delivery, reply: EgressReply, latency_ms: int, tried_at: int
    ) -> DeliveryResult:
        delivered = 200 <= reply.status < 300
        return DeliveryResult(
            delivery_id=delivery.delivery_id,
            try_number=delivery.try_number,
            delivered=delivered,
            gone=reply.status == GONE,
            status_code=reply.status,
            error=None if delivered else f"the receiver answered {reply.status}",
            latency_ms=latency_ms,
            retry_after_ms=read_retry_after(reply.status, reply.headers, self._now()),
            tried_at=tried_at,
            answer=reply.body.decode("utf-8", "replace").replace("\0", "\ufffd") or None,
        )

    def _remember(self, result: DeliveryResult) -> None:
        self._lately[result.delivery_id, result.try_number] = result
        while len(self._lately) > REMEMBER_TRIES:
            self._lately.popitem(last=False)


def read_retry_after(status: int, headers: Mapping[str, str], now: float) -> int | None:
    """Milliseconds that a 429 or 503 asks to wait, a second to a day; `now` is epoch seconds."""
    asked = wait_asked(headers, now) if status in (429, 503) else None
    return None if asked is None else max(SHORTEST_RETRY_AFTER_MS, asked)


def wait_asked(headers: Mapping[str, str], now: float) -> int | None:
    """Milliseconds that `Retry-After` asks to wait, at most a day; `now` is epoch seconds.

    None if it asks nothing that can be obeyed, as with a date that is over.
    """
    text = headers.get("Retry-After", "").strip()
    if not text:
        return None
    if text.isascii() and text.isdigit():
        return min(int(text[:9]) * 1000, LONGEST_RETRY_AFTER_MS)
    try:
        seconds = parsedate_to_datetime(text).timestamp() - now
    except (ValueError, OverflowError, OSError):
        return None
    return min(round(seconds * 1000), LONGEST_RETRY_AFTER_MS) if seconds > 0 else None


def _now() -> float:
    return asyncio.get_running_loop().time()


def _since(began: float) -> int:
    return round((time.monotonic() - began) * 1000)
