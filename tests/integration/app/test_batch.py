"""Batches: every job answered on its own, in order, in one commit."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from app.plumbing.database import Database
from tests.integration.app.rig import Door, body_of, door, rows_of, value_of
from tests.support.engines import Engine, migrated


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    """An API over each engine."""
    async with door(migrated_engine) as opened:
        yield opened


@pytest.fixture
async def one_api(sqlite_engine: Engine) -> AsyncIterator[Door]:
    """An API over one engine, for what does not depend on it."""
    async with door(migrated(sqlite_engine)) as opened:
        yield opened


async def sent(api: Door, jobs: Any) -> httpx.Response:
    return await api.client.post("/openapi/jobs/batch", json={"jobs": jobs})


async def stored(database: Database) -> int:
    return int(await value_of(database, "SELECT COUNT(*) FROM job_info"))


async def test_each_job_of_a_batch_is_answered_on_its_own_in_order(api: Door) -> None:
    await api.submit("known", params=1)
    jobs = [
        body_of("new"),
        body_of("bad", priority=10),
        body_of("known", params=1),
        body_of("known", params=2),
        7,
        body_of("twice"),
        body_of("twice"),
        body_of("twice", priority=1),
    ]
    answer = await sent(api, jobs)
    assert answer.status_code == 200
    items = answer.json()["items"]
    assert [one["httpStatus"] for one in items[:5]] == [202, 422, 200, 409, 422]
    assert sorted(one["httpStatus"] for one in items[5:]) == [200, 202, 409]
    assert (items[0]["clientRequestId"], items[0]["status"]) == ("new", "WAITING")
    assert (items[1]["code"], items[1]["status"]) == ("validation_failed", 422)
    assert items[3]["fields"] == ["params"]
    assert await stored(api.database) == 3
    for item in items:
        if item["httpStatus"] in (200, 202):
            job = (await api.client.get(f"/openapi/jobs/{item['jobId']}")).json()
            assert job == {k: v for k, v in item.items() if k != "httpStatus"} | {"warnings": []}


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was written in a transaction of its own."""
    written: list[Any] = []
    write = Database.write

    async def counted(self: Database, work: Any) -> Any:
        written.append(work)
        return await write(self, work)

    monkeypatch.setattr(Database, "write", counted)
    return written


async def test_500_jobs_of_a_new_handler_enter_in_one_commit(api: Door, writes: list[Any]) -> None:
    answer = await sent(api, [body_of(f"r{n}", jobHandler="new") for n in range(500)])
    items = answer.json()["items"]
    assert [one["clientRequestId"] for one in items] == [f"r{n}" for n in range(500)]
    assert {one["httpStatus"] for one in items} == {202}
    assert await stored(api.database) == 500
    assert len(writes) == 2  # one of them stores the queue of the new handler
    again = await sent(api, [body_of(f"r{n}", jobHandler="new") for n in range(500)])
    assert [one["jobId"] for one in again.json()["items"]] == [one["jobId"] for one in items]
    assert await stored(api.database) == 500


async def test_the_queues_of_many_new_handlers_are_stored_together(
    api: Door, writes: list[Any]
) -> None:
    jobs = [body_of(jobHandler=f"new-{n % 200}", labels={"worker.a": "b"}) for n in range(400)]
    answer = await sent(api, [*jobs, body_of(jobHandler="")])
    statuses = [one["httpStatus"] for one in answer.json()["items"]]
    assert statuses == [202] * 400 + [422]
    assert len(writes) == 3  # two of them store the queues
    placed = await rows_of(
        api.database,
        "SELECT j.job_handler AS of_job, q.job_handler AS of_queue, q.requirement "
        "FROM job_info AS j JOIN queue AS q ON q.id = j.queue_id",
    )
    assert len(placed) == 400
    assert all(row["of_job"] == row["of_queue"] and row["requirement"] for row in placed)
    writes.clear()
    await sent(api, [{**job, "clientRequestId": f"more-{n}"} for n, job in enumerate(jobs)])
    assert len(writes) == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"jobs": []},
        {"jobs": {}},
        {"jobs": None},
        {"jobs": [body_of()], "more": 1},
        {"jobs": [body_of() for _ in range(501)]},
    ],
    ids=["none", "empty", "object", "null", "more", "501"],
)
async def test_a_wrong_envelope_is_one_refusal_and_stores_nothing(
    one_api: Door, body: dict[str, Any]
) -> None:
    answer = await one_api.client.post("/openapi/jobs/batch", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed")
    assert answer.json()["detail"].startswith("jobs: ")
    assert await stored(one_api.database) == 0


async def test_a_batch_may_have_8_mib_and_not_more(one_api: Door) -> None:
    jobs = [body_of(params="x" * 60_000) for _ in range(100)]
    answer = await sent(one_api, jobs)
    assert {one["httpStatus"] for one in answer.json()["items"]} == {202}
    raw = json.dumps({"jobs": jobs * 2})
    answer = await one_api.client.post(
        "/openapi/jobs/batch", content=raw, headers={"content-type": "application/json"}
    )
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


async def test_what_is_no_json_object_is_refused(one_api: Door) -> None:
    for raw, media_type, status in (
        ("[]", "application/json", 400),
        ("{", "application/json", 400),
        ("{}", "text/plain", 415),
    ):
        answer = await one_api.client.post(
            "/openapi/jobs/batch", content=raw, headers={"content-type": media_type}
        )
        assert answer.status_code == status
