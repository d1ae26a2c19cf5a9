"""The handlers and the callers of a simulated cluster, and the receiver of its webhooks.

Handlers write down themselves when they begin and end, and where.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from oncue import Context, Fail, Retry, handler
from tests.simulation.history import History
from tests.simulation.machine import EPOCH, PROCESS, Process, State
from tests.simulation.network import Answer, Broken, Network, Refused, Unreachable
from tests.support.checker import (
    TERMINAL,
    Accepted,
    Began,
    CancelAsked,
    Ended,
    RetryAsked,
    Seen,
    Webhook,
)

CALLER: Final = "caller"
RECEIVER: Final = "hook"
ANSWER_SECONDS: Final = 10.0
MOST_TRIES: Final = 300
JSON: Final = {"content-type": "application/json"}


class _Now:
    """The simulation that runs now: handlers are functions of a module, and need to find it."""

    history: History


def observe_with(history: History) -> None:
    """Have the handlers write to this history from now on."""
    _Now.history = history


@contextmanager
def _observed(ctx: Context) -> Iterator[dict[str, Any]]:
    history = _Now.history
    process = PROCESS.get()
    assert process is not None
    assert process.worker_id is not None
    worker = process.worker_id
    history.add(Began(history.now, worker, ctx.job_id, ctx.execution_id, ctx.trigger_ts))
    how = "stopped"
    try:
        yield {"executionId": ctx.execution_id}
        how = "returned"
    except Exception:
        how = "raised"
        raise
    finally:
        # A handler that is collected with its dead process says nothing any more.
        if process.state is not State.DEAD:
            history.add(Ended(history.now, worker, ctx.execution_id, how))


@handler("brief")
async def brief(params: dict[str, Any], ctx: Context) -> Any:
    """Take as long as asked, and stop when told."""
    with _observed(ctx) as result:
        await asyncio.sleep(params["seconds"])
        return result


@handler("flaky")
async def flaky(params: dict[str, Any], ctx: Context) -> Any:
    """Fail the first attempts, in one of the ways there are."""
    with _observed(ctx) as result:
        await asyncio.sleep(params["seconds"])
        if ctx.attempt <= params["fails"]:
            if params["how"] == "retry":
                raise Retry("not yet", after=1.5)
            if params["how"] == "fail":
                raise Fail("never")
            raise ValueError("flaky")
        return result


@handler("stubborn")
async def stubborn(params: dict[str, Any], ctx: Context) -> Any:
    """Take a while to stop when told."""
    with _observed(ctx) as result:
        try:
            await asyncio.sleep(params["seconds"])
        except asyncio.CancelledError:
            await asyncio.sleep(params["linger"])
            raise
        return result


@handler("thread")
def thread(params: dict[str, Any], ctx: Context) -> Any:
    """Block a thread, and look now and then whether to stop."""
    with _observed(ctx) as result:
        until = time.monotonic() + params["seconds"]
        while time.monotonic() < until and not ctx.cancelled:
            time.sleep(0.5)
        return result


@handler("deaf")
def deaf(params: dict[str, Any], ctx: Context) -> Any:
    """Block a thread, and never look."""
    with _observed(ctx) as result:
        time.sleep(params["seconds"])
        return result


@dataclass(frozen=True, slots=True)
class Job:
    """What a caller submits and when, and what it does after that."""

    at: float
    body: dict[str, Any]
    twice: bool
    cancel_after: float | None
    retry_after: float | None
    looks_after: tuple[float, ...]


def draw_jobs(dice: random.Random, *, seconds: float, count: int) -> list[Job]:
    """Draw a mixed load over `seconds`."""
    return [_draw_job(dice, number, dice.uniform(1.0, seconds)) for number in range(count)]


def _draw_job(dice: random.Random, number: int, at: float) -> Job:
    name, params = _draw_work(dice)
    body: dict[str, Any] = {
        "clientRequestId": f"request-{number}",
        "jobName": f"job {number}",
        "jobHandler": name,
        "params": params,
        "maxRetry": dice.choice([0, 1, 3, 4, 6]),
        "retryIntervalSeconds": dice.choice([1, 1, 2]),
        "retryBackoff": dice.choice(["fixed", "fixed", "exponential"]),
        "priority": dice.choice([5, 5, 5, 0, 9]),
    }
    if dice.random() < 0.8:
        body["callbackUrl"] = f"http://{RECEIVER}/{number}"
    if name == "deaf" or dice.random() < 0.1:
        body["timeoutMs"] = dice.randrange(500, 6000)
    if dice.random() < 0.15:
        body["delayMs"] = dice.randrange(0, 20_000)
    if dice.random() < 0.08:
        body["expiresAt"] = moment(at + dice.uniform(1.0, 60.0))
    return Job(
        at,
        body,
        twice=dice.random() < 0.1,
        cancel_after=dice.uniform(0.0, 15.0) if dice.random() < 0.1 else None,
        retry_after=dice.uniform(5.0, 60.0) if dice.random() < 0.1 else None,
        looks_after=tuple(sorted(dice.uniform(0.0, 60.0) for _ in range(dice.randrange(3)))),
    )


def _draw_work(dice: random.Random) -> tuple[str, dict[str, Any]]:
    kind = dice.random()
    if kind < 0.35:
        return "brief", {"seconds": dice.uniform(0.0, 0.5)}
    if kind < 0.65:
        return "brief", {"seconds": dice.uniform(2.0, 60.0)}
    if kind < 0.80:
        how = dice.choice(["error", "error", "retry", "fail"])
        return "flaky", {"seconds": dice.uniform(0, 2), "fails": dice.randrange(1, 4), "how": how}
    if kind < 0.90:
        return "thread", {"seconds": dice.uniform(0.0, 20.0)}
    if kind < 0.95:
        return "deaf", {"seconds": dice.uniform(0.0, 20.0)}
    return "stubborn", {"seconds": dice.uniform(5, 30), "linger": dice.uniform(0.0, 5.0)}


def moment(at: float) -> str:
    """A virtual second as callers write it."""
    return datetime.fromtimestamp(EPOCH + at, UTC).isoformat()


class Callers:
    """Callers that repeat what was not answered, at whatever dispatcher answers."""

    def __init__(
        self,
        network: Network,
        history: History,
        dice: random.Random,
        dispatchers: list[str],
    ) -> None:
        self._network = network
        self._history = history
        self._dice = dice
        self._dispatchers = dispatchers

    async def play(self, job: Job) -> None:
        """Submit a job at its time until it is accepted, then look at it and maybe cancel it."""
        await asyncio.sleep(job.at)
        if job.twice:
            _, job_id = await asyncio.gather(self._submit(job), self._submit(job))
        else:
            job_id = await self._submit(job)
        if job_id is None:
            return
        await asyncio.gather(
            *(self._look(job_id, seconds) for seconds in job.looks_after),
            self._cancel(job_id, job.cancel_after),
            self._retry(job_id, job.retry_after),
        )

    async def _submit(self, job: Job) -> int | None:
        content = json.dumps(job.body).encode()
        while True:
            answer = await self.ask("POST", "/openapi/jobs", content)
            if answer is not None and answer.status in (200, 202):
                view = json.loads(answer.body)
                self._history.add(
                    Accepted(
                        self._history.now,
                        job.body["clientRequestId"],
                        view["jobId"],
                        job.body["maxRetry"],
                        "callbackUrl" in job.body,
                    )
                )
                return int(view["jobId"])
            if answer is not None and answer.status == 422 and "expiresAt" in job.body:
                return None  # its deadline has passed before anybody could be asked
            if answer is not None and answer.status < 500:
                raise RuntimeError(f"refused with {answer.status}: {answer.body!r}")
            await asyncio.sleep(self._dice.uniform(0.2, 3.0))

    async def _look(self, job_id: int, after: float) -> None:
        await asyncio.sleep(after)
        answer = await self.ask("GET", f"/openapi/jobs/{job_id}", None)
        if answer is not None and answer.status == 200:
            status = json.loads(answer.body)["status"]
            if status in TERMINAL:
                self._history.add(Seen(self._history.now, job_id, status))

    async def _cancel(self, job_id: int, after: float | None) -> None:
        if after is None:
            return
        await asyncio.sleep(after)
        self._history.add(CancelAsked(self._history.now, job_id))
        await self.ask("POST", f"/openapi/jobs/{job_id}/cancel", None)

    async def _retry(self, job_id: int, after: float | None) -> None:
        if after is None:
            return
        await asyncio.sleep(after)
        self._history.add(RetryAsked(self._history.now, job_id))
        await self.ask("POST", f"/openapi/jobs/{job_id}/retry", None)

    async def insist(self, path: str, body: dict[str, Any] | None) -> Answer:
        """POST until a dispatcher has answered, with anything but an error of its own."""
        content = None if body is None else json.dumps(body).encode()
        answer: Answer | None = None
        for _ in range(MOST_TRIES):
            answer = await self.ask("POST", path, content)
            if answer is not None and answer.status < 500:
                return answer
            await asyncio.sleep(self._dice.uniform(0.2, 3.0))
        raise RuntimeError(f"nobody answers {path}: {answer}")

    async def ask(self, method: str, path: str, content: bytes | None) -> Answer | None:
        """Ask some dispatcher once."""
        url = f"http://{self._dice.choice(self._dispatchers)}:8080{path}"
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._network.exchange(CALLER, method, url, content, JSON)
        except (Refused, Unreachable, Broken, TimeoutError):
            return None


class Receiver:
    """An ASGI application that takes webhooks, mostly."""

    def __init__(self, history: History, dice: random.Random) -> None:
        self._history = history
        self._dice = dice
        self.healthy = False

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Take one webhook."""
        message = await receive()
        data = json.loads(message["body"])["data"]
        headers = dict(scope["headers"])
        answer = 200 if self.healthy or self._dice.random() < 0.8 else self._fail()
        self._history.add(
            Webhook(
                self._history.now,
                headers[b"webhook-id"].decode(),
                data["jobId"],
                data["status"],
                data["executionId"] or "",
                answer,
            )
        )
        await send({"type": "http.response.start", "status": answer, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _fail(self) -> int:
        return self._dice.choice([500, 503, 429, 404])


def receiver_process(receiver: Receiver) -> Process:
    """A node that is nothing but the receiver."""
    process = Process(RECEIVER, 1, skew_seconds=0.0, uptime_seconds=0.0)
    process.serves = receiver
    return process
