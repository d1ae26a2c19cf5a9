"""What schedules cost: a look while all are at rest, and many that are due at once.

    python -m bench.schedules --at-rest 100000 --due 10000 [--database-url URL]

Prints the milliseconds of a look, and how many a second are spawned and then claimed, in order.
Without a URL a SQLite database is made for it. A given database must have the schema, and is
filled. Nothing else may use it meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import uuid_utils
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.ground import lay_ground
from app.lifecycle.moves.claim import Assignment, Probe, claim, find_due
from app.lifecycle.moves.fire import find_next
from app.lifecycle.reads import ensure_queue
from app.lifecycle.term import begin_term
from app.lifecycle.token import new_token
from app.main import build_parts
from app.migrate import migrate
from app.plumbing.database import Database
from app.settings import Settings

COLUMNS = (
    "tenant_id, kind, job_name, job_handler, queue_id, child_queue_id, status, priority, "
    "next_trigger_time, trigger_ts, interval_ms, interval_mode, anchor_at, misfire_policy, "
    "overlap_policy, client_request_id, max_retry, retry_interval_ms, retry_backoff, created_at, "
    "updated_at"
)
INSERT = text(
    f"INSERT INTO job_info ({COLUMNS}) VALUES (0, 1, 'bench', 'echo', 0, :queue, 7, 5, :due, "
    ":due - 1, 3600000, 'fixedRate', :due, 'once', 'skip', :request, 3, 60000, 'fixed', 1, 1)"
)
LOOKS = 300
PRIORITY = 5
BATCH = 200
CHUNK = 5000


async def fill(database: Database, name: str, queue_id: int, due: list[int]) -> None:
    """Insert a schedule for each due time."""
    for start in range(0, len(due), CHUNK):
        rows = [
            {"queue": queue_id, "due": one, "request": f"{name}-{start + number}"}
            for number, one in enumerate(due[start : start + CHUNK])
        ]

        async def insert(connection: AsyncConnection, rows: list[dict[str, object]] = rows) -> None:
            await connection.execute(INSERT, rows)

        await database.write(insert)


async def claim_all(database: Database, queue_id: int, term: int) -> list[tuple[int, int]]:
    """Claim what is due, batch by batch as dispatch does; return the (due, id) in order."""
    order: list[tuple[int, int]] = []
    while True:
        probes = [Probe(queue_id, PRIORITY, *(order[-1] if order else (0, 0)), BATCH + 1)]
        found = await database.read(
            lambda connection, probes=probes: find_due(connection, database, probes)  # type: ignore[misc]
        )
        tasks = found.due[:BATCH]
        if not tasks:
            return order
        assignments = [
            Assignment(task.job_id, task.version, "bench#1", str(uuid_utils.uuid7()))
            for task in tasks
        ]
        token = new_token()
        claimed = await database.write(
            lambda connection, wanted=assignments, token=token: claim(  # type: ignore[misc]
                connection, database, wanted, token=token, term=term
            )
        )
        assert len(claimed) == len(tasks)
        order += [(task.due_ms, task.job_id) for task in tasks]


async def measure(settings: Settings, at_rest: int, due: int) -> None:
    """Fill the database and print what its schedules cost."""
    parts = build_parts(lay_ground(settings, internal_token="bench"))
    database = parts.ground.database
    try:
        queue_id = await database.write(
            lambda connection: ensure_queue(
                connection, database, tenant_id=0, job_handler="echo", requirement=""
            )
        )
        now = await database.now()
        prefix = f"bench-{now}"
        await fill(database, f"{prefix}-rest", queue_id, [now + 10**9 + n for n in range(at_rest)])
        looks = []
        for _ in range(LOOKS):
            began = time.perf_counter()
            await database.read(lambda connection: find_next(connection, database))
            looks.append((time.perf_counter() - began) * 1000)
        print(f"a look among {at_rest} at rest: {statistics.median(looks):.2f} ms, one a second")
        now = await database.now()
        await fill(database, f"{prefix}-due", queue_id, [now - n % 1000 for n in range(due)])
        term = await database.write(lambda connection: begin_term(connection, database, "bench"))
        began = time.perf_counter()
        rounds = 0
        while await parts.spawner.fire_due(term):
            rounds += 1
        seconds = time.perf_counter() - began
        print(f"{due} due at once: {seconds:.2f} s, {due / seconds:.0f} a second, {rounds} commits")
        began = time.perf_counter()
        order = await claim_all(database, queue_id, term)
        seconds = time.perf_counter() - began
        assert len(order) == due, "not all were claimed"
        assert order == sorted(order), "they were claimed out of order"
        print(f"all claimed in order: {seconds:.2f} s, {due / seconds:.0f} a second")
    finally:
        await parts.ground.close()


def main() -> None:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-rest", type=int, default=100_000)
    parser.add_argument("--due", type=int, default=10_000)
    parser.add_argument("--database-url", default="")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        url = flags.database_url or f"sqlite+aiosqlite:///{Path(directory) / 'bench.db'}"
        if not flags.database_url:
            migrate(url)
        settings = Settings(_env_file=None, database_url=url)
        asyncio.run(measure(settings, flags.at_rest, flags.due))


if __name__ == "__main__":
    main()
