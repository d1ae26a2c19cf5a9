"""A small real dispatcher for the worker's tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from oncue.protocol import (
    HEARTBEAT_PATH,
    LOGS_PATH,
    REPORTS_PATH,
    Heartbeat,
    LogLine,
    LogsRequest,
    Outcome,
    ReportsRequest,
)
from worker.dispatchers import PROBLEM

HANDLERS = "tests.integration.worker.handlers_under_test"


class FakeDispatcher:
    """Answers beats and reports over a real socket, as a test tells it to."""

    def __init__(self) -> None:
        self.url = ""
        self.term = 1
        self.silent = False
        self.behind_a_proxy = False
        """What refuses is not the dispatcher itself."""
        self.beats: list[Heartbeat] = []
        self.reports: list[ReportsRequest] = []
        self.told: list[Heartbeat | ReportsRequest] = []
        """Both, in the order in which they came."""
        self.bodies: list[bytes] = []
        self.unwanted: list[str] = []
        self.wanted_schemas: list[str] | None = None
        self.refuses_schemas = False
        self.refused_beats = 0
        self.deliveries: list[dict[str, Any]] = []
        self.status_of: Callable[[ReportsRequest], int] = lambda _: 200
        self.acknowledges: Callable[[str], bool] = lambda _: True
        self.arrived = 0
        self.gate: asyncio.Event | None = None
        self.refused: list[ReportsRequest] = []
        self.shipments: list[LogsRequest] = []
        self.logs_status = 200
        self.logs_asked = 0
        self.refuses: list[str] = []
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        """Listen on loopback."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post(HEARTBEAT_PATH, self._beat)
        app.router.add_post(REPORTS_PATH, self._report)
        app.router.add_post(LOGS_PATH, self._ship)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = site.name if port else f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def outcomes(self) -> dict[str, Outcome]:
        """The outcomes acknowledged so far, by execution."""
        return {one.execution_id: one for report in self.reports for one in report.outcomes}

    def outcome(self, execution_id: str) -> Outcome | None:
        """The acknowledged outcome of one execution."""
        return self.outcomes().get(execution_id)

    def stopped(self) -> set[str]:
        """The executions whose thread was reported as ended."""
        return {one for report in self.reports for one in report.stopped}

    def tries(self) -> dict[tuple[str, int], Any]:
        """The tries reported so far."""
        return {
            (one.delivery_id, one.try_number): one
            for report in self.reports
            for one in report.tries
        }

    def lines(self, execution_id: str) -> list[LogLine]:
        """The lines of one execution that were taken so far, each once."""
        found = {
            line.seq: line
            for shipment in self.shipments
            for part in shipment.parts
            if part.execution_id == execution_id
            for line in part.lines
        }
        return [found[seq] for seq in sorted(found)]

    def said(self, execution_id: str) -> list[tuple[str, str]]:
        """Source and message of these lines."""
        return [(line.source.value, line.message) for line in self.lines(execution_id)]

    def is_complete(self, execution_id: str) -> bool:
        """Whether the worker has said that no more lines will come."""
        return any(
            part.complete
            for shipment in self.shipments
            for part in shipment.parts
            if part.execution_id == execution_id
        )

    def progress(self, execution_id: str) -> list[tuple[float, str]]:
        """All progress that was told of one execution."""
        return [
            (part.progress.value, part.progress.text)
            for shipment in self.shipments
            for part in shipment.parts
            if part.execution_id == execution_id and part.progress is not None
        ]

    async def _ship(self, request: web.Request) -> web.Response:
        self.logs_asked += 1
        body = await request.read()
        status = 503 if self.silent else self.logs_status
        if status != 200:
            return web.Response(status=status)
        self.shipments.append(LogsRequest.model_validate_json(body))
        return web.json_response({"refused": self.refuses})

    async def _beat(self, request: web.Request) -> web.Response:
        if self.silent:
            return web.Response(status=503)
        beat = Heartbeat.model_validate_json(await request.read())
        if self.refuses_schemas and beat.schemas:
            self.refused_beats += 1
            return web.Response(status=413)
        self.beats.append(beat)
        self.told.append(beat)
        answer: dict[str, Any] = {
            "term": self.term,
            "now": int(time.time() * 1000),
            "unwanted": self.unwanted,
        }
        if self.wanted_schemas is not None:  # a dispatcher of the last release does not ask
            answer["wantedSchemas"] = self.wanted_schemas
        return web.json_response(answer)

    async def _report(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.arrived += 1
        report = ReportsRequest.model_validate_json(body)
        if self.gate is not None:
            await self.gate.wait()
        status = 503 if self.silent else self.status_of(report)
        if status != 200:
            self.refused.append(report)
            media_type = "text/html" if self.behind_a_proxy else PROBLEM
            return web.Response(status=status, content_type=media_type)
        known = [one.execution_id for one in report.outcomes if self.acknowledges(one.execution_id)]
        taken = report.model_copy(
            update={"outcomes": [one for one in report.outcomes if one.execution_id in known]}
        )
        self.reports.append(taken)
        self.told.append(taken)
        self.bodies.append(body)
        deliveries, self.deliveries = self.deliveries, []
        answer = {
            "acknowledged": known,
            "acknowledgedStopped": report.stopped,
            "acknowledgedTries": [one.delivery_id for one in report.tries],
            "deliveries": deliveries,
        }
        return web.json_response(answer)
