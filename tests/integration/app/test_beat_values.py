"""Values of a beat that no column holds are refused where they arrive, over each engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from oncue.protocol import HEARTBEAT_PATH
from tests.integration.app.rig import TOKEN, Door, beat_of, door
from tests.support.engines import Engine


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    async with door(migrated_engine) as opened:
        yield opened


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("load", {"seq": 2**63, "active": 0}),
        ("load", {"seq": 1, "active": 2**31}),
        ("load", {"seq": 1, "active": 0, "queued": 2**31}),
        ("capacity", 2**31),
        ("termSeen", 2**63),
        ("weight", 1e300),
        ("weight", 1e-300),
        ("avgCostMs", 1e300),
    ],
)
async def test_a_beat_that_cannot_be_stored_is_refused_and_the_next_one_is_not(
    api: Door, field: str, value: Any
) -> None:
    beat = json.loads(beat_of("w").model_dump_json(by_alias=True))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = await api.client.post(HEARTBEAT_PATH, json={**beat, field: value}, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed"), answer.text
    assert answer.json()["errors"][0]["pointer"].startswith(f"/{field}")
    assert (await api.client.post(HEARTBEAT_PATH, json=beat, headers=headers)).status_code == 200


async def test_the_largest_values_of_a_beat_are_stored(api: Door) -> None:
    beat = await api.beat(
        load={"seq": 2**63 - 1, "active": 2**31 - 1, "queued": 2**31 - 1},
        capacity=2**31 - 1,
        weight=1e6,
        avg_cost_ms=1e15,
        term_seen=2**63 - 1,
    )
    assert beat.status_code == 200, beat.text
    (worker,) = (await api.client.get("/openapi/workers")).json()["items"]
    assert (worker["active"], worker["capacity"]) == (2**31 - 1, 2**31 - 1)
