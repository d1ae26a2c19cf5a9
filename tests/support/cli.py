"""The `oncue` command as its users run it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ONCUE = Path(sys.executable).with_name("oncue")


@dataclass(frozen=True)
class Told:
    """What a command said, and the code it ended with."""

    code: int
    out: str
    err: str


def cli_environment(url: str, **variables: str) -> dict[str, str]:
    """The environment of a command that speaks to `url`, without the developer's own settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ONCUE_")}
    return {**kept, "ONCUE_URL": url, "NO_COLOR": "1", **variables}


def oncue(
    *words: str, url: str, given: str = "", variables: Mapping[str, str] | None = None
) -> Told:
    """Run a command with `given` on its standard input."""
    done = subprocess.run(
        [ONCUE, *words],
        input=given,
        capture_output=True,
        text=True,
        env=cli_environment(url, **(variables or {})),
        timeout=60,
        check=False,
    )
    return Told(done.returncode, done.stdout, done.stderr)
