"""Params against the schemas of live workers, at the door: when, and when not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import httpx
import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine as SyncEngine

from app.lifecycle.handler_schemas import UNUSED_MS, prune_schemas
from oncue.protocol import MAX_SCHEMA_BYTES, OfferedHandler, ParamsSchema
from tests.integration.app.rig import Door, body_of, change, door, value_of
from tests.support.engines import Engine, migrated

ORDER = {
    "type": "object",
    "required": ["customer"],
    "properties": {
        "customer": {
            "type": "object",
            "required": ["email"],
            "properties": {"email": {"type": "string"}},
        }
    },
}
GOOD = {"customer": {"email": "a@example.com"}}
BAD: dict[str, Any] = {"customer": {}}
NEWER = {"type": "object", "required": ["buyer"], "properties": {"buyer": {"type": "string"}}}


def text_of(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def digest_of(schema: Any) -> str:
    return sha256(text_of(schema).encode()).hexdigest()


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


async def beat(api: Door, name: str, schema: Any, *, send: bool = False, **fields: Any) -> Any:
    """Beat as a worker that offers `order`, typed by a schema unless it is None."""
    digest = None if schema is None else digest_of(schema)
    handlers = [OfferedHandler(name="order", description="Takes orders.", params_digest=digest)]
    schemas = [ParamsSchema(digest=digest_of(schema), body=text_of(schema))] if send else []
    answer = await api.client.post(
        "/internal/heartbeat",
        content=json.dumps(
            {
                "workerId": f"{name}#boot",
                "name": name,
                "bootId": "boot",
                "url": "http://127.0.0.1:9",
                "handlers": [one.model_dump(by_alias=True) for one in handlers],
                "capacity": 10,
                "load": {"seq": 1, "active": 0},
                "schemas": [one.model_dump(by_alias=True) for one in schemas],
                **fields,
            }
        ),
        headers={"Authorization": "Bearer internal-token"},
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


async def offered(api: Door, schema: Any = ORDER, name: str = "w") -> None:
    """Let a worker offer `order` with a schema that is stored."""
    wanted = (await beat(api, name, schema))["wantedSchemas"]
    answer = await beat(api, name, schema, send=bool(wanted))
    assert answer["wantedSchemas"] == []


async def shown(api: Door) -> dict[str, Any]:
    answer = await api.client.get("/openapi/handlers")
    assert answer.status_code == 200, answer.text
    (item,) = answer.json()["items"]
    return dict(item)


async def order(api: Door, params: Any, request_id: str = "", **fields: Any) -> httpx.Response:
    return await api.submit(request_id, jobHandler="order", params=params, **fields)


async def test_a_schema_is_asked_for_once_stored_and_shown(api: Door) -> None:
    assert (await beat(api, "w", ORDER))["wantedSchemas"] == [digest_of(ORDER)]
    assert (await beat(api, "w", ORDER))["wantedSchemas"] == [digest_of(ORDER)]
    assert (await shown(api))["paramsSchema"] is None
    assert (await beat(api, "w", ORDER, send=True))["wantedSchemas"] == []
    assert (await beat(api, "other", ORDER))["wantedSchemas"] == []
    assert await shown(api) == {
        "name": "order",
        "description": "Takes orders.",
        "isolation": "none",
        "workers": 2,
        "paramsSchema": ORDER,
        "paramsChecked": True,
    }


async def test_another_dispatcher_knows_the_schema(migrated_engine: Engine) -> None:
    async with door(migrated_engine) as first, door(migrated_engine) as second:
        await offered(first)
        assert (await beat(second, "w", ORDER))["wantedSchemas"] == []
        assert (await shown(second))["paramsSchema"] == ORDER
        assert (await order(second, BAD)).status_code == 422


async def test_params_that_do_not_fit_are_refused_with_the_place(api: Door) -> None:
    await offered(api)
    answer = await order(api, BAD)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["code"] == "params_invalid"
    assert problem["detail"] == "params/customer/email: is required"
    assert problem["errors"] == [{"pointer": "/params/customer/email", "detail": "is required"}]
    assert await value_of(api.database, "SELECT COUNT(*) FROM job_info") == 0
    assert (await order(api, None)).json()["errors"][0]["pointer"] == "/params"
    assert (await order(api, GOOD)).status_code == 202
    assert (await api.submit(jobHandler="another", params=BAD)).status_code == 202


async def test_a_repeat_is_never_refused(api: Door) -> None:
    job_id = (await order(api, BAD, "r1")).json()["jobId"]
    await offered(api)
    again = await order(api, BAD, "r1")
    assert (again.status_code, again.json()["jobId"]) == (200, job_id)
    other = await order(api, {"customer": 1}, "r1")
    assert (other.status_code, other.json()["code"]) == (409, "request_conflict")
    assert (await order(api, BAD, "r2")).status_code == 422
    assert await value_of(api.database, "SELECT COUNT(*) FROM job_info") == 1


async def test_each_job_of_a_batch_is_checked_on_its_own(api: Door) -> None:
    await order(api, BAD, "known")
    await offered(api)
    jobs = [
        body_of("good", jobHandler="order", params=GOOD),
        body_of("bad", jobHandler="order", params=BAD),
        body_of("known", jobHandler="order", params=BAD),
        body_of("other", jobHandler="echo", params=BAD),
        body_of("none", jobHandler="order"),
    ]
    answer = await api.client.post("/openapi/jobs/batch", json={"jobs": jobs})
    items = answer.json()["items"]
    assert [one["httpStatus"] for one in items] == [202, 422, 200, 202, 422]
    assert items[1]["code"] == "params_invalid"
    assert items[1]["errors"][0]["pointer"] == "/params/customer/email"
    assert await value_of(api.database, "SELECT COUNT(*) FROM job_info") == 3


async def test_a_patch_of_params_is_checked_and_no_other(api: Door) -> None:
    job_id = (await order(api, BAD, delayMs=3_600_000)).json()["jobId"]
    await offered(api)

    async def patch(**fields: Any) -> httpx.Response:
        etag = (await api.client.get(f"/openapi/jobs/{job_id}")).headers["etag"]
        return await api.client.patch(
            f"/openapi/jobs/{job_id}", json=fields, headers={"If-Match": etag}
        )

    refused = await patch(params={"customer": {"email": 1}})
    assert (refused.status_code, refused.json()["code"]) == (422, "params_invalid")
    assert refused.json()["errors"][0]["pointer"] == "/params/customer/email"
    assert (await patch(params=None)).status_code == 422
    assert (await patch(priority=1)).status_code == 200
    assert (await patch(params=GOOD)).json()["params"] == GOOD
    missing = await api.client.patch(
        "/openapi/jobs/999", json={"params": BAD}, headers={"If-Match": "*"}
    )
    assert (missing.status_code, missing.json()["code"]) == (404, "job_not_found")


async def test_the_params_of_a_trigger_are_checked(api: Door) -> None:
    job_id = (await order(api, BAD, delayMs=3_600_000)).json()["jobId"]
    await offered(api)
    address = f"/openapi/jobs/{job_id}/trigger"
    refused = await api.client.post(address, json={"params": BAD})
    assert (refused.status_code, refused.json()["code"]) == (422, "params_invalid")
    assert (await api.client.get(f"/openapi/jobs/{job_id}")).json()["revision"] == 0
    taken = await api.client.post(address, json={"params": GOOD})
    assert (taken.status_code, taken.json()["params"]) == (200, GOOD)


async def test_while_versions_differ_what_any_of_them_takes_is_accepted(api: Door) -> None:
    await offered(api, ORDER, "old")
    await offered(api, NEWER, "new-1")
    await offered(api, NEWER, "new-2")
    assert (await shown(api))["paramsSchema"] == NEWER, "that of most workers"
    assert (await order(api, GOOD)).status_code == 202
    assert (await order(api, {"buyer": "b"})).status_code == 202
    refused = await order(api, {"seller": 1})
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "/params/buyer")
    await beat(api, "old", ORDER, state="DRAINING")
    assert (await order(api, GOOD)).status_code == 422, "a draining worker takes no new runs"


async def test_nothing_is_checked_while_a_worker_takes_anything_or_none_lives(api: Door) -> None:
    assert (await order(api, BAD)).status_code == 202, "no worker at all"
    await offered(api)
    assert (await order(api, BAD)).status_code == 422
    await beat(api, "untyped", None)
    assert (await order(api, BAD)).status_code == 202
    item = await shown(api)
    assert (item["paramsSchema"], item["paramsChecked"]) == (ORDER, False)
    await beat(api, "untyped", None, state="DRAINING")
    assert (await order(api, BAD)).status_code == 422
    await change(api.database, "UPDATE worker_node SET last_heartbeat = 1")
    api.parts.fleet._expire()
    assert (await order(api, BAD)).status_code == 202


async def test_a_worker_that_knows_no_schemas_is_served_as_before(one_api: Door) -> None:
    answer = await one_api.beat("old", handlers=("order",))
    assert answer.status_code == 200
    item = await shown(one_api)
    assert (item["paramsSchema"], item["paramsChecked"]) == (None, False)
    assert (await order(one_api, BAD)).status_code == 202


@pytest.mark.parametrize(
    "schema",
    [
        "not JSON",
        "[]",
        '{"minimum": NaN}',
        {"$ref": "http://127.0.0.1:9/x"},
        {"type": "nonsense"},
        {"$ref": "#"},
    ],
    ids=str,
)
async def test_a_schema_that_cannot_be_used_checks_nothing(one_api: Door, schema: Any) -> None:
    await offered(one_api, schema)
    assert (await order(one_api, BAD)).status_code == 202
    item = await shown(one_api)
    assert item["paramsChecked"] is False
    assert item["paramsSchema"] in (None, schema)


async def test_a_schema_that_is_not_what_it_is_called_is_not_stored(one_api: Door) -> None:
    forged = {"digest": digest_of(NEWER), "body": text_of(ORDER)}
    answer = await beat(one_api, "w", NEWER, schemas=[forged])
    assert answer["wantedSchemas"] == [digest_of(NEWER)]
    assert await value_of(one_api.database, "SELECT COUNT(*) FROM handler_schema") == 0


async def test_the_longest_schema_is_stored_whole(api: Door) -> None:
    longest = json.dumps({"description": "é" * 30_000}, ensure_ascii=False)
    longest += " " * (MAX_SCHEMA_BYTES - len(longest.encode()))
    await offered(api, longest)
    assert (await shown(api))["paramsSchema"] == json.loads(longest)
    assert (await order(api, BAD)).status_code == 202


async def test_a_check_costs_no_statement(one_api: Door) -> None:
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        statements.append(statement)

    async def statements_of(request_id: str, handler: str) -> int:
        statements.clear()
        answer = await one_api.submit(request_id, jobHandler=handler, params=GOOD)
        assert answer.status_code in (200, 202)
        return len(statements)

    await offered(one_api)
    for handler in ("order", "plain"):
        await one_api.submit(jobHandler=handler, params=GOOD)
    event.listen(SyncEngine, "before_cursor_execute", note)
    try:
        await one_api.client.get("/openapi/handlers")
        typed = [await statements_of(f"t{n}", "order") for n in range(3)]
        untyped = [await statements_of(f"u{n}", "plain") for n in range(3)]
    finally:
        event.remove(SyncEngine, "before_cursor_execute", note)
    assert min(typed) == min(untyped)


async def test_what_no_worker_has_offered_for_a_week_is_deleted(api: Door) -> None:
    await offered(api, ORDER, "a")
    await offered(api, NEWER, "b")
    await change(
        api.database,
        f"UPDATE handler_schema SET seen_at = seen_at - {UNUSED_MS} - 1000 WHERE digest = :digest",
        digest=digest_of(NEWER),
    )
    deleted = await api.database.write(lambda connection: prune_schemas(connection, api.database))
    assert deleted == 1
    assert await value_of(api.database, "SELECT digest FROM handler_schema") == digest_of(ORDER)
