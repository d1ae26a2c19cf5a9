"""A small process that ends what a killed test run would leave: process groups and directories.

Run as a program it reads lines `+pgid`, `-pgid` and `directory PATH`, and at the end of its
input, which comes when the test process is gone, kills the groups and removes the directories.
It knows only what it is told, so it ends nothing of anybody else.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

MEMORY = Path("/dev/shm")
LEAST_FREE = 4 * 1024**3


def memory_directory() -> Path | None:
    """Return where files are kept in memory, or None if this machine has too little of it.

    What is written there outlives the processes that wrote it, which is all that tests kill.
    """
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= LEAST_FREE:
        return MEMORY
    return None


class Guardian:
    """The guardian of this process, started when it is first told of something."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, group: int) -> None:
        """Kill this process group should we vanish."""
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        """The group has ended."""
        self._tell(f"-{group}")

    def temporary_directory(self, *, in_memory: bool = False) -> Path:
        """Make a directory with a short path, as sockets need, that goes when we go."""
        where = memory_directory() if in_memory else None
        directory = Path(tempfile.mkdtemp(prefix="oncue-", dir=where))
        self._tell(f"directory {directory}")
        return directory

    def _tell(self, line: str) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-S", __file__],
                stdin=subprocess.PIPE,
                start_new_session=True,  # so that Ctrl-C does not end it before us
            )
            atexit.register(self._close)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def _close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


GUARDIAN = Guardian()


def main() -> None:
    """Take notes until the input ends, then clean up."""
    groups: set[int] = set()
    directories: list[str] = []
    for line in sys.stdin:
        word = line.rstrip("\n")
        if word.startswith("+"):
            groups.add(int(word[1:]))
        elif word.startswith("-"):
            groups.discard(int(word[1:]))
        else:
            directories.append(word.removeprefix("directory "))
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
