"""What the platform says of its own state: metrics, readiness, log lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PATIENCE_SECONDS = 10.0


class NotExported(AssertionError):
    """A series that is not there."""


def metric(url: str, series: str) -> float:
    """The value of a series, `name` or `name{label="value"}`.

    Raises:
        NotExported: there is none, or not yet.
    """
    _, text = _asked(url, "/metrics")
    lines = [line for line in text.splitlines() if line.startswith(f"{series} ")]
    if not lines:
        raise NotExported(series)
    return float(lines[0].rpartition(" ")[2])


def readiness(url: str) -> tuple[int, Mapping[str, Any]]:
    """The status of `/readyz`, and its body."""
    status, text = _asked(url, "/readyz")
    found: Mapping[str, Any] = json.loads(text)
    return status, found


def said(log: Path, event: str) -> list[dict[str, Any]]:
    """The lines of a process's log that tell of an event."""
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    return [one for one in map(json.loads, lines) if one["event"] == event]


def _asked(url: str, path: str) -> tuple[int, str]:
    with closing(HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_SECONDS)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
