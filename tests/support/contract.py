"""The programs of the contract tests, in an environment of their own beside the project's."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.missing import not_tested_here
from tests.support.processes import ROOT

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
            timeout=110,
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
    timeout: float = 100,
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


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
