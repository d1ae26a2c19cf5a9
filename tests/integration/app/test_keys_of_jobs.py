"""Keys that callers choose: so many at once, so many a second, counted from rows."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from app.dispatch.unblock import FIRST, Unblocker
from app.lifecycle.moves.claim import Claimed, claim
from app.lifecycle.moves.follow import Claimable
from app.lifecycle.moves.free_keys import free_keys
from app.lifecycle.moves.limit_keys import CONCURRENCY, Key, look_through_keys
from app.lifecycle.moves.release import release_stopped
from app.lifecycle.states import ExecutionStatus, JobStatus
from app.lifecycle.token import new_token
from app.plumbing.database import Database
from tests.integration.app.rig import (
    Door,
    assignments_for,
    body_of,
    change,
    claimed,
    door,
    ending,
    insert,
    new_jobs,
    new_term,
    opened,
    rows_of,
    settled,
    value_of,
)
from tests.integration.app.test_api import counted
from tests.support.engines import Engine

_S = ExecutionStatus
LOADED = {"concurrency_key": "k", "concurrency_limit": 2}
RATED = {"rate_key": "r", "rate_per_second": 10.0}
BY_THE_SECOND = {"rate_key": "r", "rate_per_second": 1.0}
SLOWLY = {"rate_key": "r", "rate_per_second": 0.1}


@pytest_asyncio.fixture
async def database(migrated_engine: Engine) -> AsyncIterator[Database]:
    """A migrated database."""
    async with opened(migrated_engine) as one:
        yield one


async def statuses(database: Database) -> Counter[str]:
    """Count the jobs by status."""
    rows = await rows_of(database, "SELECT status FROM job_info")
    return Counter(JobStatus(row["status"]).name for row in rows)


async def in_status(database: Database, status: JobStatus) -> list[int]:
    """Return the jobs of a status."""
    rows = await rows_of(
        database, "SELECT id FROM job_info WHERE status = :status ORDER BY id", status=int(status)
    )
    return [row["id"] for row in rows]


async def claim_waiting(database: Database, term: int) -> list[Claimed]:
    """Try to claim all that wait."""
    waiting = await in_status(database, JobStatus.WAITING)
    return await claimed(database, waiting, term=term) if waiting else []


async def slots(database: Database) -> dict[int, list[int]]:
    """Return who is listed: 0 those that hold the key, 1 those that wait for it."""
    rows = await rows_of(database, "SELECT waits, job_id FROM concurrency_slot ORDER BY job_id")
    found: dict[int, list[int]] = {0: [], 1: []}
    for row in rows:
        found[row["waits"]].append(row["job_id"])
    return found


async def test_of_one_key_as_many_run_as_may_and_the_others_leave_the_line(
    database: Database,
) -> None:
    ids = await insert(database, 5, **LOADED)
    others = await insert(database, 2)
    term = await new_term(database)
    runs = await claim_waiting(database, term)
    assert sorted(run.job_id for run in runs) == [*ids[:2], *others]
    assert await in_status(database, JobStatus.BLOCKED) == ids[2:]
    assert await slots(database) == {0: ids[:2], 1: ids[2:]}


async def test_the_end_of_one_lets_the_next_by_priority_time_and_id_begin(
    database: Database,
) -> None:
    term = await new_term(database)
    await insert(database, 2, **LOADED)
    runs = await claim_waiting(database, term)
    low = await insert(database, 2, **LOADED, priority=1)
    (high,) = await insert(database, 1, **LOADED, priority=8)
    await claim_waiting(database, term)
    assert await in_status(database, JobStatus.BLOCKED) == [*low, high]
    (done,) = await settled(database, ending(runs[0], _S.SUCCEEDED))
    assert await in_status(database, JobStatus.WAITING) == [high]
    queue_id = await value_of(database, "SELECT MIN(id) FROM queue")
    due = await value_of(database, "SELECT next_trigger_time FROM job_info WHERE id = :id", id=high)
    assert done.followed.claimable == (Claimable(queue_id, 8, due),)
    (next_run,) = await claim_waiting(database, term)
    await settled(database, ending(runs[1], _S.SUCCEEDED), ending(next_run, _S.SUCCEEDED))
    assert await in_status(database, JobStatus.WAITING) == low
    for run in await claim_waiting(database, term):
        await settled(database, ending(run, _S.SUCCEEDED))
    assert await statuses(database) == {"SUCCEEDED": 5}
    assert await rows_of(database, "SELECT * FROM concurrency_slot") == []
    assert await rows_of(database, "SELECT * FROM limit_key") == []


@pytest.mark.parametrize(
    ("status", "becomes"),
    [
        (_S.SUCCEEDED, "SUCCEEDED"),
        (_S.FAILED, "WAITING"),
        (_S.TIMED_OUT, "WAITING"),
        (_S.LOST, "WAITING"),
        (_S.RETURNED, "WAITING"),
    ],
)
async def test_every_end_of_a_run_frees_the_key(
    database: Database, status: ExecutionStatus, becomes: str
) -> None:
    term = await new_term(database)
    limit_1 = {"concurrency_key": "k", "concurrency_limit": 1}
    first, second = await insert(database, 2, **limit_1, retry_interval_ms=600_000)
    (run,) = await claim_waiting(database, term)
    assert await in_status(database, JobStatus.BLOCKED) == [second]
    await settled(database, ending(run, status))
    rows = await rows_of(database, "SELECT id, status FROM job_info")
    by_id = {row["id"]: JobStatus(row["status"]).name for row in rows}
    assert by_id == {first: becomes, second: "WAITING"}


async def test_a_thread_that_goes_on_holds_the_key_until_it_has_ended(database: Database) -> None:
    term = await new_term(database)
    limit_1 = {"concurrency_key": "k", "concurrency_limit": 1}
    _, second = await insert(database, 2, **limit_1)
    (run,) = await claim_waiting(database, term)
    await settled(database, ending(run, _S.TIMED_OUT, stopping=True, retryable=False))
    assert await in_status(database, JobStatus.BLOCKED) == [second]
    await database.write(lambda connection: free_keys(connection, [Key(0, "k")]))
    assert await in_status(database, JobStatus.BLOCKED) == [second]
    released = await database.write(
        lambda connection: release_stopped(connection, [run.execution_id])
    )
    assert await in_status(database, JobStatus.WAITING) == [second]
    assert [one.stood_behind for one in released] == [False, True]


@pytest.mark.parametrize("now", ["k2", None])
async def test_a_job_that_left_its_key_holds_it_no_longer_than_its_old_run(
    database: Database, now: str | None
) -> None:
    term = await new_term(database)
    limit_1 = {"concurrency_key": "k", "concurrency_limit": 1}
    first, second = await insert(database, 2, **limit_1, max_retry=3, retry_interval_ms=0)
    (run,) = await claim_waiting(database, term)
    await settled(database, ending(run, _S.TIMED_OUT, stopping=True))
    await change(
        database,
        "UPDATE job_info SET concurrency_key = :now, concurrency_limit = :limit WHERE id = :id",
        now=now,
        limit=None if now is None else 1,
        id=first,
    )
    await database.write(lambda connection: free_keys(connection, [Key(0, "k")]))
    assert await in_status(database, JobStatus.BLOCKED) == [second]
    await database.write(lambda connection: release_stopped(connection, [run.execution_id]))
    assert [one.job_id for one in await claimed(database, [first], term=term)] == [first]
    await database.write(lambda connection: free_keys(connection, [Key(0, "k")]))
    assert [one.job_id for one in await claim_waiting(database, term)] == [second]


async def test_keys_are_those_of_one_tenant(database: Database) -> None:
    term = await new_term(database)
    limit_1 = {"concurrency_key": "k", "concurrency_limit": 1}
    await insert(database, 2, **limit_1)
    await insert(database, 2, **limit_1, tenant_id=1)
    assert len(await claim_waiting(database, term)) == 2


async def test_what_stands_behind_with_the_same_key_is_blocked_with_it(
    database: Database,
) -> None:
    term = await new_term(database)
    ids = await insert(database, 200, concurrency_key="k", concurrency_limit=1)
    plain = await insert(database, 3)
    runs = await claimed(database, ids[:5], term=term)
    assert [run.job_id for run in runs] == ids[:1]
    assert await in_status(database, JobStatus.WAITING) == plain


async def test_a_claim_of_an_old_term_blocks_and_charges_nothing(database: Database) -> None:
    old = await new_term(database)
    await insert(database, 3, **LOADED, **RATED)
    await new_term(database)
    assert await claim_waiting(database, old) == []
    assert await statuses(database) == {"WAITING": 3}
    assert await rows_of(database, "SELECT * FROM limit_key") == []


async def test_never_too_many_run_and_none_is_left_behind_whatever_comes_at_once(
    database: Database,
) -> None:
    term = await new_term(database)
    dice = random.Random(7)
    keys = ("a", "b", "c")
    for key in keys:
        await insert(database, 12, concurrency_key=key, concurrency_limit=2, max_retry=1)
    running: dict[str, Claimed] = {}
    seen = 0

    async def end(run: Claimed) -> None:
        outcome = dice.choice([_S.SUCCEEDED, _S.SUCCEEDED, _S.FAILED, _S.RETURNED])
        await settled(database, ending(run, outcome))

    for _ in range(400):
        waiting = await in_status(database, JobStatus.WAITING)
        chosen = dice.sample(waiting, min(len(waiting), 8))
        ends = dice.sample(list(running.values()), dice.randint(0, len(running)))
        for run in ends:
            del running[run.execution_id]
        claims = [claimed(database, chosen, term=term)] if chosen else []
        results = await asyncio.gather(*claims, *(end(run) for run in ends))
        if claims:
            for run in results[0] or []:
                running[run.execution_id] = run
        rows = await rows_of(
            database,
            "SELECT concurrency_key AS name, COUNT(*) AS n FROM job_info WHERE status = 1 "
            "GROUP BY concurrency_key",
        )
        seen = max([seen, *(row["n"] for row in rows)])
        assert all(row["n"] <= 2 for row in rows), rows
        await change(database, "UPDATE job_info SET next_trigger_time = 1 WHERE status = 0")
        blocked = await in_status(database, JobStatus.BLOCKED)
        if not running and not await in_status(database, JobStatus.WAITING):
            assert blocked == [], "some are left behind"
            break
    assert seen == 2
    assert set(await statuses(database)) <= {"SUCCEEDED", "FAILED"}
    assert await rows_of(database, "SELECT * FROM concurrency_slot") == []


async def test_runs_of_one_rate_key_get_times_so_far_apart(database: Database) -> None:
    term = await new_term(database)
    ids = await insert(database, 4, **SLOWLY)
    later: list[Claimable] = []
    assignments = await assignments_for(database, ids)
    runs = await database.write(
        lambda connection: claim(
            connection, database, assignments, token=new_token(), term=term, later=later
        )
    )
    assert [run.job_id for run in runs] == ids[:1]
    claimed_at = runs[0].claimed_at
    rows = await rows_of(
        database, "SELECT next_trigger_time AS due FROM job_info WHERE status = 0 ORDER BY id"
    )
    assert [row["due"] - claimed_at for row in rows] == [10_000, 20_000, 30_000]
    assert [one.due_ms - claimed_at for one in later] == [10_000, 20_000, 30_000]

    # At its time it begins without paying again, and what comes new stands behind all of them.
    await change(
        database,
        "UPDATE job_info SET next_trigger_time = 5, rate_due = 5 WHERE id = :id",
        id=ids[1],
    )
    await change(database, "UPDATE limit_key SET begins_at = 0")
    new = await insert(database, 1, **SLOWLY)
    runs = await claimed(database, [ids[1], *new], term=term)
    assert [run.job_id for run in runs] == [ids[1]]
    due = await value_of(
        database, "SELECT next_trigger_time FROM job_info WHERE id = :id", id=new[0]
    )
    assert due == claimed_at + 40_000


async def test_times_that_passed_in_an_outage_make_no_burst(database: Database) -> None:
    """A second's worth may begin late, together; the others get times again, in their order."""
    term = await new_term(database)
    ids = await insert(database, 40, **BY_THE_SECOND)
    await change(database, "UPDATE job_info SET next_trigger_time = id, rate_due = id")
    later: list[Claimable] = []
    assignments = await assignments_for(database, ids)
    runs = await database.write(
        lambda connection: claim(
            connection, database, assignments, token=new_token(), term=term, later=later
        )
    )
    assert [run.job_id for run in runs] == ids[:2]
    began = runs[0].claimed_at
    assert [one.due_ms - began for one in later] == [1000 * number for number in range(1, 39)]
    # At its new time each has room, and what comes new stands behind all of them.
    for number, one in enumerate(ids[2:5]):
        back = 1000 * (number + 1)
        await change(
            database,
            f"UPDATE job_info SET next_trigger_time = next_trigger_time - {back}, "
            f"rate_due = rate_due - {back} WHERE id = {one}",
        )
        await change(database, "UPDATE limit_key SET begins_at = begins_at - 1000000")
        assert [run.job_id for run in await claimed(database, [one], term=term)] == [one]
    assert await claimed(database, await insert(database, 1, **BY_THE_SECOND), term=term) == []
    due = "SELECT MAX(next_trigger_time) FROM job_info"
    assert await value_of(database, due) == began + 1000 * 39


async def test_a_long_line_is_let_go_as_far_as_there_is_room(database: Database) -> None:
    term = await new_term(database)
    (holder,) = await insert(database, 1, concurrency_key="k", concurrency_limit=1)
    (run,) = await claimed(database, [holder], term=term)
    ids = await insert(database, 50, concurrency_key="k", concurrency_limit=45)
    await change(database, "UPDATE job_info SET concurrency_limit = 1 WHERE status = 0")
    assert await claimed(database, ids[:1], term=term) == []
    assert await in_status(database, JobStatus.BLOCKED) == ids
    await change(database, "UPDATE job_info SET concurrency_limit = 45 WHERE status = 6")
    gone = (ids[0], ids[9])
    await change(database, f"UPDATE job_info SET status = 5 WHERE id IN {gone}")
    await settled(database, ending(run, _S.SUCCEEDED))
    left = [one for one in ids if one not in gone]
    assert await in_status(database, JobStatus.WAITING) == left[:45]
    assert await in_status(database, JobStatus.BLOCKED) == left[45:]
    assert (await slots(database))[1] == left[45:]


async def test_a_job_without_a_key_costs_no_statement_more(database: Database) -> None:
    term = await new_term(database)
    plain = await insert(database, 1)
    with counted(database) as statements:
        (run,) = await claimed(database, plain, term=term)
        await settled(database, ending(run, _S.SUCCEEDED))
    assert not [one for one in statements if "limit_key" in one or "concurrency_slot" in one]


@pytest_asyncio.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    """A dispatcher that anybody may call."""
    async with door(migrated_engine) as one:
        yield one


async def test_keys_are_shown_and_part_of_the_request(api: Door) -> None:
    fields = {"concurrencyKey": "customer-7", "concurrencyLimit": 3, "rateKey": "mail"}
    answer = await api.submit("one", **fields, ratePerSecond=0.5)
    assert answer.status_code == 202, answer.text
    shown = (await api.client.get(answer.headers["Location"])).json()
    for job in (answer.json(), shown):
        assert {name: job[name] for name in fields} == fields
        assert job["ratePerSecond"] == 0.5
    again = await api.client.post("/openapi/jobs", json=body_of("one", **fields, ratePerSecond=1))
    assert again.status_code == 409
    assert again.json()["fields"] == ["ratePerSecond"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrencyKey": "k"},
        {"concurrencyLimit": 1},
        {"concurrencyKey": "k", "concurrencyLimit": 0},
        {"concurrencyKey": "k", "concurrencyLimit": 1001},
        {"concurrencyKey": "k" * 129, "concurrencyLimit": 1},
        {"rateKey": "k"},
        {"rateKey": "k", "ratePerSecond": 0},
        {"rateKey": "k", "ratePerSecond": 10_001},
        {"concurrencyKey": "k", "intervalMs": 60_000},
        {"ratePerSecond": 1, "cronExpr": "0 * * * *"},
    ],
)
async def test_half_a_key_is_refused(api: Door, wrong: dict[str, Any]) -> None:
    answer = await api.submit(**wrong)
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed")


@pytest.mark.parametrize("verb", ["cancel", "pause"])
async def test_one_that_was_let_go_and_does_not_begin_lets_the_next_go(
    api: Door, verb: str
) -> None:
    term = await new_term(api.database)
    limit_1 = {"concurrencyKey": "k", "concurrencyLimit": 1}
    first, second, third = [await api.submitted(**limit_1) for _ in range(3)]
    (run,) = await claim_waiting(api.database, term)
    assert run.job_id == first
    await settled(api.database, ending(run, _S.SUCCEEDED))
    assert await in_status(api.database, JobStatus.WAITING) == [second]
    answer = await api.client.post(f"/openapi/jobs/{second}/{verb}")
    assert answer.status_code == 200, answer.text
    assert await in_status(api.database, JobStatus.WAITING) == [third]


async def test_a_blocked_one_can_be_cancelled_and_is_passed_over(api: Door) -> None:
    term = await new_term(api.database)
    limit_1 = {"concurrencyKey": "k", "concurrencyLimit": 1}
    _, second, third = [await api.submitted(**limit_1) for _ in range(3)]
    (run,) = await claim_waiting(api.database, term)
    answer = await api.client.post(f"/openapi/jobs/{second}/cancel")
    assert answer.json()["status"] == "CANCELLED"
    assert await in_status(api.database, JobStatus.BLOCKED) == [third]
    await settled(api.database, ending(run, _S.SUCCEEDED))
    assert await in_status(api.database, JobStatus.WAITING) == [third]


async def test_a_cancelled_run_holds_the_key_until_its_worker_has_stopped_it(api: Door) -> None:
    term = await new_term(api.database)
    limit_1 = {"concurrencyKey": "k", "concurrencyLimit": 1}
    first, second = [await api.submitted(**limit_1) for _ in range(2)]
    (run,) = await claim_waiting(api.database, term)
    await api.client.post(f"/openapi/jobs/{first}/cancel")
    assert await in_status(api.database, JobStatus.BLOCKED) == [second]
    await settled(api.database, ending(run, _S.CANCELLED))
    assert await in_status(api.database, JobStatus.WAITING) == [second]


async def test_what_no_end_could_let_go_is_found(api: Door) -> None:
    database = api.database
    term = await new_term(database)
    limit_1 = {"concurrencyKey": "k", "concurrencyLimit": 1}
    _, second = [await api.submitted(**limit_1) for _ in range(2)]
    await claim_waiting(database, term)
    found = await database.read(
        lambda connection: look_through_keys(connection, FIRST, idle_before_ms=0, limit=1)
    )
    assert found == ([Key(0, "k")], [], (0, CONCURRENCY, "k"))
    unblocker = Unblocker(api.parts.ground, api.parts.lock)
    assert await unblocker.look() == 0
    # As if the run had ended without a word.
    await change(database, "UPDATE job_info SET status = 2 WHERE status = 1")
    assert await unblocker.look() == 1
    assert await in_status(database, JobStatus.WAITING) == [second]
    assert await unblocker.look() == 0


async def test_a_rate_that_nobody_uses_is_forgotten(api: Door) -> None:
    ids = [await api.submitted(rateKey=name, ratePerSecond=1) for name in ("old", "new")]
    await claimed(api.database, ids, term=await new_term(api.database))
    await change(api.database, "UPDATE limit_key SET next_at = 5, begins_at = 5 WHERE name = 'old'")
    await Unblocker(api.parts.ground, api.parts.lock).look()
    assert [row["name"] for row in await rows_of(api.database, "SELECT name FROM limit_key")] == [
        "new"
    ]


async def test_a_blocked_one_expires_like_any_other(api: Door) -> None:
    term = await new_term(api.database)
    limit_1 = {"concurrencyKey": "k", "concurrencyLimit": 1}
    await api.submitted(**limit_1)
    second = await api.submitted(**limit_1, expiresAt="2199-01-01T00:00:00Z")
    third = await api.submitted(**limit_1)
    (run,) = await claim_waiting(api.database, term)
    await change(api.database, "UPDATE job_info SET expires_at = 1 WHERE id = :id", id=second)
    await change(api.database, "UPDATE job_expiry SET look_at = 1")
    assert await api.parts.expiry.look() == [second]
    assert await in_status(api.database, JobStatus.BLOCKED) == [third]
    await settled(api.database, ending(run, _S.SUCCEEDED))
    assert await in_status(api.database, JobStatus.WAITING) == [third]


@pytest.mark.parametrize("keys", [2, 130])
async def test_however_many_keys_a_batch_has_it_costs_as_many_statements(
    database: Database, keys: int
) -> None:
    term = await new_term(database)
    both = {"concurrency_limit": 1, "rate_per_second": 10_000.0}
    first: list[int] = []
    for number in range(keys):
        names = {"concurrency_key": f"c{number}", "rate_key": f"r{number}"}
        first += (await insert(database, 2, **both, **names))[:1]
    with counted(database) as claiming:
        runs = await claimed(database, first, term=term)
    assert [run.job_id for run in runs] == first
    assert len(about_keys(claiming)) == 7
    others = await in_status(database, JobStatus.WAITING)
    assert len(others) == keys
    with counted(database) as blocking:
        assert await claimed(database, others, term=term) == []
    # Some may have been put off by their rates.
    assert len(about_keys(blocking)) <= 6
    await change(
        database,
        "UPDATE job_info SET next_trigger_time = 5, rate_due = 5 WHERE status = 0",
    )
    if await in_status(database, JobStatus.WAITING):
        await claim_waiting(database, term)
    assert await in_status(database, JobStatus.BLOCKED) == others
    with counted(database) as settling:
        await settled(database, *(ending(run, _S.SUCCEEDED) for run in runs))
    # Lock, holders, forget those that are gone, the lines (100 a statement), forget those let go.
    assert len(about_keys(settling)) == 5 + (keys - 1) // 100
    assert await in_status(database, JobStatus.WAITING) == others
    runs = await claimed(database, others, term=term)
    await settled(database, *(ending(run, _S.SUCCEEDED) for run in runs))
    assert await rows_of(database, "SELECT * FROM concurrency_slot") == []
    assert await rows_of(database, "SELECT * FROM limit_key WHERE kind = 0") == []


def about_keys(statements: list[str]) -> list[str]:
    """Return those that are about keys."""
    return [one for one in statements if "limit_key" in one or "concurrency_slot" in one]


async def test_a_new_job_of_a_busy_key_costs_a_bounded_number_of_statements(
    database: Database,
) -> None:
    term = await new_term(database)
    jobs = await new_jobs(database, 1, **LOADED)
    assert jobs[0].concurrency_limit == 2
    ids = await insert(database, 60, **LOADED)
    with counted(database) as statements:
        await claimed(database, ids[:10], term=term)
    assert len(about_keys(statements)) <= 4, about_keys(statements)
