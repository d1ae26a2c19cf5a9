"""Measure submissions and claims while a million finished jobs are pruned, and while none is.

    python -m bench.prune                     # 1,000,000 finished rows, MariaDB
    python -m bench.prune --rows 200000 --embedded

Starts servers of its own and runs the product's parts in this process, as a dispatcher does: a
submission every few milliseconds through the group commit, a claim of what is due and its settle,
and retention. Windows with and without pruning take turns until all finished rows are gone, or
`--seconds` are over. Told are the percentiles of both, their ratio, and the rows pruned a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from dataclasses import dataclass, field
from typing import Final

import structlog

from app.access.caller import OPEN, Caller
from app.jobs.retention import Retention
from app.lifecycle.states import ExecutionStatus
from app.main import Parts, create_app
from app.plumbing.tempo import Tempo
from app.serve import run
from bench.claim import PRIORITY, SUCCEEDED, Claims, analyzed, grow
from bench.cluster import engine_flags, engine_name, servers
from bench.figures import Figures, json_flag, percentile
from tests.integration.app.rig import (
    body_of,
    change,
    ending,
    new_jobs,
    new_term,
    settings_of,
    settled,
    value_of,
)
from tests.support.engines import EngineName, Servers, migrated

WINDOW_SECONDS: Final = 5.0
SUBMIT_EVERY_SECONDS: Final = 0.004
CLAIM_EVERY_SECONDS: Final = 0.05


@dataclass
class Times:
    """Milliseconds that things took in one kind of window."""

    submissions: list[float] = field(default_factory=list)
    claims: list[float] = field(default_factory=list)


@dataclass
class Work:
    """Submits, claims and settles on and on; each time goes to `times`."""

    parts: Parts
    claims: Claims
    tempo: Tempo
    times: Times = field(default_factory=Times)

    async def submit(self) -> None:
        """Submit on a fixed beat, whether or not the last one is answered."""
        due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while True:
                due += SUBMIT_EVERY_SECONDS
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(self._submit_one(due, self.times))

    async def _submit_one(self, due: float, times: Times) -> None:
        body = json.dumps(body_of(priority=PRIORITY)).encode()
        await self.parts.submitter.submit(Caller(OPEN), body)
        times.submissions.append((time.monotonic() - due) * 1000)

    async def claim(self) -> None:
        """Claim what has gathered, and settle it."""
        size = round(CLAIM_EVERY_SECONDS / SUBMIT_EVERY_SECONDS)
        due = time.monotonic()
        while True:
            due = max(due + CLAIM_EVERY_SECONDS, time.monotonic() - 1)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            times, began = self.times, time.monotonic()
            runs = await self.claims.some(size)
            took = time.monotonic() - began
            if runs:
                times.claims.append(took * 1000)
                self.tempo.note(took)
                done = [ending(one, ExecutionStatus.SUCCEEDED, result="1") for one in runs]
                await settled(self.claims.database, *done)


async def take_turns(
    work: Work, retention: Retention, now_ms: int, seconds: float
) -> tuple[dict[bool, Times], float]:
    """Let windows with and without pruning take turns; return their times, and how long it ran."""
    found = {True: Times(), False: Times()}
    running = [asyncio.create_task(one) for one in (work.submit(), work.claim())]
    pruning: asyncio.Task[int] | None = None
    pruned_seconds, end = 0.0, time.monotonic() + seconds
    try:
        await asyncio.sleep(WINDOW_SECONDS)
        while time.monotonic() < end:
            work.times = found[False]
            await asyncio.sleep(WINDOW_SECONDS)
            work.times = found[True]
            began = time.monotonic()
            pruning = asyncio.create_task(retention.run_pass(now_ms))
            done, _ = await asyncio.wait({pruning, *running}, timeout=WINDOW_SECONDS)
            pruned_seconds += time.monotonic() - began
            for task in done - {pruning}:
                await task
            if pruning in done:
                await pruning
                break
            pruning.cancel()
            await asyncio.wait({pruning})
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    return found, pruned_seconds


async def measure(
    lent: Servers, engine: EngineName, rows: int, seconds: float, figures: Figures
) -> None:
    """Tell the percentiles with and without pruning, and their ratios."""
    app = create_app(settings_of(migrated(lent.engine(engine))))
    async with app.router.lifespan_context(app):
        parts: Parts = app.state.parts
        database = parts.ground.database
        (job,) = await new_jobs(database, 1)
        await grow(database, job.queue_id, SUCCEEDED, rows)
        now = int(await value_of(database, f"SELECT {database.now_ms}"))
        columns = "execution_id, job_id, attempt, trigger_ts, worker_id, term, status, claimed_at"
        await change(
            database,
            f"INSERT INTO job_log ({columns}) SELECT id, id, 1, 1, 'w', 1, 2, 1 FROM job_info",
        )
        await analyzed(database)
        claims = Claims(database, job.queue_id, await new_term(database), None)
        tempo = Tempo(floor_seconds=0.02)
        retention = Retention(
            parts.ground, parts.lock, lambda: tempo.is_slow or parts.admission.is_strained
        )
        found, pruned_seconds = await take_turns(
            Work(parts, claims, tempo), retention, now, seconds
        )
        left = await value_of(database, "SELECT COUNT(*) FROM job_info WHERE job_name = 'filled'")
    for name in ("submissions", "claims"):
        for percent in (50, 99):
            quiet = percentile(getattr(found[False], name), percent)
            busy = percentile(getattr(found[True], name), percent)
            figures.tell(
                *("prune", f"{name}, p{percent} while pruning", busy, "ms"),
                engine=engine,
                quiet=quiet,
                ratio=round(busy / quiet, 2),
                of=len(getattr(found[True], name)),
            )
    figures.tell("prune", "jobs pruned", (rows - left) / pruned_seconds, "/s", left=left)


def main() -> None:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="finished (%(default)s)")
    parser.add_argument("--seconds", type=float, default=240, help="at most (%(default)s)")
    engine_flags(parser)
    json_flag(parser)
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with servers(binlog=given.binlog) as lent:
        # As a dispatcher runs, its garbage collection with it.
        run(
            lambda: measure(
                lent, engine_name(given), given.rows, given.seconds, Figures(given.json)
            )
        )


if __name__ == "__main__":
    main()
