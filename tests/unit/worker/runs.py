"""Runs to send."""

from __future__ import annotations

import json
import uuid
from typing import Any

from oncue.protocol import Run, RunRequest


def make_run(handler: str, params: Any = None, **changes: Any) -> Run:
    """One attempt with ids of its own."""
    fields = {
        "job_id": uuid.uuid4().int % 2**60,
        "execution_id": str(uuid.uuid4()),
        "trigger_ts": 1_700_000_000_000,
        "attempt": 1,
        "max_attempts": 4,
        "job_name": "a job",
        "job_handler": handler,
        "params": params,
        "timeout_ms": 30_000,
    }
    return Run(**{**fields, **changes})


def make_request(*runs: Run, term: int = 1) -> RunRequest:
    """A `/run` request."""
    return RunRequest(term=term, runs=list(runs))


def to_json(request: RunRequest) -> Any:
    """The request as a dispatcher would send it."""
    return json.loads(request.model_dump_json(by_alias=True))
