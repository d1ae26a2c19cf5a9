"""The quota of stored bytes: counted from rows in slices, and refused beyond it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from app.access import stored_quota
from app.access.stored_quota import LetIn
from app.dispatch import stored as counting
from app.dispatch.stored import StoredCounter
from app.lifecycle.limits import Stored
from app.lifecycle.states import ExecutionStatus
from app.lifecycle.stored import Place, sum_slice, tell_stored
from app.plumbing.database import Database
from tests.integration.app.rig import (
    Door,
    body_of,
    change,
    door,
    ending,
    insert,
    opened,
    prune_all,
    rows_of,
    running_job,
    settled,
    value_of,
)
from tests.integration.app.schedule_rig import HOUR, fired, schedule_of
from tests.integration.app.test_api import counted, statements_of_a_submission
from tests.integration.app.test_claim_plan import explained
from tests.integration.app.test_limits import limit
from tests.integration.app.test_run_logs import line, part, ship
from tests.support.engines import Engine, migrated

LONG = "x" * 5000


@pytest_asyncio.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    """A dispatcher that anybody may call."""
    async with door(migrated_engine) as one:
        yield one


async def summed(database: Database, tenant_id: int = 0, *, limit: int) -> int:
    """Walk through all jobs of a tenant."""
    total, place = 0, Place()
    while True:
        found = await database.read(
            lambda connection, place=place: sum_slice(  # type: ignore[misc]
                connection, tenant_id, place, limit=limit
            )
        )
        total += found.bytes
        if found.onward is None:
            return total
        place = found.onward


async def in_the_rows(database: Database) -> int:
    """Measure every text of the tenant 0 by itself."""
    texts = [
        *(row["params"] for row in await rows_of(database, "SELECT params FROM job_info")),
        *(row["result"] for row in await rows_of(database, "SELECT result FROM job_log")),
        *(row["body"] for row in await rows_of(database, "SELECT body FROM job_payload")),
    ]
    lines = int(await value_of(database, "SELECT SUM(byte_count) FROM log_chunk"))
    return lines + sum(len((one or "").encode()) for one in texts)


async def stored_everything(api: Door) -> None:
    """Store something of every kind: short and long, of jobs with and without an id."""
    for number in range(5):
        await api.submitted(params={"n": number, "text": "ä" * 30})
    await api.submitted(params={"text": LONG + "ä"})
    made = await schedule_of(api, params={"text": LONG}, overlapPolicy="allow")
    for _ in range(3):
        await fired(api, back_ms=HOUR, schedule=made)
    for result in ('"short"', f'"{LONG}"'):
        run = await running_job(api.database)
        await ship(api, part(run, line(1), line(2)))
        await settled(api.database, ending(run, ExecutionStatus.SUCCEEDED, result=result))


@pytest.mark.parametrize("limit_of_slice", [1, 3, 500])
async def test_every_text_is_counted_once_whatever_the_slices(
    api: Door, limit_of_slice: int
) -> None:
    await stored_everything(api)
    await change(api.database, "UPDATE job_payload SET byte_count = NULL WHERE slot = 'params'")
    found = await summed(api.database, limit=limit_of_slice)
    assert found == await in_the_rows(api.database) > 6 * len(LONG)
    await insert(api.database, 3, tenant_id=1, params='"other"')
    assert await summed(api.database, limit=limit_of_slice) == found
    assert await summed(api.database, 1, limit=limit_of_slice) == 3 * len('"other"')


async def test_a_body_tells_its_length_by_a_column(api: Door) -> None:
    await stored_everything(api)
    rows = await rows_of(api.database, "SELECT body, byte_count FROM job_payload")
    assert len(rows) == 6
    assert all(row["byte_count"] == len(row["body"].encode()) for row in rows)


async def counted_anew(api: Door) -> None:
    """Count as the holder of the lock would, and let the dispatcher know."""
    counter = StoredCounter(api.parts.ground, api.parts.lock, api.parts.limits)
    while await counter.count_a_slice():
        continue
    await api.parts.limits.refresh()


async def test_beyond_the_quota_a_new_job_is_429_a_repeat_never_and_room_comes_back(
    api: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_quota, "SPAN_MS", 0)
    text = {"text": "x" * 200}
    size = len('{"text":"') + 200 + len('"}')
    first = await api.submit("first", params=text)
    await limit(api, storedBytes=3 * size)
    await counted_anew(api)
    assert [(await api.submit(params=text)).status_code for _ in range(2)] == [202, 202]
    refused = await api.submit("refused", params=text)
    assert (refused.status_code, refused.json()["code"]) == (429, "too_much_stored")
    assert f"{3 * size} bytes" in refused.json()["detail"]
    assert int(refused.headers["Retry-After"]) >= 1
    again = await api.client.post("/openapi/jobs", json=body_of("first", params=text))
    assert (again.status_code, again.json()["jobId"]) == (200, first.json()["jobId"])
    # Nor is one without params, while there is no room at all.
    assert (await api.submit()).status_code == 429
    await change(
        api.database,
        "UPDATE job_info SET status = 2, finished_at = 1 WHERE id = :id",
        id=first.json()["jobId"],
    )
    await prune_all(api.database, before_ms=1000)
    await counted_anew(api)
    assert (await api.submit("refused", params=text)).status_code == 202
    assert (await api.submit(params=text)).status_code == 429


async def test_a_burst_between_two_counts_is_counted_and_a_batch_taken_as_far_as_it_fits(
    api: Door,
) -> None:
    await limit(api, storedBytes=1000)
    # Nothing was counted yet.
    jobs = [body_of(params="x" * 198) for _ in range(8)]
    jobs.insert(2, {"jobName": "of no shape"})
    answer = await api.client.post("/openapi/jobs/batch", json={"jobs": jobs})
    statuses = [one["httpStatus"] for one in answer.json()["items"]]
    assert statuses == [202, 202, 422, 202, 202, 202, 429, 429, 429]
    await counted_anew(api)
    # What was let in within the second in which the count began is counted by both.
    assert (await api.submit(params="x")).status_code == 429


async def test_results_and_logs_count_and_children_of_schedules_are_not_refused(api: Door) -> None:
    run = await running_job(api.database)
    await settled(api.database, ending(run, ExecutionStatus.SUCCEEDED, result=f'"{LONG}"'))
    made = await schedule_of(api, params={"text": "x"})
    await limit(api, storedBytes=len(LONG))
    await counted_anew(api)
    assert (await api.submit()).status_code == 429
    assert await fired(api, back_ms=HOUR, schedule=made) == 1
    assert await value_of(api.database, "SELECT COUNT(*) FROM job_info WHERE parent_id > 0") == 1


async def test_without_the_quota_nothing_is_counted_and_a_submission_costs_nothing(
    api: Door,
) -> None:
    counter = StoredCounter(api.parts.ground, api.parts.lock, api.parts.limits)
    await limit(api, weight=2.0)
    with counted(api.database) as statements:
        assert not await counter.count_a_slice()
    assert statements == []
    plain = await statements_of_a_submission(api)
    await limit(api, storedBytes=1_000_000)
    await counted_anew(api)
    limited = await statements_of_a_submission(api)
    assert len(limited) == len(plain)


async def test_a_tenant_rests_between_counts_and_is_forgotten_without_the_quota(
    api: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = StoredCounter(api.parts.ground, api.parts.lock, api.parts.limits)
    monkeypatch.setattr(counting, "REST_SECONDS", 600.0)
    await limit(api, storedBytes=1000)
    assert await counter.count_a_slice()
    assert await counter.count_a_slice()
    assert not await counter.count_a_slice()
    assert len(await rows_of(api.database, "SELECT * FROM tenant_stored")) == 1
    monkeypatch.setattr(counting, "REST_SECONDS", 0.0)
    assert await counter.count_a_slice()
    await limit(api, storedBytes=None)
    told = Stored(5, 1)
    await api.database.write(lambda connection: tell_stored(connection, 7, told))
    assert await rows_of(api.database, "SELECT * FROM tenant_stored") == []


async def test_the_limit_is_shown_and_on_record(api: Door) -> None:
    assert (await limit(api, storedBytes=10**12))["storedBytes"] == 10**12
    newest = (await api.client.get("/openapi/audit")).json()["items"][0]
    assert (newest["before"], newest["after"]) == (
        {"storedBytes": None},
        {"storedBytes": 10**12},
    )
    assert (await limit(api, storedBytes=None))["storedBytes"] is None


async def test_the_walk_goes_by_an_index(sqlite_engine: Engine) -> None:
    async with opened(migrated(sqlite_engine)) as database:
        await insert(database, 5)
        for condition, order, used in (
            ("client_request_id IS NULL AND id > 0", "id", "client_request_id=? AND rowid>?"),
            ("client_request_id > ''", "client_request_id", "client_request_id>?"),
        ):
            query = (
                f"SELECT id FROM job_info WHERE tenant_id = 0 AND {condition} "
                f"ORDER BY {order} LIMIT 9"
            )
            (step, *more) = await explained(database, "EXPLAIN QUERY PLAN", query)
            assert used in step.detail
            assert more == []


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 100)), max_size=60),
    st.integers(0, 300_000),
)
def test_what_was_let_in_since_a_time_is_never_too_little_and_too_much_by_a_second(
    steps: list[tuple[int, int]], from_ms: int
) -> None:
    let_in, now, times = LetIn(), 0, []
    for pause, size in steps:
        now += pause
        let_in.add(size, now)
        times.append((now, size))
    found = let_in.since(from_ms)
    assert found >= sum(size for at, size in times if at >= from_ms)
    assert found <= sum(size for at, size in times if at > from_ms - 1000)


def test_what_nobody_asks_for_stays_bounded() -> None:
    let_in = LetIn()
    for second in range(5000):
        let_in.add(3, second * 1000)
    assert len(let_in._spans) <= 600
    assert let_in.since(0) == 15_000
    assert let_in.since(4_990_000) == 30
