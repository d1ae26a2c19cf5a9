"""The claim walks its index and nothing else, however many finished jobs are kept."""

from __future__ import annotations

import json
import re
from typing import Any

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.moves import assign, claim, deliver, fire, follow, keep_logs, settle
from app.lifecycle.moves.claim import Probe, probe_sql
from app.plumbing.database import Database
from tests.integration.app.rig import change, fill, insert, new_jobs, opened, value_of
from tests.support.engines import Engine, migrated

FINISHED = 200_000


async def explained(
    database: Database, prefix: str, query: str, values: tuple[Any, ...] = ()
) -> list[Any]:
    """Return the rows that explain a query."""

    async def ask(connection: AsyncConnection) -> list[Any]:
        if values:
            return list((await connection.exec_driver_sql(f"{prefix} {query}", values)).all())
        return list((await connection.execute(text(f"{prefix} {query}"))).all())

    return await database.read(ask)


def probes(queue_id: int) -> list[Probe]:
    """The ranges that are read when a queue with 32 free slots is looked through anew."""
    return [Probe(queue_id, priority, 0, 0, 33) for priority in range(9, -1, -1)]


def found_in(plan: Any, name: str) -> list[Any]:
    """Return every value of a name anywhere in a JSON plan."""
    if isinstance(plan, dict):
        own = [plan[name]] if name in plan else []
        return own + [value for part in plan.values() for value in found_in(part, name)]
    if isinstance(plan, list):
        return [value for part in plan for value in found_in(part, name)]
    return []


async def test_mariadb_claims_by_the_index_without_a_sort_among_200000_finished_jobs(
    mariadb_engine: Engine,
) -> None:
    async with opened(migrated(mariadb_engine)) as database:
        (job,) = await new_jobs(database, 1)
        await fill(database, FINISHED, status=2, queue_id=job.queue_id, priority=5)
        await insert(database, 500, priority=5)
        await insert(database, 500, priority=0)
        await explained(database, "ANALYZE TABLE", "job_info")
        assert await value_of(database, "SELECT COUNT(*) FROM job_info") == FINISHED + 1000

        query, _ = probe_sql(database, probes(job.queue_id))
        rows = await explained(database, "EXPLAIN", query)
        reads = [row for row in rows if row.table == "job_info"]
        assert len(reads) == 10
        assert {row.key for row in reads} == {"ix_job_info_claim"}
        assert not [row.Extra for row in rows if "filesort" in (row.Extra or "")]

        ((analysed,),) = await explained(database, "ANALYZE FORMAT=JSON", query)
        plan = json.loads(analysed)
        assert not found_in(plan, "filesort")
        examined = [
            table["r_rows"] * table["r_loops"]
            for table in found_in(plan, "table")
            if table.get("key") == "ix_job_info_claim"
        ]
        assert len(examined) == 10
        assert sum(examined) <= 2 * 33 + 10


async def test_sqlite_claims_by_the_index_without_a_sort(sqlite_engine: Engine) -> None:
    async with opened(migrated(sqlite_engine)) as database:
        (job,) = await new_jobs(database, 1)
        await fill(database, 20_000, status=2, queue_id=job.queue_id, priority=5)
        await insert(database, 100)
        await change(database, "ANALYZE")
        query, values = probe_sql(database, probes(job.queue_id))
        plan = await explained(database, "EXPLAIN QUERY PLAN", query, values)
        details = [row.detail for row in plan]
        assert sum("ix_job_info_claim" in detail for detail in details) == 10
        assert not [detail for detail in details if "TEMP B-TREE" in detail]
        assert not [detail for detail in details if detail.startswith("SCAN job_info")]


def _updates_of_many_rows() -> list[TextClause]:
    """Return every UPDATE that is given its rows as one parameter, as it is on SQLite."""
    modules = (assign, claim, deliver, fire, follow, keep_logs, settle)
    made = [
        one
        for module in modules
        for table in vars(module).values()
        if isinstance(table, dict)
        for one in table.values()
        if isinstance(one, TextClause)
    ]
    return [one for one in made if one.text.startswith("UPDATE ") and "json_each" in one.text]


async def test_sqlite_goes_from_the_rows_given_to_their_keys_however_many_wait(
    sqlite_engine: Engine,
) -> None:
    updates = _updates_of_many_rows()
    assert len(updates) >= 10
    async with opened(migrated(sqlite_engine)) as database:
        (job,) = await new_jobs(database, 1)
        await fill(database, 5000, status=0, queue_id=job.queue_id, priority=5)
        for analysed in (False, True):
            if analysed:
                await change(database, "ANALYZE")
            for update in updates:
                query = re.sub(
                    r"(?<![:\w]):(\w+)",
                    lambda name: "'[]'" if name[1] == "rows" else "1",
                    update.text,
                )
                plan = await explained(database, "EXPLAIN QUERY PLAN", query)
                steps = [row.detail for row in plan if "dispatch_term" not in row.detail]
                assert steps[0].startswith("SCAN json_each"), (steps, update.text)
                (of_table,) = [one for one in steps if one.startswith("SEARCH j ")]
                assert "status=?" not in of_table, (steps, update.text)


async def _index_reads(database: Database, query: str) -> int:
    """Count the rows of indexes that a query reads, whether or not it returns them."""

    async def ask(connection: AsyncConnection) -> int:
        counts = []
        for _ in range(2):
            status = await connection.execute(text("SHOW SESSION STATUS LIKE 'Handler_read%'"))
            counts.append(sum(int(row.Value) for row in status if "rnd" not in row.Variable_name))
            await connection.execute(text(query))
        return counts[1] - counts[0]

    return await database.read(ask)


async def test_mariadb_reads_no_more_of_200000_waiting_tasks_than_of_10000(
    mariadb_engine: Engine,
) -> None:
    async with opened(migrated(mariadb_engine)) as database:
        (job,) = await new_jobs(database, 1)
        query, _ = probe_sql(database, probes(job.queue_id))
        read = []
        for count in (10_000, 190_000):
            for priority in (0, 9):
                await fill(database, count // 2, status=0, queue_id=job.queue_id, priority=priority)
            await explained(database, "ANALYZE TABLE", "job_info")
            read.append(await _index_reads(database, query))
        assert await value_of(database, "SELECT COUNT(*) FROM job_info") == 200_000
        assert read[1] == read[0] <= 4 * 33 + 20
