"""What runs say: kept once, bounded, read by pages, followed without gap or repeat."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.edge.paging import encode_cursor
from app.lifecycle.moves.claim import Claimed
from app.lifecycle.states import ExecutionStatus
from oncue.output import HEAD_BYTES, LINE_OVERHEAD_BYTES, TAIL_BYTES
from oncue.protocol import LOGS_PATH
from tests.integration.app.rig import (
    TOKEN,
    WORKER,
    Door,
    change,
    claimed,
    door,
    ending,
    insert,
    new_term,
    prune_all,
    rows_of,
    running_job,
    settled,
    value_of,
)
from tests.integration.app.test_api import counted
from tests.support.engines import Engine

NOW = 1_700_000_000_000


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    """An API over each engine."""
    async with door(migrated_engine) as opened:
        yield opened


def line(seq: int, message: str = "", **fields: Any) -> dict[str, Any]:
    return {
        "seq": seq,
        "time": NOW + seq,
        "level": "info",
        "source": "stdout",
        "message": message or f"line {seq}",
        **fields,
    }


def part(run: Claimed, *lines: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"executionId": run.execution_id, "lines": lines, **fields}


async def ship(api: Door, *parts: dict[str, Any], worker_id: str = WORKER) -> dict[str, Any]:
    answer = await api.client.post(
        LOGS_PATH,
        content=json.dumps({"workerId": worker_id, "parts": parts}),
        headers={"Authorization": f"Bearer {TOKEN}"},
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def page(api: Door, run: Claimed, **query: Any) -> dict[str, Any]:
    answer = await api.client.get(f"/openapi/executions/{run.execution_id}/logs", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def all_lines(api: Door, run: Claimed, limit: int = 200) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    query: dict[str, Any] = {}
    while True:
        found = await page(api, run, limit=limit, **query)
        assert len(found["items"]) <= limit
        items += found["items"]
        if found["nextCursor"] is None:
            return items
        query = {"cursor": found["nextCursor"]}


async def test_lines_are_read_by_pages_oldest_first(api: Door) -> None:
    run = await running_job(api.database)
    fields = {"big": 2**70, "text": "\0 ü \U0001f600"}
    lines = [line(1, "a\nb \0 ü \U0001f600", fields=fields), *map(line, range(2, 12))]
    await ship(api, part(run, *lines[:3]))
    await ship(api, part(run, *lines[3:], complete=True))
    found = await all_lines(api, run)
    assert [one["seq"] for one in found] == list(range(1, 12))
    for limit in (1, 3):
        assert await all_lines(api, run, limit) == found
    assert found[0] == {
        "seq": 1,
        "time": "2023-11-14T22:13:20.001Z",
        "level": "info",
        "source": "stdout",
        "message": "a\nb \0 ü \U0001f600",
        "fields": fields,
    }
    assert (await page(api, run))["complete"] is True
    assert (await page(api, run, limit=1))["complete"] is False


async def test_a_part_that_is_repeated_or_comes_late_changes_nothing(api: Door) -> None:
    run = await running_job(api.database)
    first, second = part(run, line(1), line(2)), part(run, line(3), line(4), complete=True)
    for one in (first, first, second, first, second, part(run, line(2), line(3), line(4))):
        assert (await ship(api, one))["refused"] == []
    assert [one["seq"] for one in await all_lines(api, run)] == [1, 2, 3, 4]
    assert (await page(api, run))["complete"] is True
    assert await value_of(api.database, "SELECT COUNT(*) FROM log_chunk") == 2


async def test_only_the_worker_of_an_execution_may_speak_for_it(api: Door) -> None:
    run = await running_job(api.database)
    foreign = part(run, line(1), progress={"value": 0.5, "at": NOW})
    assert (await ship(api, foreign, worker_id="other#boot"))["refused"] == [run.execution_id]
    unknown = {"executionId": "nobody", "lines": [line(1)]}
    assert (await ship(api, unknown, part(run, line(1))))["refused"] == ["nobody"]
    assert len(await all_lines(api, run)) == 1
    assert (await api.client.get(f"/openapi/jobs/{run.job_id}")).json()["progress"] is None


async def test_what_cannot_be_read_is_refused_with_what_to_change(api: Door) -> None:
    run = await running_job(api.database)
    for bad, words in (
        (line(1, "x" * 16_385), "split it"),
        (line(1, fields={"a": "x" * 5000}), "at most 4096"),
        (line(0), "seq"),
        (line(1, level="loud"), "level"),
    ):
        answer = await api.client.post(
            LOGS_PATH,
            json={"workerId": WORKER, "parts": [part(run, bad)]},
            headers={"Authorization": f"Bearer {TOKEN}"},
        )
        assert (answer.status_code, words in answer.text) == (422, True), answer.text
    answer = await api.client.post(LOGS_PATH, json={"workerId": WORKER, "parts": []})
    assert answer.status_code == 401
    assert await all_lines(api, run) == []


def counts_of(lines: list[dict[str, Any]]) -> int:
    """What lines count, as the bound does."""
    return sum(LINE_OVERHEAD_BYTES + len(one["message"].encode()) for one in lines)


async def test_of_a_long_log_the_first_and_the_last_512_kib_stay_and_a_line_says_what_left(
    api: Door,
) -> None:
    run = await running_job(api.database)
    size, total = 1000 + LINE_OVERHEAD_BYTES, 2500
    for start in range(1, total + 1, 100):
        lines = [line(seq, "x" * 1000) for seq in range(start, start + 100)]
        await ship(api, part(run, *lines))
    found = await all_lines(api, run)
    (marker,) = [one for one in found if one["source"] == "oncue"]
    place = found.index(marker)
    head, tail = found[:place], found[place + 1 :]
    assert [one["seq"] for one in head] == list(range(1, HEAD_BYTES // size + 1))
    assert [one["seq"] for one in tail] == list(range(tail[0]["seq"], total + 1))
    assert TAIL_BYTES - 33 * 1024 < counts_of(tail) <= TAIL_BYTES
    dropped = total - len(head) - len(tail)
    assert marker["fields"] == {"droppedLines": dropped, "droppedBytes": dropped * size}
    assert marker["message"] == f"{dropped} lines ({dropped * size} bytes) were dropped here"
    assert marker["seq"] == tail[0]["seq"] - 1
    assert await all_lines(api, run, 7) == found
    stored = await value_of(api.database, "SELECT SUM(byte_count) FROM log_chunk")
    assert stored <= HEAD_BYTES + TAIL_BYTES


async def test_lines_that_the_worker_dropped_and_those_that_slid_are_one_marker(api: Door) -> None:
    run = await running_job(api.database)
    size = 10_000 + LINE_OVERHEAD_BYTES
    await ship(api, part(run, *(line(seq, "x" * 10_000) for seq in range(1, 121))))
    fields = {"droppedLines": 80, "droppedBytes": 80 * size}
    marker = line(200, "80 lines were dropped here", source="oncue", fields=fields)
    rest = [line(seq, "x" * 10_000) for seq in range(201, 261)]
    await ship(api, part(run, marker, *rest))
    found = await all_lines(api, run)
    (told,) = [one for one in found if one["source"] == "oncue"]
    kept = [one for one in found if one["source"] != "oncue"]
    assert told["fields"]["droppedLines"] + len(kept) == 260
    assert told["fields"]["droppedBytes"] == (260 - len(kept)) * size


async def test_a_reader_whose_next_lines_have_left_is_told_how_many(api: Door) -> None:
    run = await running_job(api.database)
    await ship(api, part(run, *(line(seq, "x" * 10_000) for seq in range(1, 101))))
    first = await page(api, run, limit=60)
    await ship(api, part(run, *(line(seq, "x" * 10_000) for seq in range(101, 201))))
    marker, following = (await page(api, run, limit=2, cursor=first["nextCursor"]))["items"]
    assert marker["fields"] == {"droppedLines": following["seq"] - 61}
    assert following["seq"] > 140


async def test_progress_is_the_newest_of_the_current_execution(api: Door) -> None:
    run = await running_job(api.database, max_retry=3)
    await ship(api, part(run, progress={"value": 0.4, "text": "half", "at": NOW}))
    await ship(api, part(run, progress={"value": 0.2, "text": "late", "at": NOW - 5}))
    job = (await api.client.get(f"/openapi/jobs/{run.job_id}")).json()
    progress = {"value": 0.4, "text": "half", "at": "2023-11-14T22:13:20.000Z"}
    assert job["progress"] == job["executions"][0]["progress"] == progress
    (listed,) = (await api.client.get("/openapi/jobs")).json()["items"]
    assert listed["progress"] == progress
    await settled(api.database, ending(run, ExecutionStatus.FAILED, error_code="e"))
    await change(api.database, "UPDATE job_info SET next_trigger_time = 1")
    term = await new_term(api.database)
    (again,) = await claimed(api.database, [run.job_id], term=term)
    await ship(api, part(run, line(1, "late"), progress={"value": 0.9, "at": NOW + 9}))
    job = (await api.client.get(f"/openapi/jobs/{run.job_id}")).json()
    assert job["progress"] is None
    assert [one["progress"] and one["progress"]["value"] for one in job["executions"]] == [
        None,
        0.9,
    ]
    assert [one["message"] for one in await all_lines(api, run)] == ["late"]
    assert await all_lines(api, again) == []


async def test_retention_takes_the_lines_with_the_job_in_bounded_steps(
    api: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.lifecycle.moves.prune.MOST_LOG_BYTES", 1000)
    loud = [await running_job(api.database) for _ in range(3)]
    for run in loud:
        await ship(api, part(run, *(line(seq, "x" * 100) for seq in range(1, 6)), complete=True))
        await settled(api.database, ending(run, ExecutionStatus.SUCCEEDED))
    quiet = await running_job(api.database)
    await settled(api.database, ending(quiet, ExecutionStatus.SUCCEEDED))
    deleted = await prune_all(api.database, before_ms=2**53, limit=10)
    assert deleted == [1, 1, 2]
    for table in ("job_info", "job_log", "execution_log", "log_chunk"):
        assert await rows_of(api.database, f"SELECT * FROM {table}") == []
    late = part(loud[0], line(9))
    assert (await ship(api, late))["refused"] == [loud[0].execution_id]


async def test_what_is_about_to_be_pruned_gets_nothing_new(migrated_engine: Engine) -> None:
    async with door(migrated_engine, retention_days=2) as api:
        run = await running_job(api.database)
        await settled(api.database, ending(run, ExecutionStatus.SUCCEEDED))
        await change(api.database, "UPDATE job_log SET finished_at = finished_at - 90000000")
        assert (await ship(api, part(run, line(1))))["refused"] == [run.execution_id]


async def test_logs_of_unknown_executions_and_foreign_cursors_are_refused(api: Door) -> None:
    answer = await api.client.get("/openapi/executions/nobody/logs")
    assert (answer.status_code, answer.json()["code"]) == (404, "execution_not_found")
    answer = await api.client.get("/openapi/executions/nobody/logs?follow=true")
    assert answer.status_code == 404
    run = await running_job(api.database)
    answer = await api.client.get(f"/openapi/executions/{run.execution_id}/logs?cursor=x")
    assert answer.status_code == 422
    await ship(api, part(run, line(1)))
    for position, status in ((2**63 - 1, 422), (2**63 - 2, 200)):
        cursor = encode_cursor(position)
        answer = await api.client.get(
            f"/openapi/executions/{run.execution_id}/logs", params={"cursor": cursor}
        )
        assert answer.status_code == status, answer.text
    await change(api.database, "UPDATE job_info SET tenant_id = 7")
    answer = await api.client.get(f"/openapi/executions/{run.execution_id}/logs")
    assert answer.status_code == 404


async def test_a_batch_costs_the_same_statements_for_one_run_and_for_many(api: Door) -> None:
    term = await new_term(api.database)
    runs = await claimed(api.database, await insert(api.database, 40), term=term)
    progress = {"value": 0.5, "at": NOW}
    costs = []
    for batch in (runs[:1], runs[1:]):
        with counted(api.database) as statements:
            await ship(api, *(part(run, line(1), progress=progress) for run in batch))
        costs.append(len([one for one in statements if "log" in one]))
    with counted(api.database) as statements:
        await ship(api, *(part(run, line(2)) for run in runs))
    costs.append(len([one for one in statements if "log" in one]))
    assert costs == [7, 7, 4]


async def test_looking_at_jobs_costs_no_statement_more_for_progress(api: Door) -> None:
    term = await new_term(api.database)
    runs = await claimed(api.database, await insert(api.database, 9), term=term)
    waiting = (await insert(api.database))[0]
    await ship(api, *(part(run, progress={"value": 0.5, "at": NOW}) for run in runs))

    async def cost(path: str) -> int:
        with counted(api.database) as statements:
            assert (await api.client.get(path)).status_code == 200
        return len([one for one in statements if "job_" in one])

    assert await cost(f"/openapi/jobs/{runs[0].job_id}") == 2
    assert await cost(f"/openapi/jobs/{waiting}") == 1
    assert await cost("/openapi/jobs?limit=9") == await cost("/openapi/jobs?limit=2") == 3
