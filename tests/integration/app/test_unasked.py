"""What a caller sends and a route does not take is refused: nothing is ignored without a word."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.access.roles import NEEDED
from app.main import openapi_document
from tests.integration.app.rig import Door, door
from tests.support.engines import Engine, migrated


@pytest.fixture
async def api(sqlite_engine: Engine) -> AsyncIterator[Door]:
    """An API over one engine: what is refused here never reaches it."""
    async with door(migrated(sqlite_engine)) as api:
        yield api


def routes() -> list[tuple[str, str, dict[str, Any]]]:
    """Return method, path and operation of every route of callers."""
    return [
        (method.upper(), path.replace("{jobId}", "1").replace("{", "").replace("}", ""), operation)
        for path, operations in openapi_document()["paths"].items()
        if path.startswith("/openapi/")
        for method, operation in operations.items()
    ]


def fault_of(answer: Any) -> tuple[int, str, str]:
    problem = answer.json()
    (error,) = problem["errors"]
    return answer.status_code, error["pointer"], error["detail"]


async def test_no_route_ignores_a_parameter_that_it_does_not_know(api: Door) -> None:
    found = routes()
    assert {operation["operationId"] for _, _, operation in found} == set(NEEDED)
    for method, path, operation in found:
        answer = await api.client.request(method, path, params={"chidren": "true"})
        status, pointer, detail = fault_of(answer)
        assert (status, pointer) == (422, "/chidren"), (method, path)
        for known in operation.get("parameters", []):
            if known["in"] == "query":
                assert known["name"] in detail, (method, path)


async def test_no_route_takes_one_of_two_values(api: Door) -> None:
    for method, path, operation in routes():
        for known in operation.get("parameters", []):
            if known["in"] == "query":
                answer = await api.client.request(
                    method, path, params=[(known["name"], "1"), (known["name"], "2")]
                )
                assert fault_of(answer)[:2] == (422, f"/{known['name']}"), (method, path)


async def test_a_verb_does_not_ignore_a_body_that_it_does_not_take(api: Door) -> None:
    job_id = await api.submitted(delayMs=60_000)
    for method, path, operation in routes():
        if "requestBody" not in operation:
            answer = await api.client.request(method, path, json={"params": {"n": 2}})
            assert fault_of(answer)[:2] == (422, ""), (method, path)
    assert (await api.client.get(f"/openapi/jobs/{job_id}")).json()["status"] == "WAITING"


async def test_a_wrong_method_is_told_before_what_it_would_not_take(api: Door) -> None:
    sent: list[dict[str, Any]] = [{"params": {"chidren": "true"}}, {"json": {"jobs": []}}]
    for asked in sent:
        answer = await api.client.request("GET", "/openapi/jobs/batch", **asked)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("nothing", [b"", b"{}", b"null", b" {} \n"])
async def test_a_body_that_says_nothing_is_none(api: Door, nothing: bytes) -> None:
    job_id = await api.submitted(delayMs=60_000)
    answer = await api.client.post(f"/openapi/jobs/{job_id}/cancel", content=nothing)
    assert answer.status_code == 200, answer.text
