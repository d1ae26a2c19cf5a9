"""Keys: shown once, kept as a hash, rotated with an overlap, ended at once, and cheap to check."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import ValidationError

from app.access import key_cache
from app.access.tokens import digest_of, read_token
from app.lifecycle.nodes import read_node
from app.plumbing.database import DatabaseUnavailable
from tests.integration.app.rig import (
    TOKEN,
    Door,
    beat_of,
    body_of,
    change,
    claimed,
    door,
    insert,
    new_term,
    outcome_of,
    rows_of,
    value_of,
)
from tests.integration.app.test_api import counted
from tests.support.engines import Engine, migrated
from tests.support.wait import until_async

ROOT_KEY = "root-key-of-tests"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def about_keys(statements: list[str]) -> list[str]:
    return [one for one in statements if "api_key" in one]


ROOT = bearer(ROOT_KEY)


@pytest_asyncio.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    """A dispatcher with one configured key."""
    async with door(migrated_engine, api_keys=f"root:{ROOT_KEY}") as opened:
        yield opened


@pytest.fixture
def long_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no key in memory grow old by itself, however slow the machine is."""
    monkeypatch.setattr(key_cache, "FRESH_SECONDS", 3600.0)


async def new_key(api: Door, name: str = "caller", **fields: Any) -> dict[str, Any]:
    answer = await api.client.post("/openapi/keys", json={"name": name, **fields}, headers=ROOT)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def status_with(api: Door, key: str, path: str = "/openapi/jobs") -> int:
    return (await api.client.get(path, headers=bearer(key))).status_code


async def test_a_key_is_shown_once_and_kept_as_a_hash(api: Door) -> None:
    made = await new_key(api, roles=["read", "submit"])
    assert made["key"].startswith(made["prefix"] + "_")
    assert made["prefix"].startswith("ock_")
    assert made["roles"] == ["submit", "read"]
    assert await status_with(api, made["key"]) == 200

    secret = made["key"].removeprefix(made["prefix"])
    shown = await api.client.get(f"/openapi/keys/{made['keyId']}", headers=ROOT)
    listed = await api.client.get(
        "/openapi/keys", params={"prefix": made["prefix"][:9]}, headers=ROOT
    )
    assert [one["keyId"] for one in listed.json()["items"]] == [made["keyId"]]
    (row,) = await rows_of(api.database, "SELECT * FROM api_key")
    audit = await rows_of(api.database, "SELECT * FROM audit_log")
    for text in (shown.text, listed.text, str(row), str(audit)):
        assert secret not in text
        assert "key" not in shown.json()
    assert row["digest"] == digest_of(made["key"])


async def test_a_revoked_key_stops_at_once(api: Door) -> None:
    made = await new_key(api)
    assert await status_with(api, made["key"]) == 200
    ended = await api.client.delete(f"/openapi/keys/{made['keyId']}", headers=ROOT)
    assert ended.json()["state"] == "REVOKED"
    answer = await api.client.get("/openapi/jobs", headers=bearer(made["key"]))
    assert answer.status_code == 401
    assert "was revoked" in answer.json()["detail"]
    again = await api.client.delete(f"/openapi/keys/{made['keyId']}", headers=ROOT)
    assert again.json() == ended.json()
    rotated = await api.client.post(f"/openapi/keys/{made['keyId']}/rotate", headers=ROOT)
    assert (rotated.status_code, rotated.json()["code"]) == (409, "key_revoked")
    # The repeat changed nothing, and is not on record.
    told = await rows_of(api.database, "SELECT action FROM audit_log ORDER BY id")
    assert [one["action"] for one in told] == ["key.create", "key.revoke"]


async def test_a_revoked_key_stops_at_other_dispatchers_too(
    migrated_engine: Engine, long_fresh: None
) -> None:
    keys = f"root:{ROOT_KEY}"
    async with door(migrated_engine, api_keys=keys) as one, door(migrated_engine) as two:
        redis, prefix = two.parts.ground.redis, two.parts.ground.settings.redis_prefix

        async def heard() -> bool:
            return dict(await redis.pubsub_numsub(f"{prefix}:bus"))[f"{prefix}:bus"] == 2

        await until_async(heard, what="both to listen")
        made = await new_key(one)
        assert await status_with(two, made["key"]) == 200
        await one.client.delete(f"/openapi/keys/{made['keyId']}", headers=ROOT)

        async def refused() -> bool:
            return await status_with(two, made["key"]) == 401

        await until_async(refused, what="the other dispatcher to hear of it")


async def test_both_secrets_work_while_a_rotation_overlaps(api: Door) -> None:
    made = await new_key(api)
    path = f"/openapi/keys/{made['keyId']}"
    rotated = (await api.client.post(f"{path}/rotate", headers=ROOT)).json()
    assert rotated["prefix"] == made["prefix"]
    assert rotated["key"] != made["key"]
    assert rotated["oldWorksUntil"] is not None
    assert await status_with(api, made["key"]) == 200
    assert await status_with(api, rotated["key"]) == 200

    third = await api.client.post(f"{path}/rotate", json={"overlapSeconds": 0}, headers=ROOT)
    assert await status_with(api, made["key"]) == 401
    assert await status_with(api, rotated["key"]) == 401
    assert await status_with(api, third.json()["key"]) == 200
    assert third.json()["oldWorksUntil"] is None


async def test_a_key_works_until_it_expires(api: Door) -> None:
    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    made = await new_key(api, expiresAt=soon)
    assert await status_with(api, made["key"]) == 200
    await change(api.database, f"UPDATE api_key SET expires_at = {api.database.now_ms} - 60000")
    api.parts.ground.bus.publish("keys", [made["prefix"]])
    answer = await api.client.get("/openapi/jobs", headers=bearer(made["key"]))
    assert answer.status_code == 401
    assert "has expired" in answer.json()["detail"]
    shown = await api.client.get(f"/openapi/keys/{made['keyId']}", headers=ROOT)
    assert shown.json()["state"] == "EXPIRED"
    late = await api.client.post(
        "/openapi/keys", json={"name": "x", "expiresAt": "2020-01-01T00:00:00Z"}, headers=ROOT
    )
    assert late.status_code == 422


async def test_a_hot_key_costs_no_statement(api: Door, long_fresh: None) -> None:
    await api.parts.gate.stop()  # which writes uses
    made = await new_key(api)
    path = "/openapi/cron/preview?expr=*+*+*+*+*"
    assert await status_with(api, made["key"], path) == 200
    with counted(api.database) as statements:
        for _ in range(50):
            assert await status_with(api, made["key"], path) == 200
        for _ in range(10):
            assert await status_with(api, made["key"][:-1] + "_", path) == 401
    assert about_keys(statements) == []


async def test_many_who_ask_at_once_share_one_look_up(api: Door) -> None:
    await api.parts.gate.stop()  # which writes uses
    made = await new_key(api)
    with counted(api.database) as statements:
        answers = await asyncio.gather(
            *(status_with(api, made["key"], "/openapi/cron/preview") for _ in range(20))
        )
    assert answers == [422] * 20  # let in: there is no expression
    assert len(about_keys(statements)) == 1


async def test_unknown_keys_are_remembered_but_not_without_end(
    api: Door, long_fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_cache, "MOST_UNKNOWN", 3)
    cache = api.parts.gate._cache
    for number in range(9):
        assert await cache.find(f"ock_{number:010}") is None
    assert cache.size <= 3
    with counted(api.database) as statements:
        await cache.find("ock_0000000008")
        assert about_keys(statements) == []
        await cache.find("ock_0000000000")
    assert len(about_keys(statements)) == 1


async def test_the_last_use_is_written_off_the_hot_path(api: Door) -> None:
    await api.parts.gate.stop()  # the loop that does what is done here
    made = await new_key(api)
    assert await status_with(api, made["key"]) == 200
    assert api.parts.gate.due_uses() == [made["keyId"]]
    await api.parts.gate.write_uses([made["keyId"]])
    shown = await api.client.get(f"/openapi/keys/{made['keyId']}", headers=ROOT)
    assert shown.json()["lastUsedAt"] is not None
    # Within a minute it is not written again.
    assert await status_with(api, made["key"]) == 200
    assert api.parts.gate.due_uses() == []


async def test_wrong_keys_are_limited_by_address(migrated_engine: Engine) -> None:
    async with door(migrated_engine, api_keys=f"root:{ROOT_KEY}", most_failed_keys=3) as api:
        good = await new_key(api)
        fresh = await new_key(api)
        assert await status_with(api, good["key"]) == 200
        for number in range(3):
            assert await status_with(api, f"wrong-{number}") == 401
        refused = await api.client.get("/openapi/jobs", headers=bearer("wrong-again"))
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_failures")
        assert 1 <= int(refused.headers["Retry-After"]) <= 60
        # What was right from there before stays right; what never was is not even looked at.
        assert await status_with(api, good["key"]) == 200
        assert await status_with(api, ROOT_KEY) == 200
        assert await status_with(api, fresh["key"]) == 429
        assert (await api.client.get("/openapi/jobs")).status_code == 401


async def test_without_the_database_only_keys_in_memory_work(
    api: Door, long_fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/openapi/cron/preview?expr=*+*+*+*+*"
    known, unknown = await new_key(api), await new_key(api)
    assert await status_with(api, known["key"], path) == 200

    async def away(_work: Any) -> None:
        raise DatabaseUnavailable("away")

    monkeypatch.setattr(api.database, "read", away)
    assert await status_with(api, known["key"], path) == 200
    assert await status_with(api, ROOT_KEY, path) == 200
    answer = await api.client.get(path, headers=bearer(unknown["key"]))
    assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")


async def test_an_api_without_keys_is_open_until_the_first_one(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as api:
        assert (await api.client.get("/openapi/jobs")).status_code == 200
        refused = await api.client.post("/openapi/keys", json={"name": "first"})
        assert refused.status_code == 422
        assert "closes the API" in refused.json()["detail"]
        for what_to_do in ("oncue keys create NAME --role admin", '"roles": ["admin"]', "Bearer"):
            assert what_to_do in refused.json()["detail"]
        worker = await api.client.post("/openapi/keys", json={"name": "w", "workerGroup": "g"})
        assert worker.status_code == 201
        assert (await api.client.get("/openapi/jobs")).status_code == 200
        made = await api.client.post("/openapi/keys", json={"name": "first", "roles": ["admin"]})
        assert made.status_code == 201
        assert made.json()["createdBy"] == "(open)"
        assert (await api.client.get("/openapi/jobs")).status_code == 401
        assert await status_with(api, made.json()["key"]) == 200
        # To revoke the last key opens nothing.
        path = f"/openapi/keys/{made.json()['keyId']}"
        assert (await api.client.delete(path, headers=bearer(made.json()["key"]))).is_success
        assert (await api.client.get("/openapi/jobs")).status_code == 401


async def test_a_disabled_tenant_is_refused_and_its_jobs_stay(api: Door) -> None:
    tenant = (await api.client.post("/openapi/tenants", json={"name": "one"}, headers=ROOT)).json()
    key = (await new_key(api, tenantId=tenant["tenantId"], roles=["submit", "read"]))["key"]
    job = await api.client.post("/openapi/jobs", json=body_of(), headers=bearer(key))
    path = f"/openapi/tenants/{tenant['tenantId']}"
    assert (await api.client.patch(path, json={"disabled": True}, headers=ROOT)).json()[
        "disabled"
    ] is True
    refused = await api.client.get("/openapi/jobs", headers=bearer(key))
    assert (refused.status_code, refused.json()["code"]) == (403, "tenant_disabled")
    assert await value_of(api.database, "SELECT status FROM job_info") == 0
    await api.client.patch(path, json={"disabled": False}, headers=ROOT)
    assert await status_with(api, key, f"/openapi/jobs/{job.json()['jobId']}") == 200
    own = await api.client.patch("/openapi/tenants/0", json={"disabled": True}, headers=ROOT)
    assert own.status_code == 422
    twice = await api.client.post("/openapi/tenants", json={"name": "one"}, headers=ROOT)
    assert (twice.status_code, twice.json()["code"]) == (409, "tenant_name_taken")


async def test_what_was_made_is_at_its_location(api: Door) -> None:
    for path, name in (("/openapi/tenants", "tenantId"), ("/openapi/keys", "keyId")):
        made = await api.client.post(path, json={"name": "one"}, headers=ROOT)
        found = await api.client.get(made.headers["location"], headers=ROOT)
        assert (found.status_code, found.json()[name]) == (200, made.json()[name])


async def test_keys_of_a_tenant_that_is_not_there_are_refused(api: Door) -> None:
    body = {"name": "x", "tenantId": 77}
    answer = await api.client.post("/openapi/keys", json=body, headers=ROOT)
    assert (answer.status_code, answer.json()["code"]) == (404, "tenant_not_found")
    assert await value_of(api.database, "SELECT COUNT(*) FROM api_key") == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "x y"},
        {"name": ""},
        {"name": "x", "roles": []},
        {"name": "x", "roles": ["root"]},
        {"name": "x", "roles": ["read", "read"]},
        {"name": "x", "workerGroup": "g", "roles": ["read"]},
        {"name": "x", "tenantId": -1},
        {"name": "x", "key": "my own"},
    ],
)
async def test_a_key_that_cannot_be_is_refused(sqlite_engine: Engine, wrong: Any) -> None:
    async with door(migrated(sqlite_engine), api_keys=f"root:{ROOT_KEY}") as api:
        answer = await api.client.post("/openapi/keys", json=wrong, headers=ROOT)
        assert answer.status_code == 422, answer.text


# Workers


async def beat(api: Door, key: str, name: str = "w", **fields: Any) -> httpx.Response:
    return await api.client.post(
        "/internal/heartbeat",
        content=beat_of(name, **fields).model_dump_json(by_alias=True),
        headers=bearer(key),
    )


async def report(api: Door, key: str, worker_id: str, **fields: Any) -> httpx.Response:
    content = {"workerId": worker_id, "load": {"seq": 1, "active": 0}, "outcomes": [], **fields}
    # Escaped: a lone surrogate has no other form.
    text = json.dumps(content)
    return await api.client.post("/internal/reports", content=text, headers=bearer(key))


async def ship(api: Door, key: str, worker_id: str, execution_id: str) -> httpx.Response:
    line = {"seq": 1, "time": 1, "level": "info", "source": "ctx", "message": "hello"}
    content = {"workerId": worker_id, "parts": [{"executionId": execution_id, "lines": [line]}]}
    return await api.client.post("/internal/logs", json=content, headers=bearer(key))


async def test_a_group_key_beats_as_workers_of_its_group_alone(api: Door) -> None:
    one = (await new_key(api, "one", workerGroup="one"))["key"]
    two = (await new_key(api, "two", workerGroup="two"))["key"]
    assert one.startswith("ocw_")
    assert (await beat(api, one, "first")).status_code == 200
    assert (await beat(api, TOKEN, "plain")).status_code == 200
    for key, name in ((two, "first"), (one, "plain")):
        refused = await beat(api, key, name, url="http://127.0.0.1:1")
        assert (refused.status_code, refused.json()["code"]) == (403, "not_your_run")
    rows = await rows_of(api.database, "SELECT name, url, worker_group FROM worker_node")
    assert {row["name"]: row["worker_group"] for row in rows} == {"first": "one", "plain": None}
    assert {row["url"] for row in rows} == {"http://127.0.0.1:9"}
    # The key of a caller is none of a worker, and the other way round.
    assert (await beat(api, ROOT_KEY, "x")).status_code == 401
    assert await status_with(api, one) == 401
    # A repeat of its own goes on; an end of the key ends it.
    assert (await beat(api, one, "first")).status_code == 200
    listed = (await api.client.get("/openapi/keys", headers=ROOT)).json()["items"]
    key_id = next(item["keyId"] for item in listed if item["workerGroup"] == "one")
    await api.client.delete(f"/openapi/keys/{key_id}", headers=ROOT)
    assert (await beat(api, one, "first")).status_code == 401


async def test_a_group_key_reports_what_was_sent_to_its_group_alone(api: Door) -> None:
    one = (await new_key(api, "one", workerGroup="one"))["key"]
    two = (await new_key(api, "two", workerGroup="two"))["key"]
    assert (await beat(api, one, "w")).status_code == 200
    assert (await beat(api, two, "thief")).status_code == 200
    term = await new_term(api.database)
    (run,) = await claimed(api.database, await insert(api.database), term=term)  # to w#boot
    outcome = outcome_of(run, result="stolen")

    refused = await report(api, two, "w#boot", outcomes=[outcome])
    assert (refused.status_code, refused.json()["code"]) == (403, "not_your_run")
    foreign = await report(api, two, "thief#boot", outcomes=[outcome], stopped=[run.execution_id])
    # As a stale report: acknowledged, so that it ends, and without any effect.
    assert foreign.json()["acknowledged"] == [run.execution_id]
    assert await value_of(api.database, "SELECT status FROM job_info") == 1
    assert api.parts.ground.metrics.foreign_reports._value.get() == 2
    assert (await ship(api, two, "w#boot", run.execution_id)).status_code == 403
    foreign_log = await ship(api, two, "thief#boot", run.execution_id)
    assert foreign_log.json()["refused"] == [run.execution_id]
    own_log = await ship(api, one, "w#boot", run.execution_id)
    assert own_log.json()["refused"] == []
    own = await report(api, one, "w#boot", outcomes=[outcome_of(run, result="own")])
    assert own.json()["acknowledged"] == [run.execution_id]
    assert await value_of(api.database, "SELECT status FROM job_info") == 2


async def test_a_group_key_tells_the_load_of_its_own_workers_alone(api: Door) -> None:
    one = (await new_key(api, "one", workerGroup="one"))["key"]
    two = (await new_key(api, "two", workerGroup="two"))["key"]
    assert (await beat(api, one, "w")).status_code == 200
    assert (await beat(api, two, "own")).status_code == 200
    told: list[Any] = []
    api.parts.ground.bus.subscribe("load", told.append)
    full = {"seq": 2**63 - 1, "active": 2**31 - 1}
    assert (await report(api, two, "w#boot", load=full)).status_code == 403
    assert told == []
    assert (await report(api, two, "own#boot", load=full)).status_code == 200
    assert told == [["own#boot", full["seq"], full["active"]]]


@pytest.mark.parametrize(
    "sent",
    [
        {"workerId": "w\ud800"},
        {"workerId": ""},
        {"workerId": "w" * 129},
        {"load": {"seq": 1, "active": -1}},
    ],
)
async def test_a_report_that_no_signal_could_carry_is_refused(
    api: Door, sent: dict[str, Any]
) -> None:
    refused = await report(api, TOKEN, "w#boot", **sent)
    assert (refused.status_code, refused.json()["code"]) == (422, "validation_failed")


@pytest.mark.parametrize(
    "url",
    [
        *("http://inner/admin?x=", "http://inner/#", "http://user@inner/", "ftp://inner/"),
        *("http://inner:0", "http:///run", "http://inner/a b", "http://inner\\@other/"),
    ],
)
async def test_a_worker_says_no_more_than_where_its_calls_go(api: Door, url: str) -> None:
    with pytest.raises(ValidationError):
        beat_of("w", url=url)
    sent = beat_of("w").model_dump(mode="json", by_alias=True) | {"url": url}
    answer = await api.client.post(
        "/internal/heartbeat", content=json.dumps(sent), headers=bearer(TOKEN)
    )
    assert answer.status_code == 422
    assert await rows_of(api.database, "SELECT * FROM worker_node") == []


@pytest.mark.parametrize("trusted", [True, False])
async def test_workers_of_groups_deliver_only_where_they_may(
    migrated_engine: Engine, trusted: bool
) -> None:
    flags = {"group_workers_deliver": trusted, "api_keys": f"root:{ROOT_KEY}"}
    async with door(migrated_engine, **flags) as api:
        key = (await new_key(api, "one", workerGroup="one"))["key"]
        assert (await beat(api, key, "w", delivers=True)).status_code == 200
        rows = await rows_of(api.database, "SELECT delivers FROM worker_node")
        assert [bool(row["delivers"]) for row in rows] == [trusted]
        ids = await insert(api.database, callback_url="http://127.0.0.1:9/hook")
        (run,) = await claimed(api.database, ids, term=await new_term(api.database))
        answer = await report(api, key, "w#boot", outcomes=[outcome_of(run, 1)], delivers=True)
        assert len(answer.json()["deliveries"]) == trusted
        owed = await rows_of(api.database, "SELECT owner_worker_id FROM callback_delivery")
        assert [row["owner_worker_id"] for row in owed] == ["w#boot" if trusted else None]


async def test_calls_to_a_group_worker_do_not_carry_the_internal_token(api: Door) -> None:
    made = await new_key(api, "one", workerGroup="one")
    assert (await beat(api, made["key"], "w")).status_code == 200
    node = await api.database.read(lambda connection: read_node(connection, "w#boot"))
    assert node is not None
    assert node.call_token is not None
    assert TOKEN not in node.call_token
    token = read_token(node.call_token)
    assert token is None  # no dispatcher takes it for a key
    assert (await beat(api, node.call_token, "w")).status_code == 401
    rotated = await api.client.post(f"/openapi/keys/{made['keyId']}/rotate", json={}, headers=ROOT)
    assert (await beat(api, rotated.json()["key"], "w")).status_code == 200
    after = await api.database.read(lambda connection: read_node(connection, "w#boot"))
    assert after is not None
    assert after.call_token != node.call_token
