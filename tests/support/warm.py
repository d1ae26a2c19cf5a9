"""Processes of the platform that begin as copies of one that has imported everything.

A dispatcher or worker that is started anew spends a second of processor time on its imports, and
the suite starts hundreds. The copies are processes like others, with their own memory, session
and environment, and are killed and frozen like others. What is tested of the commands themselves
starts them anew.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import NamedTuple, NoReturn

from app import cli
from tests.support.child import Child, Process
from worker import main as worker_main

PRELOADED = ("tests.support.warm", "app.serve", "app.migrate")


class WarmChild(Child):
    """`oncue` with these words, begun as a copy."""

    def _begin(self) -> Process:
        return WarmProcess(
            self._command,
            Streams(Path(os.devnull), self.log, self.log),
            environment=self._environment,
            directory=self._directory or Path.cwd(),
        )


class Streams(NamedTuple):
    """The files that a process reads, and appends to; the last two may be one."""

    given: Path
    out: Path
    err: Path


class WarmProcess:
    """The process of such a copy; what `subprocess.Popen` has, as far as needed."""

    def __init__(
        self,
        words: Sequence[str],
        streams: Streams,
        *,
        environment: Mapping[str, str],
        directory: Path,
    ) -> None:
        self._process = ForkServerProcess(
            target=_run,
            args=(list(words), streams, dict(environment), directory),
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._command = ["oncue", *words]

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended; raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._command, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # reaped by its parent, which has not told us yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it alone, at once."""
        self.send_signal(signal.SIGKILL)


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


_context()


def _run(words: list[str], streams: Streams, environment: dict[str, str], directory: Path) -> None:
    """Be `oncue` with these words: nothing of the test's own process is left but its imports."""
    os.setsid()
    _open(streams.given, os.O_RDONLY, 0)
    _open(streams.out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 1)
    _open(streams.err, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has closed the other
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(directory)
    _take(environment)
    sys.argv = ["oncue", *words]
    os.execve = _become  # type: ignore[assignment]
    cli.main()


def _open(path: Path, flags: int, number: int) -> None:
    opened = os.open(path, flags, 0o644)
    os.dup2(opened, number)
    os.close(opened)


def _take(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    added = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [one for one in added if one and one not in sys.path]


def _become(path: str, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Go on as `python -m worker`, which is what `oncue worker` makes of its process."""
    assert list(words[1:]) == ["-m", "worker"], words
    _take(environment)
    sys.path.insert(0, str(Path.cwd()))
    sys.exit(worker_main.main())
