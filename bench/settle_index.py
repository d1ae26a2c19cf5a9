"""Measure what the index of finished times costs where it is written: at the end of a job.

    python -m bench.settle_index --jobs 4000 --rounds 8

Starts servers of its own. Jobs are inserted, claimed and settled in batches of 200, straight on
the database, without HTTP or handlers, among 200,000 finished ones: so the index weighs more
than in a platform. Each round is done with and without the index, in turn; printed are drained
jobs a second (from the insert to the settled end), the processor's time a job (this process and
MariaDB's together: other work on the machine disturbs it less), the ratios of each pair, and on
MariaDB the bytes of the redo log a job.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time

import psutil
import uuid_utils
from sqlalchemy import text

from app.lifecycle.moves.claim import Assignment, claim
from app.lifecycle.states import ExecutionStatus
from app.lifecycle.token import new_token
from app.plumbing.database import Database
from tests.integration.app.rig import (
    WORKER,
    change,
    ending,
    fill,
    insert,
    new_jobs,
    new_term,
    opened,
    rows_of,
    settled,
)
from tests.support.engines import ENGINE_NAMES, Servers, migrated

BATCH = 200
KEPT = 200_000


async def drained(
    database: Database, jobs: int, term: int, server: int | None
) -> tuple[float, float, float]:
    """Drain jobs; return drained a second, processor microseconds and redo bytes a job."""
    before = await _redo(database)
    gc.collect()
    began, busy = time.perf_counter(), _processor_seconds(server)
    for _ in range(jobs // BATCH):
        new = [
            Assignment(job_id, 0, WORKER, str(uuid_utils.uuid7()))
            for job_id in await insert(database, BATCH)
        ]
        runs = await database.write(
            lambda connection, new=new: claim(  # type: ignore[misc]
                connection, database, new, token=new_token(), term=term
            )
        )
        endings = [ending(run, ExecutionStatus.SUCCEEDED, result="1") for run in runs]
        await settled(database, *endings)
    took, busy = time.perf_counter() - began, _processor_seconds(server) - busy
    return jobs / took, busy * 1_000_000 / jobs, (await _redo(database) - before) / jobs


def _processor_seconds(server: int | None) -> float:
    if server is None:
        return time.process_time()
    times = psutil.Process(server).cpu_times()
    return time.process_time() + float(times.user) + float(times.system)


async def _redo(database: Database) -> float:
    if database.is_sqlite:
        return 0.0
    (row,) = await rows_of(database, "SHOW GLOBAL STATUS LIKE 'Innodb_os_log_written'")
    return float(row["Value"])


async def _have_index(database: Database, *, wanted: bool) -> None:
    where = " WHERE finished_at IS NOT NULL" if database.is_sqlite else ""
    on = "" if database.is_sqlite else " ON job_info"
    statement = (
        f"CREATE INDEX ix_job_info_finished ON job_info (tenant_id, finished_at, id){where}"
        if wanted
        else f"DROP INDEX ix_job_info_finished{on}"
    )
    async with database._writers.connect() as connection:  # noqa: SLF001 - no DDL in the product
        await connection.execute(text(statement))
        await connection.commit()


async def measure(
    database: Database, jobs: int, rounds: int, name: str, server: int | None
) -> None:
    """Print the figures of one engine."""
    term = await new_term(database)
    (job,) = await new_jobs(database, 1)
    await fill(database, KEPT, status=2, queue_id=job.queue_id, priority=5)
    await change(database, "UPDATE job_info SET finished_at = 1700000000000 + id")
    await drained(database, BATCH * 2, term, server)
    found: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    has = True
    for number in range(rounds):
        for wanted in (True, False) if number % 2 else (False, True):
            if wanted != has:
                await _have_index(database, wanted=wanted)
                has = wanted
            found[wanted].append(await drained(database, jobs, term, server))
    for wanted in (False, True):
        columns = [statistics.median(column) for column in zip(*found[wanted], strict=True)]
        print(
            f"{name:14} {'with' if wanted else 'without':8} drained {columns[0]:7.0f}/s  "
            f"processor {columns[1]:5.0f} us/job  redo {columns[2]:6.0f} B/job"
        )
    for place, what in ((0, "drained"), (1, "processor")):
        ratios = [
            one[place] / other[place] for one, other in zip(found[True], found[False], strict=True)
        ]
        shown = " ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{name:14} {what} with/without: median {statistics.median(ratios):.3f} ({shown})")


async def main(jobs: int, rounds: int) -> None:
    """Measure both engines."""
    servers = Servers()
    try:
        for engine_name in ENGINE_NAMES:
            async with opened(migrated(servers.engine(engine_name))) as database:
                server = None if database.is_sqlite else servers.mariadb.pid
                await measure(database, jobs, rounds, engine_name, server)
    finally:
        servers.remove()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.jobs, arguments.rounds))
