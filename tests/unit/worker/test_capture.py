"""Catching standard streams: whoever prints while it begins or ends comes to no harm."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest

from worker.capture import CURRENT, catching, stand_in

PRINTS_WHILE_IT_ENDS = """
import gc, io, os, sys, threading
from worker.capture import catching

inside, goes_on = threading.Event(), threading.Event()

class Log:
    def write(self, source, text, *, by=0):
        inside.set()
        goes_on.wait(10)

log, sys.stdout = Log(), io.StringIO()
with catching(lambda: log):
    printer = threading.Thread(target=lambda: print(*range(50)), daemon=True)
    printer.start()
    inside.wait(10)
sys.stdout = io.StringIO()
goes_on.set()
while printer.is_alive():
    noise = [bytearray(n) for n in range(16, 512)] + [io.StringIO() for _ in range(50)]
    gc.collect()
os._exit(0)
"""


def test_a_thread_that_prints_while_catching_ends_does_no_harm() -> None:
    """`print` holds no reference to the stream: freed under it, the whole process would die."""
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", PRINTS_WHILE_IT_ENDS],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert ended.returncode == 0, ended.stderr[-2000:]


class Said:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(
        self, level: str, source: str, message: str, fields: dict[str, Any] | None = None
    ) -> None:
        self.texts.append(message)

    def write(self, source: str, text: str, *, by: int = 0) -> None:
        self.texts.append(text)


def test_workers_of_one_process_catch_each_text_once_whichever_ends_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = io.StringIO()
    monkeypatch.setattr(sys, "stdout", first)
    said = Said()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    token = CURRENT.set(said)
    try:
        one, other = catching(), catching()
        one.__enter__()
        other.__enter__()
        print("a", end="")
        one.__exit__(None, None, None)
        print("b", end="")
        other.__exit__(None, None, None)
        print("c", end="")
    finally:
        CURRENT.reset(token)
    assert "".join(said.texts) == "ab"
    assert sys.stdout is first
    assert first.getvalue() == "abc"


def test_a_stream_that_was_put_in_place_meanwhile_is_caught_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pytest puts its own back before each test, and a handler may do what it likes."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    second = io.StringIO()
    said = Said()
    token = CURRENT.set(said)
    try:
        with catching():
            sys.stdout = second
            stand_in()
            print("caught", end="")
        stand_in()
        print("let go", end="")
    finally:
        CURRENT.reset(token)
    assert said.texts == ["caught", ""]
    assert sys.stdout is second
    assert second.getvalue() == "caughtlet go"
