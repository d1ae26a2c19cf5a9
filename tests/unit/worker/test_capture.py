"""Catching standard streams: whoever prints while it begins or ends comes to no harm."""

from __future__ import annotations

import subprocess
import sys

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
