"""Counts that never scan, and for how long a tenant's finished jobs are kept."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.jobs.retention import Retention
from app.lifecycle import tables
from app.lifecycle.counts import count_jobs, counts_sql
from app.lifecycle.dependents import DEPENDENTS, delete_of, select_of
from app.lifecycle.moves import prune
from app.lifecycle.policies import write_policy
from app.lifecycle.states import DeliveryStatus, ExecutionStatus, JobKind, JobStatus
from app.plumbing.database import Database
from tests.integration.app.rig import (
    Door,
    change,
    door,
    ending,
    fill,
    insert,
    new_jobs,
    opened,
    rows_of,
    running_job,
    settled,
    value_of,
)
from tests.support.engines import Engine, migrated

DAY = 24 * 3600 * 1000
URL = "http://127.0.0.1:9/hook"


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    """An API over each engine."""
    async with door(migrated_engine) as api:
        yield api


async def now_of(database: Database) -> int:
    return int(await value_of(database, f"SELECT {database.now_ms}"))


async def ended(database: Database, how: ExecutionStatus, **fields: Any) -> int:
    run = await running_job(database, max_retry=0, **fields)
    await settled(database, ending(run, how, error_code="e", result='"r"'))
    return run.job_id


async def left(database: Database) -> list[int]:
    return [row["id"] for row in await rows_of(database, "SELECT id FROM job_info ORDER BY id")]


async def counts_of(api: Door, **query: Any) -> dict[str, Any]:
    answer = await api.client.get("/openapi/counts", params=query)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    counts = {one["status"]: (one["count"], one["atLeast"]) for one in told["items"]}
    return counts | {"due": (told["due"]["count"], told["due"]["atLeast"])}


async def test_jobs_are_counted_by_state(api: Door) -> None:
    database = api.database
    assert set((await counts_of(api)).values()) == {(0, False)}
    await running_job(database)
    await ended(database, ExecutionStatus.SUCCEEDED)
    await ended(database, ExecutionStatus.FAILED)
    await insert(database, 3)
    await api.submitted(delayMs=3_600_000)
    await api.submitted(intervalMs=3_600_000)
    paused = await api.submitted(intervalMs=3_600_000)
    assert (await api.client.post(f"/openapi/jobs/{paused}/pause")).status_code == 200
    cancelled = await api.submitted()
    assert (await api.client.post(f"/openapi/jobs/{cancelled}/cancel")).status_code == 200
    counts = await counts_of(api)
    assert counts == {
        "WAITING": (4, False),
        "RUNNING": (1, False),
        "SUCCEEDED": (1, False),
        "FAILED": (1, False),
        "PAUSED": (1, False),
        "CANCELLED": (1, False),
        "BLOCKED": (0, False),
        "SCHEDULED": (1, False),
        "due": (3, False),
    }
    bounded = await counts_of(api, upTo=3)
    assert (bounded["WAITING"], bounded["RUNNING"]) == ((3, True), (1, False))
    assert bounded["due"][1]
    for wrong in (0, 10_001, "x"):
        answer = await api.client.get("/openapi/counts", params={"upTo": wrong})
        assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed")


async def test_a_tenant_counts_its_own_alone(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        await insert(database, 3)
        (other,) = await new_jobs(database, 1, job_handler="other")
        await change(database, "UPDATE queue SET tenant_id = 7 WHERE id = :id", id=other.queue_id)
        await insert(database, 2, tenant_id=7, queue_id=other.queue_id)
        for tenant, expected in ((0, 3), (7, 2), (8, 0)):
            counts = await database.read(
                lambda connection, tenant=tenant: count_jobs(  # type: ignore[misc]
                    connection, database, tenant_id=tenant, most=100
                )
            )
            assert counts.of_status[JobStatus.WAITING].count == expected


async def test_a_tenant_chooses_how_long_its_jobs_are_kept(api: Door) -> None:
    defaults = {"succeededDays": 30.0, "failedDays": 30.0, "cancelledDays": 30.0}
    nothing = {"succeededDays": None, "failedDays": None, "cancelledDays": None}
    answer = await api.client.get("/openapi/retention")
    assert answer.json() == {**nothing, "defaults": defaults}
    answer = await api.client.put(
        "/openapi/retention", json={"succeededDays": 7, "failedDays": 90.5}
    )
    assert answer.status_code == 200, answer.text
    chosen = {"succeededDays": 7.0, "failedDays": 90.5, "cancelledDays": None}
    assert answer.json() == {**chosen, "defaults": defaults}
    assert (await api.client.get("/openapi/retention")).json() == answer.json()
    refused: tuple[Any, ...] = (
        {"succeededDays": 0.5},
        {"succeededDays": 4000},
        {"succeededDays": -1},
        {"succeededDays": "soon"},
        {"succeededDays": "7"},
        {"succeededDays": True},
        {"waitingDays": 7},
        [],
    )
    for wrong in refused:
        answer = await api.client.put("/openapi/retention", json=wrong)
        assert answer.status_code in (400, 422), wrong
        assert answer.json()["detail"]
    assert (await api.client.put("/openapi/retention", json={})).json()["succeededDays"] is None


async def test_each_state_of_each_tenant_leaves_in_its_own_time(migrated_engine: Engine) -> None:
    async with door(migrated_engine, retention="SUCCEEDED=2,FAILED=20") as api:
        database = api.database
        good = await ended(database, ExecutionStatus.SUCCEEDED)
        bad = await ended(database, ExecutionStatus.FAILED)
        off = await api.submitted()
        await api.client.post(f"/openapi/jobs/{off}/cancel")
        own = await ended(database, ExecutionStatus.SUCCEEDED)
        await change(database, "UPDATE job_info SET tenant_id = 7 WHERE id = :id", id=own)

        async def choose(connection: AsyncConnection) -> None:
            await write_policy(connection, 7, {JobStatus.SUCCEEDED: 25 * DAY})

        await database.write(choose)
        now = await now_of(database)
        retention = Retention(api.parts.ground, api.parts.lock)
        for days, deleted, stay in (
            (1, 0, [good, bad, off, own]),
            (3, 1, [bad, off, own]),
            (19, 0, [bad, off, own]),
            (21, 1, [off, own]),
            (26, 1, [off]),
            (31, 1, []),
        ):
            assert await retention.run_pass(now + days * DAY) == deleted, days
            assert await left(database) == stay


async def test_what_was_passed_over_leaves_once_nothing_keeps_it(api: Door) -> None:
    database = api.database
    owing = await ended(database, ExecutionStatus.SUCCEEDED, callback_url=URL)
    child = await ended(database, ExecutionStatus.SUCCEEDED)
    parent = await ended(database, ExecutionStatus.SUCCEEDED)
    # The parent finished before its child, which is kept longer: it failed.
    await change(
        database,
        "UPDATE job_info SET kind = :kind, finished_at = finished_at - 1000 WHERE id = :id",
        kind=int(JobKind.GROUP),
        id=parent,
    )
    await change(
        database,
        "UPDATE job_info SET parent_id = :parent, status = 3 WHERE id = :id",
        parent=parent,
        id=child,
    )
    await api.client.put("/openapi/retention", json={"failedDays": 90})
    retention = Retention(api.parts.ground, api.parts.lock)
    now = await now_of(database)
    assert await retention.run_pass(now + 31 * DAY) == 0
    await change(database, f"UPDATE callback_delivery SET status = {int(DeliveryStatus.DELIVERED)}")
    assert await retention.run_pass(now + 31 * DAY) == 1
    assert owing not in await left(database)
    # First the child, then at the end of the same pass its parent.
    assert await retention.run_pass(now + 91 * DAY) == 2
    assert await left(database) == []


async def test_many_that_ended_in_one_millisecond_leave_in_small_steps(
    migrated_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.jobs.retention.WALKED_AT_ONCE", 7)
    async with door(migrated_engine) as api:
        (job,) = await new_jobs(api.database, 1)
        await fill(api.database, 50, status=2, queue_id=job.queue_id, priority=5)
        await change(api.database, "UPDATE job_info SET status = 0 WHERE id % 10 = 0")
        retention = Retention(api.parts.ground, api.parts.lock)
        assert await retention.run_pass(await now_of(api.database)) == 45
        assert len(await left(api.database)) == 5


def written(directory: Path) -> list[dict[str, Any]]:
    """Read the files of dropped jobs."""
    files = sorted(directory.iterdir())
    lines = [line for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
    return [json.loads(line) for line in lines]


async def test_what_is_deleted_is_written_down_before(
    migrated_engine: Engine, tmp_path: Path
) -> None:
    async with door(migrated_engine, retention_export=tmp_path) as api:
        database = api.database
        long = f'"{"x" * 5000}"'
        whole = await ended(
            database, ExecutionStatus.SUCCEEDED, params=long, labels={"a": "b"}, callback_url=URL
        )
        await change(
            database, f"UPDATE callback_delivery SET status = {int(DeliveryStatus.DELIVERED)}"
        )
        owing = await ended(database, ExecutionStatus.FAILED, callback_url=URL)
        schedule = await api.submitted(intervalMs=3_600_000)
        await api.client.post(f"/openapi/jobs/{schedule}/cancel")
        retention = Retention(api.parts.ground, api.parts.lock)
        now = await now_of(database)
        assert await retention.run_pass(now + 31 * DAY) == 2
        assert await left(database) == [owing]
        found = {one["jobId"]: one["rows"] for one in written(tmp_path)}
        assert found.keys() == {whole, schedule}
        rows = found[whole]
        assert rows["job_info"][0]["status"] == JobStatus.SUCCEEDED
        assert rows["job_payload"][0]["body"] == long
        assert rows["job_label"] == [{"job_id": whole, "name": "a", "value": "b"}]
        assert len(rows["job_log"]) == len(rows["callback_delivery"]) == 1
        # A later pass goes on in the same file.
        await change(database, f"UPDATE callback_delivery SET status = {int(DeliveryStatus.GONE)}")
        assert await retention.run_pass(now + 31 * DAY) == 1
        assert [one["jobId"] for one in written(tmp_path)] == [whole, schedule, owing]
        assert len(list(tmp_path.iterdir())) == 1


async def test_what_cannot_be_written_down_is_not_deleted(
    migrated_engine: Engine, tmp_path: Path
) -> None:
    async with door(migrated_engine, retention_export=tmp_path / "away") as api:
        job_id = await ended(api.database, ExecutionStatus.SUCCEEDED)
        retention = Retention(api.parts.ground, api.parts.lock)
        later = await now_of(api.database) + 31 * DAY
        with pytest.raises(FileNotFoundError):
            await retention.run_pass(later)
        assert await left(api.database) == [job_id]
        (tmp_path / "away").mkdir()
        assert await retention.run_pass(later) == 1


def test_every_table_with_rows_of_a_job_is_dealt_with() -> None:
    by_job = {"job_id", "schedule_id", "log_id", "delivery_id"}
    with_rows = {
        table.name
        for table in tables.metadata.tables.values()
        if by_job & {column.name for column in table.columns}
    }
    # A deadline leaves by its time, a place under a concurrency key with the job's end; what
    # goes on stopping leaves when it has.
    others = {"job_expiry", "stopping_execution", "concurrency_slot"}
    assert with_rows - others == {one.table for one in DEPENDENTS}


def statements(*, sqlite: bool) -> list[tuple[str, str]]:
    """Every statement of retention that reads or deletes rows, and the table."""
    by_keys = [
        ("job_info", prune.SAME_AGAIN[sqlite]),
        ("job_info", prune.LOCK[sqlite]),
        ("job_info", prune.LIVE[sqlite]),
        ("callback_delivery", prune.OWED[sqlite]),
        ("job_log", prune.EXECUTIONS[sqlite]),
        ("execution_log", prune.LOG_SIZES[sqlite]),
        ("job_info", prune.DELETE_JOBS[sqlite]),
        ("job_info", prune.ANY_CHILD),
        *(("job_info", walk) for walk in prune.WALKS[sqlite]),
        ("schedule_skip", prune.WALK_SKIPS),
    ]
    for one in DEPENDENTS:
        by_keys.append((one.table, select_of(one, "*", sqlite=sqlite)))
        by_keys.append((one.table, delete_of(one, sqlite=sqlite)))
    return by_keys


def with_values(statement: str) -> str:
    """Put values in place of the parameters: 300 keys, as a batch has."""
    keys = ", ".join(str(number) for number in range(1, 301))
    return (
        statement.replace(":keys", f"({keys})")
        .replace(":tenant", "0")
        .replace(":parent", "5")
        .replace(":at", "1")
        .replace(":after", "40")
        .replace(":before", "2000000000000")
        .replace(":cursor", "0")
        .replace(":limit", "500")
        .replace(":most", "1000")
    )


async def filled(database: Database) -> None:
    (job,) = await new_jobs(database, 1)
    await fill(database, 5000, status=2, queue_id=job.queue_id, priority=5)
    await insert(database, 20)
    # MariaDB reads a table of a few rows whole.
    for one in DEPENDENTS:
        names = [
            column.name
            for column in tables.metadata.tables[one.table].columns
            if not column.nullable and column.server_default is None and column.name != "id"
        ]
        numbers = ", ".join(
            "id % 2" if name in ("complete", "delivered") else "id" for name in names
        )
        await change(
            database, f"INSERT INTO {one.table} ({', '.join(names)}) SELECT {numbers} FROM job_info"
        )


async def test_sqlite_finds_by_a_key_whatever_retention_and_counts_ask(
    sqlite_engine: Engine,
) -> None:
    async with opened(migrated(sqlite_engine)) as database:
        await filled(database)
        await change(database, "ANALYZE")
        asked = [*statements(sqlite=True), ("job_info", counts_sql(database))]
        for table, statement in asked:
            plan = await rows_of(database, f"EXPLAIN QUERY PLAN {with_values(statement)}")
            scans = [row["detail"] for row in plan if row["detail"].startswith(f"SCAN {table}")]
            scans += [
                row["detail"] for row in plan if row["detail"].startswith(("SCAN j", "SCAN q"))
            ]
            # To walk a table by its primary key from a place on is a search, too.
            assert not scans, (statement, plan)


async def test_mariadb_finds_by_a_key_whatever_retention_and_counts_ask(
    mariadb_engine: Engine,
) -> None:
    async with opened(migrated(mariadb_engine)) as database:
        await filled(database)
        await change(database, "ANALYZE TABLE job_info")
        asked = [*statements(sqlite=False), ("job_info", counts_sql(database))]
        for _table, statement in asked:

            async def explain(connection: AsyncConnection, one: str = statement) -> list[Any]:
                found = await connection.execute(text(f"EXPLAIN {with_values(one)}"))
                return list(found.mappings())

            plan = await database.read(explain)
            for row in plan:
                derived = str(row["table"] or "").startswith("<")
                # An empty table, or keys beyond all rows, are known without a look.
                if row["type"] is None or derived:
                    continue
                assert row["type"] in ("range", "ref", "eq_ref", "const", "index_subquery"), (
                    statement,
                    plan,
                )
                assert row["key"] is not None, (statement, plan)
