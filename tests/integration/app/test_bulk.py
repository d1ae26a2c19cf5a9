"""Bulk operations: each matching job has one turn, at the rate, whoever holds the lock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from app.jobs import bulk
from app.jobs.sweeper import MOST_AT_ONCE, NEXT_PAGE_SECONDS
from app.lifecycle import lists
from app.lifecycle.lists import Matching
from app.lifecycle.moves import sweep as sweep_file
from app.lifecycle.moves.guard import Asked, Changed
from app.lifecycle.moves.submit import insert_jobs
from app.lifecycle.moves.sweep import Calendar, Swept, sweep
from app.lifecycle.operations import MOST_OPEN, Operation, open_operations
from app.lifecycle.states import ExecutionStatus, JobKind, JobStatus
from app.lifecycle.token import new_token
from app.plumbing.bus import CANCEL, ENDED, OWED, WAKE, Signal
from app.plumbing.database import Database
from app.plumbing.times import rfc3339
from tests.integration.app.rig import (
    Door,
    change,
    claimed,
    door,
    ending,
    insert,
    new_jobs,
    new_term,
    rows_of,
    running_job,
    settled,
    value_of,
)
from tests.integration.app.schedule_rig import moved_back, skips
from tests.support.engines import Engine, migrated
from tests.support.wait import until_async

URL = "http://127.0.0.1:9/hook"
HOUR_MS = 3_600_000
_S = JobStatus


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


async def ask(api: Door, action: str, filter: Any, **fields: Any) -> httpx.Response:  # noqa: A002 - the field's name
    return await api.client.post(
        "/openapi/bulk", json={"action": action, "filter": filter, **fields}
    )


async def started(api: Door, action: str, filter: Any, **fields: Any) -> str:  # noqa: A002
    """Ask for an operation that must be new and return its id."""
    answer = await ask(api, action, filter, **fields)
    assert answer.status_code == 202, answer.text
    told = answer.json()
    assert answer.headers["location"] == f"/openapi/bulk/{told['operationId']}"
    assert (told["status"], told["examined"], told["startedAt"]) == ("QUEUED", 0, None)
    return str(told["operationId"])


async def look(api: Door, operation_id: str) -> dict[str, Any]:
    answer = await api.client.get(f"/openapi/bulk/{operation_id}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def let_time_pass(database: Database) -> None:
    """The rate allows the next step now."""
    await change(database, "UPDATE bulk_operation SET resume_at = 0 WHERE status IN (0, 1)")


async def carried_out(api: Door, operation_id: str) -> dict[str, Any]:
    """Give an operation its steps, as the holder of the lock does, until it has ended."""
    term = await new_term(api.database)
    told: dict[str, Any] = {}
    for _ in range(500):
        told = await look(api, operation_id)
        if told["status"] not in ("QUEUED", "RUNNING"):
            return told
        await let_time_pass(api.database)
        await api.parts.sweeper.round(term)
    raise AssertionError(f"it goes on and on: {told}")


async def statuses(database: Database) -> dict[int, JobStatus]:
    rows = await rows_of(database, "SELECT id, status FROM job_info")
    return {row["id"]: JobStatus(row["status"]) for row in rows}


async def put(database: Database, count: int, status: JobStatus, **fields: Any) -> list[int]:
    """Make jobs that are in a state."""
    made = await insert(database, count, delay_ms=60_000, **fields)
    ended = status in (_S.SUCCEEDED, _S.FAILED, _S.CANCELLED)
    for job_id in made:
        await change(
            database,
            "UPDATE job_info SET status = :status, finished_at = :ended WHERE id = :id",
            status=int(status),
            ended=1_800_000_000_000 if ended else None,
            id=job_id,
        )
    return made


async def the_operation(database: Database) -> Operation:
    ((operation,), _) = await database.read(
        lambda connection: open_operations(connection, database, limit=10)
    )
    return operation


async def test_each_filter_changes_its_own_jobs_and_no_others(api: Door) -> None:
    database = api.database
    base = 1_700_000_000_000
    plain = await insert(database, 3)
    handled = await insert(database, 4, job_handler="close")
    named = await insert(database, 5, job_name="close order")
    labelled = await insert(database, 6, labels={"team": "x"})
    paused = await put(database, 2, _S.PAUSED, labels={"team": "x"})
    old = await insert(database, 3)
    ended = await put(database, 4, _S.SUCCEEDED, job_handler="close", labels={"team": "x"})
    for job_id in old:
        await change(
            database, "UPDATE job_info SET created_at = :at WHERE id = :id", at=base, id=job_id
        )
    gone: set[int] = set()
    for narrowed, own in (
        ({"label": "team=x", "status": "PAUSED"}, paused),
        ({"label": "team=x"}, labelled),
        ({"handler": "close"}, handled),
        ({"namePrefix": "close"}, named),
        ({"createdFrom": rfc3339(base), "createdTo": rfc3339(base + 1)}, old),
        ({"status": "WAITING", "handler": "none"}, []),
        ({"status": "WAITING", "handler": "echo"}, plain),
    ):
        told = await carried_out(api, await started(api, "cancel", narrowed))
        gone |= set(own)
        assert (told["status"], told["refused"], told["error"]) == ("SUCCEEDED", {}, None)
        assert told["changed"] == told["examined"] == told["matched"] == len(own), narrowed
        assert not told["matchedIsMinimum"]
        assert told["filter"].keys() == narrowed.keys()
        now = await statuses(database)
        assert {job_id for job_id, status in now.items() if status is _S.CANCELLED} == gone
    assert {(await statuses(database))[job_id] for job_id in ended} == {_S.SUCCEEDED}
    versions = await rows_of(database, "SELECT DISTINCT version FROM job_info WHERE status = 5")
    assert [row["version"] for row in versions] == [1]


@pytest.mark.parametrize("few", [2000, 3])
async def test_many_jobs_have_one_turn_each_in_the_order_of_their_ids(
    api: Door, monkeypatch: Any, few: int
) -> None:
    monkeypatch.setattr(lists, "FEW", few)
    monkeypatch.setattr(lists, "WALK_ROWS", 20)
    database = api.database
    made = []
    for _ in range(6):
        made += await insert(database, 20, labels={"team": "x"})
        await put(database, 15, _S.SUCCEEDED, labels={"team": "x"})
    turns: list[int] = []
    api.parts.ground.bus.subscribe(ENDED, lambda signal: turns.extend(one[0] for one in signal))
    for narrowed in ({"label": "team=x"}, {"handler": "echo"}, {"namePrefix": "a j"}):
        turns.clear()
        told = await carried_out(api, await started(api, "cancel", narrowed, ratePerSecond=100.0))
        assert (told["changed"], told["status"]) == (120, "SUCCEEDED"), narrowed
        assert turns == made
        await change(
            database, "UPDATE job_info SET status = 0, finished_at = NULL WHERE status = 5"
        )


async def test_a_rate_is_shown_as_it_was_sent(api: Door) -> None:
    operation_id = await started(api, "cancel", {"handler": "echo"}, ratePerSecond=333.3333333333)
    assert (await look(api, operation_id))["ratePerSecond"] == 333.3333333333


async def test_pause_resume_and_retry_are_those_of_the_single_verbs(api: Door) -> None:
    database = api.database
    waiting = await insert(database, 3, labels={"a": "b"})
    schedule = await api.submitted(intervalMs=HOUR_MS, labels={"a": "b"})
    failed = await put(database, 2, _S.FAILED, labels={"a": "b"})
    wakes: list[Signal] = []
    api.parts.ground.bus.subscribe(WAKE, wakes.append)
    for action, own, becomes in (
        ("pause", waiting, _S.PAUSED),
        ("resume", waiting, _S.WAITING),
        ("retry", failed, _S.WAITING),
    ):
        told = await carried_out(api, await started(api, action, {"label": "a=b"}))
        assert told["status"] == "SUCCEEDED"
        assert told["changed"] == len(own) + (action != "retry")
        assert {(await statuses(database))[job_id] for job_id in own} == {becomes}
    assert (await statuses(database))[schedule] is _S.SCHEDULED
    assert len(wakes) >= 2
    assert await value_of(database, "SELECT MAX(finished_at) FROM job_info") is None


async def test_a_retry_by_a_range_of_finishing_meets_no_job_twice(api: Door) -> None:
    database = api.database
    base = 1_800_000_000_000 - 30 * 24 * HOUR_MS * 30  # long before now
    jobs = await put(database, 8, _S.FAILED)
    for number, job_id in enumerate(reversed(jobs)):
        await change(
            database,
            "UPDATE job_info SET finished_at = :at WHERE id = :id",
            at=base + number * HOUR_MS,
            id=job_id,
        )
    narrowed = {"finishedFrom": rfc3339(base + 2 * HOUR_MS), "status": "FAILED"}
    operation_id = await started(api, "retry", narrowed, ratePerSecond=10)
    term = await new_term(database)
    for _ in range(2):
        await let_time_pass(database)
        await api.parts.sweeper.round(term)
    # Those that had their turn run at once and fail again, after the operation began.
    again = [
        job_id for job_id, status in (await statuses(database)).items() if status == _S.WAITING
    ]
    assert sorted(again) == sorted(jobs[2:6])
    for job_id in again:
        (run,) = await claimed(database, [job_id], term=term)
        await change(database, "UPDATE job_info SET max_retry = 0 WHERE id = :id", id=job_id)
        await settled(database, ending(run, ExecutionStatus.FAILED, error_code="e"))
    told = await carried_out(api, operation_id)
    assert (told["changed"], told["refused"], told["status"]) == (6, {}, "SUCCEEDED")
    now = await statuses(database)
    assert [now[job_id] for job_id in jobs] == [_S.WAITING] * 2 + [_S.FAILED] * 6
    for job_id in again:
        query = "SELECT COUNT(*) FROM job_log WHERE job_id = :id"
        assert await value_of(database, query, id=job_id) == 1


async def test_the_rate_says_when_the_next_step_may_come(api: Door) -> None:
    database = api.database
    await insert(database, 9)
    operation_id = await started(api, "cancel", {"handler": "echo"}, ratePerSecond=10)
    term = await new_term(database)

    async def step() -> tuple[int, int]:
        """Return how many are changed, and how long from now the next step may come, in ms."""
        await api.parts.sweeper.round(term)
        (row,) = await rows_of(
            database, "SELECT changed, resume_at - updated_at AS ahead FROM bulk_operation"
        )
        return row["changed"], row["ahead"]

    changed, ahead = await step()
    assert changed == 2  # what ten a second are in a fifth of one
    assert -50 <= ahead <= 200
    await change(database, "UPDATE bulk_operation SET resume_at = :far", far=2**50)
    assert (await step())[0] == 2
    # However late a step comes, it is one step, and the next may be drawn near by a quarter second.
    await let_time_pass(database)
    changed, ahead = await step()
    assert (changed, ahead) == (4, 200 - sweep_file.CATCH_UP_MS)
    # A step in time: what the rate allows is counted from when it could have come.
    await change(database, f"UPDATE bulk_operation SET resume_at = {database.now_ms} - 20")
    changed, ahead = await step()
    assert changed == 6
    assert -200 <= ahead <= 180
    assert (await carried_out(api, operation_id))["changed"] == 9


async def test_a_rate_is_the_caller_s_the_default_or_refused(one_api: Door) -> None:
    narrowed = {"handler": "x"}
    assert (await ask(one_api, "cancel", narrowed)).json()["ratePerSecond"] == 200
    asked = await ask(one_api, "cancel", narrowed, ratePerSecond=0.5)
    assert asked.json()["ratePerSecond"] == 0.5
    for rate in (0, -1, 1001, "fast", True):
        answer = await ask(one_api, "cancel", narrowed, ratePerSecond=rate)
        assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed")


async def test_a_dry_run_counts_and_changes_nothing(api: Door, monkeypatch: Any) -> None:
    database = api.database
    await insert(database, 7)
    await put(database, 5, _S.SUCCEEDED)
    narrowed = {"handler": "echo"}
    answer = await ask(api, "cancel", narrowed, dryRun=True, clientRequestId="k")
    assert answer.status_code == 200
    assert answer.json() == {
        "dryRun": True,
        "action": "cancel",
        "filter": narrowed,
        "matched": 7,
        "matchedIsMinimum": False,
    }
    monkeypatch.setattr(bulk, "MOST_COUNTED", 4)
    answer = await ask(api, "cancel", narrowed, dryRun=True)
    assert (answer.json()["matched"], answer.json()["matchedIsMinimum"]) == (4, True)
    monkeypatch.setattr(bulk, "MOST_COUNTED", 7)
    answer = await ask(api, "cancel", narrowed, dryRun=True)
    assert (answer.json()["matched"], answer.json()["matchedIsMinimum"]) == (7, False)
    # A walk that finds nothing ends, too.
    monkeypatch.setattr(lists, "WALK_ROWS", 2)
    monkeypatch.setattr(lists, "FEW", 2)
    monkeypatch.setattr(bulk, "MOST_PAGES", 3)
    answer = await ask(api, "cancel", {"namePrefix": "none"}, dryRun=True)
    assert (answer.json()["matched"], answer.json()["matchedIsMinimum"]) == (0, True)
    assert await value_of(database, "SELECT COUNT(*) FROM bulk_operation") == 0
    assert set((await statuses(database)).values()) == {_S.WAITING, _S.SUCCEEDED}


@pytest.mark.parametrize("narrowed", [{}, None, {"status": None}, {"label": None, "handler": None}])
@pytest.mark.parametrize("dry_run", [False, True])
async def test_an_empty_filter_is_refused(one_api: Door, narrowed: Any, dry_run: bool) -> None:
    answer = await ask(one_api, "cancel", narrowed, dryRun=dry_run)
    assert (answer.status_code, answer.json()["code"]) == (422, "empty_filter"), answer.text
    without = await one_api.client.post("/openapi/bulk", json={"action": "cancel"})
    assert (without.status_code, without.json()["code"]) == (422, "empty_filter")


@pytest.mark.parametrize(
    ("action", "narrowed", "words"),
    [
        ("explode", {"handler": "x"}, "action"),
        ("cancel", {"handler": "x", "label": "a=b"}, "one of"),
        ("cancel", {"handler": "x", "namePrefix": "b"}, "one of"),
        ("cancel", {"handler": ""}, "handler"),
        ("cancel", {"handler": "\0"}, "handler"),
        ("cancel", {"label": "a"}, "name=value"),
        ("cancel", {"status": "waiting"}, "status"),
        ("cancel", {"status": "SUCCEEDED"}, "not possible for a SUCCEEDED job"),
        ("retry", {"status": "WAITING"}, "it is for FAILED, CANCELLED"),
        ("cancel", {"createdFrom": "yesterday"}, "RFC 3339"),
        ("cancel", {"createdFrom": "2026-01-01T00:00:00"}, "RFC 3339"),
        ("cancel", {"finishedFrom": "2026-01-01T00:00:00Z"}, "redeliver alone"),
        (
            "retry",
            {"finishedFrom": "2026-01-01T00:00:00Z", "createdTo": "2026-01-01T00:00:00Z"},
            "not both",
        ),
        ("cancel", {"clientRequestId": "x"}, "clientRequestId"),
        ("cancel", {"handlr": "x"}, "handlr"),
        ("cancel", "all", "filter"),
        ("cancel", ["x"], "filter"),
    ],
)
async def test_what_is_not_offered_is_refused_with_a_sentence(
    one_api: Door, action: str, narrowed: Any, words: str
) -> None:
    answer = await ask(one_api, action, narrowed)
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed"), answer.text
    assert words in answer.json()["detail"]


async def test_one_client_request_id_is_one_operation(api: Door) -> None:
    await insert(api.database, 3)
    narrowed = {"handler": "echo"}
    answers = await asyncio.gather(
        *(ask(api, "cancel", narrowed, clientRequestId="k") for _ in range(8))
    )
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [202]
    (operation_id,) = {answer.json()["operationId"] for answer in answers}
    told = await carried_out(api, operation_id)
    assert told["changed"] == 3
    again = await ask(api, "cancel", narrowed, clientRequestId="k")
    assert (again.status_code, again.json()) == (200, told)
    other = await ask(api, "pause", {"handler": "y"}, clientRequestId="k")
    assert (other.status_code, other.json()["code"]) == (409, "request_conflict")
    assert other.json()["fields"] == ["action", "filter"]


async def test_an_operation_that_is_cancelled_goes_no_further(api: Door) -> None:
    database = api.database
    await insert(database, 10)
    operation_id = await started(api, "cancel", {"handler": "echo"}, ratePerSecond=10)
    term = await new_term(database)
    await api.parts.sweeper.round(term)
    operation = await the_operation(database)
    for _ in range(2):
        answer = await api.client.post(f"/openapi/bulk/{operation_id}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, "CANCELLED")
        assert answer.json()["finishedAt"]
    # A step that was under way when it was cancelled finds that out under the lock.
    stale = await swept(database, operation, await found_by(api, operation), term=term)
    assert stale is None
    await api.parts.sweeper.round(term)
    assert list((await statuses(database)).values()).count(_S.CANCELLED) == 2
    assert (await look(api, operation_id))["changed"] == 2

    ended = await started(api, "cancel", {"handler": "none"})
    await carried_out(api, ended)
    answer = await api.client.post(f"/openapi/bulk/{ended}/cancel")
    assert (answer.status_code, answer.json()["code"]) == (409, "operation_ended")
    for method, path in (("GET", "/openapi/bulk/none"), ("POST", "/openapi/bulk/none/cancel")):
        answer = await api.client.request(method, path)
        assert (answer.status_code, answer.json()["code"]) == (404, "operation_not_found")


async def found_by(api: Door, operation: Operation) -> Matching:
    return await api.parts.sweeper._find(operation)


async def no_schedule(_connection: AsyncConnection, job: RowMapping, _asked: Asked) -> Changed:
    raise AssertionError(f"job {job['id']} is a schedule")


async def no_close(_connection: AsyncConnection, job: RowMapping) -> dict[str, Any]:
    raise AssertionError(f"job {job['id']} is a schedule")


async def swept(
    database: Database,
    operation: Operation,
    found: Matching,
    *,
    term: int,
    statuses: frozenset[JobStatus] = frozenset(JobStatus),
) -> Swept | None:
    return await database.write(
        lambda connection: sweep(
            connection,
            database,
            operation,
            found,
            term=term,
            token=new_token(),
            calendar=Calendar(no_schedule, no_close),
            statuses=statuses,
        )
    )


async def test_a_schedule_that_is_cancelled_with_many_leaves_what_was_undecided_on_record(
    api: Door,
) -> None:
    made = await api.submitted(intervalMs=HOUR_MS)
    await moved_back(api.database, made, 2 * HOUR_MS)
    told = await carried_out(api, await started(api, "cancel", {"handler": "echo"}))
    assert (told["status"], told["changed"]) == ("SUCCEEDED", 1)
    assert [(one["count"], one["reason"]) for one in await skips(api.database, made)] == [
        (2, "cancelled")
    ]


async def test_jobs_that_refuse_are_counted_by_reason(api: Door) -> None:
    database = api.database
    term = await new_term(database)
    jobs = await insert(database, 5)
    (run,) = await claimed(database, [jobs[0]], term=term)
    operation_id = await started(api, "cancel", {"handler": "echo"})
    operation = await the_operation(database)
    found = await found_by(api, operation)
    assert [job_id for _, job_id in found.turns] == jobs
    # Between the look and the turn: one succeeds, one is cancelled, one leaves.
    await settled(database, ending(run, ExecutionStatus.SUCCEEDED, result="1"))
    assert (await api.client.post(f"/openapi/jobs/{jobs[1]}/cancel")).status_code == 200
    await change(database, "DELETE FROM job_info WHERE id = :id", id=jobs[2])
    await swept(database, operation, found, term=term)
    told = await carried_out(api, operation_id)
    assert told["refused"] == {"verb_not_possible": 1, "already_done": 1, "job_not_found": 1}
    assert (told["changed"], told["examined"], told["matched"]) == (2, 5, 5)
    assert (await statuses(database))[jobs[0]] is _S.SUCCEEDED


async def test_a_cancel_of_what_waits_stops_nothing_that_has_begun(api: Door) -> None:
    database = api.database
    term = await new_term(database)
    jobs = await insert(database, 3)
    operation_id = await started(api, "cancel", {"status": "WAITING"})
    operation = await the_operation(database)
    found = await found_by(api, operation)
    # Between the look and the turn the first one is claimed.
    await claimed(database, [jobs[0]], term=term)
    await swept(database, operation, found, term=term, statuses=frozenset({_S.WAITING}))
    told = await carried_out(api, operation_id)
    assert (told["changed"], told["refused"]) == (2, {"verb_not_possible": 1})
    assert [(await statuses(database))[one] for one in jobs] == [
        _S.RUNNING,
        _S.CANCELLED,
        _S.CANCELLED,
    ]
    stored = await value_of(database, "SELECT COUNT(*) FROM stopping_execution")
    assert stored == 0


async def test_children_of_an_ended_group_and_groups_refuse(api: Door) -> None:
    database = api.database
    (group,) = await put(database, 1, _S.FAILED)
    await change(
        database, f"UPDATE job_info SET kind = {int(JobKind.GROUP)} WHERE id = :g", g=group
    )
    children = await put(database, 3, _S.FAILED)
    await change(
        database,
        "UPDATE job_info SET parent_id = :g WHERE id IN (:one, :two)",
        g=group,
        one=children[0],
        two=children[1],
    )
    await change(
        database,
        "UPDATE job_info SET nominal_time = id WHERE parent_id = :g",
        g=group,
    )
    told = await carried_out(api, await started(api, "retry", {"handler": "echo"}))
    assert (told["changed"], told["refused"]) == (1, {"verb_not_possible": 3})
    assert (await statuses(database))[children[2]] is _S.WAITING


async def test_jobs_made_later_are_not_touched(api: Door) -> None:
    await insert(api.database, 3, labels={"a": "b"})
    for narrowed in ({"label": "a=b"}, {"handler": "echo"}, {"namePrefix": "a"}):
        operation_id = await started(api, "pause", narrowed)
        later = await insert(api.database, 2, labels={"a": "b"})
        told = await carried_out(api, operation_id)
        assert told["changed"] == told["matched"]
        now = await statuses(api.database)
        assert {now[job_id] for job_id in later} == {_S.WAITING}
        assert {status for job_id, status in now.items() if job_id not in later} == {_S.PAUSED}


async def test_a_step_by_an_older_term_or_from_an_older_place_changes_nothing(api: Door) -> None:
    database = api.database
    await insert(database, 6)
    await started(api, "cancel", {"handler": "echo"}, ratePerSecond=10)
    old = await new_term(database)
    new = await new_term(database)
    operation = await the_operation(database)
    found = await found_by(api, operation)
    assert await swept(database, operation, found, term=old) is None
    assert set((await statuses(database)).values()) == {_S.WAITING}
    first = await swept(database, operation, found, term=new)
    assert first is not None
    assert len(first.changed) == 2
    # The same step again, as after a commit whose answer was lost.
    assert await swept(database, operation, found, term=new) is None
    (row,) = await rows_of(database, "SELECT changed, after_id FROM bulk_operation")
    assert row == {"changed": 2, "after_id": found.turns[-1][1]}
    assert list((await statuses(database)).values()).count(_S.CANCELLED) == 2


async def test_two_holders_at_once_give_no_job_two_turns(api: Door) -> None:
    database = api.database
    jobs = await insert(database, 60, callback_url=URL)
    operation_id = await started(api, "cancel", {"handler": "echo"}, ratePerSecond=1000)
    term = await new_term(database)
    for _ in range(4):
        await let_time_pass(database)
        await asyncio.gather(*(api.parts.sweeper.round(term) for _ in range(4)))
    told = await carried_out(api, operation_id)
    assert (told["changed"], told["refused"]) == (60, {})
    owed = await rows_of(database, "SELECT job_id FROM callback_delivery ORDER BY job_id")
    assert [row["job_id"] for row in owed] == jobs


async def test_a_cancel_owes_callbacks_and_stops_what_runs(api: Door) -> None:
    database = api.database
    run = await running_job(database, callback_url=URL)
    waiting = await insert(database, 2, callback_url=URL)
    told: dict[str, list[Signal]] = {topic: [] for topic in (CANCEL, ENDED, OWED)}
    for topic, signals in told.items():
        api.parts.ground.bus.subscribe(topic, signals.append)
    operation = await carried_out(api, await started(api, "cancel", {"handler": "echo"}))
    assert operation["changed"] == 3
    owed = await rows_of(
        database, "SELECT job_id, event_type FROM callback_delivery ORDER BY job_id"
    )
    assert [row["job_id"] for row in owed] == [run.job_id, *waiting]
    assert {row["event_type"] for row in owed} == {"job.cancelled"}
    (stopping,) = await rows_of(database, "SELECT * FROM stopping_execution")
    assert stopping["execution_id"] == run.execution_id
    assert told[CANCEL] == [[run.worker_id, run.execution_id]]
    assert told[ENDED] == [[[run.job_id, run.execution_id], [waiting[0], ""], [waiting[1], ""]]]
    assert told[OWED] == [[]]


async def test_a_tenant_neither_sees_nor_changes_another_s(api: Door) -> None:
    database = api.database
    own = await insert(database, 2, labels={"a": "b"})
    jobs = await new_jobs(database, 2, tenant_id=7, labels={"a": "b"})
    rows = await database.write(lambda connection: insert_jobs(connection, database, jobs))
    theirs = [row.id for row in rows.values()]
    for narrowed in ({"label": "a=b"}, {"namePrefix": "a"}, {"status": "WAITING"}):
        told = await carried_out(api, await started(api, "pause", narrowed))
        assert told["changed"] == told["matched"] == 2
        now = await statuses(database)
        assert {now[job_id] for job_id in own} == {_S.PAUSED}
        assert {now[job_id] for job_id in theirs} == {_S.WAITING}
        await change(database, "UPDATE job_info SET status = 0")
    operation_id = await started(api, "cancel", {"label": "a=b"}, clientRequestId="k")
    await change(database, "UPDATE bulk_operation SET tenant_id = 7")
    assert (await api.client.get(f"/openapi/bulk/{operation_id}")).status_code == 404
    assert (await api.client.post(f"/openapi/bulk/{operation_id}/cancel")).status_code == 404
    assert (await api.client.get("/openapi/bulk")).json()["items"] == []
    assert (await ask(api, "cancel", {"label": "a=b"}, clientRequestId="k")).status_code == 202


async def test_a_job_whose_move_raises_is_passed_over_and_counted(
    one_api: Door, monkeypatch: Any
) -> None:
    database = one_api.database
    jobs = await insert(database, 7)
    whole = sweep_file._MOVES["cancel"]

    async def breaks(
        connection: AsyncConnection, database: Database, asked: Asked, calendar: Calendar
    ) -> Any:
        answer = await whole(connection, database, asked, calendar)
        if asked.job_id == jobs[3]:
            raise ValueError("this one cannot be moved")
        return answer

    monkeypatch.setattr(sweep_file, "_MOVES", {"cancel": breaks})
    told = await carried_out(one_api, await started(one_api, "cancel", {"handler": "echo"}))
    assert (told["status"], told["changed"]) == ("SUCCEEDED", 6)
    assert told["refused"] == {"internal_error": 1}
    now = await statuses(database)
    assert [job_id for job_id in jobs if now[job_id] is _S.WAITING] == [jobs[3]]


async def test_an_operation_that_cannot_be_understood_fails_and_says_so(one_api: Door) -> None:
    await insert(one_api.database, 2)
    bad = await started(one_api, "cancel", {"handler": "echo"})
    await change(
        one_api.database,
        "UPDATE bulk_operation SET filter = :new",
        new=json.dumps({"moon": "full"}),
    )
    good = await started(one_api, "cancel", {"handler": "echo"})
    await one_api.parts.sweeper.round(await new_term(one_api.database))
    (row,) = await rows_of(
        one_api.database,
        "SELECT status, error_code FROM bulk_operation WHERE operation_id = :id",
        id=bad,
    )
    assert row == {"status": 4, "error_code": "internal_error"}
    assert (await carried_out(one_api, good))["changed"] == 2


async def test_operations_are_listed_newest_first(api: Door) -> None:
    made = [await started(api, "cancel", {"handler": f"h{n}"}) for n in range(5)]
    found: list[str] = []
    query: dict[str, Any] = {"limit": 2}
    while True:
        page = (await api.client.get("/openapi/bulk", params=query)).json()
        found += [one["operationId"] for one in page["items"]]
        if page["nextCursor"] is None:
            break
        query["cursor"] = page["nextCursor"]
    assert found == made[::-1]
    assert (await api.client.get("/openapi/bulk?cursor=x")).status_code == 422


async def test_a_tenant_has_a_bounded_number_of_open_operations(one_api: Door) -> None:
    made = [await started(one_api, "cancel", {"handler": "x"}) for _ in range(MOST_OPEN)]
    answer = await ask(one_api, "cancel", {"handler": "x"})
    assert (answer.status_code, answer.json()["code"]) == (409, "too_many_operations")
    assert (await one_api.client.post(f"/openapi/bulk/{made[0]}/cancel")).status_code == 200
    await started(one_api, "cancel", {"handler": "x"})


async def test_no_number_of_slow_operations_keeps_another_from_its_turn(one_api: Door) -> None:
    database = one_api.database
    columns = "tenant_id, request_digest, action, filter, rate, status, until_id, after_id"
    more = "after_finished, resume_at, matched, matched_is_minimum, refused, created_at, updated_at"
    for number in range(MOST_AT_ONCE):
        await change(
            database,
            f"INSERT INTO bulk_operation (operation_id, {columns}, {more}) VALUES (:slow, :tenant, "
            "'{}', 'cancel', '{}', 0.1, 1, 0, 0, 0, 9000000000000, 0, 0, '{}', 1, 1)",
            slow=f"slow-{number}",
            tenant=1 + number // MOST_OPEN,
        )
    (job_id,) = await insert(database, 1)
    operation_id = await started(one_api, "cancel", {"handler": "echo"})
    term = await new_term(database)
    for _ in range(2):
        assert await one_api.parts.sweeper.round(term) <= NEXT_PAGE_SECONDS
    assert (await look(one_api, operation_id))["status"] == "SUCCEEDED"
    assert (await statuses(database))[job_id] is _S.CANCELLED


async def test_open_operations_take_turns(one_api: Door) -> None:
    database = one_api.database
    await insert(database, 20, job_handler="one")
    await insert(database, 20, job_handler="two")
    made = [
        await started(one_api, "cancel", {"handler": name}, ratePerSecond=10)
        for name in ("one", "two")
    ]
    await one_api.parts.sweeper.round(await new_term(database))
    assert [(await look(one_api, one))["changed"] for one in made] == [2, 2]


async def test_operations_leave_after_their_retention(api: Door) -> None:
    database = api.database
    ended = await started(api, "cancel", {"handler": "x"})
    await carried_out(api, ended)
    lately = await started(api, "cancel", {"handler": "x"})
    await carried_out(api, lately)
    going = await started(api, "cancel", {"handler": "x"})
    await change(
        database,
        "UPDATE bulk_operation SET created_at = 1, finished_at = "
        "CASE WHEN operation_id = :old THEN 1 ELSE finished_at END",
        old=ended,
    )
    assert await api.parts.sweeper.prune() == 1
    left = [one["operationId"] for one in (await api.client.get("/openapi/bulk")).json()["items"]]
    assert left == [going, lately]


async def test_the_loop_of_a_dispatcher_carries_out_what_is_asked(migrated_engine: Engine) -> None:
    async with door(migrated_engine, no_dispatch=False) as api:
        await insert(api.database, 30, delay_ms=60_000)
        operation_id = await started(api, "cancel", {"handler": "echo"}, ratePerSecond=100)

        async def over() -> dict[str, Any] | None:
            told = await look(api, operation_id)
            return told if told["status"] == "SUCCEEDED" else None

        told = await until_async(over, 60, what="the operation to end")
        assert (told["changed"], told["refused"]) == (30, {})

        async def counted() -> bool:
            text = (await api.client.get("/metrics")).text
            return (
                'oncue_bulk_jobs_total{action="cancel",outcome="changed"} 30.0' in text
                and 'oncue_bulk_operations_ended_total{status="SUCCEEDED"} 1.0' in text
            )

        await until_async(counted, what="the metrics")
