"""The wheel in an environment of its own, with nothing but the base dependencies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.missing import not_tested_here
from tests.support.processes import ROOT, Platform

PROGRAM = """
import importlib.util, json, sys
from pathlib import Path

absent = ("fastapi", "sqlalchemy", "redis", "aiohttp", "typer", "alembic", "uvicorn", "structlog")
assert not [name for name in absent if importlib.util.find_spec(name)], "the server came along"

import oncue, oncue.testing, oncue.protocol
from oncue import AsyncClient, Client, Context, Fail, handler, verify_webhook

assert all(hasattr(oncue, name) for name in oncue.__all__)
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"app", "worker"}, "the services came along"
assert Path(oncue.__file__).is_relative_to(sys.prefix), oncue.__file__
assert Path(oncue.__file__).with_name("py.typed").exists()

try:
    oncue.testing.Platform().start()
except oncue.testing.PlatformUnavailable as error:
    assert "pip install 'oncue[server]'" in str(error), error
else:
    raise AssertionError("a platform ran without the server")

with oncue.Client(sys.argv[1]) as client:
    job = client.wait(client.submit("echo", {"from": "wheel"}), timeout=30, check=True)
print(json.dumps(job.result))
"""


@pytest.mark.timeout(900)
@pytest.mark.xdist_group("sdk")
def test_the_wheel_works_without_what_the_server_needs(
    sdk_platform: Platform, tmp_path: Path
) -> None:
    builder = new_environment(tmp_path / "builder")
    if (failure := install(builder, "hatchling")) is not None:
        not_tested_here("the wheel in a fresh environment", f"no package index: {failure}")
    built = run(builder, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist"))
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "dist").glob("oncue-*.whl")

    fresh = new_environment(tmp_path / "fresh")
    failure = install(fresh, str(wheel))
    assert failure is None, failure
    told = run(fresh, "-I", "-c", PROGRAM, sdk_platform.url)
    assert (told.stdout, told.stderr) == ('{"from": "wheel"}\n', "")

    failure = install(fresh, f"oncue[cli] @ {wheel.as_uri()}")
    assert failure is None, failure
    words = ["submit", "--handler", "echo", "--params", "7", "--wait", "--url", sdk_platform.url]
    told = subprocess.run(
        [fresh.with_name("oncue"), *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert (told.returncode, told.stderr) == (0, "")
    assert "SUCCEEDED" in told.stdout
    for command in ("up", "dispatcher", "worker", "migrate"):
        told = subprocess.run(
            [fresh.with_name("oncue"), command],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            cwd=tmp_path,
        )
        assert (told.returncode, told.stdout) == (2, "")
        assert told.stderr.startswith("oncue: this command needs the server: pip install ")
        assert told.stderr.count("\n") == 1


def new_environment(place: Path) -> Path:
    """Make a virtual environment and return its python."""
    uv = uv_program()
    command = [uv, "venv", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
    made = subprocess.run([*command, place], capture_output=True, text=True, check=False)
    if made.returncode:
        not_tested_here("the wheel in a fresh environment", "neither uv nor venv is here")
    return place / "bin" / "python"


def install(python: Path, what: str) -> str | None:
    """Install into an environment; return the last line of what went wrong, None when nothing."""
    uv = uv_program()
    with_uv = [uv, "pip", "install", "--python", str(python)] if uv else None
    command = with_uv or [str(python), "-m", "pip", "install"]
    try:
        done = subprocess.run(
            [*command, "--quiet", what],
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
            env={"UV_HTTP_TIMEOUT": "30", **os.environ},
        )
    except subprocess.TimeoutExpired as late:
        not_tested_here(
            "the wheel in a fresh environment", f"no package index within {late.timeout:.0f} s"
        )
    return None if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2]


def run(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a python of an environment in the checkout."""
    return subprocess.run(
        [python, *words], capture_output=True, text=True, check=False, cwd=ROOT, timeout=100
    )


def uv_program() -> str | None:
    """Find uv as `tools/bootstrap` does."""
    own = ROOT / ".uv" / "bin" / "uv"
    return shutil.which("uv") or (str(own) if own.exists() else None)
