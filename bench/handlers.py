"""Handlers that the benches run."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from oncue import handler

SLOWNESS = float(os.environ.get("ONCUE_BENCH_SLOWNESS", "1"))


@handler("bench-wait")
async def wait(params: Any) -> None:
    """Wait `ms`, longer on a slow worker."""
    await asyncio.sleep(params["ms"] * SLOWNESS / 1000)
