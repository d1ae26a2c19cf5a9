"""Measure `explain` among a thousand and a million due jobs, on MariaDB and SQLite.

    python -m bench.explain --jobs 1000000

Starts servers of its own. Prints the median and the longest milliseconds of an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from oncue.protocol import Load
from tests.integration.app.rig import Door, door, fill, new_jobs, value_of
from tests.support.engines import ENGINE_NAMES, Servers, migrated

ROUNDS = 30


async def answers(api: Door, jobs: int) -> dict[str, list[float]]:
    """Return the milliseconds of an answer for the first and the last of so many due jobs."""
    database = api.database
    (job,) = await new_jobs(database, 1)
    there = await value_of(database, "SELECT COUNT(*) FROM job_info")
    for priority in (5, 9):
        count = (jobs - there) // 2
        await fill(database, count, status=0, queue_id=job.queue_id, priority=priority)
    found: dict[str, list[float]] = {}
    for name, which in (("first", "MIN"), ("last", "MAX")):
        query = f"SELECT {which}(id) FROM job_info WHERE priority = 5"
        job_id = await value_of(database, query)
        for _ in range(ROUNDS):
            await api.beat(capacity=1, load=Load(seq=1, active=1))
            began = time.perf_counter()
            answer = await api.client.get(f"/openapi/jobs/{job_id}/explain")
            found.setdefault(name, []).append((time.perf_counter() - began) * 1000)
            assert answer.status_code == 200, answer.text
    return found


async def main(jobs: int) -> None:
    """Measure both engines, first small, then large."""
    servers = Servers()
    try:
        for engine_name in ENGINE_NAMES:
            async with door(migrated(servers.engine(engine_name)), log_level="error") as api:
                for count in (1000, jobs):
                    for name, times in (await answers(api, count)).items():
                        print(
                            f"{engine_name:14} {count:>9,} {name:6} "
                            f"{statistics.median(times):7.1f} {max(times):7.1f}"
                        )
    finally:
        servers.remove()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    asyncio.run(main(parser.parse_args().jobs))
