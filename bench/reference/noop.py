"""The least that a FastAPI service does with a POST: check the body by a model, and answer.

uvicorn bench.reference.noop:app
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

app = FastAPI()


class NewJob(BaseModel):
    """A job as a caller would send it."""

    clientRequestId: str  # noqa: N815 - the names on the wire
    jobName: str  # noqa: N815
    jobHandler: str  # noqa: N815
    params: dict[str, Any]
    callbackUrl: str  # noqa: N815


class Accepted(BaseModel):
    """The answer."""

    id: int
    status: str


@app.post("/openapi/jobs", response_model=Accepted)
async def submit(_job: NewJob) -> Accepted:
    """Do nothing."""
    return Accepted(id=1, status="pending")
