"""Many receivers of callbacks, each on a loopback address of its own, some of which misbehave.

They listen in the caller's event loop, note each request with the time it came, and verify it
with the independent `standardwebhooks` package.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from aiohttp import web
from standardwebhooks.webhooks import Webhook

Manner = Literal["healthy", "silent", "error", "busy", "reset"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: who it is for, when it came and how it was answered (0: not at all)."""

    webhook_id: str
    job_id: int
    sequence: int
    at: float
    finished_at: float
    status: int

    @property
    def late_seconds(self) -> float:
        """From the end of the job to the request."""
        return self.at - self.finished_at


@dataclass(eq=False)
class Host:
    """A receiver; `manner` is how it answers until it heals."""

    address: str
    manner: Manner
    secret: str
    arrivals: list[Arrival] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    healed: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    @property
    def url(self) -> str:
        """Where it takes callbacks."""
        return f"http://{self.address}:{self.port}/hook"

    def delivered(self) -> dict[int, set[str]]:
        """The webhook-ids that it has accepted, by job."""
        found: dict[int, set[str]] = {}
        for one in self.arrivals:
            if one.status == 200:
                found.setdefault(one.job_id, set()).add(one.webhook_id)
        return found

    def ids(self) -> dict[int, set[str]]:
        """All webhook-ids that came, by job."""
        found: dict[int, set[str]] = {}
        for one in self.arrivals:
            found.setdefault(one.job_id, set()).add(one.webhook_id)
        return found

    async def receive(self, request: web.Request) -> web.StreamResponse:
        """Note and answer one callback."""
        at = time.time()
        body = await request.text()
        headers = {name.lower(): value for name, value in request.headers.items()}
        try:
            told: Any = Webhook(self.secret).verify(body, headers)
        except Exception as error:  # noqa: BLE001 - whatever the verifier says is noted
            self.refused.append(f"{type(error).__name__}: {error}")
            return web.Response(status=400)
        manner = "healthy" if self.healed.is_set() else self.manner
        status = {"healthy": 200, "silent": 0, "error": 500, "busy": 429, "reset": 0}[manner]
        data = told["data"]
        finished = datetime.fromisoformat(data["finishedAt"]).timestamp()
        self.arrivals.append(
            Arrival(headers["webhook-id"], data["jobId"], data["sequence"], at, finished, status)
        )
        if manner == "silent":
            await self.healed.wait()
            return web.Response(status=500)
        if manner == "reset":
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=500)
        more = {"Retry-After": "3"} if status == 429 else {}
        return web.Response(status=status, headers=more, text=f"{manner}\n")


@asynccontextmanager
async def open_hosts(manners: Sequence[Manner], secret: str) -> AsyncIterator[list[Host]]:
    """Let a receiver of each manner listen, on 127.0.0.2 and the addresses behind it."""
    hosts: list[Host] = []
    runners: list[web.AppRunner] = []
    try:
        for number, manner in enumerate(manners):
            host = Host(f"127.0.0.{number + 2}", manner, secret)
            app = web.Application()
            app.router.add_post("/hook", host.receive)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            runners.append(runner)
            await runner.setup()
            await web.TCPSite(runner, host.address, 0, backlog=1024).start()
            host.port = runner.addresses[0][1]
            hosts.append(host)
        yield hosts
    finally:
        for host in hosts:
            host.healed.set()
        await asyncio.gather(*(runner.cleanup() for runner in runners))
