"""The worker's HTTP interface: what dispatchers send, and what operators look at."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response, Security
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field, PlainValidator

from oncue.protocol import (
    CANCEL_PATH,
    DELIVER_PATH,
    DRAIN_PATH,
    LEASE_SECONDS,
    RUN_PATH,
    CancelRequest,
    CancelResponse,
    DeliverRequest,
    DeliverResponse,
    DrainResponse,
    Message,
    RunRequest,
    RunResponse,
    WorkerHealth,
    WorkerState,
)
from worker.parts import Parts
from worker.problems import documented
from worker.run import ReceivedRuns

token = HTTPBearer(
    auto_error=False, scheme_name="internalToken", description="ONCUE_INTERNAL_TOKEN"
)
guarded = APIRouter(tags=["dispatcher"], dependencies=[Security(token)])
opened = APIRouter(tags=["operations"])


class Readiness(Message):
    """Whether the worker takes runs; if not, which part is missing, or that it drains."""

    ready: bool
    draining: bool = Field(description="It takes no more runs, and goes on with those it has.")
    redis: bool = Field(description="Redis answers.")
    dispatcher: bool = Field(description="A beat was acknowledged in the last 15 s.")
    handlers: bool = Field(description="It offers handlers, or delivers callbacks.")
    missing: list[str]


async def parts_of(request: Request) -> Parts:
    """The running worker behind a request."""
    parts: Parts = request.app.state.parts
    return parts


Running = Annotated[Parts, Depends(parts_of)]
Runs = Annotated[
    ReceivedRuns, PlainValidator(ReceivedRuns.model_validate, json_schema_input_type=RunRequest)
]


@guarded.post(
    RUN_PATH,
    response_model=RunResponse,
    responses=documented(400, 401, 409, 413, 421, 422, 503),
)
async def run(request: Runs, parts: Running) -> Response:
    """Take runs; each is accepted, a duplicate, or rejected with its reason."""
    return Response(await parts.intake.take(request), media_type="application/json")


@guarded.post(CANCEL_PATH, responses=documented(400, 401, 409, 413, 422))
async def cancel(request: CancelRequest, parts: Running) -> CancelResponse:
    """Stop executions, and refuse those that may come later."""
    return parts.intake.cancel(request)


@guarded.post(DELIVER_PATH, responses=documented(400, 401, 409, 413, 422))
async def deliver(request: DeliverRequest, parts: Running) -> DeliverResponse:
    """Take callbacks over for one try each; those that do not fit stay owed."""
    parts.terms.admit(request.term)
    taken = parts.deliverer.take([] if parts.held.draining else request.deliveries)
    return DeliverResponse(
        worker_id=parts.identity.worker_id, accepted=taken.accepted, paused=taken.paused
    )


@guarded.post(DRAIN_PATH, responses=documented(401))
async def drain(parts: Running) -> DrainResponse:
    """Take no more runs; those that run go on, and the process stays."""
    parts.drain()
    return DrainResponse(
        state=WorkerState.DRAINING,
        load=parts.held.load(),
        unreported=parts.reporter.backlog,
        deliveries=parts.deliverer.backlog,
    )


@opened.get("/healthz")
async def healthz(parts: Running) -> WorkerHealth:
    """Prove that this very process lives."""
    return WorkerHealth(worker_id=parts.identity.worker_id, boot_id=parts.identity.boot_id)


@opened.get("/readyz", response_model=Readiness, responses={503: {"model": Readiness}})
async def readyz(parts: Running) -> Response:
    """Say whether runs can be taken; 503 if anything is missing, or the worker drains."""
    age = parts.liveness.beat_age_seconds()
    found = {
        "redis": await parts.leases.is_reachable(),
        "dispatcher": age is not None and age < LEASE_SECONDS,
        "handlers": bool(parts.identity.handlers) or parts.identity.delivers,
    }
    missing = [name for name, there in found.items() if not there]
    draining = parts.held.draining
    ready = not missing and not draining
    state = Readiness(ready=ready, draining=draining, missing=missing, **found)
    return JSONResponse(state.model_dump(by_alias=True), 200 if ready else 503)


@opened.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(parts: Running) -> Response:
    """The worker's numbers, in the text format of Prometheus."""
    return Response(parts.metrics.render(), media_type=CONTENT_TYPE_LATEST)


# Load balancers may ask with HEAD.
for _path, _answer in (("/healthz", healthz), ("/readyz", readyz), ("/metrics", metrics)):
    opened.add_api_route(_path, _answer, methods=["HEAD"], include_in_schema=False)
