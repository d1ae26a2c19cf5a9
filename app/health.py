"""Health, readiness and metrics of the dispatcher; none of them needs a key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

CHECK_SECONDS = 2.0
Check = Callable[[], Awaitable[str | None]]


class Health(BaseModel):
    """The process answers."""

    status: Literal["ok"]


class Readiness(BaseModel):
    """Each part and what is missing; `ready` only if nothing is. `instance` is who answers."""

    ready: bool
    parts: dict[str, str]
    instance: str


def health_routes(
    checks: dict[str, Check], metrics: Callable[[], Awaitable[bytes]], instance: str
) -> APIRouter:
    """Return the routes; a check gives None when its part is there, else what is wrong."""
    router = APIRouter(tags=["operations"])

    @router.get("/healthz", response_model=Health, summary="Is the process alive?")
    async def healthz() -> dict[str, str]:
        """Answer as long as the process can."""
        return {"status": "ok"}

    @router.get(
        "/readyz",
        response_model=Readiness,
        summary="Can it serve?",
        responses={503: {"model": Readiness, "description": "A part is missing"}},
    )
    async def readyz() -> Response:
        """Say which part is missing, if any."""
        found = await asyncio.gather(*(_ask(check) for check in checks.values()))
        parts = {name: wrong or "ok" for name, wrong in zip(checks, found, strict=True)}
        ready = not any(found)
        body: dict[str, Any] = {"ready": ready, "parts": parts, "instance": instance}
        return Response(
            orjson.dumps(body), status_code=200 if ready else 503, media_type="application/json"
        )

    @router.get(
        "/metrics",
        summary="Metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def get_metrics() -> Response:
        """Return all metrics in the Prometheus text format."""
        return Response(await metrics(), media_type=CONTENT_TYPE_LATEST)

    # Load balancers may ask with HEAD.
    for path, answer in (("/healthz", healthz), ("/readyz", readyz), ("/metrics", get_metrics)):
        router.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)
    return router


async def _ask(check: Check) -> str | None:
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            return await check()
    except TimeoutError:
        return "no answer"
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a part, readiness says so
        return type(error).__name__
