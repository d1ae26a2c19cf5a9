"""The callers of the fault harness: they submit the jobs of a plan and keep their own record."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import aiohttp

from tests.faults.plan import Call
from tests.support.checker import Accepted, CancelAsked, Event, RetryAsked, Seen

REQUEST_SECONDS: Final = 8.0
AGAIN_SECONDS: Final = 0.3
RETRYABLE: Final = frozenset({"FAILED", "CANCELLED"})


class Callers(threading.Thread):
    """Submits, repeats, cancels and retries until told that the faults are over.

    What they were told is in `events` and, a line each, in the file `record`.
    """

    def __init__(
        self,
        calls: Sequence[Sequence[Call]],
        urls: Sequence[str],
        record: Path,
        *,
        callback_url: str,
        seed: int,
    ) -> None:
        super().__init__(name="callers")
        self.events: list[Event] = []
        self.answers: Counter[str] = Counter()
        self.given_up: list[str] = []
        self.wrong: list[str] = []
        self.calls_of: dict[int, Call] = {}
        self._calls = calls
        self._urls = urls
        self._record = record
        self._callback_url = callback_url
        self._give_up_at = float("inf")
        self._dice = random.Random(f"callers {seed}")

    def run(self) -> None:
        """Make all calls."""
        asyncio.run(self._all())

    def give_up_in(self, seconds: float) -> None:
        """From then on a caller that is not answered gives up."""
        self._give_up_at = time.monotonic() + seconds

    async def _all(self) -> None:
        began = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._caller(session, own, began) for own in self._calls))

    async def _caller(
        self, session: aiohttp.ClientSession, calls: Sequence[Call], began: float
    ) -> None:
        later: list[asyncio.Task[None]] = []
        for call in calls:
            await asyncio.sleep(max(0.0, began + call.at - time.monotonic()))
            job_id = await self._submit(session, call)
            if job_id is not None and call.cancel_after is not None:
                later.append(asyncio.create_task(self._change_mind(session, call, job_id)))
        await asyncio.gather(*later)

    async def _submit(self, session: aiohttp.ClientSession, call: Call) -> int | None:
        body = {**call.body, "callbackUrl": self._callback_url}
        expires_in = body.pop("expiresInMs", None)
        if expires_in is not None:
            moment = datetime.now(UTC) + timedelta(milliseconds=expires_in + body.get("delayMs", 0))
            body["expiresAt"] = moment.isoformat(timespec="milliseconds")
        job_id: int | None = None
        for _ in range(2 if call.twice else 1):
            answer = await self._ask(session, "POST", "/openapi/jobs", body)
            if answer is None:
                self.given_up.append(body["clientRequestId"])
                return job_id
            job_id = int(answer["jobId"])
            self.calls_of[job_id] = call
            self._note(
                Accepted(
                    time.monotonic(),
                    body["clientRequestId"],
                    job_id,
                    body["maxRetry"],
                    webhook=True,
                )
            )
        return job_id

    async def _change_mind(self, session: aiohttp.ClientSession, call: Call, job_id: int) -> None:
        assert call.cancel_after is not None
        await asyncio.sleep(call.cancel_after)
        # Noted first: a request whose answer is lost may have been heard.
        self._note(CancelAsked(time.monotonic(), job_id))
        await self._ask(session, "POST", f"/openapi/jobs/{job_id}/cancel", None)
        job = await self._ask(session, "GET", f"/openapi/jobs/{job_id}", None)
        if job is None:
            return
        self._note(Seen(time.monotonic(), job_id, job["status"]))
        if call.retry and job["status"] in RETRYABLE:
            await self._ask(
                *(session, "POST", f"/openapi/jobs/{job_id}/retry", None),
                told=lambda: RetryAsked(time.monotonic(), job_id),
            )

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        body: Any,
        *,
        told: Callable[[], Event] | None = None,
    ) -> dict[str, Any] | None:
        """Ask again and again, any dispatcher, until answered; None once it is time to give up.

        A refusal (409 of a verb that comes too late) is an answer, and returned as it is. `told`
        makes the event that is noted before each try: one whose answer is lost may have been heard.
        """
        while time.monotonic() < self._give_up_at:
            if told is not None:
                self._note(told())
            try:
                url = self._dice.choice(self._urls) + path
                async with session.request(method, url, json=body) as response:
                    answer = await response.read()
                    self.answers[str(response.status)] += 1
                    if response.status < 300 or response.status == 409:
                        found: dict[str, Any] = json.loads(answer)
                        return found
                    if response.status != 503:
                        self.wrong.append(f"{method} {path}: {response.status} {answer[:200]!r}")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.answers[type(error).__name__] += 1
            await asyncio.sleep(AGAIN_SECONDS)
        return None

    def _note(self, event: Event) -> None:
        self.events.append(event)
        fields = {name: getattr(event, name) for name in event.__dataclass_fields__}
        with self._record.open("a") as record:
            record.write(f"{json.dumps({'event': type(event).__name__, **fields})}\n")
