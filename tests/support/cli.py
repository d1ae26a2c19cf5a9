"""The `oncue` command as its users run it: a process of its own, begun as a copy."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.warm import Streams, WarmProcess

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
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        streams = Streams(directory / "in", directory / "out", directory / "err")
        streams.given.write_text(given)
        process = WarmProcess(
            words,
            streams,
            environment=cli_environment(url, **(variables or {})),
            directory=Path.cwd(),
        )
        try:
            code = process.wait(60)
        finally:
            process.kill()
        return Told(code, streams.out.read_text(), streams.err.read_text())
