"""Handlers that return when they began, for benches."""

from __future__ import annotations

import time
from typing import Any

from oncue import handler


@handler("mark")
async def mark(params: Any) -> float:
    """Return the epoch seconds of its start, in the worker's event loop."""
    return time.time()


@handler("mark_thread")
def mark_thread(params: Any) -> float:
    """Return the epoch seconds of its start, in a thread."""
    return time.time()
