"""Many schedules: what is due is found by the claim index, and spawned in batches, in order."""

from __future__ import annotations

import json
from typing import Any

from app.lifecycle.moves.fire import due_sql
from app.lifecycle.moves.mend import Mended, mend_schedules
from app.plumbing.database import Database
from tests.integration.app.rig import change, door, new_term, numbers, rows_of, value_of
from tests.integration.app.test_claim_plan import explained, found_in
from tests.support.engines import Engine, migrated

AT_REST = 100_000
DUE = 10_000
FAR = 4_000_000_000_000

_COLUMNS = (
    "tenant_id, kind, job_name, job_handler, queue_id, child_queue_id, status, priority, "
    "next_trigger_time, trigger_ts, interval_ms, interval_mode, anchor_at, misfire_policy, "
    "overlap_policy, client_request_id, max_retry, retry_interval_ms, retry_backoff, created_at, "
    "updated_at"
)


async def filled(database: Database, count: int, *, due: str, name: str, queue_id: int) -> None:
    """Insert hourly schedules by SQL, whose next fire is `due` (SQL over n)."""
    request = f"'{name}-' || n" if database.is_sqlite else f"CONCAT('{name}-', n)"
    await change(
        database,
        f"INSERT INTO job_info ({_COLUMNS}) SELECT 0, 1, '{name}', 'echo', 0, {queue_id}, 7, "
        f"5, {due}, {due} - 1, 3600000, 'fixedRate', {due}, 'once', 'skip', {request}, 3, 60000, "
        f"'fixed', 1, 1 FROM {numbers(count)} AS numbers ORDER BY n",
    )


async def test_ten_thousand_due_among_a_hundred_thousand_at_rest(migrated_engine: Engine) -> None:
    # To fill the table may take longer than what is late without being a misfire.
    async with door(migrated_engine, misfire_grace_seconds=300) as api:
        database = api.database
        await api.submitted()
        queue_id = await value_of(database, "SELECT id FROM queue")
        await filled(database, AT_REST, due=f"{FAR} + n", name="rest", queue_id=queue_id)
        now = int(await value_of(database, f"SELECT {database.now_ms}"))
        # All of one second, the lower ids later: the order is that of time.
        await filled(database, DUE, due=f"{now} - n % 1000", name="due", queue_id=queue_id)
        term = await new_term(database)
        spawner = api.parts.spawner
        assert await spawner.fire_due(term, limit=3) == 3
        first = await rows_of(
            database, "SELECT nominal_time FROM job_info WHERE parent_id IS NOT NULL"
        )
        assert [row["nominal_time"] for row in first] == [now - 999] * 3
        rounds = 1
        while await spawner.fire_due(term):
            rounds += 1
        assert rounds <= 2 + DUE // 500
        spawned = await rows_of(
            database,
            "SELECT COUNT(*) AS count, COUNT(DISTINCT parent_id) AS parents, "
            "MIN(next_trigger_time) AS first, MAX(next_trigger_time) AS last "
            "FROM job_info WHERE parent_id IS NOT NULL",
        )
        assert spawned == [{"count": DUE, "parents": DUE, "first": now - 999, "last": now}]
        assert await value_of(database, "SELECT COUNT(*) FROM schedule_live") == DUE
        assert await mend_schedules(database) == Mended()


def _arms(rows: list[Any]) -> list[Any]:
    return [row for row in rows if row.table == "job_info"]


async def test_mariadb_finds_what_is_due_by_the_index(mariadb_engine: Engine) -> None:
    async with door(migrated(mariadb_engine)) as api:
        database = api.database
        await filled(database, 20_000, due=f"{FAR} + n", name="rest", queue_id=1)
        await filled(database, 10, due="1000 + n", name="due", queue_id=1)
        await explained(database, "ANALYZE TABLE", "job_info")
        for limit, most in ((500, 10), (None, 10)):
            query = due_sql(database, limit=limit)
            reads = _arms(await explained(database, "EXPLAIN", query))
            assert len(reads) == 10
            assert {row.key for row in reads} == {"ix_job_info_claim"}
            assert not [row for row in reads if "filesort" in (row.Extra or "")]
            ((plan,),) = await explained(database, "ANALYZE FORMAT=JSON", query)
            examined = [
                table["r_rows"] * table["r_loops"]
                for table in found_in(json.loads(plan), "table")
                if table.get("key") == "ix_job_info_claim" and table["r_rows"] is not None
            ]
            assert sum(examined) <= most


async def test_sqlite_finds_what_is_due_by_the_index(sqlite_engine: Engine) -> None:
    async with door(migrated(sqlite_engine)) as api:
        database = api.database
        await filled(database, 20_000, due=f"{FAR} + n", name="rest", queue_id=1)
        await change(database, "ANALYZE")
        for limit in (500, None):
            query = due_sql(database, limit=limit)
            details = [row.detail for row in await explained(database, "EXPLAIN QUERY PLAN", query)]
            assert sum("ix_job_info_claim" in detail for detail in details) == 10
            assert not [detail for detail in details if "TEMP B-TREE" in detail]
            assert not [detail for detail in details if detail.startswith("SCAN job_info")]
