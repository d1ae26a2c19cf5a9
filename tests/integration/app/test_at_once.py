"""A new task that has a free worker is claimed by the commit that stores it, and by no other."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uuid_utils

from app.dispatch.offers import Offers
from app.in_process import open_dispatcher
from app.lifecycle.moves.claim import Candidate
from app.lifecycle.moves.submit import Entered, NewJob, Start, Starts, insert_jobs
from app.lifecycle.nodes import read_nodes
from app.lifecycle.reads import read_queues
from app.lifecycle.states import JobStatus
from app.lifecycle.token import new_token
from app.plumbing.database import Database
from tests.integration.app.rig import (
    WORKER,
    body_of,
    claimed,
    door,
    insert,
    new_jobs,
    new_term,
    opened,
    rows_of,
    value_of,
)
from tests.support.counted import Asked, counted
from tests.support.engines import Engine
from tests.support.wait import until_async
from worker.in_process import open_worker

CLAIM = "claim_token = "
"""What only the claim of waiting tasks sets in an UPDATE."""
CAPACITY = 3


class Running:
    """A dispatcher and a worker in this process, what they ask, and a look at their rows."""

    def __init__(self, asked: Asked, session: aiohttp.ClientSession, database: Database) -> None:
        self.asked = asked
        self.session = session
        self.database = database

    async def submit(self, **fields: Any) -> int:
        async with self.session.post("/openapi/jobs", json=body_of(**fields)) as answer:
            assert answer.status == 202, await answer.text()
            return int((await answer.json())["jobId"])

    async def ended(self, job_id: int) -> dict[str, Any]:
        url = f"/openapi/jobs/{job_id}"
        while True:
            async with self.session.get(url, params={"wait": "20"}) as answer:
                job: dict[str, Any] = await answer.json()
            if job["finishedAt"] is not None:
                return job

    def claims(self) -> int:
        """How many transactions have claimed what waited."""
        return sum(CLAIM in one and one.startswith("UPDATE") for one in self.asked.statements)


@pytest.fixture
async def running(migrated_engine: Engine, tmp_path: Path) -> AsyncIterator[Running]:
    async with opened(migrated_engine) as database:
        with counted(but_not=database) as asked:
            async with (
                open_dispatcher(tmp_path, migrated_engine.environment) as dispatcher,
                open_worker({**dispatcher.environment, "ONCUE_WORKER_CAPACITY": str(CAPACITY)}, {}),
                aiohttp.ClientSession(dispatcher.url) as session,
            ):
                running = Running(asked, session, database)
                # The first one makes its queue, which no dispatcher knows before it has read it.
                await running.ended(await running.submit())
                asked.clear()
                yield running


async def stored(
    database: Database, jobs: Sequence[NewJob], starts: Starts
) -> dict[tuple[int, str], Entered]:
    return await database.write(lambda connection: insert_jobs(connection, database, jobs, starts))


def start_each(jobs: Sequence[NewJob], term: int, worker_id: str = WORKER) -> Starts:
    return Starts(
        term, {job.submit_token: Start(worker_id, str(uuid_utils.uuid7())) for job in jobs}
    )


async def test_it_needs_no_claim_of_its_own(running: Running) -> None:
    job = await running.ended(await running.submit(params={"n": 1}))
    assert job["status"] == "SUCCEEDED"
    assert job["attempt"] == 1
    assert [one["status"] for one in job["executions"]] == ["SUCCEEDED"]
    assert running.claims() == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"delayMs": 1},
        {"runAt": "2026-01-01T00:00:00Z"},
        {"expiresAt": "2100-01-01T00:00:00Z"},
        {"concurrencyKey": "k", "concurrencyLimit": 1},
        {"rateKey": "k", "ratePerSecond": 100},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_needs_more_than_a_worker_is_claimed_as_ever(
    running: Running, fields: dict[str, Any]
) -> None:
    job = await running.ended(await running.submit(**fields))
    assert job["status"] == "SUCCEEDED"
    assert running.claims() >= 1


async def test_no_more_begin_than_the_worker_has_slots(running: Running) -> None:
    held = [await running.submit(jobHandler="sleep", params={"ms": 60000}) for _ in range(CAPACITY)]
    waiting = await running.submit()

    query = "SELECT status, attempt FROM job_info WHERE id = :id"
    for job_id in held:
        assert await rows_of(running.database, query, id=job_id) == [
            {"status": JobStatus.RUNNING, "attempt": 1}
        ]
    assert await rows_of(running.database, query, id=waiting) == [
        {"status": JobStatus.WAITING, "attempt": 0}
    ]
    for job_id in held:
        async with running.session.post(f"/openapi/jobs/{job_id}/cancel") as answer:
            assert answer.status == 200
    job = await running.ended(waiting)
    assert job["status"] == "SUCCEEDED"
    assert len(job["executions"]) == 1


async def test_where_slots_are_few_the_loop_says_who_goes_first(running: Running) -> None:
    """Of one commit, too: the last and most urgent is not left over."""
    one: dict[str, Any] = {"jobHandler": "sleep", "params": {"ms": 60000}}
    jobs = [
        *(body_of(**one, priority=0) for _ in range(CAPACITY)),
        body_of(**one, priority=9, concurrencyKey="k", concurrencyLimit=1),
    ]
    async with running.session.post("/openapi/jobs/batch", json={"jobs": jobs}) as answer:
        ids = [one["jobId"] for one in (await answer.json())["items"]]

    async def slots_are_used() -> bool:
        query = f"SELECT COUNT(*) FROM job_info WHERE status = {int(JobStatus.RUNNING)}"
        return bool(await value_of(running.database, query) == CAPACITY)

    await until_async(slots_are_used, 30, what="every slot to be used")
    query = f"SELECT id FROM job_info WHERE status = {int(JobStatus.WAITING)}"
    ((left),) = await rows_of(running.database, query)
    assert left["id"] in ids[:CAPACITY]
    for job_id in ids:
        async with running.session.post(f"/openapi/jobs/{job_id}/cancel") as answer:
            assert answer.status == 200


async def test_what_nobody_could_run_keeps_no_other_from_beginning(running: Running) -> None:
    jobs = [body_of(jobHandler="nobody-has-it"), body_of()]
    ids: list[int] = []
    for _ in range(2):  # the second time its queue is known
        jobs = [{**job, "clientRequestId": uuid.uuid4().hex} for job in jobs]
        async with running.session.post("/openapi/jobs/batch", json={"jobs": jobs}) as answer:
            ids = [one["jobId"] for one in (await answer.json())["items"]]
        await running.ended(ids[1])
    assert (
        await value_of(
            running.database,
            "SELECT l.claimed_at - j.created_at FROM job_log AS l JOIN job_info AS j "
            "ON j.id = l.job_id WHERE j.id = :id",
            id=ids[1],
        )
        == 0
    )


async def test_slots_that_the_loop_has_dealt_are_taken_while_it_claims(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as api:
        await api.beat(capacity=1)
        (waiting,) = await insert(api.database)
        loop = api.parts.loop
        loop._queues.load(await api.database.read(lambda one: read_queues(one, after_id=0)))
        loop._roster.refresh(await api.database.read(read_nodes))
        loop._roster.trust(WORKER)
        row = await rows_of(api.database, "SELECT * FROM job_info WHERE id = :id", id=waiting)
        task = Candidate(waiting, 0, row[0]["queue_id"], 5, row[0]["next_trigger_time"])
        dealt = loop._deal([task], api.parts.ground.clock.now_ms(), {}, ends=0)
        assert [one.worker_id for one in dealt] == [WORKER]
        assert loop._roster.free() == {WORKER: 0}
        loop._let_go(dealt)
        assert loop._roster.free() == {WORKER: 1}


async def test_turns_go_on_from_deal_to_deal(migrated_engine: Engine) -> None:
    """Round robin would else give each lone job to the same worker."""
    async with door(migrated_engine, balance="round_robin") as api:
        for name in ("v", "w"):
            await api.beat(name)
        await insert(api.database)
        loop = api.parts.loop
        loop._queues.load(await api.database.read(lambda one: read_queues(one, after_id=0)))
        loop._roster.refresh(await api.database.read(read_nodes))
        for worker in loop._roster.workers():
            worker.suspect = False
        queue_id = await value_of(api.database, "SELECT id FROM queue")
        taken = [
            Offers(loop._queues, loop._roster, "round_robin", loop.turns).take(queue_id)
            for _ in range(4)
        ]
        assert taken[0] != taken[1]
        assert taken[:2] == taken[2:]


async def test_of_two_with_one_request_id_in_a_commit_the_first_is_stored(
    migrated_engine: Engine,
) -> None:
    async with opened(migrated_engine) as database:
        term = await new_term(database)
        for first_is_dealt in (True, False):
            (first,) = await new_jobs(database, 1, job_name="first")
            second = replace(first, submit_token=new_token(), job_name="second")
            starts = start_each([first if first_is_dealt else second], term)
            (row,) = (await stored(database, [first, second], starts)).values()
            assert row.submit_token == first.submit_token
            assert (row.claimed is not None) is first_is_dealt


async def test_the_same_request_at_once_begins_one_run(running: Running) -> None:
    body = body_of(params={"n": 1})

    async def submit() -> int:
        async with running.session.post("/openapi/jobs", json=body) as answer:
            return int((await answer.json())["jobId"])

    ids = set(await asyncio.gather(*(submit() for _ in range(12))))
    assert len(ids) == 1
    job = await running.ended(ids.pop())
    assert len(job["executions"]) == 1
    # The slots that were dealt for the repeats are free again.
    for _ in range(CAPACITY + 1):
        await running.ended(await running.submit())
    # What comes while the loop looks at the slots that were let go is left to it.
    assert running.claims() <= 1


async def test_what_was_stored_and_never_sent_is_sent_by_recovery(running: Running) -> None:
    """As if the dispatcher had ended between its commit and the send."""
    term = await value_of(running.database, "SELECT term FROM dispatch_term WHERE partition_no = 0")
    worker_id = await value_of(running.database, "SELECT id FROM worker_node")
    (job,) = await new_jobs(running.database, 1)
    (row,) = (await stored(running.database, [job], start_each([job], term, worker_id))).values()
    assert row.claimed is not None
    ended = await running.ended(row.id)
    assert ended["status"] == "SUCCEEDED"
    assert [one["executionId"] for one in ended["executions"]] == [row.claimed.execution_id]


async def test_retention_sees_by_these_commits_too_that_claims_are_quick_again(
    migrated_engine: Engine,
) -> None:
    """Else it would wait for the next claim of what waited, which may be hours away."""
    async with door(migrated_engine) as api:
        loop, at_once = api.parts.loop, api.parts.at_once
        for seconds in (0.001, 1.0):
            loop.tempo.note(seconds)
        assert loop.tempo.is_slow
        (job,) = await new_jobs(api.database, 1)
        for _ in range(40):
            at_once.begin(start_each([job], 1), [], seconds=0.001)
        assert not loop.tempo.is_slow


async def test_the_run_is_what_a_claim_would_have_made(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        term = await new_term(database)
        fields: dict[str, Any] = {"params": '{"n":1}', "timeout_ms": 5000, "max_retry": 2}
        (at_once,) = await new_jobs(database, 1, **fields)
        (row,) = (await stored(database, [at_once], start_each([at_once], term))).values()
        (later,) = await new_jobs(database, 1, **fields)
        await stored(database, [later], Starts(term, {}))
        other = await value_of(database, "SELECT MAX(id) FROM job_info")
        (run,) = await claimed(database, [other], term=term)

        assert row.claimed is not None
        assert row.claimed == replace(
            run,
            job_id=row.id,
            execution_id=row.claimed.execution_id,
            client_request_id=at_once.client_request_id,
            trigger_ts=row.claimed.trigger_ts,
            due_ms=row.claimed.due_ms,
            claimed_at=row.claimed.claimed_at,
        )
        assert row.claimed.trigger_ts == row.claimed.due_ms == row.claimed.claimed_at
        own = "id, client_request_id, submit_token, execution_id, claim_token"
        times = "next_trigger_time, trigger_ts, created_at, updated_at"
        first, second = await rows_of(database, "SELECT * FROM job_info ORDER BY id")
        but = {*own.split(", "), *times.split(", ")}
        assert {k: v for k, v in first.items() if k not in but} == {
            k: v for k, v in second.items() if k not in but
        }
        logs = await rows_of(
            database, "SELECT job_id, execution_id, status, attempt, worker_id, term FROM job_log"
        )
        assert sorted(one.pop("job_id") for one in logs) == [row.id, other]
        assert sorted(one.pop("execution_id") for one in logs) == sorted(
            [row.claimed.execution_id, run.execution_id]
        )
        assert logs[0] == logs[1]


async def test_a_holder_whose_term_is_over_stores_what_waits(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        old = await new_term(database)
        new = await new_term(database)
        jobs = await new_jobs(database, 3)
        # One of the batch is not dealt: it shares the transaction.
        rows = await stored(database, jobs, start_each(jobs[:2], old))
        assert [row.claimed for row in rows.values()] == [None] * 3
        assert await value_of(database, "SELECT COUNT(*) FROM job_log") == 0
        left = "id, client_request_id, submit_token"
        dealt, _, plain = await rows_of(database, "SELECT * FROM job_info ORDER BY id")
        but = {*left.split(", "), "next_trigger_time", "created_at", "updated_at"}
        assert {k: v for k, v in dealt.items() if k not in but} == {
            k: v for k, v in plain.items() if k not in but
        }
        runs = await claimed(database, [row.id for row in rows.values()], term=new)
        assert len(runs) == 3


async def test_a_commit_whose_answer_was_lost_is_not_done_twice(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        term = await new_term(database)
        jobs = await new_jobs(database, 2)
        starts = start_each(jobs, term)
        first = await stored(database, jobs, starts)
        before = await rows_of(database, "SELECT * FROM job_info ORDER BY id")
        # Meanwhile another has taken over: what it may have sent must not be taken back.
        await new_term(database)
        again = await stored(database, jobs, starts)
        assert {key: row.id for key, row in again.items()} == {
            key: row.id for key, row in first.items()
        }
        assert [row.claimed for row in again.values()] == [None, None]
        assert await rows_of(database, "SELECT * FROM job_info ORDER BY id") == before
        assert await value_of(database, "SELECT COUNT(*) FROM job_log") == 2


async def test_a_repeat_is_neither_stored_nor_begun(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        term = await new_term(database)
        (job,) = await new_jobs(database, 1)
        await stored(database, [job], Starts(term, {}))
        repeat = replace(job, submit_token=new_token())
        (row,) = (await stored(database, [repeat], start_each([repeat], term))).values()
        assert row.submit_token == job.submit_token
        assert row.claimed is None
        assert await value_of(database, "SELECT status FROM job_info") == JobStatus.WAITING
        assert await value_of(database, "SELECT COUNT(*) FROM job_log") == 0
