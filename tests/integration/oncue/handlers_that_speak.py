"""Handlers that log, print and make progress, for the tests of the client and its commands."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from typing import Any

from oncue import Context, handler


@handler("speak")
async def speak(params: Any, ctx: Context) -> str:
    """Say something in each way there is."""
    ctx.log("begun", customer=7, names=["a", "b"])
    print("printed")
    print("to stderr", file=sys.stderr)
    logging.getLogger("shop").warning("logged %s", "so", extra={"order": 1001})
    for step in range(1, params.get("steps", 0) + 1):
        ctx.progress(step / params["steps"], f"step {step}")
        ctx.log(f"step {step}")
        await asyncio.sleep(params.get("seconds", 0.05))
    return "said"


@handler("speak_isolated", isolation="process")
def speak_isolated(params: Any, ctx: Context) -> str:
    """Say something in a child process, also past Python, and die in the middle if asked."""
    ctx.log("begun")
    print("printed")
    os.write(1, b"past python\n")
    ctx.progress(0.5, "half")
    if "seconds" in params:
        print("last words, without an end", end="")
        time.sleep(params["seconds"])
    return "said"


@handler("fail_first")
def fail_first(params: Any, ctx: Context) -> int:
    """Fail the first attempts: one, or as many as `times` says."""
    ctx.log(f"attempt {ctx.attempt}")
    if ctx.attempt <= (params or {}).get("times", 1):
        raise ValueError("not yet")
    return ctx.attempt
