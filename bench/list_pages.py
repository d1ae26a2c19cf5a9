"""Measure pages of lists over a thousand and over a million jobs, on MariaDB and SQLite.

    python -m bench.list_pages --jobs 1000000

Starts servers of its own. Prints the median and the longest milliseconds of a page, by filter.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from app.lifecycle.lists import JobFilter, list_jobs
from app.lifecycle.states import JobStatus
from app.plumbing.database import Database
from tests.integration.app.rig import change, fill, insert, new_jobs, opened, value_of
from tests.support.engines import ENGINE_NAMES, Servers, migrated

ROUNDS = 20
BASE_MS = 1_700_000_000_000


async def pages(database: Database, jobs: int) -> dict[str, list[float]]:
    """Return the milliseconds of a page of 50, by filter, with this many jobs kept."""
    (job,) = await new_jobs(database, 1)
    there = await value_of(database, "SELECT COUNT(*) FROM job_info")
    await fill(database, jobs - there, status=2, queue_id=job.queue_id, priority=5)
    await change(database, f"UPDATE job_info SET created_at = {BASE_MS} + id WHERE created_at = 1")
    await insert(database, 50, labels={"team": "x"})
    middle = BASE_MS + jobs // 2
    filters = {
        "none": JobFilter(),
        "status SUCCEEDED (all)": JobFilter(status=JobStatus.SUCCEEDED),
        "status FAILED (none)": JobFilter(status=JobStatus.FAILED),
        "handler echo (all)": JobFilter(handler="echo"),
        "namePrefix (none)": JobFilter(name_prefix="nothing"),
        "label": JobFilter(label=("team", "x")),
        "clientRequestId": JobFilter(client_request_id="nothing"),
        "created, in the middle": JobFilter(created_from=middle, created_to=middle + 100),
        "namePrefix + created": JobFilter(name_prefix="no", created_to=middle),
    }
    found: dict[str, list[float]] = {}
    for name, wanted in filters.items():
        for _ in range(ROUNDS):
            began = time.perf_counter()
            await database.read(
                lambda connection, wanted=wanted: list_jobs(  # type: ignore[misc]
                    connection, database, tenant_id=0, wanted=wanted, before=None, limit=50
                )
            )
            found.setdefault(name, []).append((time.perf_counter() - began) * 1000)
    return found


async def main(jobs: int) -> None:
    """Measure both engines, first small, then large."""
    servers = Servers()
    try:
        for engine_name in ENGINE_NAMES:
            async with opened(migrated(servers.engine(engine_name))) as database:
                for count in (1000, jobs):
                    for name, times in (await pages(database, count)).items():
                        print(
                            f"{engine_name:14} {count:>9,} {name:24} "
                            f"{statistics.median(times):7.1f} {max(times):7.1f}"
                        )
    finally:
        servers.remove()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    asyncio.run(main(parser.parse_args().jobs))
