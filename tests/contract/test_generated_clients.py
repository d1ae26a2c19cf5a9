"""Clients that others generate from the document work as they come: compiled, run, unedited."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.contract import TOOLS, Keyed, run_tool, tool_environment
from tests.support.missing import not_tested_here
from tests.support.processes import ROOT

DOCUMENT = ROOT / "openapi" / "dispatcher.json"
PROGRAMS = ROOT / "tests" / "contract" / "programs"
TYPESCRIPT = ROOT / "tests" / "contract" / "typescript"


def test_a_python_client_submits_reads_and_is_told_its_errors(
    keyed: Keyed, tools: Path, tmp_path: Path
) -> None:
    environment = tool_environment(tools, PYTHONPATH=str(tmp_path))
    told = run_tool(
        *(tools / "openapi-python-client", "generate", "--path", DOCUMENT, "--meta", "none"),
        *("--output-path", tmp_path / "oncue_api", "--fail-on-warning"),
        environment=environment,
        directory=tmp_path,
    )
    assert "warning" not in told.lower(), told

    told = run_tool(
        *(tools / "python", "-W", "error", PROGRAMS / "python_client.py"),
        *(keyed.url, keyed.api_key),
        environment=environment,
        directory=tmp_path,
    )
    assert told == "job 1\n"


@pytest.mark.timeout(600)
def test_a_typescript_client_compiles_submits_reads_and_is_told_its_errors(
    keyed: Keyed, tools: Path, tmp_path: Path
) -> None:
    environment = tool_environment(tools)
    for program in ("java", "node", "npm"):
        if shutil.which(program) is None:
            not_tested_here("the generated TypeScript client", f"no {program} found")
    compiler = typescript_compiler(environment)
    run_tool(
        *(tools / "openapi-generator-cli", "generate", "-g", "typescript-fetch"),
        *("-i", DOCUMENT, "-o", tmp_path / "client"),
        environment=environment,
        directory=tmp_path,
    )
    for name in ("main.ts", "tsconfig.json"):
        shutil.copy(TYPESCRIPT / name, tmp_path)
    run_tool("node", compiler, "-p", tmp_path, environment=environment, directory=tmp_path)
    told = run_tool(
        *("node", tmp_path / "built" / "main.js", keyed.url, keyed.api_key),
        environment=environment,
        directory=tmp_path,
    )
    assert told == "job 1\n"


def typescript_compiler(environment: Mapping[str, str]) -> Path:
    """Install what the npm lock names, unless it is there, and return the compiler."""
    place = TOOLS / "typescript"
    locked = (TYPESCRIPT / "package-lock.json").read_bytes()
    compiler = place / "node_modules" / "typescript" / "lib" / "tsc.js"
    place.mkdir(exist_ok=True)
    with (place / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        copied = place / "package-lock.json"
        if compiler.exists() and copied.exists() and copied.read_bytes() == locked:
            return compiler
        for name in ("package.json", "package-lock.json"):
            shutil.copy(TYPESCRIPT / name, place)
        try:
            run_tool(
                *("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"),
                environment=environment,
                directory=place,
                timeout=200,
            )
        except (AssertionError, subprocess.TimeoutExpired) as failed:
            copied.unlink()
            not_tested_here("the generated TypeScript client", str(failed).splitlines()[-1])
    return compiler
