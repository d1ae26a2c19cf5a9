"""Many seeds in several processes: simulations share nothing, so two cores play two at a time."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Final

from tests.simulation.play import Played, play

SEEDS_PER_PROCESS: Final = 40


def play_all(
    seeds: Sequence[int], *, processes: int, seconds: float | None = None, bug: str | None = None
) -> Generator[Played, None, None]:
    """Play seeds, and yield each when it is over; none is begun after `seconds`.

    `bug` names one to plant first.
    """
    until = None if seconds is None else time.time() + seconds
    context = multiprocessing.get_context("spawn")
    # A thread that never ends keeps its stack for ever, and each simulation leaves some.
    with context.Pool(processes, maxtasksperchild=SEEDS_PER_PROCESS) as pool:
        for played in pool.imap_unordered(_play_in_time, [(seed, until, bug) for seed in seeds]):
            if played is not None:
                yield played


def _play_in_time(asked: tuple[int, float | None, str | None]) -> Played | None:
    seed, until, bug = asked
    if until is not None and time.time() > until:
        return None
    began = time.process_time()
    played = play(seed, bug=bug)
    return replace(played, cpu_seconds=time.process_time() - began)
