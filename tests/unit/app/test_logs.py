"""Logs: one form for all, and no local variable in a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
import structlog
from app.logs import configure_logs

configure_logs("INFO", as_json=sys.argv[1] == "json")


def fail(secret: str) -> None:
    raise RuntimeError("it broke")


for tell in (structlog.get_logger().exception, logging.getLogger("library").exception):
    try:
        fail("whsec_" + "TOPSECRET")
    except RuntimeError:
        tell("fault")
"""


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_traceback_shows_no_local_variable(form: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, form], capture_output=True, text=True, check=True
    )
    assert done.stderr.count("it broke") >= 2
    assert "TOPSECRET" not in done.stderr
    assert "secret = " not in done.stderr
