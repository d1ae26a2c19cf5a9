"""Several dispatcher processes behind one port, kept running by one that serves nothing itself.

All of them accept from the same listening socket, so that a connection which comes while one is
gone is served by the others. Each is a whole dispatcher with its own limits, connections and
instance id; with several partitions they share these too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Final

import structlog

log = structlog.get_logger(__name__)

BACKLOG: Final = 2048
REFUSED: Final = 2
NOT_STARTED: Final = 1
TERMINATED: Final = 128 + signal.SIGTERM
FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 30.0
STANDS_SECONDS: Final = 10.0
"""One that lives so long has started, unless it refuses after all: a slow machine may need long."""
MOST_FALSE_STARTS: Final = 3
"""So often each may fail before any has started; then the whole is given up."""
GRACE_MARGIN_SECONDS: Final = 3.0
LISTEN_VARIABLE: Final = "ONCUE_LISTEN_FDS"
"""Names the sockets that a supervised process has inherited."""


class CannotListen(Exception):
    """The port cannot be had; the message is one sentence for the operator."""


def inherited_sockets(environment: Mapping[str, str]) -> list[socket.socket] | None:
    """Return the sockets on which a supervised process is to listen; None: it is not one."""
    told = environment.get(LISTEN_VARIABLE)
    return None if told is None else [socket.socket(fileno=int(one)) for one in told.split(",")]


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket that child processes may inherit.

    Raises:
        CannotListen: somebody else has the port, or it may not be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise CannotListen(
            f"the dispatchers could not start on {host}:{port} ({error.strerror}): "
            "is the port in use?"
        ) from None


class Supervisor:
    """Runs `command` several times, each with its sockets, until told to stop.

    One that dies is started again, after pauses that double while it does not stand. A process
    that ends by itself for good (`REFUSED`) ends the whole, unless one has started before.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        sockets: Sequence[Sequence[socket.socket]],
        *,
        grace_seconds: float,
    ) -> None:
        self._command = command
        self._environment = environment
        self._sockets = sockets
        self._grace_seconds = grace_seconds + GRACE_MARGIN_SECONDS
        self._stopping = asyncio.Event()
        self._any_stood = False
        self._standing: set[int] = set()
        self._false_starts = 0
        self._code = 0

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT, or until nothing can start, and return the exit code."""
        loop = asyncio.get_running_loop()
        for told in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(told, self._stopping.set)
        async with asyncio.TaskGroup() as group:
            for number, own in enumerate(self._sockets):
                group.create_task(self._keep_running(number, own))
        return self._code

    async def _keep_running(self, number: int, sockets: Sequence[socket.socket]) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._run_one(number, sockets)
            if self._stopping.is_set():
                # What went wrong in ending is ours to tell; one that had not begun to serve yet
                # ends by the signal itself.
                if code not in (0, -signal.SIGTERM, TERMINATED):
                    self._code = self._code or (code if code > 0 else 1)
                return
            seconds = time.monotonic() - began
            stood = number in self._standing and code != REFUSED
            self._standing.discard(number)
            log.warning(
                "dispatcher_ended", number=number, exit_code=code, seconds=round(seconds, 1)
            )
            if stood:
                self._any_stood, pause = True, FIRST_PAUSE_SECONDS
            if self._is_hopeless(code):
                log.error("dispatchers_cannot_start", exit_code=code)
                self._code = code if code > 0 else 1
                self._stopping.set()
                return
            await self._wait(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    def _is_hopeless(self, code: int) -> bool:
        if self._any_stood or self._standing:
            return False
        self._false_starts += 1
        return code == REFUSED or self._false_starts > MOST_FALSE_STARTS * len(self._sockets)

    async def _run_one(self, number: int, sockets: Sequence[socket.socket]) -> int:
        """Run one process until it ends by itself, or is told to; return its exit code."""
        descriptors = [one.fileno() for one in sockets]
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                env={**self._environment, LISTEN_VARIABLE: ",".join(map(str, descriptors))},
                # It reads until our end of the pipe closes, however this process ends.
                stdin=asyncio.subprocess.PIPE,
                pass_fds=descriptors,
            )
        except OSError as error:
            # For want of memory, say: the others go on, and this one is tried again.
            log.warning("dispatcher_not_started", number=number, error=str(error))
            return NOT_STARTED
        log.info("dispatcher_started", number=number, pid=process.pid)
        ended = asyncio.create_task(process.wait())
        stop = asyncio.create_task(self._stopping.wait())
        stands = asyncio.create_task(asyncio.sleep(STANDS_SECONDS))
        await asyncio.wait({ended, stop, stands}, return_when=asyncio.FIRST_COMPLETED)
        if stands.done():
            self._standing.add(number)
        await asyncio.wait({ended, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        stands.cancel()
        if not ended.done():
            await self._end(process, ended)
        return await ended

    async def _end(self, process: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> None:
        with suppress(ProcessLookupError):
            process.terminate()
        done, _ = await asyncio.wait({ended}, timeout=self._grace_seconds)
        if not done:
            log.warning("dispatcher_killed", pid=process.pid)
            with suppress(ProcessLookupError):
                process.kill()

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()


def supervise(
    *, host: str, port: int, processes: int, own_ports: int, grace_seconds: float, no_dispatch: bool
) -> int:
    """Run dispatchers behind one port until told to stop, and return the exit code.

    With `own_ports` each listens on a port of its own too, counted from there.

    Raises:
        CannotListen: a port cannot be had.
    """
    with ExitStack() as open_sockets:
        shared = open_sockets.enter_context(listen(host, port))
        sockets = [
            [shared, open_sockets.enter_context(listen(host, own_ports + number))]
            if own_ports
            else [shared]
            for number in range(processes)
        ]
        environment = {
            **os.environ,
            "ONCUE_HOST": host,
            "ONCUE_PORT": str(shared.getsockname()[1]),
            "ONCUE_NO_DISPATCH": str(no_dispatch),
            "ONCUE_PROCESSES": "1",
        }
        command = [sys.executable, "-m", "app.cli", "dispatcher"]

        async def run() -> int:
            return await Supervisor(
                command, environment, sockets, grace_seconds=grace_seconds
            ).run()

        return asyncio.run(run())
