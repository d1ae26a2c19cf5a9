"""Python imports this at the start of every process that has this folder on its PYTHONPATH.

It puts into a dispatcher or worker of a test what ONCUE_TEST_PLANT names (`module:function`,
several by commas), and shifts the wall clock by the seconds in the file ONCUE_TEST_CLOCK.
Nothing of this is known to the product.
"""

from __future__ import annotations

import importlib
import os
import sys
import time

_AGAIN_SECONDS = 0.05


def _is_service() -> bool:
    return not {"dispatcher", "worker"}.isdisjoint(sys.orig_argv)


def _shift_clock(path: str) -> None:
    real, monotonic = time.time, time.monotonic
    read_at, shift = float("-inf"), 0.0

    def shifted() -> float:
        nonlocal read_at, shift
        if monotonic() - read_at > _AGAIN_SECONDS:
            read_at = monotonic()
            with open(path) as file:  # noqa: PTH123 (nothing more is imported here than must be)
                shift = float(file.read() or shift)
        return real() + shift

    time.time = shifted
    time.time_ns = lambda: int(shifted() * 1e9)


if _is_service():
    if _clock := os.environ.get("ONCUE_TEST_CLOCK"):
        _shift_clock(_clock)
    for _plant in filter(None, os.environ.get("ONCUE_TEST_PLANT", "").split(",")):
        _module, _, _function = _plant.partition(":")
        getattr(importlib.import_module(_module), _function)()
