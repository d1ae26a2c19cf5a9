"""The routes of workers under `/internal`; they need the internal token, or a worker's key."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from app.access.keys import Gate
from app.edge.problems import problem_answers, validation_problem
from app.fleet.heartbeat import Heartbeats
from app.fleet.logs import RunLogs
from app.fleet.reports import Reports
from oncue.protocol import (
    HEARTBEAT_PATH,
    LOGS_PATH,
    REPORTS_PATH,
    Heartbeat,
    HeartbeatResponse,
    LogsResponse,
    Message,
    ReportsResponse,
)


def fleet_routes(
    *, keys: Gate, heartbeats: Heartbeats, reports: Reports, logs: RunLogs
) -> APIRouter:
    """Return the routes, bound to the parts that serve them."""
    router = APIRouter(tags=["internal"])
    problems = problem_answers(
        "unauthorized",
        "not_your_run",
        "body_too_large",
        "validation_failed",
        "too_many_failures",
        "database_unavailable",
    )

    @router.post(
        HEARTBEAT_PATH,
        response_model=HeartbeatResponse,
        summary="Beat",
        responses=problems,
        openapi_extra=_body_of("Heartbeat"),
    )
    async def heartbeat(request: Request) -> Response:
        """Record a worker's beat; the answer comes only after its commit."""
        by_key = await keys.worker(request)
        try:
            beat = Heartbeat.model_validate_json(await request.body())
        except ValidationError as error:
            raise validation_problem(list(error.errors(include_url=False))) from None
        return _json(await heartbeats.take(beat, by_key))

    @router.post(
        REPORTS_PATH,
        response_model=ReportsResponse,
        summary="Report",
        responses=problems,
        openapi_extra=_body_of("ReportsRequest"),
    )
    async def report(request: Request) -> Response:
        """Store outcomes and tries; what is acknowledged need not be reported again."""
        by_key = await keys.worker(request)
        return _json(await reports.take(await request.body(), by_key))

    @router.post(
        LOGS_PATH,
        response_model=LogsResponse,
        summary="Ship logs",
        responses=problems,
        openapi_extra=_body_of("LogsRequest"),
    )
    async def ship_logs(request: Request) -> Response:
        """Keep lines and progress of the worker's own executions; a repeat changes nothing."""
        by_key = await keys.worker(request)
        return _json(await logs.take(await request.body(), by_key))

    return router


def _body_of(schema: str) -> dict[str, object]:
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
        }
    }


def _json(message: Message) -> Response:
    return Response(message.model_dump_json(by_alias=True), media_type="application/json")
