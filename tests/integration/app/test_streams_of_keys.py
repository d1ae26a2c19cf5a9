"""A stream, or a long poll, ends when the key by which it was opened does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.access import key_cache
from app.jobs import events, logs
from tests.integration.app.rig import Door, change, insert, running_job
from tests.integration.app.test_keys import ROOT, ROOT_KEY, bearer, new_key
from tests.integration.app.test_streams import ended, reading, served
from tests.support.engines import Engine
from tests.support.wait import until_async

SILENCE_SECONDS = 120
BOTH = pytest.mark.parametrize("of", ["job", "log"])


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    """An API with keys over each engine, behind a real socket."""
    async with served(migrated_engine, api_keys=f"root:{ROOT_KEY}") as opened:
        yield opened


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is told often, and keys are looked at again soon."""
    for module in (events, logs):
        monkeypatch.setattr(module, "KEEP_ALIVE_SECONDS", 0.1)
    monkeypatch.setattr(key_cache, "FRESH_SECONDS", 0.1)


async def path_of(api: Door, of: str) -> str:
    """Return where a run that goes on can be followed."""
    run = await running_job(api.database)
    if of == "job":
        return f"/openapi/jobs/{run.job_id}/events"
    return f"/openapi/executions/{run.execution_id}/logs"


async def revoke(api: Door, key: dict[str, Any]) -> None:
    """End a key."""
    answer = await api.client.delete(f"/openapi/keys/{key['keyId']}", headers=ROOT)
    assert answer.status_code == 200, answer.text


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is told seldom, so that nothing but the news ends a stream."""
    for module in (events, logs):
        monkeypatch.setattr(module, "KEEP_ALIVE_SECONDS", SILENCE_SECONDS)


@BOTH
@pytest.mark.usefixtures("seldom")
async def test_a_stream_ends_at_once_when_its_key_is_revoked_and_others_go_on(
    api: Door, of: str
) -> None:
    path = await path_of(api, of)
    mine, others = await new_key(api, "mine"), await new_key(api, "others")
    async with (
        reading(api, path, **bearer(mine["key"])) as stream,
        reading(api, path, **bearer(others["key"])) as other,
        reading(api, path, **ROOT) as root,
    ):
        await until_async(lambda: api.parts.streams.count == 3)
        await revoke(api, mine)
        # Long before the next line of silence.
        await asyncio.wait_for(stream.task, SILENCE_SECONDS / 2)
        await until_async(lambda: api.parts.streams.count == 2)
        assert not other.task.done()
        assert not root.task.done()
        assert not {"ended", "end"} & set(stream.names)


@BOTH
@pytest.mark.usefixtures("often")
async def test_a_stream_ends_with_the_next_silence_when_its_key_expires_or_its_end_is_not_told(
    api: Door, of: str
) -> None:
    path = await path_of(api, of)
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    expires, untold = await new_key(api, "expires", expiresAt=later), await new_key(api, "untold")
    async with (
        reading(api, path, **bearer(expires["key"])) as one,
        reading(api, path, **bearer(untold["key"])) as other,
    ):
        await until_async(lambda: one.comments >= 2 and other.comments >= 2)
        soon = round(time.time() * 1000) + 1000
        await change(
            api.database,
            "UPDATE api_key SET expires_at = :soon WHERE id = :id",
            soon=soon,
            id=expires["keyId"],
        )
        # As another dispatcher would, whose signal is lost.
        await change(
            api.database, "UPDATE api_key SET revoked_at = 1 WHERE id = :id", id=untold["keyId"]
        )
        await ended(api, other)
        await ended(api, one)
        assert time.time() * 1000 >= soon - 1
    assert await refused(api, path, expires) == 401


async def refused(api: Door, path: str, key: dict[str, Any]) -> int:
    """Return the status of another request with the key."""
    return (await api.client.get(path, headers=bearer(key["key"]))).status_code


@BOTH
@pytest.mark.usefixtures("seldom")
async def test_a_stream_ends_when_its_tenant_is_disabled(api: Door, of: str) -> None:
    made = await api.client.post("/openapi/tenants", json={"name": "t"}, headers=ROOT)
    tenant_id = made.json()["tenantId"]
    path = await path_of(api, of)
    await change(api.database, "UPDATE job_info SET tenant_id = :tenant", tenant=tenant_id)
    key = await new_key(api, tenantId=tenant_id)
    async with reading(api, path, **bearer(key["key"])) as stream:
        await until_async(lambda: api.parts.streams.count == 1)
        answer = await api.client.patch(
            f"/openapi/tenants/{tenant_id}", json={"disabled": True}, headers=ROOT
        )
        assert answer.status_code == 200, answer.text
        await asyncio.wait_for(stream.task, SILENCE_SECONDS / 2)


async def test_a_long_poll_whose_key_has_ended_waits_no_more_and_tells_nothing(api: Door) -> None:
    (job_id,) = await insert(api.database)
    key, other = await new_key(api, "mine"), await new_key(api, "others")
    waits, waits_on = (
        asyncio.ensure_future(
            api.client.get(f"/openapi/jobs/{job_id}?wait=25", headers=bearer(one["key"]))
        )
        for one in (key, other)
    )
    await until_async(lambda: api.parts.waiters.count == 2)
    await revoke(api, key)
    answer = await asyncio.wait_for(waits, 15)
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
    assert not waits_on.done()
    assert (await api.client.post(f"/openapi/jobs/{job_id}/cancel", headers=ROOT)).is_success
    assert (await waits_on).json()["status"] == "CANCELLED"


@pytest.mark.usefixtures("often")
async def test_a_stream_that_needed_no_key_ends_when_one_is_needed(
    migrated_engine: Engine,
) -> None:
    async with served(migrated_engine) as api:
        path = await path_of(api, "job")
        async with reading(api, path) as stream:
            await until_async(lambda: stream.comments >= 2)
            made = await api.client.post(
                "/openapi/keys", json={"name": "first", "roles": ["admin"]}
            )
            assert made.status_code == 201, made.text
            await ended(api, stream)
