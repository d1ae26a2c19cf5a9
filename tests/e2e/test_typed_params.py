"""Typed params from end to end: real workers publish, the door checks, handlers get the values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from oncue import Client, Invalid, NewJob
from tests.support import typed_handlers
from tests.support.cli import oncue
from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform
from tests.support.wait import until

TYPED = typed_handlers.__name__
V1 = {"orderId": 7, "customer": {"email": "a@b.example"}}
V2 = {"number": 8, "customer": {"email": "a@b.example"}}


@pytest.fixture
def typed(engine: Engine, new_platform: NewPlatform) -> Platform:
    """One dispatcher, and one worker with typed handlers; once over each engine."""
    platform = new_platform(engine)
    platform.dispatcher()
    platform.worker("old", handlers=TYPED)
    wait_for_versions(platform, ["orderId"])
    return platform


def offered(platform: Platform) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in platform.get("/openapi/handlers")["items"]}


def wait_for_versions(platform: Platform, required: list[str]) -> None:
    """Wait until the order handler is shown with one of these as its first field."""

    def found() -> bool:
        order = offered(platform).get("typed_order")
        return bool(
            order and order["paramsChecked"] and order["paramsSchema"]["required"][0] in required
        )

    until(found, 30, what="the schema to be known")


def refused(platform: Platform, handler: str, params: Any) -> dict[str, Any]:
    body = {"clientRequestId": "x", "jobName": "n", "jobHandler": handler, "params": params}
    answer = platform.http.post("/openapi/jobs", json=body)
    assert answer.status_code == 422, answer.text
    problem: dict[str, Any] = answer.json()
    assert problem["code"] == "params_invalid"
    return {one["pointer"]: one["detail"] for one in problem["errors"]}


@pytest.mark.parametrize(
    ("handler", "params", "result"),
    [
        ("typed_order", V1, {"type": "OrderV1", "order": 7, "attempt": 1}),
        ("typed_point", {"x": 1, "y": 2}, ["Point", 1, 2]),
        ("typed_movie", {"title": "M"}, ["M", 1]),
        ("typed_numbers", [1, 2], 3),
        ("untyped", "anything", "anything"),
    ],
)
def test_values_go_through_and_others_are_refused_at_the_door(
    sqlite_platform: Platform, handler: str, params: Any, result: Any
) -> None:
    sqlite_platform.dispatcher()
    sqlite_platform.worker("old", handlers=TYPED)
    wait_for_versions(sqlite_platform, ["orderId"])
    job = sqlite_platform.ended(sqlite_platform.submit(handler, params))
    assert (job["status"], job["result"]) == ("SUCCEEDED", result)
    if handler != "untyped":
        assert refused(sqlite_platform, handler, "text")


def test_the_door_the_client_and_the_command_line_tell_the_same(typed: Platform) -> None:
    assert refused(typed, "typed_order", {"orderId": "7", "customer": {}, "more": 1}) == {
        "/params/orderId": "must be an integer",
        "/params/customer/email": "is required",
        "/params/more": "is no field of this handler's params",
    }
    with Client(typed.url) as client:
        found = {one.name: one for one in client.handlers()}
        schema = found["typed_order"].params_schema
        assert schema is not None
        assert schema["required"] == ["orderId", "customer"]
        assert found["typed_order"].params_checked
        assert found["untyped"].params_schema is None
        with pytest.raises(Invalid) as caught:
            client.submit("typed_point", {"y": 1})
        assert caught.value.code == "params_invalid"
        assert caught.value.problem["errors"][0]["pointer"] == "/params/x"
        many = client.submit_many([NewJob("typed_point", {"x": 1}), NewJob("typed_point", [])])
        assert [type(one).__name__ for one in many] == ["Job", "Invalid"]
    told = oncue("handlers", "typed_order", url=typed.url)
    rows = {words[0]: words for line in told.out.splitlines() if (words := line.split())}
    assert told.code == 0
    assert rows["customer.email"][1:3] == ["string", "yes"]
    shown = json.loads(oncue("handlers", "typed_order", "--json", url=typed.url).out)
    assert shown == offered(typed)["typed_order"]
    missing = oncue("handlers", "nobody", url=typed.url)
    assert (missing.code, missing.out) == (3, "")
    assert "no live worker offers the handler 'nobody'" in missing.err


def test_what_only_the_worker_can_know_fails_there_once_and_for_good(typed: Platform) -> None:
    job = typed.ended(typed.submit("typed_even", {"n": 3}, maxRetry=3, retryIntervalSeconds=0))
    assert (job["status"], job["attempt"]) == ("FAILED", 1)
    assert job["error"]["code"] == "params_invalid"
    assert "n must be even" in job["error"]["message"]


def test_two_versions_are_rolled_over_without_a_refusal(typed: Platform) -> None:
    typed.submit("typed_order", V1, clientRequestId="kept", delayMs=3_600_000)
    typed.worker("new", handlers=TYPED, environment={"ONCUE_TEST_ORDER_VERSION": "2"})
    until(lambda: offered(typed)["typed_order"]["workers"] == 2, 30, what="both workers")
    until(lambda: offered(typed)["typed_order"]["paramsChecked"], 30, what="both schemas")
    for params in (V1, V2):
        typed.submit("typed_order", params, delayMs=3_600_000)
    assert refused(typed, "typed_order", {"customer": {}})
    typed.services["old"].terminate()
    wait_for_versions(typed, ["number"])
    until(lambda: offered(typed)["typed_order"]["workers"] == 1, 30, what="the old one to be gone")
    assert "/params/number" in refused(typed, "typed_order", V1)
    again = typed.submit("typed_order", V1, clientRequestId="kept", delayMs=3_600_000)
    assert typed.job(again)["params"] == V1, "a repeat is never refused"
    job = typed.ended(typed.submit("typed_order", V2))
    assert job["result"] == {"type": "OrderV2", "order": 8}
