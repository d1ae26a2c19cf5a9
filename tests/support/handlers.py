"""Handlers for tests. They note each start and end in the file that ONCUE_TEST_RECORD names."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oncue import Context, handler


@dataclass(frozen=True)
class RecordLine:
    """A noted start or end: `event` is start, returned, or the name of the exception that ended it.

    `monotonic` (seconds) is comparable between all processes of one machine.
    """

    event: str
    handler: str
    job_id: int
    execution_id: str
    attempt: int
    trigger_ts: int
    pid: int
    worker: str
    monotonic: float
    wall: float


def read_record(path: Path) -> list[RecordLine]:
    """Return all lines noted so far, in the order they were written."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")  # a line may be half written
    return [RecordLine(**json.loads(line)) for line in whole.splitlines()]


def _note(event: str, ctx: Context) -> None:
    target = os.environ.get("ONCUE_TEST_RECORD")
    if not target:
        return
    line = RecordLine(
        event=event,
        handler=ctx.handler,
        job_id=ctx.job_id,
        execution_id=ctx.execution_id,
        attempt=ctx.attempt,
        trigger_ts=ctx.trigger_ts,
        pid=os.getpid(),
        worker=os.environ.get("ONCUE_WORKER_NAME", ""),
        monotonic=time.monotonic(),
        wall=time.time(),
    )
    # One write to a file opened for appending: lines of many processes never mix.
    descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{json.dumps(line.__dict__)}\n".encode())
    finally:
        os.close(descriptor)


@contextmanager
def _noted(ctx: Context) -> Iterator[None]:
    _note("start", ctx)
    try:
        yield
    except BaseException as error:
        _note(type(error).__name__, ctx)
        raise
    _note("returned", ctx)


def _seconds(params: Any, default_ms: int = 0) -> float:
    return float((params or {}).get("ms", default_ms)) / 1000


@handler("record")
async def record(params: Any, ctx: Context) -> Any:
    """Sleep `ms` on the worker's event loop."""
    with _noted(ctx):
        await asyncio.sleep(_seconds(params))
    return {"attempt": ctx.attempt}


@handler("record_thread")
def record_thread(params: Any, ctx: Context) -> Any:
    """Sleep `ms` in a thread, and stop early when told to."""
    with _noted(ctx):
        ctx.cancel_event.wait(_seconds(params))
    return {"attempt": ctx.attempt}


@handler("record_process", isolation="process")
def record_process(params: Any, ctx: Context) -> Any:
    """Sleep `ms` in a child process."""
    with _noted(ctx):
        time.sleep(_seconds(params))
    return {"attempt": ctx.attempt}


@handler("nominal")
async def nominal(params: Any, ctx: Context) -> str | None:
    """Tell which time of its schedule the run stands for."""
    return None if ctx.nominal_time is None else ctx.nominal_time.isoformat()


@handler("stubborn_thread")
def stubborn_thread(params: Any, ctx: Context) -> Any:
    """Sleep `ms` in a thread, deaf to being cancelled."""
    with _noted(ctx):
        time.sleep(_seconds(params))
    return {"attempt": ctx.attempt}


@handler("burn")
def burn(params: Any, ctx: Context) -> Any:
    """Compute in pure Python, holding the interpreter, for `ms`."""
    with _noted(ctx):
        end = time.monotonic() + _seconds(params)
        rounds = 0
        while time.monotonic() < end:
            rounds += 1
    return {"rounds": rounds}


@handler("one_ms")
async def one_ms(params: Any) -> None:
    """Do next to nothing: sleep a millisecond."""
    await asyncio.sleep(0.001)


@handler("unstorable")
async def unstorable(params: Any) -> str:
    """Return a lone surrogate, which is no valid Unicode text."""
    return "\ud800"


@handler("big")
async def big(params: Any) -> str:
    """Return `bytes` characters."""
    return "x" * int(params["bytes"])
