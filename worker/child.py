"""The other side of `isolate.py`: `python -m worker.child FD PARENT` runs one handler and exits.

It reads one line of JSON from standard input and writes one line, the verdict, to the file
descriptor FD, so that nothing a handler prints can be taken for its result. It dies with its
worker: by the kernel's parent-death signal on Linux, and everywhere when its input ends.
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
import threading
from typing import Any, BinaryIO

from oncue.handlers import REGISTRY, Context
from worker.verdict import Verdict, judge_error, judge_value

PR_SET_PDEATHSIG = 1


def main(verdict_fd: int, parent_pid: int) -> None:
    """Run the one execution that stands in the first line of standard input."""
    os.set_inheritable(verdict_fd, False)
    _die_with(parent_pid)
    requests = _take_standard_input()
    request = json.loads(requests.readline())
    threading.Thread(target=_watch, args=(requests,), daemon=True).start()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(levelname)s %(name)s execution={request['context']['execution_id']} %(message)s",
    )
    verdict = _run(request)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    _write(verdict_fd, verdict)


def _run(request: dict[str, Any]) -> Verdict:
    try:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        for module in request["modules"]:
            importlib.import_module(module)
        handler = REGISTRY[request["handler"]]
        arguments = [request["params"]]
        if handler.takes_context:
            arguments.append(Context(**request["context"]))
        value = handler.function(*arguments)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return judge_value(value)
    except BaseException as error:  # noqa: BLE001 (also SystemExit is only a failed run)
        verdict = judge_error(error)
        if verdict.code == "handler_error":
            logging.getLogger("oncue.handler").exception("the handler failed")
        return verdict


def _take_standard_input() -> BinaryIO:
    """Move the request pipe away from where handlers and their own children would read it."""
    requests = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return requests


def _watch(requests: BinaryIO) -> None:
    requests.read()
    os.killpg(0, signal.SIGKILL)


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
    main(int(sys.argv[1]), int(sys.argv[2]))
