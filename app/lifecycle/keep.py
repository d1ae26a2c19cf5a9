"""How long finished jobs are kept: the settings for all, and what tenants chose (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from app.lifecycle.states import TERMINAL_JOBS, JobStatus

DAY_MS: Final = 24 * 3600 * 1000
LEAST_DAYS: Final = 1.0
"""Least that a tenant may choose: callers must have the time to read how a job ended."""


@dataclass(frozen=True, slots=True)
class KeepClass:
    """States whose jobs are kept equally long."""

    statuses: frozenset[JobStatus]
    keep_ms: int


def default_keeps(days: float, of_status: Mapping[str, float]) -> dict[JobStatus, int]:
    """Return the milliseconds for each terminal state, as the settings say."""
    return {
        status: int(of_status.get(status.name, days) * DAY_MS) for status in sorted(TERMINAL_JOBS)
    }


def keep_classes(
    defaults: Mapping[JobStatus, int], chosen: Mapping[JobStatus, int]
) -> list[KeepClass]:
    """Put a tenant's states together that are kept equally long, the shortest first."""
    together: dict[int, set[JobStatus]] = defaultdict(set)
    for status, keep_ms in {**defaults, **chosen}.items():
        together[keep_ms].add(status)
    return [KeepClass(frozenset(together[keep_ms]), keep_ms) for keep_ms in sorted(together)]


def shortest_keep_days(days: float, of_status: Mapping[str, float]) -> float:
    """Return the least days after which any job may leave, whatever its tenant chose."""
    return min(LEAST_DAYS, days, *of_status.values())
