"""What callers give to both clients: where the server is, a key, and things or their ids."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import urlsplit

import httpx

from oncue.results import BulkOperation, Callback, Job
from oncue.version import __version__

DEFAULT_URL: Final = "http://127.0.0.1:8080"
DEFAULT_TIMEOUT_SECONDS: Final = 15.0

POOL: Final = httpx.Limits(max_connections=None, max_keepalive_connections=100)
"""A wait holds a connection for as long as it lasts, so the callers alone bound their number."""

OPEN: Final = 200
NOTHING_MORE: Final = 204
"""What a stream of a job answers whose last event has been seen."""


def id_of(job: int | Job) -> int:
    """Return the id of a job that was given as it or by its id."""
    if isinstance(job, int):
        return job
    if not isinstance(job, Job):
        raise TypeError(f"a Job or its id is needed, not {job!r:.100}")
    return job.job_id


def operation_id_of(operation: str | BulkOperation) -> str:
    """Return the id of a bulk operation."""
    return operation if isinstance(operation, str) else operation.operation_id


def delivery_id_of(callback: str | Callback) -> str:
    """Return the id of a callback."""
    return callback if isinstance(callback, str) else callback.delivery_id


def revision_of(job: int | Job, given: int | None) -> int:
    """Return the revision that a change is based on."""
    if given is not None:
        return given
    if isinstance(job, int):
        raise TypeError("give the Job as you saw it, or its revision")
    return job.revision


def address_of(given: str | None) -> str:
    """Return where the server is: as given, by ONCUE_URL, or here.

    Raises:
        ValueError: it is not an http or https URL.
    """
    url = (given or os.environ.get("ONCUE_URL") or DEFAULT_URL).rstrip("/")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        valid = False
    if not valid:
        raise ValueError(f"the address of the server must be an http or https URL, not {url!r}")
    return url


def headers_of(given: str | None) -> dict[str, str]:
    """Return the headers of every request, with the key that was given or ONCUE_API_KEY.

    Raises:
        ValueError: the key cannot be sent.
    """
    key = os.environ.get("ONCUE_API_KEY") if given is None else given
    headers = {"Accept": "application/json", "User-Agent": f"oncue-python/{__version__}"}
    if key:
        if not (key.isascii() and key.isprintable()):
            raise ValueError("the API key must be printable ASCII")
        headers["Authorization"] = f"Bearer {key}"
    return headers
