"""Runs one execution in a child process of its own session, which can be killed as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import Any, Final

from oncue.handlers import Context
from worker.child_frames import ChildPipes
from worker.held import Execution
from worker.verdict import Verdict

EXIT_SECONDS: Final = 5.0
"""How long a child may tidy up after it gave its verdict."""
LONGEST_VERDICT_BYTES: Final = 1024 * 1024


async def run_in_child(
    execution: Execution, context: Context, modules: tuple[str, ...], pipes: ChildPipes
) -> Verdict:
    """Return the child's verdict once its process group is gone; its output goes into `pipes`."""
    request = _encode_request(execution, context, modules)
    reader, pipe, writer_fd = await _open_verdict_pipe()
    frames_fd, stdout_fd, stderr_fd = pipes.child_fds
    own_streams = _own_streams()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "worker.child",
            *(str(fd) for fd in (writer_fd, os.getpid(), frames_fd, *own_streams)),
            stdin=asyncio.subprocess.PIPE,
            stdout=stdout_fd,
            stderr=stderr_fd,
            pass_fds=(writer_fd, frames_fd, *own_streams),
            start_new_session=True,
        )
    except BaseException:
        pipe.close()
        raise
    finally:
        for fd in (writer_fd, *own_streams):
            os.close(fd)
        pipes.close_child_ends()
    execution.child_pid = process.pid
    try:
        if execution.stop_verdict is not None:
            kill_group(process.pid)
        await _send_request(process, request)
        line = await _read_verdict(reader)
        execution.has_verdict = bool(line)
        await _wait_for_exit(process, EXIT_SECONDS if line else None)
    finally:
        # The leader may be gone and its children not: what a run started ends with it.
        kill_group(process.pid)
        if process.returncode is None:
            await process.wait()
        execution.child_pid = None
        # A process that left the group may still hold the other end.
        pipe.close()
    return _decode_verdict(line, process.returncode)


def kill_group(leader_pid: int | None) -> None:
    """Kill a child and all that it started."""
    if leader_pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader_pid, signal.SIGKILL)


def _encode_request(execution: Execution, context: Context, modules: tuple[str, ...]) -> bytes:
    request = {
        "modules": modules,
        "path": sys.path,
        "handler": execution.handler.name,
        "params": execution.run.params,
        "context": {
            "job_id": context.job_id,
            "execution_id": context.execution_id,
            "handler": context.handler,
            "job_name": context.job_name,
            "attempt": context.attempt,
            "max_attempts": context.max_attempts,
            "trigger_ts": context.trigger_ts,
            "deadline_ms": context.deadline_ms,
            "client_request_id": context.client_request_id,
            "shard_index": context.shard_index,
            "shard_total": context.shard_total,
            "secret_params": context.secret_params,
            "nominal_time": context.nominal_time and context.nominal_time.isoformat(),
        },
    }
    return json.dumps(request).encode() + b"\n"


def _own_streams() -> tuple[int, int]:
    """Copies of the worker's standard streams: what the child prints goes there, too."""
    copies = []
    for fd in (1, 2):
        try:
            copies.append(os.dup(fd))
        except OSError:
            # A daemon may have closed them.
            copies.append(os.open(os.devnull, os.O_WRONLY))
    return copies[0], copies[1]


async def _open_verdict_pipe() -> tuple[asyncio.StreamReader, asyncio.ReadTransport, int]:
    read_fd, write_fd = os.pipe()
    reader = asyncio.StreamReader(limit=LONGEST_VERDICT_BYTES)
    try:
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", buffering=0)
        )
    except BaseException:
        os.close(write_fd)
        raise
    return reader, pipe, write_fd


async def _send_request(process: asyncio.subprocess.Process, request: bytes) -> None:
    if process.stdin is None:
        raise RuntimeError("the child has no standard input")
    # Left open: its end tells the child that its worker is gone.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(request)
        await process.stdin.drain()


async def _read_verdict(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return b""


async def _wait_for_exit(process: asyncio.subprocess.Process, seconds: float | None) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), seconds)


def _decode_verdict(line: bytes, exit_code: int | None) -> Verdict:
    if not line:
        return Verdict("failed", code="child_died", message=_describe_exit(exit_code))
    fields: dict[str, Any] = json.loads(line)
    result = fields.pop("result")
    return Verdict(result_json=None if result is None else result.encode(), **fields)


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-exit_code).name
            return f"the child process was ended by {name} before it gave a result"
    return f"the child process ended with exit code {exit_code} before it gave a result"
