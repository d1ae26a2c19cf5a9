"""Limits of tenants: what is refused, what never is, and what they cost."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from app.access import submission_quota
from app.access.submission_quota import LocalBucket, SubmissionQuota, Taken, burst_of
from app.lifecycle.limits import count_running, count_waiting
from tests.integration.app.rig import (
    Door,
    body_of,
    change,
    door,
    fill,
    insert,
    new_jobs,
    opened,
    rows_of,
    running_job,
    value_of,
)
from tests.integration.app.test_api import statements_of_a_submission
from tests.integration.app.test_claim_plan import explained
from tests.support.engines import Engine, migrated


@pytest_asyncio.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    """A dispatcher that anybody may call."""
    async with door(migrated_engine) as one:
        yield one


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a slow machine be no Redis that does not answer."""
    monkeypatch.setattr(submission_quota, "REDIS_SECONDS", 30.0)


async def limit(api: Door, **limits: Any) -> dict[str, Any]:
    """Limit the tenant 0, and return once that is known to the dispatcher."""
    answer = await api.client.patch("/openapi/tenants/0", json={"limits": limits})
    assert answer.status_code == 200, answer.text
    await api.parts.limits.refresh()
    shown: dict[str, Any] = answer.json()["limits"]
    return shown


async def submit_all(api: Door, count: int) -> list[httpx.Response]:
    """Submit jobs one after the other."""
    return [await api.submit() for _ in range(count)]


async def test_limits_are_shown_changed_taken_away_and_on_record(api: Door) -> None:
    shown = (await api.client.get("/openapi/tenants/0")).json()["limits"]
    assert shown == {
        "weight": 1.0,
        "submissionsPerSecond": None,
        "waitingJobs": None,
        "runningJobs": None,
        "mayBorrow": True,
        "storedBytes": None,
    }
    assert (await limit(api, weight=2.5, waitingJobs=10))["weight"] == 2.5
    changed = await limit(api, runningJobs=3, mayBorrow=False)
    assert (changed["weight"], changed["waitingJobs"], changed["runningJobs"]) == (2.5, 10, 3)
    (listed,) = (await api.client.get("/openapi/tenants")).json()["items"]
    assert listed["limits"] == changed
    newest = (await api.client.get("/openapi/audit")).json()["items"][0]
    assert newest["before"] == {"runningJobs": None, "mayBorrow": True}
    assert newest["after"] == {"runningJobs": 3, "mayBorrow": False}
    cleared = await limit(api, weight=None, waitingJobs=None, runningJobs=None, mayBorrow=None)
    assert cleared == shown
    assert await rows_of(api.database, "SELECT * FROM tenant_limits") == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": 0},
        {"weight": 1001},
        {"submissionsPerSecond": 0},
        {"waitingJobs": 0},
        {"waitingJobs": 1.5},
        {"runningJobs": -1},
        {"runningJobs": "3"},
        {"mayBorrow": 1},
        {"unknown": 1},
    ],
)
async def test_a_limit_that_makes_no_sense_is_refused(api: Door, wrong: dict[str, Any]) -> None:
    answer = await api.client.patch("/openapi/tenants/0", json={"limits": wrong})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == f"/limits/{next(iter(wrong))}"


async def test_beyond_its_rate_a_new_job_is_429_and_a_repeat_never(api: Door) -> None:
    await limit(api, submissionsPerSecond=0.02)
    first = await api.submit("the-first")
    assert first.status_code == 202
    assert first.headers["RateLimit-Policy"] == '"submissions";q=1;w=50'
    assert first.headers["RateLimit"].startswith('"submissions";r=0;t=')
    refused = await api.submit()
    assert (refused.status_code, refused.json()["code"]) == (429, "too_many_submissions")
    assert 40 <= int(refused.headers["Retry-After"]) <= 50
    assert refused.headers["RateLimit"].startswith('"submissions";r=0;t=')
    again = await api.client.post("/openapi/jobs", json=body_of("the-first"))
    assert again.status_code == 200
    assert again.json()["jobId"] == first.json()["jobId"]
    assert await value_of(api.database, "SELECT COUNT(*) FROM job_info") == 1


async def test_a_submission_that_was_counted_and_refused_tells_what_is_left(api: Door) -> None:
    await limit(api, submissionsPerSecond=5.0)
    await api.submitted(clientRequestId="taken")
    conflict = await api.submit("taken", params=1)
    assert (conflict.status_code, conflict.json()["code"]) == (409, "request_conflict")
    assert conflict.headers["RateLimit-Policy"] == '"submissions";q=5;w=1'
    assert conflict.headers["RateLimit"].startswith('"submissions";r=')


async def test_of_a_batch_as_many_as_there_is_room_for_are_taken_in_order(api: Door) -> None:
    await limit(api, submissionsPerSecond=5.0)
    known = (await api.submit("known")).json()["jobId"]
    jobs = [body_of() for _ in range(10)]
    jobs.insert(8, body_of("known"))
    jobs.insert(0, {"jobName": "of no shape"})
    answer = await api.client.post("/openapi/jobs/batch", json={"jobs": jobs})
    statuses = [one["httpStatus"] for one in answer.json()["items"]]
    assert statuses[0] == 422
    taken = statuses.count(202)
    # Four are left; one more a fifth of a second.
    assert 4 <= taken <= 8
    assert statuses[1 : taken + 1] == [202] * taken
    assert statuses[9] == (202 if taken >= 9 else 200)
    assert answer.json()["items"][9]["jobId"] == known
    assert answer.headers["RateLimit-Policy"] == '"submissions";q=5;w=1'
    assert answer.headers["RateLimit"].startswith('"submissions";r=0;t=')


async def test_a_batch_of_a_tenant_without_a_rate_has_no_such_header(api: Door) -> None:
    answer = await api.client.post("/openapi/jobs/batch", json={"jobs": [body_of()]})
    assert "RateLimit" not in answer.headers


async def test_of_a_high_rate_a_little_is_taken_ahead_and_no_more_let_in(
    api: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = 50.0
    await limit(api, submissionsPerSecond=rate)
    taken: list[int] = []
    take = SubmissionQuota._take

    async def noted(self: SubmissionQuota, tenant_id: int, each: float, wanted: int) -> Taken:
        taken.append(wanted)
        return await take(self, tenant_id, each, wanted)

    monkeypatch.setattr(SubmissionQuota, "_take", noted)
    monkeypatch.setattr(submission_quota, "AHEAD_SECONDS", 0.08)
    monkeypatch.setattr(submission_quota, "AHEAD_KEPT_SECONDS", 60.0)
    began = time.monotonic()
    first = await submit_all(api, 20)
    assert {answer.status_code for answer in first} == {202}
    # One that asks and four ahead, which is what 80 ms bring.
    assert taken == [5] * 4
    left = [int(one.headers["RateLimit"].split(";")[1].removeprefix("r=")) for one in first]
    assert all(later <= one + 1 for one, later in pairwise(left[:5])), left
    codes = Counter(one.status_code for one in first)
    for _ in range(20):
        if codes[429]:
            break
        answers = await asyncio.gather(*(api.submit() for _ in range(80)))
        codes.update(answer.status_code for answer in answers)
    assert codes[202] <= rate + rate * (time.monotonic() - began) + 1
    assert set(codes) == {202, 429}


async def test_what_was_taken_ahead_is_given_up_when_it_is_old_or_the_rate_changes(
    api: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission_quota, "AHEAD_KEPT_SECONDS", 0.0)
    await limit(api, submissionsPerSecond=100.0)
    quota = api.parts.submitter._quota
    assert (await api.submit()).status_code == 202
    (ahead,) = quota._ahead.values()
    assert ahead.count == 2
    assert ahead.spend(1, 100.0) is None
    monkeypatch.setattr(submission_quota, "AHEAD_KEPT_SECONDS", 60.0)
    assert (await api.submit()).status_code == 202
    (ahead,) = quota._ahead.values()
    assert ahead.spend(1, 99.0) is None
    assert ahead.spend(3, 100.0) is None
    assert ahead.spend(2, 100.0) is not None
    assert ahead.spend(1, 100.0) is None


async def test_only_those_wait_for_a_count_for_whom_what_is_known_would_not_do(
    api: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    await limit(api, waitingJobs=10)
    assert (await api.submit()).status_code == 202
    (counted,) = api.parts.submitter._quota._counted.values()
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow(*given: Any, **named: Any) -> int:
        asked.set()
        await go_on.wait()
        return await count_waiting(*given, **named)

    monkeypatch.setattr(submission_quota, "count_waiting", slow)
    counted.until, counted.at_last = 0.0, float("inf")
    assert (await api.submit()).status_code == 202
    await asked.wait()
    batch = {"jobs": [body_of() for _ in range(9)]}
    waits = asyncio.ensure_future(api.client.post("/openapi/jobs/batch", json=batch))
    assert (await api.submit()).status_code == 202
    assert not waits.done()
    go_on.set()
    statuses = [one["httpStatus"] for one in (await waits).json()["items"]]
    # Three of ten wait; one of them may be counted twice, since it came while it was counted.
    assert statuses.count(202) in (6, 7)
    counted.until = counted.at_last = 0.0
    assert (await api.client.post("/openapi/jobs/batch", json=batch)).status_code == 200
    assert await value_of(api.database, "SELECT COUNT(*) FROM job_info") <= 10


async def test_those_who_come_at_once_share_what_there_is(api: Door) -> None:
    rate = 5.0
    await limit(api, submissionsPerSecond=rate)
    began = time.monotonic()
    answers = await asyncio.gather(*(api.submit() for _ in range(60)))
    elapsed = time.monotonic() - began
    codes = Counter(answer.status_code for answer in answers)
    assert set(codes) == {202, 429}
    # The burst, and what comes while they are being answered.
    assert rate <= codes[202] <= rate + rate * elapsed + 1
    assert await value_of(api.database, "SELECT COUNT(*) FROM job_info") == codes[202]


async def test_one_rate_holds_over_all_dispatchers(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as one, door(migrated_engine) as other:
        await limit(one, submissionsPerSecond=0.1)
        await other.parts.limits.refresh()
        assert (await one.submit()).status_code == 202
        assert (await other.submit()).status_code == 429


async def test_without_redis_each_dispatcher_counts_and_refuses_nobody_for_that(
    migrated_engine: Engine,
) -> None:
    away = "redis://127.0.0.1:9/0"
    async with door(migrated_engine, redis_url=away) as one:
        await limit(one, submissionsPerSecond=3.0)
        statuses = [answer.status_code for answer in await submit_all(one, 3)]
        assert statuses == [202] * 3


@given(
    st.floats(0.01, 1000), st.lists(st.tuples(st.integers(1, 50), st.floats(0, 5e6)), max_size=40)
)
def test_a_bucket_gives_no_more_than_its_burst_and_its_rate(
    rate: float, asked: list[tuple[int, float]]
) -> None:
    bucket, each, burst = LocalBucket(), 1_000_000 / rate, burst_of(rate)
    began = now = 1_000_000_000.0
    given_out = 0
    for wanted, pause in asked:
        now += pause
        taken = bucket.take(wanted, each=each, burst=burst, now=now)
        assert 0 <= taken.taken <= wanted
        assert taken.taken == wanted or taken.left == 0
        given_out += taken.taken
        assert given_out <= burst + (now - began) / each + 1e-3
    rested = bucket.take(burst, each=each, burst=burst, now=now + burst * each + 1)
    assert rested.taken == burst


async def test_while_so_many_wait_a_new_job_is_429_and_then_no_more(
    api: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission_quota, "COUNTED_SECONDS", 0.0)
    monkeypatch.setattr(submission_quota, "COUNTING_SHARE", float("inf"))
    await limit(api, waitingJobs=3)
    # What waits for its time counts, too.
    statuses = [(await api.submit(delayMs=60_000)).status_code for _ in range(4)]
    assert statuses == [202, 202, 202, 429]
    refused = await api.submit("refused")
    assert refused.json()["code"] == "too_many_waiting"
    assert int(refused.headers["Retry-After"]) >= 1
    await change(api.database, "UPDATE job_info SET status = 2 WHERE id = 1")
    assert (await api.submit("refused")).status_code == 202
    assert (await api.submit("refused")).status_code == 200
    assert (await api.submit()).status_code == 429


async def test_between_two_counts_what_was_let_in_is_counted(api: Door) -> None:
    await limit(api, waitingJobs=5)
    jobs = [body_of() for _ in range(8)]
    answer = await api.client.post("/openapi/jobs/batch", json={"jobs": jobs})
    statuses = [one["httpStatus"] for one in answer.json()["items"]]
    assert statuses == [202] * 5 + [429] * 3
    assert (await api.submit()).status_code == 429


async def test_those_who_ask_while_their_rate_is_asked_for_do_not_count_on_the_same_room(
    api: Door,
) -> None:
    await limit(api, waitingJobs=5, submissionsPerSecond=1000.0)
    answers = await asyncio.gather(*(api.submit() for _ in range(20)))
    assert Counter(one.status_code for one in answers) == {202: 5, 429: 15}


async def test_room_that_the_rate_does_not_let_in_is_given_back(api: Door) -> None:
    await limit(api, waitingJobs=5, submissionsPerSecond=1.0)
    answers = await asyncio.gather(*(api.submit() for _ in range(4)))
    assert Counter(one.status_code for one in answers) == {202: 1, 429: 3}
    await limit(api, submissionsPerSecond=1000.0)
    answers = await asyncio.gather(*(api.submit() for _ in range(20)))
    assert Counter(one.status_code for one in answers) == {202: 4, 429: 16}


async def test_without_limits_a_submission_costs_no_statement_more(api: Door) -> None:
    plain = await statements_of_a_submission(api)
    await limit(api, submissionsPerSecond=1000.0, waitingJobs=1000, runningJobs=10, weight=2.0)
    limited = await statements_of_a_submission(api)
    assert len(plain) == len(limited)
    assert not [one for one in plain if "limit" in one.lower() and "tenant_limits" in one]


async def test_counts_go_by_ranges_of_the_claim_index(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        (job,) = await new_jobs(database, 1)
        await fill(database, 3000, status=2, queue_id=job.queue_id, priority=5)
        await insert(database, 40)
        await running_job(database)
        assert await database.read(lambda c: count_waiting(c, 0, most=100)) == 40
        assert await database.read(lambda c: count_waiting(c, 0, most=7)) == 7
        assert await database.read(lambda c: count_waiting(c, 1, most=7)) == 0
        running = await database.read(lambda c: count_running(c, [job.queue_id, 999]))
        assert running == {job.queue_id: 1}


async def test_sqlite_counts_by_the_claim_index(sqlite_engine: Engine) -> None:
    async with opened(migrated(sqlite_engine)) as database:
        await insert(database, 5)
        for status in ("IN (0, 6)", "= 1"):
            query = f"SELECT id FROM job_info WHERE status {status} AND queue_id IN (1, 2) LIMIT 9"
            (step, *_) = await explained(database, "EXPLAIN QUERY PLAN", query)
            assert "ix_job_info_claim (status=? AND queue_id=?)" in step.detail


def test_a_burst_is_what_a_second_brings() -> None:
    assert [burst_of(rate) for rate in (0.01, 1, 2.9, 50)] == [1, 1, 2, 50]
