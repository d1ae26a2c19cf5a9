"""Lists: every job once, newest first, by filters that each have their index."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_asyncio
from pydantic.alias_generators import to_camel
from sqlalchemy import event, text

from app.jobs import bulk
from app.jobs.bulk_schemas import ONE_OF, BulkFilter
from app.jobs.listing import OFFERED, RANGES
from app.lifecycle import lists
from app.lifecycle.lists import WALK_ROWS
from app.lifecycle.states import ExecutionStatus
from app.plumbing.database import Database
from app.plumbing.times import rfc3339
from tests.integration.app.rig import (
    Door,
    change,
    claimed,
    door,
    ending,
    fill,
    insert,
    new_jobs,
    new_term,
    opened,
    rows_of,
    running_job,
    settled,
    value_of,
)
from tests.support.engines import Engine, EngineName, Servers, migrated

HOUR_MS = 3_600_000


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    """An API over each engine."""
    async with door(migrated_engine) as api:
        yield api


@pytest.fixture
async def one_api(sqlite_engine: Engine) -> AsyncIterator[Door]:
    """An API over one engine, for what does not depend on it."""
    async with door(migrated(sqlite_engine)) as api:
        yield api


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def full_sqlite(servers: Servers) -> AsyncIterator[Engine]:
    """An engine that keeps 10,000 jobs, shared since no test here changes any."""
    async for engine in _full(servers, "sqlite+valkey", 10_000):
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def full_mariadb(servers: Servers) -> AsyncIterator[Engine]:
    """An engine that keeps 100,000 jobs, shared since no test here changes any."""
    async for engine in _full(servers, "mariadb+redis", 100_000):
        yield engine


async def _full(servers: Servers, name: EngineName, count: int) -> AsyncIterator[Engine]:
    engine = migrated(servers.engine(name))
    async with opened(engine) as database:
        await filled(database, count)
        if database.is_sqlite:
            await change(database, "ANALYZE")
    yield engine
    servers.drop(engine)


async def listed(api: Door, path: str = "/openapi/jobs", **query: Any) -> list[dict[str, Any]]:
    """Follow the cursors to the end."""
    items: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    while True:
        answer = await api.client.get(path, params=query | cursor)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        assert len(page["items"]) <= query.get("limit", 50)
        items += page["items"]
        if page["nextCursor"] is None:
            return items
        cursor = {"cursor": page["nextCursor"]}


async def ids(api: Door, **query: Any) -> list[int]:
    return [item["jobId"] for item in await listed(api, **query)]


async def test_pages_show_every_job_once_newest_first(api: Door) -> None:
    made = [await api.submitted() for _ in range(7)]
    assert await ids(api, limit=3) == made[::-1]
    assert await ids(api, limit=7) == made[::-1]
    assert await ids(api) == made[::-1]


async def test_each_filter_finds_its_own(api: Door) -> None:
    database = api.database
    one = await api.submitted(clientRequestId="a", jobName="close order 1", jobHandler="close")
    two = await api.submitted(clientRequestId="A", jobName="close order 2", labels={"team": "x"})
    three = await api.submitted(jobName="100%_close", labels={"team": "y"})
    four = await api.submitted(jobName="close order", labels={"team": "x"}, delayMs=60_000)
    (run,) = await claimed(database, [three], term=await new_term(database))
    await settled(database, ending(run, ExecutionStatus.SUCCEEDED, result='"r"'))
    for query, expected in (
        ({"clientRequestId": "a"}, [one]),
        ({"clientRequestId": "none"}, []),
        ({"handler": "close"}, [one]),
        ({"handler": "echo"}, [four, three, two]),
        ({"handler": "none"}, []),
        ({"status": "WAITING"}, [four, two, one]),
        ({"status": "SUCCEEDED"}, [three]),
        ({"status": "FAILED"}, []),
        ({"namePrefix": "close order"}, [four, two, one]),
        ({"namePrefix": "close order 2"}, [two]),
        ({"namePrefix": "100%_"}, [three]),
        ({"namePrefix": "%"}, []),
        ({"label": "team=x"}, [four, two]),
        ({"label": "team=z"}, []),
    ):
        for limit in (1, 50):
            assert await ids(api, **query, limit=limit) == expected, query


async def test_a_filter_is_compared_to_its_last_space(api: Door) -> None:
    short = await api.submitted(
        clientRequestId="one", jobName="Report", jobHandler="echo", labels={"t": "x"}
    )
    long = await api.submitted(jobName="Report of June", jobHandler="other", labels={"t": "x "})
    await change(api.database, "UPDATE job_info SET status = 2, finished_at = 1800000000000")
    ranges: list[dict[str, str]] = [{}, {"finishedFrom": "2020-01-01T00:00:00Z"}]
    for more in ranges:
        for name, value, found in (
            ("namePrefix", "Report", {short, long}),
            ("namePrefix", "Report ", {long}),
            ("label", "t=x", {short}),
            ("label", "t=x ", {long}),
            ("label", "t =x", set[int]()),
            ("handler", "echo", {short}),
            ("handler", "echo ", set[int]()),
            ("clientRequestId", "one", {short}),
            ("clientRequestId", "one ", set[int]()),
        ):
            answer = await api.client.get("/openapi/jobs", params={name: value, **more})
            assert {job["jobId"] for job in answer.json()["items"]} == found, (name, value, more)
    asked = {"action": "retry", "filter": {"namePrefix": "Report "}, "dryRun": True}
    await change(api.database, "UPDATE job_info SET status = 3")
    counted = (await api.client.post("/openapi/bulk", json=asked)).json()
    assert counted["matched"] == 1


async def test_a_range_of_creation_goes_with_every_filter(api: Door) -> None:
    database = api.database
    made = await insert(database, 20, labels={"team": "x"})
    base = 1_800_000_000_000
    for number, job_id in enumerate(made):
        await change(
            database,
            "UPDATE job_info SET created_at = :at WHERE id = :id",
            at=base + number * HOUR_MS,
            id=job_id,
        )
    since, until = rfc3339(base + 5 * HOUR_MS), rfc3339(base + 10 * HOUR_MS)
    for query in ({}, {"status": "WAITING"}, {"handler": "echo"}, {"label": "team=x"}):
        for limit in (2, 50):
            both = await ids(api, **query, createdFrom=since, createdTo=until, limit=limit)
            assert both == made[5:10][::-1]
        assert await ids(api, **query, createdFrom=since) == made[5:][::-1]
        assert await ids(api, **query, createdTo=until) == made[:10][::-1]
    key = await value_of(
        database, "SELECT client_request_id FROM job_info WHERE id = :id", id=made[7]
    )
    assert await ids(api, clientRequestId=key, createdFrom=since) == [made[7]]
    assert await ids(api, clientRequestId=key, createdTo=since) == []


async def test_a_range_finds_its_jobs_among_many(api: Door, monkeypatch: Any) -> None:
    monkeypatch.setattr(lists, "NEAR_IDS", 8)
    database = api.database
    (job,) = await new_jobs(database, 1)
    await fill(database, 3000, status=2, queue_id=job.queue_id, priority=5)
    # Created a minute apart, neighbours at times in the wrong order.
    await change(database, "UPDATE job_info SET created_at = id * 60000 + (id % 3) * 4000")
    rows = await rows_of(database, "SELECT id, created_at FROM job_info ORDER BY id DESC")
    for first, last in ((0, 1), (1, 17), (500, 740), (2900, 4000), (0, 5000)):
        low, high = first * 60_000, last * 60_000
        expected = [row["id"] for row in rows if low <= row["created_at"] < high]
        found = await ids(api, createdFrom=rfc3339(low), createdTo=rfc3339(high), limit=200)
        assert found == expected


async def test_a_job_in_a_list_is_its_document_without_executions_and_long_bodies(
    api: Door,
) -> None:
    database = api.database
    short = await running_job(database, params='{"a":1}')
    long = await running_job(database, params=f'"{"p" * 3000}"')
    await settled(database, ending(short, ExecutionStatus.SUCCEEDED, result='{"b":2}'))
    await settled(database, ending(long, ExecutionStatus.SUCCEEDED, result=f'"{"r" * 3000}"'))
    second, first = await listed(api)
    whole = (await api.client.get(f"/openapi/jobs/{short.job_id}")).json()
    assert first == whole | {"executions": [], "omitted": []}
    assert (first["params"], first["result"]) == ({"a": 1}, {"b": 2})
    assert (second["params"], second["result"]) == (None, None)
    assert second["omitted"] == ["params", "result"]


@pytest.mark.parametrize(
    "query",
    [
        "status=WAITING&handler=echo",
        "label=a=b&clientRequestId=x",
        "status=waiting",
        "status=",
        "status=WAITING&status=FAILED",
        "handler=",
        "handler=%00",
        "namePrefix=" + "x" * 257,
        "label=a",
        "label==b",
        "createdFrom=yesterday",
        "createdFrom=2026-01-01",
        "createdTo=2026-01-01T00:00:00",
        "createdTo=2026-13-01T00:00:00Z",
        "createdFrom=9999-12-31T23:59:59-14:00",
        "finishedFrom=2026-01-01T00:00:00Z&createdTo=2026-01-01T00:00:00Z",
        "finishedTo=yesterday",
        "finishedAfter=2026-01-01T00:00:00Z",
        "finishedFrom=2026-01-01T00:00:00Z&cursor=MTox",
        "cursor=MjoxOjE",
        "stauts=WAITING",
        "limit=0",
        "limit=201",
        "cursor=x",
    ],
)
async def test_what_is_not_offered_is_refused_with_a_sentence(one_api: Door, query: str) -> None:
    answer = await one_api.client.get(f"/openapi/jobs?{query}")
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed"), answer.text
    assert len(answer.json()["detail"]) > 10


async def test_a_time_may_have_any_offset(one_api: Door) -> None:
    job_id = await one_api.submitted()
    assert await ids(one_api, createdFrom="2020-01-01T00:00:00+02:00") == [job_id]
    raw = await one_api.client.get("/openapi/jobs?createdFrom=2020-01-01T00:00:00+02:00")
    assert [one["jobId"] for one in raw.json()["items"]] == [job_id]


async def test_a_page_may_be_short_while_more_follow(api: Door, monkeypatch: Any) -> None:
    monkeypatch.setattr(lists, "WALK_ROWS", 10)
    monkeypatch.setattr(lists, "FEW", 5)
    made = []
    for number in range(35):
        rare = number in (3, 17, 33)
        made.append(await api.submitted(jobName="rare" if rare else "common"))
    rare_ones = [made[33], made[17], made[3]]
    answer = (await api.client.get("/openapi/jobs?namePrefix=rare")).json()
    assert [one["jobId"] for one in answer["items"]] == rare_ones[:1]
    assert answer["nextCursor"]
    assert await ids(api, namePrefix="rare") == rare_ones
    assert await ids(api, status="WAITING", limit=4) == made[::-1]
    assert await ids(api, handler="echo") == made[::-1]


async def test_children_are_listed_latest_first(api: Door) -> None:
    database = api.database
    parent = await api.submitted()
    made = await insert(database, 12)
    places = [(1 + n // 6, n // 2 % 3, "ab"[n % 2]) for n in range(12)]
    for job_id, (nominal, shard, key) in zip(made, places, strict=True):
        await change(
            database,
            "UPDATE job_info SET parent_id = :parent, nominal_time = :nominal, "
            "shard_index = :shard, child_key = :key WHERE id = :id",
            parent=parent,
            nominal=nominal,
            shard=shard,
            key=key,
            id=job_id,
        )
    for limit in (1, 5, 50):
        found = await listed(api, f"/openapi/jobs/{parent}/children", limit=limit)
        assert [one["jobId"] for one in found] == made[::-1]
    assert await listed(api, f"/openapi/jobs/{made[0]}/children") == []
    for path, status in (
        ("/openapi/jobs/999999/children", 404),
        (f"/openapi/jobs/{parent}/children?cursor=x", 422),
        (f"/openapi/jobs/{parent}/children?cursor=WzEsMl0", 422),
    ):
        assert (await api.client.get(path)).status_code == status


@contextmanager
def seen(database: Database) -> Iterator[list[tuple[str, Any]]]:
    """Collect the reads that the database gets, with their values."""
    found: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, values: Any, *_rest: Any) -> None:
        if statement.startswith("SELECT") and "job_" in statement:
            found.append((statement, values))

    engine = database._readers.sync_engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(engine, "before_cursor_execute", note)


SAMPLES: dict[str, tuple[str, ...]] = {
    "status": ("FAILED", "SUCCEEDED"),
    "handler": ("echo", "rare"),
    "namePrefix": ("nothing", "filled"),
    "label": ("team=x", "all=y"),
    "clientRequestId": ("x",),
    "createdFrom": ("2023-11-14T22:13:22.500Z",),
    "createdTo": ("2023-11-14T22:13:27.500Z",),
    "finishedFrom": ("2023-11-14T22:15:02.500Z",),
    "finishedTo": ("2023-11-14T22:15:07.500Z",),
}
"""Values of which few and many jobs have the one; a filter that is new in the code has none here,
and fails."""
QUERIES = [
    dict(zip(names, values, strict=True))
    for names in OFFERED
    for values in itertools.product(*(SAMPLES[name] for name in names))
]


async def filled(database: Database, count: int) -> None:
    """Keep many finished jobs, a few that wait, and a label that all have."""
    (job,) = await new_jobs(database, 1)
    await fill(database, count, status=2, queue_id=job.queue_id, priority=5)
    await insert(database, 30, labels={"team": "x"})
    await insert(database, 10, job_handler="rare")
    await change(
        database,
        "UPDATE job_info SET created_at = 1700000000000 + id, "
        "finished_at = CASE WHEN status = 2 THEN 1700000100000 + id ELSE NULL END",
    )
    await change(
        database,
        "INSERT INTO job_label (job_id, name, value) SELECT id, 'all', 'y' FROM job_info",
    )


@pytest.mark.parametrize("query", QUERIES, ids=json.dumps)
async def test_mariadb_examines_few_rows_of_100000_for_any_filter(
    full_mariadb: Engine, query: dict[str, str]
) -> None:
    async with door(full_mariadb) as api:
        database = api.database
        with seen(database) as statements:
            await api.client.get("/openapi/jobs", params=query)
        assert 1 <= len(statements) <= 50
        assert await examined_rows(database, statements) <= 3 * WALK_ROWS + 3000


async def examined_rows(database: Database, statements: list[tuple[str, Any]]) -> float:
    """Carry statements out again, each by its key, and return how many rows MariaDB examined."""
    examined = 0.0
    for statement, values in statements:

        async def analyse(connection: Any, one: str = statement, given: Any = values) -> Any:
            return (
                await connection.exec_driver_sql(f"ANALYZE FORMAT=JSON {one}", given)
            ).scalar_one()

        plan = json.loads(await database.read(analyse))
        assert "filesort" not in json.dumps(plan) or "IN (" in statement
        for table in tables_in(plan):
            assert table["access_type"] != "ALL", (statement, table)
            examined += (table.get("r_rows", 0) or 0) * (table.get("r_loops", 1) or 1)
    return examined


def tables_in(plan: Any) -> list[dict[str, Any]]:
    """Return every table access in a JSON plan."""
    if isinstance(plan, dict):
        own = [plan["table"]] if isinstance(plan.get("table"), dict) else []
        own = [one for one in own if "access_type" in one]
        return own + [one for part in plan.values() for one in tables_in(part)]
    if isinstance(plan, list):
        return [one for part in plan for one in tables_in(part)]
    return []


@pytest.mark.parametrize("query", QUERIES, ids=json.dumps)
async def test_sqlite_searches_by_a_key_for_any_filter(
    full_sqlite: Engine, monkeypatch: Any, query: dict[str, str]
) -> None:
    # So few that a walk without its bound shows among 10,000 jobs.
    monkeypatch.setattr(lists, "WALK_ROWS", 500)
    monkeypatch.setattr(lists, "FEW", 200)
    async with door(full_sqlite) as api:
        database = api.database
        with seen(database) as statements:
            await api.client.get("/openapi/jobs", params=query)
        for statement, values in statements:

            async def explain(connection: Any, one: str = statement, given: Any = values) -> Any:
                rows = await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {one}", given)
                return [row.detail for row in rows]

            plan = await database.read(explain)
            assert not [step for step in plan if "SCAN job_" in step], (statement, plan)
            assert "TEMP B-TREE" not in str(plan) or "json_each" in statement, (statement, plan)
        assert await machine_steps(database, statements) <= 30_000


async def machine_steps(database: Database, statements: list[tuple[str, Any]]) -> int:
    """Carry statements out again and return how many steps SQLite's machine takes, in hundreds."""
    steps = itertools.count()

    async def replay(connection: Any) -> None:
        raw = (await connection.get_raw_connection()).driver_connection
        await raw.set_progress_handler(lambda: next(steps) < 0, 100)
        for statement, values in statements:
            (await connection.exec_driver_sql(statement, values)).all()
        await raw.set_progress_handler(None, 100)

    await database.read(replay)
    return next(steps) * 100


BULK_OTHERS = ((), *((to_camel(name),) for name in ONE_OF))
BULK = [
    dict(zip(names, (SAMPLES[name][0] for name in names), strict=True))
    for status in ((), ("status",))
    for other in BULK_OTHERS
    for ends in ((), *RANGES)
    if (names := (*status, *other, *ends))
]


def test_the_filters_of_bulk_actions_are_all_asked_for_here() -> None:
    asked = {name for one in BULK for name in one}
    assert asked == {to_camel(name) for name in BulkFilter.model_fields}


@pytest.mark.parametrize("narrowed", BULK, ids=json.dumps)
async def test_a_page_of_a_bulk_action_is_bounded_for_any_filter(
    full_mariadb: Engine, monkeypatch: Any, narrowed: dict[str, str]
) -> None:
    monkeypatch.setattr(bulk, "MOST_PAGES", 1)
    async with door(full_mariadb) as api:
        with seen(api.database) as statements:
            answer = await api.client.post(
                "/openapi/bulk", json={"action": "retry", "filter": narrowed, "dryRun": True}
            )
        assert answer.status_code == 200, answer.text
        assert await examined_rows(api.database, statements) <= 3 * WALK_ROWS + 3000


async def test_the_hot_table_has_no_other_index(one_api: Door) -> None:
    """What an index on the hot table costs is told in a decision (ADR 12), or it is not there."""

    async def ask(connection: Any) -> set[str]:
        rows = await connection.execute(
            text("SELECT name FROM sqlite_master WHERE type = 'index' AND tbl_name = 'job_info'")
        )
        return {row.name for row in rows if not row.name.startswith("sqlite_")}

    indexes = {"ix_job_info_claim", "ix_job_info_finished"}
    assert await one_api.database.read(ask) == indexes


async def finish(database: Database, ends: dict[int, int], *, status: int = 2) -> None:
    """Say when jobs ended."""
    for job_id, finished_at in ends.items():
        await change(
            database,
            f"UPDATE job_info SET status = {status}, finished_at = :at WHERE id = :id",
            at=finished_at,
            id=job_id,
        )


async def test_a_range_of_finishing_lists_the_latest_finished_first(api: Door) -> None:
    database = api.database
    made = await insert(database, 12, labels={"team": "x"})
    await api.submitted(labels={"team": "x"})
    base = 1_800_000_000_000
    # Not in the order of ids, and three at the very same moment.
    hours = {job_id: (n * 5) % 12 for n, job_id in enumerate(made)}
    hours |= dict.fromkeys(made[4:7], 6)
    await finish(database, {job_id: base + h * HOUR_MS for job_id, h in hours.items()})
    newest = sorted(made, key=lambda job_id: (hours[job_id], job_id), reverse=True)
    inside = [job_id for job_id in newest if 4 <= hours[job_id] < 9]
    since, until = rfc3339(base + 4 * HOUR_MS), rfc3339(base + 9 * HOUR_MS)
    for query in (
        {},
        {"status": "SUCCEEDED"},
        {"handler": "echo"},
        {"label": "team=x"},
        {"namePrefix": "a "},
    ):
        for limit in (1, 2, 50):
            found = await ids(api, **query, finishedFrom=since, finishedTo=until, limit=limit)
            assert found == inside, (query, limit)
        assert await ids(api, **query, finishedTo=rfc3339(base + 99 * HOUR_MS)) == newest
        assert await ids(api, **query, finishedFrom=until) == [
            job_id for job_id in newest if hours[job_id] >= 9
        ]
    for query in (
        {"status": "FAILED"},
        {"status": "WAITING"},
        {"handler": "none"},
        {"label": "team=y"},
        {"namePrefix": "b"},
        {"clientRequestId": "none"},
    ):
        assert await ids(api, **query, finishedFrom=since) == []
    key = await value_of(
        database, "SELECT client_request_id FROM job_info WHERE id = :id", id=inside[0]
    )
    assert await ids(api, clientRequestId=key, finishedFrom=since) == [inside[0]]
    assert await ids(api, clientRequestId=key, finishedTo=since) == []


async def test_a_page_by_finish_may_be_short_while_more_follow(api: Door, monkeypatch: Any) -> None:
    monkeypatch.setattr(lists, "WALK_ROWS", 10)
    database = api.database
    made = await insert(database, 35)
    await finish(database, dict.fromkeys(made, 1_800_000_000_000))
    rare = [made[33], made[17], made[3]]
    for job_id in rare:
        await finish(database, {job_id: 1_800_000_000_000}, status=3)
    query = {"status": "FAILED", "finishedFrom": "2020-01-01T00:00:00Z"}
    answer = (await api.client.get("/openapi/jobs", params=query | {"limit": "2"})).json()
    assert [one["jobId"] for one in answer["items"]] == rare[:1]
    assert answer["nextCursor"]
    for limit in (1, 2, 50):
        assert await ids(api, **query, limit=limit) == rare
        assert await ids(api, finishedFrom=query["finishedFrom"], limit=limit) == made[::-1]


async def test_a_job_that_is_opened_again_leaves_the_list_of_the_finished(api: Door) -> None:
    run = await running_job(api.database, max_retry=0)
    await settled(api.database, ending(run, ExecutionStatus.FAILED, error_code="e"))
    assert await ids(api, finishedFrom="2020-01-01T00:00:00Z") == [run.job_id]
    assert (await api.client.post(f"/openapi/jobs/{run.job_id}/retry")).status_code == 200
    assert await ids(api, finishedFrom="2020-01-01T00:00:00Z") == []


@pytest.mark.parametrize(
    ("name", "value", "detail"),
    [
        ("namePrefix", "", "must have 1 to 256 characters"),
        ("namePrefix", "\0", "must not have a NUL character"),
        ("label", "a", "must be name=value"),
        ("createdFrom", "today", "must be RFC 3339 text with an offset, as 2026-01-31T09:00:00Z"),
    ],
)
async def test_a_filter_that_cannot_be_is_told_what_it_must_be(
    one_api: Door, name: str, value: str, detail: str
) -> None:
    answer = await one_api.client.get("/openapi/jobs", params={name: value})
    assert (answer.status_code, answer.json()["detail"]) == (422, f"{name}: {detail}")
