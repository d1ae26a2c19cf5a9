"""One real child process of a test: started, frozen, ended, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

from tests.support.guardian import GUARDIAN
from tests.support.wait import until


def is_running(pid: int) -> bool:
    """Whether the process is there, and not merely waits to be reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class ChildDied(AssertionError):
    """A process ended that should have been running; the message holds the end of its log."""


class ChildrenLeft(AssertionError):
    """A process that was asked to end left children of its own running."""


class Process(Protocol):
    """What is asked of a started process; `subprocess.Popen` has it."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended; raises `subprocess.TimeoutExpired`."""

    def send_signal(self, number: int) -> None:
        """Send it a signal unless it has ended."""

    def kill(self) -> None:
        """Kill it alone, at once."""


class Child:
    """A command in a process group of its own, its output appended to `log`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._command = [str(word) for word in command]
        self._environment = dict(os.environ if environment is None else environment)
        self._directory = directory
        self._process: Process | None = None
        self.sessions: set[int] = set()
        """The ids of the sessions that its processes were the first of."""

    def start(self, ready: Callable[[], object] | None = None, timeout: float = 120) -> None:
        """Start it and return once `ready()` holds. Raises `ChildDied` if it ends before."""
        assert not self.running, f"{self.name} runs already"
        self._process = self._begin()
        self.sessions.add(self._process.pid)
        GUARDIAN.watch(self._process.pid)
        if ready is not None:
            self.wait_until(ready, timeout)

    def wait_until(self, fact: Callable[[], object], timeout: float = 120) -> None:
        """Wait for a fact that this process must bring about while it runs."""

        def holds_and_runs() -> object:
            if not self.running:
                raise ChildDied(
                    f"{self.name} ended with {self.exit_code}; its log ends:\n{self.log_tail()}"
                )
            return fact()

        try:
            until(holds_and_runs, timeout, what=f"{self.name} to be ready")
        except TimeoutError as late:
            raise TimeoutError(f"{late}; its log ends:\n{self.log_tail()}") from None

    @property
    def pid(self) -> int:
        """The process's id; also of its process group."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """What it ended with; negative for a signal, None while it runs."""
        return None if self._process is None else self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        assert self._process is not None
        self._process.send_signal(number)

    def freeze(self) -> None:
        """Stop the whole process group where it stands (SIGSTOP); return once it does."""
        os.killpg(self.pid, signal.SIGSTOP)
        # A thread that another processor runs goes on for a moment.
        until(lambda: _stand_still(self.pid), what=f"{self.name} to stand still")

    def thaw(self) -> None:
        """Let a frozen process group go on (SIGCONT)."""
        os.killpg(self.pid, signal.SIGCONT)

    def terminate(self, timeout: float = 60) -> int:
        """Ask it to end (SIGTERM) and return its exit code. Raises TimeoutError if it goes on."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def wait(self, timeout: float = 60, *, children_timeout: float = 30) -> int:
        """Return its exit code once it ended by itself, and its children soon after it.

        Raises:
            TimeoutError: it still runs.
            ChildrenLeft: it ended, but a child in its process group did not; it is killed now.
        """
        assert self._process is not None
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"{self.name} still runs after {timeout} s; its log ends:\n{self.log_tail()}"
            ) from None
        try:
            until(
                lambda: not self._group(),
                children_timeout,
                what=f"the children of {self.name} to end",
            )
        except TimeoutError:
            left = [f"{child.pid} {' '.join(child.cmdline())}" for child in self._group()]
            raise ChildrenLeft(f"{self.name} ended, but not its children: {left}") from None
        finally:
            self._end_group()
        return code

    def kill(self) -> None:
        """Kill the process and all of its group at once (SIGKILL). Fine when it has ended."""
        if self._process is None:
            return
        self._end_group()
        self._process.kill()  # a copy that has only just begun is in no group of its own yet
        self._process.wait()

    def kill_alone(self) -> None:
        """Kill the process but none of its children, as the kernel's memory killer would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def log_tail(self, lines: int = 40) -> str:
        """The last lines that it wrote."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _begin(self) -> Process:
        with self.log.open("ab") as output:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._directory,
                start_new_session=True,
            )

    def _group(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_in_group(process)]

    def _is_in_group(self, process: psutil.Process) -> bool:
        try:
            return os.getpgid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE
        except (OSError, psutil.Error):
            return False

    def _end_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        GUARDIAN.forget(self.pid)


def _stand_still(pid: int) -> bool:
    """Whether all threads of a process are stopped, or it is gone; elsewhere than on Linux yes."""
    tasks = Path(f"/proc/{pid}/task")
    with suppress(FileNotFoundError, ProcessLookupError):
        states = [
            (one / "stat").read_text().rpartition(")")[2].split()[0] for one in tasks.iterdir()
        ]
        return all(state in "TtZX" for state in states)
    return True
