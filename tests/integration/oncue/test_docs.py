"""Every example in the documentation of the client runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.cli import ONCUE, cli_environment
from tests.support.processes import ROOT, Platform

pytestmark = pytest.mark.xdist_group("sdk")


def examples(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


CLIENT = [
    *examples("docs/sdk.md", "python"),
    *(example for example in examples("README.md", "python") if "Client(" in example),
]


@pytest.mark.parametrize("example", CLIENT, ids=range(1, len(CLIENT) + 1))
def test_an_example_of_the_client_runs(sdk_platform: Platform, example: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        capture_output=True,
        text=True,
        env=cli_environment(sdk_platform.url),
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_commands_of_the_documentation_succeed(sdk_platform: Platform) -> None:
    (block,) = examples("docs/cli.md", "sh")
    environment = cli_environment(sdk_platform.url)
    environment["PATH"] = f"{ONCUE.parent}{os.pathsep}{environment['PATH']}"
    ran = subprocess.run(
        ["/bin/sh", "-eu", "-c", block],
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert '{"hello": "world"}' in ran.stdout
    assert (
        'oncue submit --handler echo --params \'{"hello": "world"}\' --wait'
        in (ROOT / "README.md").read_text()
    )


def test_every_command_and_exit_code_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    commands = (
        "submit",
        "get",
        "list",
        "cancel",
        "pause",
        "resume",
        "retry",
        "bulk",
        "workers",
        "handlers",
    )
    assert not [name for name in commands if f"`{name}" not in page]
    assert not [code for code in (0, 1, 2, 3, 4, 5, 130) if f"| {code} |" not in page]
