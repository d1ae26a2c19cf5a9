"""The programs of the contract tests, in an environment of their own beside the project's."""

from __future__ import annotations

import fcntl
import os
import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.engines import Engine
from tests.support.missing import not_tested_here
from tests.support.processes import ROOT, NewPlatform, Platform

TOOLS = ROOT / ".venv-contract"


def installed_tools() -> Path:
    """Return the folder of the programs, installed by `tools/bootstrap contract` if need be.

    Skips the test (or fails it in CI) where they cannot be installed.
    """
    # Not in TOOLS, which the set-up may make anew.
    with (ROOT / ".venv" / ".contract.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(
            [ROOT / "tools" / "bootstrap", "contract"],
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
    if made.returncode:
        not_tested_here(
            "the contract", f"its programs cannot be installed: {_last_line(made.stderr)}"
        )
    return TOOLS / "bin"


def tool_environment(tools: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a contract program: its own programs first, no settings of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ONCUE_")}
    return {**kept, "PATH": f"{tools}{os.pathsep}{kept['PATH']}", "NO_COLOR": "1", **variables}


def run_tool(
    *command: str | Path,
    environment: Mapping[str, str],
    directory: Path,
    timeout: float = 200,
) -> str:
    """Run a program that must succeed and return what it said."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=directory,
        env=environment,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


class Keyed:
    """A running platform whose callers need a key."""

    def __init__(self, platform: Platform, api_key: str) -> None:
        self.platform = platform
        self.api_key = api_key

    @property
    def url(self) -> str:
        """Where its dispatcher listens."""
        return self.platform.url

    @property
    def worker_url(self) -> str:
        """Where its worker listens."""
        return self.platform.services["worker-1"].url


def start_keyed(engine: Engine, new_platform: NewPlatform, **environment: str) -> Keyed:
    """Start a platform whose one key is known."""
    api_key = secrets.token_hex(16)
    platform = new_platform(
        engine,
        environment={
            "ONCUE_API_KEYS": f"contract:{api_key}",
            "ONCUE_MOST_FAILED_KEYS": "1000000",  # each case sends wrong ones, too
            **environment,
        },
    )
    platform.http.headers["Authorization"] = f"Bearer {api_key}"
    return Keyed(platform.start(), api_key)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
