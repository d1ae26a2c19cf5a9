"""`oncue.testing` runs handlers as a worker would."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from oncue import Context, Fail, handler
from oncue.testing import HandlerNotFound, NotStorable, run_handler, run_handler_async


@handler("testing-plain")
def plain(params: Any) -> Any:
    return params


@handler("testing-context")
async def with_context(params: Any, ctx: Context) -> dict[str, Any]:
    return {
        "params": params,
        "handler": ctx.handler,
        "attempt": ctx.attempt,
        "of": ctx.max_attempts,
        "key": ctx.idempotency_key,
        "cancelled": ctx.cancelled,
    }


FIRST = {
    "params": 1,
    "handler": "testing-context",
    "attempt": 1,
    "of": 4,
    "key": "1",
    "cancelled": False,
}


def test_a_handler_runs_by_its_name_or_by_itself() -> None:
    assert run_handler("testing-plain", [1]) == [1]
    assert run_handler(plain, [1]) == [1]
    assert run_handler("testing-context", 1) == FIRST
    assert run_handler(with_context, 1) == FIRST


async def test_a_handler_runs_inside_a_loop() -> None:
    assert await run_handler_async("testing-context", 1) == FIRST
    assert await run_handler_async("testing-plain", 1) == 1
    assert run_handler("testing-plain", 1) == 1
    with pytest.raises(RuntimeError, match="run_handler_async"):
        run_handler("testing-context", 1)


def test_the_context_can_be_set() -> None:
    told = run_handler("testing-context", None, attempt=9, job_id=42)
    assert (told["attempt"], told["of"], told["key"]) == (9, 9, "42")


def test_a_run_of_a_schedule_can_be_played() -> None:
    def day(_: Any, ctx: Context) -> str | None:
        return None if ctx.nominal_time is None else ctx.nominal_time.date().isoformat()

    assert run_handler(day) is None
    assert run_handler(day, nominal_time=datetime(2026, 1, 31, 2, tzinfo=UTC)) == "2026-01-31"


def test_a_function_that_is_not_registered_runs_too() -> None:
    assert run_handler(lambda params, ctx: ctx.attempt) == 1


def test_params_and_results_pass_as_json() -> None:
    assert run_handler("testing-plain", {"pair": (1, 2)}) == {"pair": [1, 2]}
    with pytest.raises(NotStorable, match="params is not JSON"):
        run_handler("testing-plain", {1, 2})
    with pytest.raises(NotStorable, match="the result is not JSON"):
        run_handler(lambda params: object())
    with pytest.raises(NotStorable, match="65538 bytes"):
        run_handler(lambda params: "x" * 65_536)


def test_what_a_handler_raises_is_passed_on() -> None:
    def refuse(params: Any) -> None:
        raise Fail("no", code="refused")

    with pytest.raises(Fail, match="no"):
        run_handler(refuse)


def test_an_unknown_handler_is_named_beside_the_known() -> None:
    with pytest.raises(HandlerNotFound, match=r"'nobody'.*testing-plain"):
        run_handler("nobody")
