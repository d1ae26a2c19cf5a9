"""Bulk actions that meet schedules and their children: as by the single verbs, signals included."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.lifecycle.states import JobStatus
from app.plumbing.bus import ENDED, FIRE, WAKE, Signal
from tests.integration.app.rig import Door, change, door, new_term
from tests.integration.app.schedule_rig import (
    HOUR,
    children,
    fired,
    moved_back,
    schedule_of,
    skips,
)
from tests.integration.app.test_bulk import carried_out, started
from tests.support.engines import Engine

_S = JobStatus


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    async with door(migrated_engine) as opened:
        yield opened


def heard(api: Door, kind: str) -> list[list[Any]]:
    told: list[list[Any]] = []

    def note(signal: Signal) -> None:
        told.append(list(signal))

    api.parts.ground.bus.subscribe(kind, note)
    return told


async def job(api: Door, job_id: int) -> dict[str, Any]:
    found: dict[str, Any] = (await api.client.get(f"/openapi/jobs/{job_id}")).json()
    return found


async def bulk(api: Door, action: str) -> dict[str, Any]:
    return await carried_out(api, await started(api, action, {"handler": "echo"}))


async def test_schedules_are_paused_resumed_and_cancelled_as_by_the_single_verbs(api: Door) -> None:
    database = api.database
    bulked = [await schedule_of(api) for _ in range(2)]
    alone = await schedule_of(api, jobHandler="other")
    fires, ends = heard(api, FIRE), heard(api, ENDED)

    assert (await bulk(api, "pause"))["changed"] == 2
    assert (await api.client.post(f"/openapi/jobs/{alone}/pause")).status_code == 200
    assert len(fires) == 2
    for job_id in (*bulked, alone):
        assert (await job(api, job_id))["status"] == "PAUSED"
        await moved_back(database, job_id, 3 * HOUR + HOUR // 2)
    assert await fired(api) == 0

    fires.clear()
    assert (await bulk(api, "resume"))["changed"] == 2
    assert len(fires) == 1
    assert (await api.client.post(f"/openapi/jobs/{alone}/resume")).status_code == 200
    records = []
    for job_id in (*bulked, alone):
        assert (await job(api, job_id))["status"] == "SCHEDULED"
        records.append([(one["count"], one["reason"]) for one in await skips(database, job_id)])
        assert await children(database, job_id) == []
    assert records == [[(3, "paused")]] * 3

    fires.clear()
    assert (await bulk(api, "cancel"))["changed"] == 2
    assert [one for told in ends for one in told] == [[job_id, ""] for job_id in bulked]
    assert fires == []
    assert (await bulk(api, "resume"))["examined"] == 0


async def test_a_schedule_whose_zone_is_gone_is_refused_and_the_others_go_on(api: Door) -> None:
    schedules = [await schedule_of(api, cronExpr="0 * * * *", timezone="Asia/Tokyo") for _ in "abc"]
    assert (await bulk(api, "pause"))["changed"] == 3
    await change(
        api.database, "UPDATE job_info SET timezone = 'Mars/Base' WHERE id = :id", id=schedules[1]
    )
    told = await bulk(api, "resume")
    assert (told["status"], told["changed"]) == ("SUCCEEDED", 2)
    assert told["refused"] == {"validation_failed": 1}
    now = [(await job(api, job_id))["status"] for job_id in schedules]
    assert now == ["SCHEDULED", "PAUSED", "SCHEDULED"]


async def test_a_child_that_is_cancelled_in_bulk_lets_the_next_one_run(api: Door) -> None:
    database = api.database
    schedule = await schedule_of(api, overlapPolicy="queue", jobName="nightly")
    await fired(api, back_ms=HOUR, schedule=schedule)
    await fired(api, back_ms=HOUR, schedule=schedule)
    first, second = await children(database, schedule)
    assert (first["status"], second["status"]) == (_S.WAITING, _S.BLOCKED)
    wakes = heard(api, WAKE)
    await new_term(database)
    await carried_out(api, await started(api, "cancel", {"handler": "echo", "status": "WAITING"}))
    first, second = await children(database, schedule)
    assert (first["status"], second["status"]) == (_S.CANCELLED, _S.WAITING)
    assert [second["queue_id"], second["priority"], second["next_trigger_time"]] in [
        place for told in wakes for place in told
    ]


async def test_a_child_of_a_fixed_delay_that_is_cancelled_in_bulk_sets_its_next_time(
    api: Door,
) -> None:
    schedule = await schedule_of(api, intervalMs=HOUR, intervalMode="fixedDelay")
    await fired(api, back_ms=HOUR, schedule=schedule)
    assert (await job(api, schedule))["nextTriggerTime"] is None
    fires = heard(api, FIRE)
    await carried_out(api, await started(api, "cancel", {"handler": "echo", "status": "WAITING"}))
    assert fires == [[]]
    assert (await job(api, schedule))["nextTriggerTime"] is not None
