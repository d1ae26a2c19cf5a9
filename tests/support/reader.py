"""Does what a page says, as a reader would: in a checkout, block after block, in terminals.

Two things differ from a reader: the ports (free ones stand for those in the text), and that the
checkout has its `.venv` already.
"""

from __future__ import annotations

import doctest
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.support.child import Child
from tests.support.pages import Block
from tests.support.ports import free_port
from tests.support.processes import ROOT

SECONDS: Final = 100
OWN: Final = frozenset(
    {".venv", ".git", ".env", ".oncue", ".pytest_cache", ".hypothesis", ".mypy_cache"}
)
PORTS: Final = ("8080", "8081", "9000")
_NUMBER: Final = re.compile(r"(?<!\d)(8080|8081|9000)(?!\d)")
_SEPARATOR: Final = "\x1eended\x1e"
_STATE: Final = "READER_STATE"


class Unlike(AssertionError):
    """An example does not do what its page says."""


class Reader:
    """One reader of one page, with a checkout, ports and terminals of its own."""

    def __init__(self, directory: Path) -> None:
        self.checkout = directory / "oncue"
        self._directory = directory
        self._ports = {port: str(free_port()) for port in PORTS}
        self._terminals: dict[int, Child] = {}
        self._state = directory / "state"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ONCUE_")}
        self.environment = {
            **kept,
            "PATH": f"{self.checkout}/.venv/bin:{kept.get('PATH', '')}",
            "NO_COLOR": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            # Where an example names no port, the defaults are meant.
            "ONCUE_PORT": self._ports["8080"],
            "ONCUE_WORKER_PORT": self._ports["8081"],
            "ONCUE_URL": f"http://127.0.0.1:{self._ports['8080']}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        for name in ("VIRTUAL_ENV", "PYTHONPATH", "PYTEST_ADDOPTS", "MAKEFLAGS", "MAKELEVEL"):
            self.environment.pop(name, None)
        self._check_out()

    def start_platform(self) -> None:
        """Start what every page but the first ones takes for granted."""
        self._stay(1, "oncue up", "Oncue is up")

    def do(self, block: Block) -> None:
        """Do what a block says.

        Raises:
            Unlike: it fails, or prints something else.
        """
        text = self._with_ports(block.text)
        if block.kind == "file":
            path = self.checkout / block.word
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif block.kind == "terminal":
            self._stay(block.terminal, text, self._with_ports(block.word))
        elif block.kind == "show":
            if block.language == "json":
                json.loads(text)
        elif block.kind == "run":
            self._run(block, text)

    def close(self) -> None:
        """Leave all terminals."""
        for terminal in self._terminals.values():
            self._interrupt(terminal)

    def logs(self) -> str:
        """What the terminals show, for a failed test."""
        return "\n".join(
            f"--- terminal {number}\n{terminal.log_tail()}"
            for number, terminal in self._terminals.items()
        )

    def _run(self, block: Block, text: str) -> None:
        if block.language == "python":
            code, out = self._python(text)
        elif block.language == "sh":
            code, out = self._shell(f"set -eu\n{text}")
        else:
            self._compare(block, text)
            return
        if code != 0:
            raise Unlike(f"{block.place} ended with {code}:\n{text}\n{out}\n{self.logs()}")

    def _compare(self, block: Block, text: str) -> None:
        examples = _examples(text)
        script = "".join(
            # `$?` is what the reader's last command left, not what we did since.
            f"{command}\nREADER_CODE=$?; printf '{_SEPARATOR}\\n'; (exit $READER_CODE)\n"
            for command, _ in examples
        )
        _, out = self._shell(f"{script}exit 0\n")
        found = out.split(f"{_SEPARATOR}\n")
        for (command, wanted), got in zip(examples, found, strict=False):
            if not _is_alike(wanted, got):
                raise Unlike(
                    f"{block.place}: `{command}` should print\n{wanted}\nbut printed\n{got}\n"
                    f"{self.logs()}"
                )

    def _python(self, text: str) -> tuple[int, str]:
        return self._command([f"{self.checkout}/.venv/bin/python", "-W", "error", "-c", text])

    def _shell(self, text: str) -> tuple[int, str]:
        """Run a script in the one shell of the page: what it exports is there in the next."""
        keep = f"trap 'code=$?; env -0 > \"${_STATE}\"; exit $code' EXIT\n"
        code, out = self._command(["bash", "-c", keep + text], {_STATE: str(self._state)})
        if self._state.exists():
            pairs = self._state.read_text().rstrip("\0").split("\0")
            self.environment = dict(pair.split("=", 1) for pair in pairs)
            self.environment.pop(_STATE, None)
            self._state.unlink()
        return code, out

    def _command(
        self, words: list[str], variables: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        running = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.checkout,
            env={**self.environment, **(variables or {})},
            start_new_session=True,
        )
        try:
            out, _ = running.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            out, _ = running.communicate()
            return -1, f"{out}\n(no end after {SECONDS} s)"
        return running.returncode, out

    def _stay(self, number: int, text: str, until_it_prints: str) -> None:
        if number in self._terminals:
            self._interrupt(self._terminals.pop(number))
        terminal = Child(
            f"terminal {number}",
            ["bash", "-c", text],
            log=self._directory / f"terminal-{number}.log",
            environment=self.environment,
            directory=self.checkout,
        )
        terminal.log.unlink(missing_ok=True)
        self._terminals[number] = terminal
        terminal.start(lambda: until_it_prints in terminal.log_tail(10_000), SECONDS)

    def _interrupt(self, terminal: Child) -> None:
        """Press Ctrl-C, which reaches all that runs in the terminal."""
        if not terminal.running:
            return
        with suppress(ProcessLookupError):
            os.killpg(terminal.pid, signal.SIGINT)
        try:
            terminal.wait(40)
        finally:
            terminal.kill()

    def _with_ports(self, text: str) -> str:
        return _NUMBER.sub(lambda found: self._ports[found[1]], text)

    def _check_out(self) -> None:
        """A checkout that shares our files, set up as `make up` would have done."""
        self.checkout.mkdir(parents=True)
        for entry in ROOT.iterdir():
            if entry.name not in OWN:
                (self.checkout / entry.name).symlink_to(entry)
        environment = self.checkout / ".venv"
        environment.mkdir()
        for entry in Path(sys.prefix).iterdir():
            if not entry.name.startswith("."):
                (environment / entry.name).symlink_to(entry)
        (environment / ".home").write_text(f"{self.checkout}\n")
        for lock, name in (("requirements.lock", "server"), ("requirements-dev.lock", "dev")):
            stamp = subprocess.run(
                ["sh", "-c", f'echo "$(pwd) $(cat {lock} pyproject.toml tools/bootstrap | cksum)"'],
                capture_output=True,
                text=True,
                check=True,
                cwd=self.checkout,
            )
            (environment / f".installed-{name}").write_text(stamp.stdout)


def _examples(text: str) -> list[tuple[str, str]]:
    """Split a console block into commands, which begin with `$ `, and what each prints."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif line.startswith("> ") and found and not found[-1][1]:
            found[-1] = (f"{found[-1][0]}\n{line[2:]}", "")
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
        else:
            raise Unlike(f"a console block begins with `$ `, not with {line!r}")
    return found


def _is_alike(wanted: str, got: str) -> bool:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(wanted, got, flags)
