"""The door under load: a submission that would wait too long is refused before its body is read.

What was let in with its body is never refused for want of room later, and what is refused costs
next to nothing: else the refusals of a flood would take the time of what was let in. A body that
does not follow its head at once takes no place but that of its bytes. Calls of workers do not pass
here.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from types import TracebackType
from typing import Final, get_args

import orjson
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.edge.heads import header_of
from app.edge.pressure import Limits, Pressure, Why
from app.edge.problems import MEDIA_TYPE, Problem
from app.edge.requests import request_id_of
from app.metrics import Metrics
from app.plumbing.loops import Loop
from app.settings import Settings

log = structlog.get_logger(__name__)

BUSY_SECONDS: Final = 0.05
IDLE_SECONDS: Final = 1.0
"""Between two looks at the event loop's lag, while submissions are under way or not."""
CALM_SECONDS: Final = 5.0
"""After the last refusal the overload is over: the log must not flutter."""
LONGEST_RETRY_SECONDS: Final = 30
FEW: Final = 128
"""So many at once are let in however long they wait: else a rate could not be measured again."""
SOME: Final = 256
"""So many at once are let in however late the event loop is: they fill commits."""
FREE_UNITS: Final = 1000
"""The few and the some are no more jobs than that: two batches, and not a third."""
ARRIVAL_SECONDS: Final = 0.25
"""So long a body whose head was let in counts before it is there. Bodies of honest callers follow
at once; one that does not keeps nobody out for longer."""
MIB: Final = 1024 * 1024
OVERLOADED: Final = Problem("overloaded", "Repeat the same request after Retry-After.")
_BODY: Final = orjson.dumps(OVERLOADED.document())
_HEADERS: Final = [
    (b"content-type", MEDIA_TYPE.encode()),
    (b"content-length", str(len(_BODY)).encode()),
]


class Admission:
    """Knows whether a submission is let in, and measures what that depends on."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.pressure = Pressure(
            Limits(
                wait_seconds=settings.submit_wait_ms / 1000,
                lag_seconds=settings.loop_lag_ms / 1000,
                few=min(settings.submit_batch, FEW),
                some=min(settings.submit_batch, SOME),
                free_units=FREE_UNITS,
                most_bytes=settings.submit_mib * MIB,
            )
        )
        self.crowd = Crowd(settings.most_requests, metrics)
        self.arrivals = Arrivals()
        self._loop_lag = metrics.loop_lag
        self._refusals = {why: metrics.refused.labels(why) for why in get_args(Why)}
        self._refused = 0
        self._refused_at = float("-inf")
        self._loop = Loop("admission", self._step)

    def start(self) -> None:
        """Start measuring the event loop's lag."""
        self._loop.start()

    async def stop(self) -> None:
        """Stop measuring."""
        await self._loop.stop()
        self.arrivals.stop()

    def refuses(self, now: float, declared: int) -> bool:
        """Tell whether a body of `declared` bytes is refused by its head now; count it if so."""
        pressure = self.pressure
        why: Why | None = "memory" if pressure.lacks_room(declared) else pressure.why_not(now)
        if why is None:
            return False
        self.note_refusal(now, why)
        return True

    def note_refusal(self, now: float, why: Why) -> None:
        """Count a submission that is refused."""
        self._refusals[why].inc()
        if not self._refused:
            log.warning("overloaded", reason=why, expected_wait=round(self.wait_seconds, 3))
        self._refused += 1
        self._refused_at = now

    @property
    def wait_seconds(self) -> float:
        """How long a submission would wait now."""
        return self.pressure.wait_seconds()

    @property
    def is_strained(self) -> bool:
        """True while submissions are refused, or nearly: what can rest should."""
        pressure = self.pressure
        return bool(self._refused) or pressure.units >= SOME

    def retry_after(self) -> int:
        """Return whole seconds after which to come back: by then what waits now is done.

        Drawn, so that those who are refused together do not come back together.
        """
        low = max(1, math.ceil(min(self.wait_seconds, LONGEST_RETRY_SECONDS / 2)))
        return random.randint(low, min(2 * low + 1, LONGEST_RETRY_SECONDS))

    async def _step(self) -> None:
        pause = BUSY_SECONDS if self.pressure.units else IDLE_SECONDS
        slept_at = time.monotonic()
        await asyncio.sleep(pause)
        now = time.monotonic()
        late = max(0.0, now - slept_at - pause)
        self.pressure.note_lag(late)
        self._loop_lag.observe(late)
        if self._refused and now - self._refused_at > CALM_SECONDS:
            log.info("overload_over", refused=self._refused)
            self._refused = 0


class Crowd:
    """Bounds how many requests of callers are served at once, long polls and streams among them."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        self._most = most
        self._count = 0
        self._refused = metrics.refused.labels("requests")

    def __enter__(self) -> None:
        if self._count >= self._most:
            self._refused.inc()
            raise OVERLOADED
        self._count += 1

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._count -= 1


class Arrivals:
    """Ends, `ARRIVAL_SECONDS` after their heads, that bodies which are not there count.

    One timer serves all of them: nearly every body is there with its head, and a timer of its own
    would cost more than all else that is counted of it.
    """

    def __init__(self) -> None:
        self._stays: deque[tuple[float, Stay]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, stay: Stay, now: float) -> None:
        """Wait for the body of a submission whose head came now."""
        self._stays.append((now + ARRIVAL_SECONDS, stay))
        if self._timer is None:
            self._look_in(ARRIVAL_SECONDS)

    def stop(self) -> None:
        """Wait no more."""
        self._stays.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        stays, now = self._stays, time.monotonic()
        while stays and stays[0][0] <= now:
            stays.popleft()[1].expect_no_more()
        if stays:
            self._look_in(stays[0][0] - now)


class Stay:
    """What one submission counts for, from its head until it is answered.

    A body counts for a job each `job_bytes`, for `most_jobs` at most, until it is weighed: by the
    length that it declares for a moment, then for nothing until it is there.
    """

    __slots__ = (
        "_admission",
        "_bytes",
        "_is_expected",
        "_is_in",
        "_job_bytes",
        "_most_jobs",
        "_units",
    )

    def __init__(
        self, admission: Admission, now: float, job_bytes: int, most_jobs: int, declared: int
    ) -> None:
        self._admission = admission
        self._job_bytes = job_bytes
        self._most_jobs = most_jobs
        self._bytes = 0
        self._units = self._units_of(declared)
        self._is_in, self._is_expected = False, True
        admission.pressure.expect(self._units)
        admission.arrivals.expect(self, now)

    def take(self, size: int, *, is_last: bool) -> None:
        """Hold a piece of the body; with the last one the submission is let in.

        Raises:
            Problem: `overloaded`.
        """
        now, pressure = time.monotonic(), self._admission.pressure
        if pressure.lacks_room(size, own=self._bytes):
            raise self._refusal(now, "memory", is_last=is_last)
        pressure.hold(size)
        self._bytes += size
        if not is_last or self._is_in:
            return
        if self._is_expected:
            self.expect_no_more()
        elif (why := pressure.why_not(now)) is not None:
            # It was let in by its head, but too long ago: others have come since.
            raise self._refusal(now, why, is_last=True)
        self._units, self._is_in = self._units_of(self._bytes), True
        pressure.enter(now, self._units)

    def weigh(self, jobs: int) -> None:
        """Count for so many jobs, which the body turned out to hold."""
        self._admission.pressure.enter(time.monotonic(), jobs - self._units, requests=0)
        self._units = jobs

    def end(self) -> None:
        """Count for nothing more."""
        pressure = self._admission.pressure
        pressure.hold(-self._bytes)
        if self._is_in:
            pressure.leave(time.monotonic(), self._units)
        else:
            self.expect_no_more()

    def expect_no_more(self) -> None:
        """Count for nothing until the body is there, if it is not yet."""
        if self._is_expected:
            self._is_expected = False
            self._admission.pressure.expect_no_more(self._units)

    def _units_of(self, size: int) -> int:
        return min(max(1, size // self._job_bytes), self._most_jobs)

    def _refusal(self, now: float, why: Why, *, is_last: bool) -> Problem:
        self._admission.note_refusal(now, why)
        problem = Problem(
            OVERLOADED.code,
            OVERLOADED.detail,
            retry_after_seconds=self._admission.retry_after(),
        )
        # Under overload a closed connection is one more that has to be opened.
        problem.body_was_read = is_last
        return problem


class Turnstile:
    """ASGI: lets a submission in or refuses it, by its headers alone where they are enough.

    A body counts for a job each `job_bytes`, at least for one and for `most_jobs` at most. The
    route finds its `Stay` in the scope as "stay".
    """

    def __init__(
        self,
        app: ASGIApp,
        admission: Admission,
        *,
        longest: int,
        job_bytes: int = 1,
        most_jobs: int = 1,
    ) -> None:
        self._app = app
        self._admission = admission
        self._longest = longest
        self._job_bytes = job_bytes
        self._most_jobs = most_jobs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        declared, now = self._declared(scope), time.monotonic()
        if self._admission.refuses(now, declared):
            await self._refuse(scope, send)
            return
        stay = Stay(self._admission, now, self._job_bytes, self._most_jobs, declared)
        scope["stay"] = stay

        async def counted() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                is_last = not message.get("more_body", False)
                stay.take(len(message.get("body", b"")), is_last=is_last)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            stay.end()

    def _declared(self, scope: Scope) -> int:
        """Return how long the body says it is; one that says nothing is counted as it comes."""
        length = header_of(scope, b"content-length", "0")
        # One that is too long is refused where that is checked.
        return min(int(length), self._longest) if length.isdecimal() else self._longest

    async def _refuse(self, scope: Scope, send: Send) -> None:
        request_id = request_id_of(header_of(scope, b"x-request-id"))
        headers = [
            *_HEADERS,
            (b"retry-after", str(self._admission.retry_after()).encode()),
            (b"x-request-id", request_id.encode()),
        ]
        await send({"type": "http.response.start", "status": OVERLOADED.status, "headers": headers})
        await send({"type": "http.response.body", "body": _BODY})
