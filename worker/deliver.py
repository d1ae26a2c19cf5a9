"""Tries callbacks, each once: signed, bounded, fair between hosts.

Dispatchers own the schedule of retries and hand out each try. A host that gives no answer again
and again is not called for a while: what is held for it goes back uncounted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
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
MOST_PER_SLOW_HOST: Final = 2
LATE_MS: Final = 2000
"""A host whose answers take longer may not fill all places, however many such there are."""
LONGEST_RETRY_AFTER_MS: Final = 24 * 3600 * 1000
REMEMBER_TRIES: Final = 10_000
REMEMBER_HOSTS: Final = 2000
GONE: Final = 410
TRIAL_AGAIN_SECONDS: Final = 5.0
"""When a host is offered again whose one trial is under way."""
NO_ROOM_SECONDS: Final = 1.0
NO_ANSWER_LATELY: Final = "not tried: its host gave no answer lately"
NO_ROOM: Final = "not tried: the worker holds as many as it may"

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


@dataclass(slots=True, eq=False)
class _Host:
    """One receiver: its deliveries not yet tried, and whether its last try got no answer."""

    name: str
    limits: DeliveryLimits
    breaker: Breaker
    waiting: deque[Delivery] = field(default_factory=deque)
    in_flight: int = 0
    slow: bool = False
    lags: bool = False
    """Its last try was answered, but late."""
    queued: bool = False

    @property
    def in_slow_lane(self) -> bool:
        """True when its tries may have a part of all places only."""
        return self.slow or self.lags

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
        most = (
            min(MOST_PER_SLOW_HOST, self.limits.most_per_host)
            if self.slow
            else (self.limits.most_per_host)
        )
        return bool(self.waiting) and self.in_flight < most


class Deliverer:
    """Holds deliveries until their one try is made and the result acknowledged.

    Hosts take turns, and each may fill only a part of the room: a small part when its last try
    got no answer, so that dead hosts, however many, delay only themselves.
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
        self._hosts: dict[str, _Host] = {}
        self._fast: deque[_Host] = deque()
        self._slow: deque[_Host] = deque()
        self._in_flight = 0
        self._in_flight_slow = 0
        self._waiting = 0
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
        """Take over what a report brought; what does not fit goes back at once, uncounted."""
        taken = self.take(deliveries)
        accepted = set(taken.accepted)
        for one in deliveries:
            if one.delivery_id not in accepted and one.delivery_id not in self._held:
                self._held[one.delivery_id] = one
                self._return(one, taken.paused.get(callback_host(one.url)))

    def acknowledged(self, result: DeliveryResult) -> None:
        """Let go of a delivery whose try is on record."""
        held = self._held.get(result.delivery_id)
        if held is not None and held.try_number == result.try_number:
            del self._held[result.delivery_id]

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
            self._held[delivery.delivery_id] = delivery
            self._tried(result)
            return True
        if len(self._held) >= MOST_HELD:
            return False
        host = self._host(callback_host(delivery.url))
        if not host.has_room or host.breaker.wait_seconds(_now()) > 0:
            return False
        self._held[delivery.delivery_id] = delivery
        host.waiting.append(delivery)
        self._waiting += 1
        self._idle.clear()
        self._enqueue(host)
        return True

    def _host(self, name: str) -> _Host:
        host = self._hosts.get(name)
        if host is None:
            breaker = Breaker(self._limits.breaker_failures, self._limits.breaker_seconds)
            host = self._hosts[name] = _Host(name, self._limits, breaker)
        return host

    def _pause_ms(self, delivery: Delivery) -> int:
        """For how long the host of a delivery that was not taken is not called; 0: it is full."""
        host = self._hosts.get(callback_host(delivery.url))
        if host is None or host.breaker.is_closed:
            return 0
        return round((host.breaker.wait_seconds(_now()) or TRIAL_AGAIN_SECONDS) * 1000)

    def _return(self, delivery: Delivery, pause_ms: int | None) -> None:
        """Give a delivery back without a try; it is held until that is on record."""
        paused = bool(pause_ms)
        self._tried(
            DeliveryResult(
                delivery_id=delivery.delivery_id,
                try_number=delivery.try_number,
                delivered=False,
                not_tried=True,
                error=NO_ANSWER_LATELY if paused else NO_ROOM,
                # Spread, so that what comes back does not come at once.
                retry_after_ms=round((pause_ms or NO_ROOM_SECONDS * 1000) * random.uniform(1, 1.2)),
            )
        )

    def _return_waiting(self, host: _Host) -> None:
        pause_ms = round(host.breaker.wait_seconds(_now()) * 1000)
        while host.waiting and pause_ms:
            self._waiting -= 1
            self._return(host.waiting.popleft(), pause_ms)

    def _enqueue(self, host: _Host) -> None:
        if host.may_start and not host.queued:
            host.queued = True
            (self._slow if host.in_slow_lane else self._fast).append(host)

    def _pump(self) -> None:
        while not self._closing and self._in_flight < MOST_IN_FLIGHT:
            if self._slow and self._in_flight_slow < MOST_IN_FLIGHT_TO_SLOW_HOSTS:
                host = self._slow.popleft()
            elif self._fast:
                host = self._fast.popleft()
            else:
                return
            host.queued = False
            if host.may_start:
                self._begin(host)
            self._enqueue(host)

    def _begin(self, host: _Host) -> None:
        delivery = host.waiting.popleft()
        counts_as_slow = host.in_slow_lane
        self._waiting -= 1
        host.in_flight += 1
        self._in_flight += 1
        self._in_flight_slow += counts_as_slow
        task = asyncio.get_running_loop().create_task(self._try(host, delivery, counts_as_slow))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _try(self, host: _Host, delivery: Delivery, counted_as_slow: bool) -> None:
        try:
            result, answered = await self._attempt(delivery)
            host.slow, host.lags = not answered, answered and result.latency_ms > LATE_MS
            host.breaker.note(answered=answered, now=_now())
            self._remember(result)
            self._tried(result)
        finally:
            host.in_flight -= 1
            self._in_flight -= 1
            self._in_flight_slow -= counted_as_slow
            self._return_waiting(host)
            self._enqueue(host)
            if not host.waiting and not host.in_flight:
                self._forget(host)
            self._pump()
            if not self._in_flight and not self._waiting:
                self._idle.set()

    def _forget(self, host: _Host) -> None:
        """Drop an idle host; slow ones are remembered, as long as they are few."""
        if not host.in_slow_lane or len(self._hosts) > REMEMBER_HOSTS:
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
                    "user-agent": f"oncue/{__version__}",
                },
                body=body,
                timeout_seconds=self._limits.try_seconds,
                most_bytes=MAX_ANSWER_BYTES,
                within=read_networks(delivery.egress_allow),
            )
        except EgressRefused as refusal:
            return failed(str(refusal)), True
        except EgressFailed as failure:
            return failed(str(failure)), False
        except Exception as error:
            log.exception("a callback could not be tried", delivery_id=delivery.delivery_id)
            return failed(f"the try failed ({type(error).__name__})"), False
        result = self._judge(delivery, reply, _since(began))
        return result.model_copy(update={"tried_at": tried_at}), True

    def _signing(self, delivery: Delivery) -> list[str]:
        """The secrets that sign a delivery: those it came with, else this worker's own."""
        if delivery.signing is None:
            return list(self._secrets)
        return [one for named in delivery.signing for one in ([named] if named else self._secrets)]

    def _judge(self, delivery: Delivery, reply: EgressReply, latency_ms: int) -> DeliveryResult:
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
            answer=reply.body.decode("utf-8", "replace").replace("\0", "\ufffd") or None,
        )

    def _remember(self, result: DeliveryResult) -> None:
        self._lately[result.delivery_id, result.try_number] = result
        while len(self._lately) > REMEMBER_TRIES:
            self._lately.popitem(last=False)


def read_retry_after(status: int, headers: Mapping[str, str], now: float) -> int | None:
    """Milliseconds that a 429 or 503 asks to wait, at most a day; `now` is epoch seconds."""
    text = headers.get("Retry-After", "").strip()
    if status not in (429, 503) or not text:
        return None
    if text.isascii() and text.isdigit():
        return min(int(text[:9]) * 1000, LONGEST_RETRY_AFTER_MS)
    try:
        seconds = parsedate_to_datetime(text).timestamp() - now
    except (ValueError, OverflowError, OSError):
        return None
    return min(max(0, round(seconds * 1000)), LONGEST_RETRY_AFTER_MS)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _since(began: float) -> int:
    return round((time.monotonic() - began) * 1000)
