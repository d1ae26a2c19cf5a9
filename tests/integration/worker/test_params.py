"""Typed params at the worker: what handlers are given, and how their schemas are published."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import pytest
from pydantic import create_model

from oncue.handlers import RegisteredHandler, params_type_of
from oncue.protocol import (
    MAX_SCHEMA_BYTES,
    MAX_SCHEMAS_BYTES,
    Heartbeat,
    Outcome,
    OutcomeStatus,
)
from tests.integration.worker.conftest import OpenWorker
from tests.integration.worker.rig import FakeDispatcher
from tests.support import typed_handlers
from tests.support.wait import until_async
from tests.unit.worker.runs import make_request, make_run
from worker import heartbeat
from worker.offered import describe_offer
from worker.parts import Parts

TYPED = typed_handlers.__name__
OWN = {"handlers": (TYPED,)}


async def run_once(
    parts: Parts, dispatcher: FakeDispatcher, handler: str, params: Any, **changes: Any
) -> Outcome:
    run = make_run(handler, params, **changes)
    await parts.intake.take(make_request(run))
    return await until_async(lambda: dispatcher.outcome(run.execution_id))


@pytest.mark.parametrize(
    ("handler", "params", "result"),
    [
        (
            "typed_order",
            {"orderId": 7, "customer": {"email": "a@b"}},
            {"type": "OrderV1", "order": 7, "attempt": 2},
        ),
        ("typed_point", {"x": 1}, ["Point", 1, 0]),
        ("typed_movie", {"title": "M", "more": 1}, ["M", 2]),
        ("typed_numbers", [1, 2**80], 2**80 + 1),
        ("untyped", "anything", "anything"),
    ],
    ids=["thread", "async", "child", "list", "untyped"],
)
async def test_a_handler_is_given_the_value_that_its_annotation_says(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, handler: str, params: Any, result: Any
) -> None:
    async with open_worker(**OWN) as parts:
        outcome = await run_once(parts, dispatcher, handler, params, attempt=2)
    assert (outcome.status, outcome.result) == (OutcomeStatus.SUCCEEDED, result)


@pytest.mark.parametrize(
    ("handler", "params", "pointer"),
    [
        ("typed_order", {"orderId": "7", "customer": {"email": "a@b"}}, "/params/orderId"),
        ("typed_point", {}, "/params/x"),
        ("typed_movie", {"title": 1}, "/params/title"),
        ("typed_numbers", ["1"], "/params/0"),
        ("typed_even", {"n": 3}, "n must be even"),
        ("typed_point", None, "/params"),
    ],
    ids=["thread", "async", "child", "list", "validator", "null"],
)
async def test_params_that_do_not_fit_fail_for_good_and_name_the_field(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, handler: str, params: Any, pointer: str
) -> None:
    async with open_worker(**OWN) as parts:
        outcome = await run_once(parts, dispatcher, handler, params)
    assert outcome.error is not None
    assert (outcome.status, outcome.error.code) == (OutcomeStatus.FAILED, "params_invalid")
    assert outcome.retryable is False
    assert pointer in outcome.error.message


def digests(beat: Heartbeat) -> dict[str, str | None]:
    return {one.name: one.params_digest for one in beat.handlers}


async def test_schemas_are_sent_when_they_are_asked_for_and_only_then(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    async with open_worker(**OWN) as parts:
        first = dispatcher.beats[-1]
        wanted = digests(first)["typed_order"]
        assert wanted is not None
        assert digests(first)["untyped"] is None
        assert digests(first)["echo"] is None
        assert not any(beat.schemas for beat in dispatcher.beats)
        dispatcher.wanted_schemas = [wanted, "unknown"]
        parts.beats.beat_now()
        sent = await until_async(
            lambda: next((beat.schemas for beat in dispatcher.beats if beat.schemas), None)
        )
        assert [one.digest for one in sent] == [wanted]
        assert sha256(sent[0].body.encode()).hexdigest() == wanted
        assert json.loads(sent[0].body)["required"] == ["orderId", "customer"]
        dispatcher.wanted_schemas = []
        parts.beats.beat_now()
        await until_async(lambda: not dispatcher.beats[-1].schemas)


async def test_a_beat_with_schemas_that_fails_is_followed_by_plain_ones(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "RETRY_SECONDS", 0.05)
    dispatcher.refuses_schemas = True
    async with open_worker(**OWN) as parts:
        wanted = digests(dispatcher.beats[-1])["typed_order"]
        assert wanted is not None
        dispatcher.wanted_schemas = [wanted]
        parts.beats.beat_now()
        await until_async(lambda: dispatcher.refused_beats == 1)
        count = len(dispatcher.beats)
        await until_async(lambda: len(dispatcher.beats) > count)
        parts.beats.beat_now()
        await until_async(lambda: len(dispatcher.beats) > count + 1)
        assert dispatcher.refused_beats == 1
        assert not any(beat.schemas for beat in dispatcher.beats)


def typed(name: str, docstring_length: int) -> RegisteredHandler:
    def function(params: Any) -> None: ...

    model = create_model(f"Long_{name}", __doc__=name + "x" * docstring_length, n=(int, ...))
    function.__annotations__["params"] = model
    return RegisteredHandler(
        name=name,
        function=function,
        isolation="none",
        description="",
        takes_context=False,
        is_async=False,
        params_type=params_type_of(name, function, {}),
    )


def test_a_schema_that_is_too_long_is_offered_as_untyped() -> None:
    offer = describe_offer({"short": typed("short", 10), "long": typed("long", MAX_SCHEMA_BYTES)})
    assert [one.params_digest is None for one in offer.handlers] == [False, True]
    assert len(offer.schemas) == 1


def test_all_schemas_of_a_worker_fit_into_one_beat() -> None:
    many = {f"h{n}": typed(f"h{n}", 60_000) for n in range(20)}
    offer = describe_offer(many)
    sizes = [len(body.encode()) for body in offer.schemas.values()]
    assert MAX_SCHEMAS_BYTES - 61_000 < sum(sizes) <= MAX_SCHEMAS_BYTES
    published = [one for one in offer.handlers if one.params_digest is not None]
    assert len(published) == len(sizes) < 20
