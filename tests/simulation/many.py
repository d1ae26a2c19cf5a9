"""Many seeds in several processes: simulations share nothing, so two cores play two at a time."""

from __future__ import annotations

import multiprocessing
import queue
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
"""Of the clock, in which some seed must end."""


class NothingEnds(Exception):
    """The processes that play seeds are gone, or wait for what never comes."""


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
        NothingEnds: the processes have not ended a seed for too long.
    """
    until = float("inf") if seconds is None else time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    ended: queue.SimpleQueue[Played | BaseException] = queue.SimpleQueue()
    # A thread that never ends keeps its stack for ever, and each simulation leaves some.
    with context.Pool(processes, maxtasksperchild=SEEDS_PER_PROCESS) as pool:
        going = 0
        for number, seed in enumerate(seeds):
            if going >= processes:
                yield _next_of(ended)
                going -= 1
            if number >= fewest and time.monotonic() > until:
                break
            _ = pool.apply_async(
                play_bounded, (seed,), {"bug": bug}, callback=ended.put, error_callback=ended.put
            )
            going += 1
        for _ in range(going):
            yield _next_of(ended)


def _next_of(ended: queue.SimpleQueue[Played | BaseException]) -> Played:
    try:
        one = ended.get(timeout=SILENT_SECONDS)
    except queue.Empty:
        raise NothingEnds(f"no seed has ended for {SILENT_SECONDS:.0f} s") from None
    if isinstance(one, BaseException):
        raise one
    return one


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
