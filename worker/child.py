"""The other side of `isolate.py`: `python -m worker.child FD PARENT ...` runs a handler and exits.

It reads one line of JSON from standard input and writes one line, the verdict, to the file
descriptor FD, so that nothing a handler prints can be taken for its result. What the handler
says goes into a pipe of frames, and to where the worker's own output goes. It dies with its
worker, and what it started with it: at once by the kernel's parent-death signal on Linux, and
everywhere by a guardian that waits for the end of the input.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import importlib
import inspect
import json
import logging
import os
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from oncue.handlers import REGISTRY, Context
from worker.capture import catching
from worker.child_output import ChildOutput
from worker.verdict import Verdict, judge_error, judge_value

PR_SET_PDEATHSIG = 1


def main(verdict_fd: int, parent_pid: int, frames_fd: int, stdout_fd: int, stderr_fd: int) -> None:
    """Run the one execution that stands in the first line of standard input."""
    for fd in (verdict_fd, frames_fd, stdout_fd, stderr_fd):
        os.set_inheritable(fd, False)
    _die_with(parent_pid)
    # Who ends a service ends all of its processes at once, and the worker's runs have their grace:
    # the worker ends this one, by SIGKILL. What a handler starts is not meant (see below): to
    # ignore the signal would be handed on to all of it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    requests = _take_standard_input()
    request = json.loads(requests.readline())
    _leave_guardian(requests, verdict_fd)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    # Descriptors 1 and 2 are pipes to the worker: for what is written past Python's streams.
    sys.stdout = open(stdout_fd, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(stderr_fd, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(levelname)s %(name)s execution={request['context']['execution_id']} %(message)s",
    )
    output = ChildOutput(frames_fd)
    with catching(lambda: output):
        verdict = _run(request, output)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    _write(verdict_fd, verdict)


def _run(request: dict[str, Any], output: ChildOutput) -> Verdict:
    try:
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)
        # What its worker could import by then, the child can too.
        sys.path.extend(one for one in request["path"] if one not in sys.path)
        for module in request["modules"]:
            importlib.import_module(module)
        handler = REGISTRY[request["handler"]]
        value = handler.call(request["params"], lambda: _context(request["context"], output))
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return judge_value(value)
    except BaseException as error:
        verdict = judge_error(error)
        if verdict.code == "handler_error":
            logging.getLogger("oncue.handler").exception("the handler failed")
        return verdict


def _context(fields: dict[str, Any], output: ChildOutput) -> Context:
    nominal = fields["nominal_time"]
    moment = None if nominal is None else datetime.fromisoformat(nominal)
    return Context(**{**fields, "nominal_time": moment}, output=output)


def _take_standard_input() -> BinaryIO:
    """Move the request pipe away from where handlers and their own children would read it."""
    requests = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return requests


def _leave_guardian(requests: BinaryIO, verdict_fd: int) -> None:
    """Leave a process in our group that kills all of it when the worker's end of the pipe closes.

    It is no child of ours, so that a handler that waits for any child does not meet it; and it
    is no thread, so that a handler that never lets go of the interpreter cannot stop it.
    """
    middle = os.fork()
    if middle == 0:
        if os.fork() == 0:
            os.close(verdict_fd)
            while os.read(requests.fileno(), 4096):
                pass
            os.killpg(0, signal.SIGKILL)
        os._exit(0)
    os.waitpid(middle, 0)
    requests.close()


def _die_with(parent_pid: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _write(verdict_fd: int, verdict: Verdict) -> None:
    fields = dataclasses.asdict(verdict)
    result = fields.pop("result_json")
    fields["result"] = None if result is None else result.decode()
    data = json.dumps(fields).encode() + b"\n"
    while data:
        data = data[os.write(verdict_fd, data) :]
    os.close(verdict_fd)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
