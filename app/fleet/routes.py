"""The routes of workers under `/internal`; they need the internal token."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from app.access.keys import InternalTokens
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
    *, tokens: InternalTokens, heartbeats: Heartbeats, reports: Reports, logs: RunLogs
) -> APIRouter:
    """Return the routes, bound to the parts that serve them."""
    router = APIRouter(tags=["internal"])
    problems = problem_answers(
        "unauthorized", "body_too_large", "validation_failed", "database_unavailable"
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
        tokens.check(request.headers)
        try:
            beat = Heartbeat.model_validate_json(await request.body())
        except ValidationError as error:
            raise validation_problem(list(error.errors(include_url=False))) from None
        return _json(await heartbeats.take(beat))

    @router.post(
        REPORTS_PATH,
        response_model=ReportsResponse,
        summary="Report",
        responses=problems,
        openapi_extra=_body_of("ReportsRequest"),
    )
    async def report(request: Request) -> Response:
        """Store outcomes and tries; what is acknowledged need not be reported again."""
        return await take_report(tokens, reports, request.headers, await request.body())

    @router.post(
        LOGS_PATH,
        response_model=LogsResponse,
        summary="Ship logs",
        responses=problems,
        openapi_extra=_body_of("LogsRequest"),
    )
    async def ship_logs(request: Request) -> Response:
        """Keep lines and progress of the worker's own executions; a repeat changes nothing."""
        tokens.check(request.headers)
        return _json(await logs.take(await request.body()))

    return router


async def take_report(
    tokens: InternalTokens, reports: Reports, headers: Mapping[str, str], body: bytes
) -> Response:
    """Answer `POST /internal/reports`.

    Raises:
        Problem: no valid token, or an envelope that cannot be read.
        DatabaseUnavailable: the worker must report again.
    """
    tokens.check(headers)
    return _json(await reports.take(body))


def _body_of(schema: str) -> dict[str, object]:
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
        }
    }


def _json(message: Message) -> Response:
    return Response(message.model_dump_json(by_alias=True), media_type="application/json")
