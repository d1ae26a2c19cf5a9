"""Measure pages of lists over a thousand and over a million jobs, on SQLite and MariaDB.

    python -m bench.list_pages --jobs 1000000

Starts servers of its own. For every combination of filters that a list offers, printed are the
median milliseconds of a page of 50 and what it examines, with few and with many jobs kept, and
the ratio of the times. Examined are the rows that MariaDB's handler reads (its `Handler_read`
counters), and thousands of steps of SQLite's machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from app.jobs.listing import OFFERED, filter_of
from app.lifecycle.lists import JobFilter, list_jobs
from app.plumbing.database import Database
from app.plumbing.times import rfc3339
from tests.integration.app.rig import change, fill, insert, new_jobs, opened, rows_of, value_of
from tests.support.engines import ENGINE_NAMES, Servers, migrated

ROUNDS = 15
PAGE = 50
BASE_MS = 1_700_000_000_000
FINISHED_AFTER_MS = 10_000_000_000
STEPS = 1000
SMALL = (1000, 10_000)
SAMPLES = {
    "status": ("SUCCEEDED", "FAILED"),
    "handler": ("echo", "none"),
    "namePrefix": ("filled", "none"),
    "label": ("all=y", "team=x"),
    "clientRequestId": ("none",),
}
"""Values of which nearly all and nearly no jobs are."""


@dataclass(frozen=True)
class Cost:
    """What one page costs: milliseconds, and what is examined."""

    milliseconds: float
    examined: float


def asked(jobs: int) -> dict[str, JobFilter]:
    """Return a filter for every combination that the code offers, by its name."""
    moments = {
        "createdFrom": rfc3339(BASE_MS + jobs // 4),
        "createdTo": rfc3339(BASE_MS + jobs * 3 // 4),
        "finishedFrom": rfc3339(BASE_MS + FINISHED_AFTER_MS + jobs // 4),
        "finishedTo": rfc3339(BASE_MS + FINISHED_AFTER_MS + jobs * 3 // 4),
    }
    found = {}
    for names in OFFERED:
        own = [name for name in names if name not in moments]
        ranges = {name: moments[name] for name in names if name in moments}
        for values in itertools.product(*(SAMPLES[name] for name in own)):
            query = dict(zip(own, values, strict=True))
            words = [f"{name}={value}" for name, value in query.items()]
            words += [min(ranges).removesuffix("From")] if ranges else []
            found[" ".join(words) or "nothing"] = filter_of(_lists(query | ranges))
    return found


def _lists(query: Mapping[str, str]) -> dict[str, list[str]]:
    return {name: [value] for name, value in query.items()}


async def keep(database: Database, jobs: int) -> None:
    """Keep so many jobs, nearly all finished, in another order than they were created."""
    (job,) = await new_jobs(database, 1)
    there = await value_of(database, "SELECT COUNT(*) FROM job_info")
    await fill(database, jobs - there, status=2, queue_id=job.queue_id, priority=5)
    await change(
        database,
        f"UPDATE job_info SET created_at = {BASE_MS} + id, finished_at = "
        f"{BASE_MS + FINISHED_AFTER_MS} + (id * 7919) % {jobs} WHERE created_at = 1",
    )
    await change(
        database,
        "INSERT INTO job_label (job_id, name, value) SELECT id, 'all', 'y' FROM job_info "
        "WHERE id > (SELECT COALESCE(MAX(job_id), 0) FROM job_label)",
    )
    await insert(database, PAGE, labels={"team": "x"})
    await change(database, "ANALYZE" if database.is_sqlite else "ANALYZE TABLE job_info")


async def cost(database: Database, wanted: JobFilter) -> Cost:
    """Measure the first page of a list."""
    steps = itertools.count()

    async def page(connection: AsyncConnection) -> None:
        await list_jobs(connection, database, tenant_id=0, wanted=wanted, before=None, limit=PAGE)

    async def counted(connection: AsyncConnection) -> None:
        raw: Any = (await connection.get_raw_connection()).driver_connection
        await raw.set_progress_handler(lambda: next(steps) < 0, STEPS)
        await page(connection)
        await raw.set_progress_handler(None, STEPS)

    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        await database.read(page)
        times.append((time.perf_counter() - began) * 1000)
    if database.is_sqlite:
        await database.read(counted)
        return Cost(statistics.median(times), next(steps))
    before = await _handler_reads(database)
    await database.read(page)
    mid = await _handler_reads(database)
    own = await _handler_reads(database) - mid  # what it takes to ask
    return Cost(statistics.median(times), mid - before - own)


async def _handler_reads(database: Database) -> float:
    rows = await rows_of(database, "SHOW GLOBAL STATUS LIKE 'Handler_read%'")
    return sum(float(row["Value"]) for row in rows)


async def main(jobs: int) -> None:
    """Measure both engines, first small, then large."""
    servers = Servers()
    sizes = (*SMALL, jobs)
    try:
        for engine_name in ENGINE_NAMES:
            print(f"\n{engine_name}: ms and examined, of {', '.join(f'{n:,}' for n in sizes)} jobs")
            found: dict[str, list[Cost]] = {}
            async with opened(migrated(servers.engine(engine_name))) as database:
                for count in sizes:
                    await keep(database, count)
                    for name, wanted in asked(count).items():
                        found.setdefault(name, []).append(await cost(database, wanted))
            for name, costs in found.items():
                cells = [f"{one.milliseconds:7.1f} {one.examined:7.0f}" for one in costs]
                ratios = [costs[-1].milliseconds / one.milliseconds for one in costs[:-1]]
                shown = " ".join(f"{ratio:5.1f}x" for ratio in ratios)
                print(f"{name:32} {' | '.join(cells)} | {shown}", flush=True)
    finally:
        servers.remove()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    asyncio.run(main(parser.parse_args().jobs))
