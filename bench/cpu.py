"""Processor time of process trees, read from /proc."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil


def busy_seconds(pid: int) -> float:
    """Return the processor seconds of a process and its children, also of those that ended."""
    root = psutil.Process(pid)
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


class Processor:
    """What named process trees, and this one, use from now on."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._before = {name: busy_seconds(pid) for name, pid in self._pids.items()}
        self._own = time.process_time()

    def seconds(self) -> dict[str, float]:
        """Return the seconds used so far; `receiver` is this process."""
        used = {name: busy_seconds(pid) - self._before[name] for name, pid in self._pids.items()}
        return {**used, "receiver": time.process_time() - self._own}

    def microseconds_each(self, count: int) -> dict[str, int]:
        """Return the microseconds of each tree for one of `count`, `total` without the receiver."""
        each = {name: round(used * 1e6 / count) for name, used in self.seconds().items()}
        total = sum(used for name, used in each.items() if name != "receiver")
        return {**each, "total": total}
