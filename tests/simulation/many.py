"""Many seeds in several processes: simulations share nothing, so two cores play two at a time."""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Final, NoReturn

from tests.simulation.play import Played, play
from tests.support.checker import Report

SEEDS_PER_PROCESS: Final = 40
LONGEST_SECONDS: Final = 120.0
"""Of processor time, for one seed: ten times what any takes."""
SILENT_SECONDS: Final = 900.0
"""If no seed ends for so long, a process is gone, or waits for what never comes."""


class Hangs(KeyboardInterrupt):
    """A seed takes too long: code loops without time moving on.

    Neither tasks nor the loop keep this kind of exception to themselves.
    """


def play_all(
    seeds: Sequence[int],
    *,
    processes: int,
    seconds: float | None = None,
    fewest: int = 0,
    bug: str | None = None,
) -> Generator[Played, None, None]:
    """Play seeds, and yield each when it is over; after the `fewest` none is begun past `seconds`.

    `bug` names one to plant first. A seed that hangs has broken a promise.

    Raises:
        multiprocessing.TimeoutError: the processes have not ended a seed for too long.
    """
    until = None if seconds is None else time.time() + seconds
    context = multiprocessing.get_context("spawn")
    # A thread that never ends keeps its stack for ever, and each simulation leaves some.
    with context.Pool(processes, maxtasksperchild=SEEDS_PER_PROCESS) as pool:
        asked = [
            (seed, None if number < fewest else until, bug) for number, seed in enumerate(seeds)
        ]
        ended = pool.imap_unordered(_play_in_time, asked)
        for _ in seeds:
            played = ended.next(SILENT_SECONDS)
            if played is not None:
                yield played


def _play_in_time(asked: tuple[int, float | None, str | None]) -> Played | None:
    seed, until, bug = asked
    if until is not None and time.time() > until:
        return None
    return play_bounded(seed, bug=bug)


def play_bounded(seed: int, *, bug: str | None = None, longest: float = LONGEST_SECONDS) -> Played:
    """Play a seed for `longest` seconds of processor time at most."""
    began = time.process_time()
    try:
        with _at_most(longest):
            played = play(seed, bug=bug)
    except Hangs as hangs:
        where = "".join(traceback.format_tb(hangs.__traceback__)[-3:])
        report = Report(violations=[f"hangs: not over after {longest:.0f} s, at {where}"])
        played = Played(seed, "", report, {}, 0.0, 0)
    return replace(played, cpu_seconds=time.process_time() - began)


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise `Hangs` in the block after so long, again and again, lest a handler swallows it."""
    before = signal.signal(signal.SIGPROF, _interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise Hangs
