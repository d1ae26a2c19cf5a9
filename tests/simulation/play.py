"""One simulation: a seed in, a history and its judgement out."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
import tempfile
import warnings
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import structlog

from app.migrate import migrate
from tests.simulation.bugs import planted
from tests.simulation.cluster import DISPATCHERS, Cluster
from tests.simulation.faults import Faults
from tests.simulation.history import History
from tests.simulation.lean import lean
from tests.simulation.machine import PROCESS, Machine, Stuck
from tests.simulation.pace import paced
from tests.simulation.planned import Planner, draw_schedules
from tests.simulation.workload import Callers, draw_jobs, observe_with
from tests.support.checker import Event, Healed, Report, judge
from tests.support.fires import implied, judge_fires
from tests.support.guardian import memory_directory

FAULT_SECONDS: Final = 500.0
LEAST_SECONDS: Final = 600.0
SETTLE_SECONDS: Final = 420.0
"""All must be over so long after everything is mended: a stalled worker is dead after 300 s."""
LOOK_SECONDS: Final = 2.0
CALM_SECONDS: Final = 45.0
"""So long after everything is mended schedules go on, then they are cancelled."""
REAL_ENGINE_EVERY: Final = 20
PARTITIONS: Final = (1, 1, 2, 3)
"""Of dispatch, by the seed."""
JOBS: Final = (30, 70)
BULK_SHARE: Final = 0.4


@dataclass(frozen=True, slots=True)
class Played:
    """What came of one seed."""

    seed: int
    history: str
    report: Report
    faults: dict[str, int]
    virtual_seconds: float
    steps: int
    cpu_seconds: float = 0.0
    """Of the host, with what an earlier simulation left to be collected."""

    @property
    def violations(self) -> list[str]:
        """What was broken; empty when nothing was."""
        return self.report.violations


def play(
    seed: int,
    *,
    trace: Callable[[str], None] | None = None,
    seconds: float = FAULT_SECONDS,
    bug: str | None = None,
    quick: bool | None = None,
) -> Played:
    """Play a seed, and judge it. The same seed gives the same history, whatever the host does.

    Unless `quick`, dispatchers use SQLAlchemy's own engine, at twice the cost: without it every
    20th seed does.
    """
    if quick is None:
        quick = seed % REAL_ENGINE_EVERY != 0
    with _stage(trace, bug) as path:
        return _play(seed, path, trace, seconds, quick)


def tell(
    story: Callable[[Cluster], Awaitable[None]],
    seed: int,
    *,
    trace: Callable[[str], None] | None = None,
) -> list[Event]:
    """Play a story that is told by hand, and return its history with the rows that are left."""
    with _stage(trace, None) as path, Machine(seed) as machine:
        history = History(machine.loop.time, trace=trace)
        observe_with(history)
        cluster = Cluster(machine, history, random.Random(f"world {seed}"), path, quick=True)
        machine.loop.run_until_complete(story(cluster))
        jobs, executions = cluster.rows()
        for row in (*jobs, *executions):
            history.add(row)
        history.closed = True
        cluster.close()
        machine.loop.forget_all()
        machine.loop.close()
        return history.events


@contextmanager
def _stage(trace: Callable[[str], None] | None, bug: str | None) -> Iterator[Path]:
    """Prepare this process for one simulation, and return where its empty database is."""
    _quiet(trace)
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    # What an earlier simulation left goes now, not somewhere within this one. Of what died in the
    # middle Python complains that it was never awaited.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        gc.collect()
    # What is left is code: the next collection need not walk through it.
    gc.freeze()
    gc.disable()
    try:
        with tempfile.TemporaryDirectory(dir=memory_directory()) as directory:
            path = Path(directory) / "oncue.db"
            path.write_bytes(_empty_database())
            with planted(bug), paced(), lean():
                yield path
    finally:
        sys.unraisablehook = hook
        gc.enable()


def _play(
    seed: int, path: Path, trace: Callable[[str], None] | None, seconds: float, quick: bool
) -> Played:
    with Machine(seed) as machine:
        loop = machine.loop
        history = History(loop.time, trace=trace)
        dice = random.Random(f"world {seed}")
        observe_with(history)
        cluster = Cluster(machine, history, dice, path, quick=quick)
        cluster.partitions = PARTITIONS[seed % len(PARTITIONS)]
        stuck: list[str] = []
        try:
            loop.run_until_complete(_story(cluster, seed, seconds))
        except Stuck:
            stuck.append("stuck: nothing is left that could ever happen, or one moment never ends")
        except RuntimeError as error:
            stuck.append(f"the story ended early: {error}")
        jobs, executions = cluster.rows()
        for row in (*jobs, *executions, *cluster.schedule_rows()):
            history.add(row)
        history.closed = True
        report = judge([*history.events, *implied(history.events)])
        report.violations += judge_fires(history.events)
        report.violations += stuck + [f"unhandled: {one}" for one in loop.unhandled]
        report.violations += [f"fault: {one}" for one in cluster.network.faults]
        played = Played(seed, history.text(), report, history.faults, history.now, history.steps)
        cluster.close()
        loop.forget_all()
        loop.close()
        return played


async def _story(cluster: Cluster, seed: int, seconds: float) -> None:
    """Start all, break things under load, mend, and wait until all is over."""
    dice = random.Random(f"story {seed}")
    history = cluster.history
    cluster.start_all()
    callers = Callers(cluster.network, history, random.Random(f"callers {seed}"), list(DISPATCHERS))
    jobs = draw_jobs(dice, seconds=seconds * 0.97, count=dice.randrange(*JOBS))
    calls = [asyncio.create_task(callers.play(job)) for job in jobs]
    planner = Planner(callers, history, dice, over_at=seconds + CALM_SECONDS)
    schedules = draw_schedules(dice, seconds=seconds)
    calls += [asyncio.create_task(planner.play(schedule)) for schedule in schedules]
    if dice.random() < BULK_SHARE:
        calls.append(asyncio.create_task(planner.change_many(dice.uniform(30.0, seconds))))
    cluster.restart_seconds = dice.choice([2.0, 15.0, 40.0])
    await Faults(cluster, random.Random(f"faults {seed}")).run(seconds)
    history.add(Healed(history.now))
    cluster.receiver.healthy = True
    until = history.now + SETTLE_SECONDS
    await asyncio.gather(*calls)
    while history.now < until:
        if cluster.is_over() and (seconds < FAULT_SECONDS or history.now >= LEAST_SECONDS):
            break
        await asyncio.sleep(LOOK_SECONDS)
    await asyncio.sleep(LOOK_SECONDS)


def _quiet(trace: Callable[[str], None] | None) -> None:
    if trace is None:
        structlog.configure(
            processors=[_drop],
            wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL),
            cache_logger_on_first_use=True,
        )
        return

    def show(_logger: Any, level: str, event: MutableMapping[str, Any]) -> Any:
        process = PROCESS.get()
        name = "-" if process is None else process.name
        words = " ".join(f"{key}={value}" for key, value in event.items() if key != "event")
        trace(f"{'':>11}   {name} {level} {event.get('event')} {words}")
        raise structlog.DropEvent

    structlog.configure(
        processors=[structlog.processors.format_exc_info, show],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )


def _drop(_logger: Any, _level: str, _event: Any) -> Any:
    raise structlog.DropEvent


@cache
def _empty_database() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "empty.db"
        migrate(f"sqlite+aiosqlite:///{path}")
        return path.read_bytes()
