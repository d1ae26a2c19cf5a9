"""The handlers of the fault harness, which keep a record that the product has no part in.

Each run notes its start and its end in the file that ONCUE_TEST_RECORD names, and holds a lock of
its job in the folder beside it: the kernel frees that lock when its process ends, however it
ends, so that the next run of the job can tell whether this one was over.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oncue import Context, handler


@dataclass(frozen=True)
class Note:
    """A start or an end; `held` tells that an earlier run of the job had not ended.

    `at` (seconds, CLOCK_MONOTONIC) is comparable between all processes of one machine;
    `boot` (CLOCK_BOOTTIME) and `wall` are for readers.
    """

    event: str
    handler: str
    job_id: int
    execution_id: str
    attempt: int
    trigger_ts: int
    pid: int
    worker: str
    at: float
    boot: float
    wall: float
    held: bool


def read_notes(path: Path, offset: int = 0) -> tuple[list[Note], int]:
    """Return the whole lines after `offset`, and the offset after them."""
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        whole, newline, _ = file.read().rpartition(b"\n")
    return [Note(**json.loads(line)) for line in whole.splitlines()], offset + len(whole + newline)


def _note(event: str, ctx: Context, *, held: bool = False) -> None:
    note = Note(
        event=event,
        handler=ctx.handler,
        job_id=ctx.job_id,
        execution_id=ctx.execution_id,
        attempt=ctx.attempt,
        trigger_ts=ctx.trigger_ts,
        pid=os.getpid(),
        worker=os.environ["ONCUE_WORKER_NAME"],
        at=time.monotonic(),
        boot=time.clock_gettime(time.CLOCK_BOOTTIME),
        wall=time.time(),
        held=held,
    )
    # One write to a file opened for appending: lines of many processes never mix.
    target = os.environ["ONCUE_TEST_RECORD"]
    descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{json.dumps(asdict(note))}\n".encode())
    finally:
        os.close(descriptor)


@contextmanager
def _noted(ctx: Context) -> Iterator[None]:
    path = Path(f"{os.environ['ONCUE_TEST_RECORD']}.locks") / str(ctx.job_id)
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = False
        except BlockingIOError:
            held = True
        _note("start", ctx, held=held)
        try:
            yield
        except asyncio.CancelledError:
            _note("stopped", ctx)
            raise
        except BaseException:
            _note("raised", ctx)
            raise
        _note("returned", ctx)
    finally:
        # A child that is being born may share the descriptor: closing alone would not free it.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _result(ctx: Context) -> dict[str, Any]:
    """Tell whose result this is, so that a result in the wrong place is seen."""
    return {"by": ctx.execution_id, "attempt": ctx.attempt}


def _seconds(params: Any) -> float:
    return float(params["ms"]) / 1000


@handler("fault_async")
async def fault_async(params: Any, ctx: Context) -> Any:
    """Sleep `ms` on the event loop, and speak if told to."""
    with _noted(ctx):
        for step in range(params.get("lines", 0)):
            ctx.log("step", number=step)
            ctx.progress((step + 1) / params["lines"], f"step {step}")
        await asyncio.sleep(_seconds(params))
    return _result(ctx)


@handler("fault_thread")
def fault_thread(params: Any, ctx: Context) -> Any:
    """Sleep `ms` in a thread, and stop early when told to."""
    with _noted(ctx):
        if ctx.cancel_event.wait(_seconds(params)):
            raise InterruptedError
    return _result(ctx)


@handler("fault_stubborn")
def fault_stubborn(params: Any, ctx: Context) -> Any:
    """Sleep `ms` in a thread, deaf to being told to stop."""
    with _noted(ctx):
        time.sleep(_seconds(params))
    return _result(ctx)


@handler("fault_process", isolation="process")
def fault_process(params: Any, ctx: Context) -> Any:
    """Sleep `ms` in a child process."""
    with _noted(ctx):
        time.sleep(_seconds(params))
    return _result(ctx)


@handler("fault_failing")
async def fault_failing(params: Any, ctx: Context) -> Any:
    """Sleep `ms`, and fail in the first `times` attempts."""
    with _noted(ctx):
        await asyncio.sleep(_seconds(params))
        if ctx.attempt <= params["times"]:
            raise ValueError("told to fail")
    return _result(ctx)


@handler("fault_burn")
def fault_burn(params: Any, ctx: Context) -> Any:
    """Compute in pure Python, holding the interpreter, for `ms`."""
    with _noted(ctx):
        end = time.monotonic() + _seconds(params)
        while time.monotonic() < end:
            pass
    return _result(ctx)
