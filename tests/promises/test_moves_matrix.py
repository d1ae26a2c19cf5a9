"""Every move of every kind from every state: it leads where the table says, or is refused.

A new state needs its way there in `BUILDS`, a new move its call in `CALLS`: without, a test fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import pytest
import uuid_utils

from app.lifecycle.moves.assign import Reassignment, reassign
from app.lifecycle.moves.expire import expire_jobs
from app.lifecycle.moves.free_keys import free_keys
from app.lifecycle.moves.limit_keys import Key
from app.lifecycle.moves.submit import insert_expiries
from app.lifecycle.states import JOB_MOVES, ExecutionStatus, JobKind, JobStatus
from app.lifecycle.token import new_token
from tests.integration.app.every_state import (
    BUILDS,
    ask,
    end,
    finish,
    fire_past,
    hold_key,
    job_in,
    patch,
    row_of,
    schedule_body,
    task_body,
    try_to_claim,
)
from tests.integration.app.rig import Door, change, door, new_term
from tests.support.engines import Engine

PAST: Final = 1_700_000_000_000
FAR: Final = 4_000_000_000_000
Row = dict[str, Any]
Call = Callable[[Door, Row], Awaitable[None]]
_E = ExecutionStatus


async def _submit_again(api: Door, row: Row) -> None:
    body = task_body if row["interval_ms"] is None else schedule_body
    answer = await api.submit(row["client_request_id"], **body(row["job_name"]))
    assert (answer.status_code, answer.json()["jobId"]) == (200, row["id"])


async def _claim(api: Door, row: Row) -> None:
    await try_to_claim(api, row["id"])


async def _block(api: Door, row: Row) -> None:
    await hold_key(api, row["concurrency_key"])
    await try_to_claim(api, row["id"])


async def _unblock(api: Door, row: Row) -> None:
    await change(api.database, "DELETE FROM concurrency_slot WHERE waits = 0")
    key = Key(row["tenant_id"], row["concurrency_key"])
    await api.database.write(lambda connection: free_keys(connection, [key]))


async def _reassign(api: Door, row: Row) -> None:
    execution_id = row["execution_id"] or "none"
    move = Reassignment(row["id"], execution_id, "other#1", str(uuid_utils.uuid7()), "full")
    term = await new_term(api.database)
    await api.database.write(
        lambda connection: reassign(connection, api.database, [move], token=new_token(), term=term)
    )


async def _expire(api: Door, row: Row) -> None:
    await change(
        api.database,
        "UPDATE job_info SET expires_at = :past WHERE id = :id",
        past=PAST,
        id=row["id"],
    )
    await api.database.write(
        lambda connection: insert_expiries(connection, api.database, [(PAST, row["id"])])
    )
    await api.database.write(lambda connection: expire_jobs(connection, api.database, limit=9))


async def _trigger_later(api: Door, row: Row) -> None:
    """One that is due already has nothing to be moved by."""
    later = "UPDATE job_info SET next_trigger_time = :far WHERE id = :id"
    await change(api.database, later, far=FAR, id=row["id"])
    await ask(api, "trigger", row["id"])


def _verb(verb: str) -> Call:
    return lambda api, row: ask(api, verb, row["id"])


def _end(status: ExecutionStatus, **fields: Any) -> Call:
    return lambda api, row: end(api, row["id"], status, **fields)


def _by_id(step: Callable[[Door, int], Awaitable[None]]) -> Call:
    return lambda api, row: step(api, row["id"])


CALLS: Final[dict[JobKind, dict[str, Call]]] = {
    JobKind.TASK: {
        "submit": _submit_again,
        "unblock": _unblock,
        "block": _block,
        "claim": _claim,
        "reassign": _reassign,
        "succeed": _end(_E.SUCCEEDED, result="2"),
        "fail": _end(_E.FAILED, retryable=False),
        "retry": _end(_E.FAILED),
        "give_back": _end(_E.RETURNED),
        "cancel": _verb("cancel"),
        "expire": _expire,
        "pause": _verb("pause"),
        "resume": _verb("resume"),
        "trigger": _trigger_later,
        "change": _by_id(patch),
        "reopen": _verb("retry"),
    },
    JobKind.SCHEDULE: {
        "submit": _submit_again,
        "fire": _by_id(fire_past),
        "change": _by_id(patch),
        "trigger": _verb("trigger"),
        "pause": _verb("pause"),
        "resume": _verb("resume"),
        "cancel": _verb("cancel"),
        "finish": _by_id(finish),
    },
    JobKind.GROUP: {
        "submit": _submit_again,
        "succeed": _end(_E.SUCCEEDED, result="2"),
        "fail": _end(_E.FAILED, retryable=False),
        "cancel": _verb("cancel"),
    },
}


def targets(kind: JobKind, name: str, source: JobStatus | None) -> set[JobStatus]:
    """Return where the table lets a move lead to; of groups nothing is built yet."""
    return {
        move.target
        for move in JOB_MOVES
        if (move.kind, move.name, move.source) == (kind, name, source) and kind is not JobKind.GROUP
    }


def test_every_kind_state_and_move_of_the_table_has_its_place_here() -> None:
    for kind in JobKind:
        moves = [move for move in JOB_MOVES if move.kind is kind]
        assert set(CALLS[kind]) == {move.name for move in moves}, kind
        if kind is not JobKind.GROUP:
            assert set(BUILDS[kind]) == {move.target for move in moves}, kind


@pytest.mark.parametrize("kind", JobKind)
async def test_a_move_leads_where_the_table_says_or_is_refused(
    migrated_engine: Engine, kind: JobKind
) -> None:
    async with door(migrated_engine) as api:
        for status in JobStatus:
            for name, call in CALLS[kind].items():
                job_id = await job_in(api, kind, status, f"{status.name}-{name}")
                before = await row_of(api, job_id)
                await call(api, before)
                after = await row_of(api, job_id)
                case = (kind.name, status.name, name, JobStatus(after["status"]).name)
                legal = targets(kind, name, status)
                moved = after["version"] > before["version"]
                spawned = after["children"] > before["children"]
                assert (moved or spawned) == bool(legal), case
                assert after["status"] in (legal or {status}), case


async def test_what_enters_enters_in_a_state_of_the_table(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as api:
        schedule = await job_in(api, JobKind.SCHEDULE, JobStatus.SCHEDULED, "a")
        await fire_past(api, schedule)
        await fire_past(api, schedule)
        rows = await asyncio.gather(*map(partial(row_of, api), await _all_ids(api)))
    found = {(JobKind(row["kind"]), JobStatus(row["status"])) for row in rows}
    assert found == {(kind, target) for kind in JobKind for target in targets(kind, "submit", None)}


async def _all_ids(api: Door) -> list[int]:
    items = (await api.client.get("/openapi/jobs")).json()["items"]
    return [item["jobId"] for item in items]
