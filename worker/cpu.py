"""How idle the processors are that this worker may use, minding a container's limit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import psutil

SHORTEST_SAMPLE_SECONDS = 0.1
SMOOTHING = 0.5
CGROUP_ROOT = Path("/sys/fs/cgroup")


class _Reading(NamedTuple):
    at: float
    busy_seconds: float
    processors: float


class CpuIdle:
    """Smoothed idle percentage between two readings at least 100 ms apart."""

    def __init__(self) -> None:
        self._limit = find_cgroup_limit()
        self._last = self._read()
        self._smoothed: float | None = None

    def percent(self) -> float:
        """The idle share since the last call, smoothed; waits only when called too early."""
        wait = self._last.at + SHORTEST_SAMPLE_SECONDS - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        last, now = self._last, self._read()
        self._last = now
        used = (now.busy_seconds - last.busy_seconds) / ((now.at - last.at) * now.processors)
        idle = 100.0 * min(1.0, max(0.0, 1.0 - used))
        if self._smoothed is None:
            self._smoothed = idle
        else:
            self._smoothed += SMOOTHING * (idle - self._smoothed)
        return round(self._smoothed, 1)

    def _read(self) -> _Reading:
        if self._limit is not None:
            directory, processors = self._limit
            try:
                return _Reading(time.monotonic(), _cgroup_busy_seconds(directory), processors)
            except (OSError, ValueError):
                self._limit = None
        times = psutil.cpu_times()
        busy = times.user + times.system + getattr(times, "nice", 0.0)
        return _Reading(time.monotonic(), busy, float(psutil.cpu_count() or 1))


def find_cgroup_limit(
    root: Path = CGROUP_ROOT, own: Path = Path("/proc/self/cgroup")
) -> tuple[Path, float] | None:
    """Return the cgroup v2 directory with the tightest `cpu.max` around this process, if any."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        return None
    tightest: tuple[Path, float] | None = None
    directory = root / path.lstrip("/")
    for candidate in (directory, *directory.parents):
        if candidate != root and root not in candidate.parents:
            break
        processors = _cpu_max(candidate)
        if processors is not None and (tightest is None or processors < tightest[1]):
            tightest = candidate, processors
    return tightest


def _cpu_max(directory: Path) -> float | None:
    try:
        quota, period = (directory / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _cgroup_busy_seconds(directory: Path) -> float:
    for line in (directory / "cpu.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "usage_usec":
            return int(value) / 1e6
    raise ValueError("cpu.stat has no usage_usec")
