"""Measure what a claim of a full batch costs among few and many rows, beside one row by row.

    python -m bench.claim                               # 10k, 100k, 1M waiting; 1M finished
    python -m bench.claim --rows 10000000               # and 10M
    python -m bench.claim --snapshot 300                # and with a snapshot held open so long

Starts servers of its own and calls the product's own moves, without HTTP. A claim is its read of
the candidates, as the loop goes on from its last one, and the guarded transaction; every commit
is flushed. Told is the median of the trials, in milliseconds a batch (row by row: of 40 rows, times
5), and the processor's time a row (this process and the database together), which other work on
the machine disturbs less. `ratio` is to the smallest size, row by row to the batch of that size,
and with a snapshot to the cost before it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import uuid_utils
import uvloop

from app.lifecycle.moves.claim import Assignment, Candidate, Claimed, Probe, claim, find_due
from app.lifecycle.states import ExecutionStatus
from app.lifecycle.token import new_token
from app.plumbing.database import Database
from bench.cluster import engine_flags, engine_name, servers
from bench.cpu import busy_seconds
from bench.figures import Figures, json_flag
from tests.integration.app.rig import (
    WORKER,
    change,
    ending,
    fill,
    insert,
    new_jobs,
    new_term,
    opened,
    settled,
)
from tests.support.engines import EngineName, Servers, migrated

BATCH: Final = 200
PRIORITY: Final = 5
SIZES: Final = (10_000, 100_000, 1_000_000)
FILLED_AT_ONCE: Final = 500_000
BY_ROW: Final = 40
WAITING, SUCCEEDED = 0, 2


@dataclass
class Claims:
    """Claims one batch after the other out of one queue, as the dispatch loop does."""

    database: Database
    queue_id: int
    term: int
    server: int | None
    cursor: tuple[int, int] = (0, 0)

    async def once(self, size: int, *, from_start: bool = False) -> tuple[float, float]:
        """Claim so many tasks; return the milliseconds and the processor's microseconds a row."""
        if from_start:
            self.cursor = (0, 0)
        busy, began = self._busy(), time.perf_counter()
        await self.take(size)
        took, busy = time.perf_counter() - began, self._busy() - busy
        return took * 1000, busy * 1e6 / size

    async def take(self, size: int) -> Sequence[Claimed]:
        """Claim so many tasks, and go on behind them."""
        won = await self.some(size)
        if len(won) != size:
            raise RuntimeError(f"{len(won)} of {size} tasks were claimed: is the bench alone?")
        return won

    async def some(self, size: int) -> Sequence[Claimed]:
        """Claim up to so many tasks, if there are any, and go on behind them."""
        found = await self._find(size)
        if not found:
            return []
        self.cursor = (found[-1].due_ms, found[-1].job_id)
        return await self._claim(found)

    async def _find(self, size: int) -> Sequence[Candidate]:
        probe = Probe(self.queue_id, PRIORITY, *self.cursor, size + 1)
        found = await self.database.read(
            lambda connection: find_due(connection, self.database, [probe])
        )
        return found.due[:size]

    async def _claim(self, found: Sequence[Candidate]) -> Sequence[Claimed]:
        wanted = [
            Assignment(one.job_id, one.version, WORKER, str(uuid_utils.uuid7())) for one in found
        ]
        return await self.database.write(
            lambda connection: claim(
                connection, self.database, wanted, token=new_token(), term=self.term
            )
        )

    def _busy(self) -> float:
        own = time.process_time()
        return own if self.server is None else own + busy_seconds(self.server)


async def cost(
    claims: Claims, trials: int, size: int = BATCH, *, from_start: bool = False
) -> tuple[float, float]:
    """Return the median milliseconds of a claim, and the processor's microseconds a row."""
    await grow(claims.database, claims.queue_id, WAITING, (trials + 1) * size)
    await claims.once(size, from_start=True)
    taken = [await claims.once(size, from_start=from_start) for _ in range(trials)]
    return statistics.median(one[0] for one in taken), statistics.fmean(one[1] for one in taken)


async def grow(database: Database, queue_id: int, status: int, count: int) -> None:
    """Insert so many rows."""
    while count > 0:
        some = min(count, FILLED_AT_ONCE)
        await fill(database, some, status=status, queue_id=queue_id, priority=PRIORITY)
        count -= some


async def churn(claims: Claims, seconds: float) -> int:
    """Insert jobs at the backlog's end, claim and settle those at its front; return how many."""
    database, done = claims.database, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await insert(database, BATCH, priority=PRIORITY)
        runs = await claims.take(BATCH)
        await settled(
            database, *(ending(one, ExecutionStatus.SUCCEEDED, result="1") for one in runs)
        )
        done += len(runs)
    return done


async def measure(
    lent: Servers, engine: EngineName, most: int, trials: int, snapshot: float, figures: Figures
) -> None:
    """Tell the cost at each size, of waiting rows and then of finished ones."""
    made = migrated(lent.engine(engine))
    server = None if engine == "sqlite+valkey" else lent.mariadb.pid
    async with opened(made) as database:
        (job,) = await new_jobs(database, 1)
        claims = Claims(database, job.queue_id, await new_term(database), server)
        waiting, first = 0, 0.0
        for size in sorted({*(one for one in SIZES if one <= most), most}):
            await grow(database, job.queue_id, WAITING, size - waiting)
            waiting = size
            await analyzed(database)
            milliseconds, cpu_us = await cost(claims, trials)
            first = first or milliseconds
            tell(figures, f"{BATCH} of {size:,} waiting", milliseconds, engine, cpu_us, first)
            by_row = (await cost(claims, BY_ROW, size=1))[0] * BATCH
            tell(figures, f"{size:,} waiting, row by row", by_row, engine, 0, milliseconds)
        finished = most
        await grow(database, job.queue_id, SUCCEEDED, finished)
        await analyzed(database)
        milliseconds, cpu_us = await cost(claims, trials)
        name = f"{BATCH} of {waiting:,} waiting, {finished:,} finished"
        tell(figures, name, milliseconds, engine, cpu_us, first)
        if snapshot and server is not None:
            await with_snapshot(lent, claims, trials, snapshot, figures, engine)


async def with_snapshot(
    lent: Servers,
    claims: Claims,
    trials: int,
    seconds: float,
    figures: Figures,
    engine: EngineName,
) -> None:
    """Tell the cost before and after jobs went through under an open snapshot: none is purged."""
    before, _ = await cost(claims, trials)
    scanned_before, _ = await cost(claims, trials, from_start=True)
    name = claims.database.url.database
    with closing(lent.mariadb.connect(name)) as held, held.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        done = await churn(claims, seconds)
        after, cpu_us = await cost(claims, trials)
        scanned, scanned_us = await cost(claims, trials, from_start=True)
        cursor.execute("ROLLBACK")
    name = f"{BATCH}, a snapshot open for {seconds:.0f} s"
    tell(figures, name, after, engine, cpu_us, before, jobs_meanwhile=done)
    name = "the same, each read from the queue's start"
    tell(figures, name, scanned, engine, scanned_us, scanned_before)


async def analyzed(database: Database) -> None:
    """Let the planner know the sizes, as it does after a while."""
    if database.is_sqlite:
        await change(database, "ANALYZE")
    else:
        await change(database, "ANALYZE TABLE job_info")
    await asyncio.sleep(1)


def tell(
    figures: Figures,
    name: str,
    milliseconds: float,
    engine: EngineName,
    cpu_us: float,
    base: float,
    **more: int,
) -> None:
    """Tell one cost, and its ratio to another."""
    extra = {"cpu_us_a_row": round(cpu_us)} if cpu_us else {}
    ratio = round(milliseconds / base, 2)
    figures.tell("claim", name, milliseconds, "ms", engine=engine, ratio=ratio, **extra, **more)


def main() -> None:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=1_000_000,
        choices=range(10_000, 10_000_001),
        metavar="N",
        help="most rows that wait, and then that have finished (%(default)s)",
    )
    parser.add_argument("--trials", type=int, default=20, help="of each size (%(default)s)")
    parser.add_argument(
        "--snapshot",
        type=float,
        default=0,
        metavar="SECONDS",
        help="at last, let jobs go through so long while a snapshot is open (MariaDB alone)",
    )
    engine_flags(parser)
    json_flag(parser)
    given = parser.parse_args()
    figures = Figures(given.json)
    with servers(binlog=given.binlog) as lent:
        uvloop.run(
            measure(lent, engine_name(given), given.rows, given.trials, given.snapshot, figures)
        )


if __name__ == "__main__":
    main()
