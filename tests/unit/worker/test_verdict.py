"""What return values and exceptions mean."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncue import Fail, Retry
from oncue.protocol import MAX_ERROR_MESSAGE_LENGTH, MAX_RESULT_BYTES, Failure, Outcome
from tests.unit.worker.runs import make_run
from worker import verdict as limits
from worker.outcome import RunTimes, encode_outcome
from worker.verdict import Verdict, judge_error, judge_value

TIMES = RunTimes(1, 2, 3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def test_the_limits_are_those_of_the_wire() -> None:
    assert limits.MAX_RESULT_BYTES == MAX_RESULT_BYTES
    assert limits.MAX_MESSAGE_LENGTH == MAX_ERROR_MESSAGE_LENGTH


@given(JSON)
def test_a_json_value_arrives_unchanged_at_the_dispatcher(value: Any) -> None:
    judged = judge_value(value)
    assert judged.status == "succeeded"
    encoded = encode_outcome(make_run("h"), judged, TIMES)
    assert Outcome.model_validate_json(encoded.wire).result == value
    assert json.loads(encoded.wire)["result"] == value


@given(st.text() | st.characters(categories=["Cs"]))
def test_any_error_text_can_be_sent(text: str) -> None:
    for error in (ValueError(text), Fail(text, code=text), Retry(text)):
        outcome = encode_outcome(make_run("h"), judge_error(error), TIMES)
        Failure.model_validate(json.loads(outcome.wire)["error"])


def test_what_extends_fail_or_retry_need_not_know_how_they_begin() -> None:
    class NoStock(Fail):
        code = "no_stock"

        def __init__(self, sku: str) -> None:
            self.sku = sku

    class Busy(Retry):
        def __init__(self) -> None:
            pass

    class Plain(Fail):
        code = "plain"

    verdict = judge_error(NoStock("a-1"))
    assert (verdict.code, verdict.retryable) == ("no_stock", False)
    assert judge_error(Plain("no")).code == "plain"
    assert judge_error(Plain("no", code="told")).code == "told"
    assert judge_error(Fail("no")).code == "handler_failed"

    class Soon(Retry):
        after_seconds = -5.0

    assert judge_error(Soon()).retry_after_ms is None
    verdict = judge_error(Busy())
    assert (verdict.code, verdict.retryable, verdict.retry_after_ms) == (
        "retry_requested",
        True,
        None,
    )


@pytest.mark.parametrize(
    ("after", "expected"),
    [(1.5, 1500), (timedelta(milliseconds=1500), 1500), (timedelta(), 0), (None, None)],
)
def test_a_retry_is_asked_for_in_seconds_or_as_a_timedelta(
    after: float | timedelta | None, expected: int | None
) -> None:
    assert judge_error(Retry("later", after=after)).retry_after_ms == expected


@pytest.mark.parametrize("after", [-1, timedelta(seconds=-1), timedelta(days=400), float("nan")])
def test_a_retry_that_is_no_time_ahead_is_refused(after: float | timedelta) -> None:
    with pytest.raises(ValueError, match="between 0 and 31536000"):
        Retry(after=after)


class Broken(Exception):
    """An error that cannot say what is wrong."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_without_a_usable_text_has_its_name() -> None:
    assert judge_error(Broken()).message == "Broken"


def test_a_value_nested_too_deeply_is_unstorable() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    judged = judge_value(value)
    assert (judged.code, judged.retryable) == ("result_unstorable", False)


@pytest.mark.parametrize(("size", "status"), [(0, "succeeded"), (1, "failed")])
def test_the_size_of_a_result_is_its_bytes_of_json(size: int, status: str) -> None:
    umlauts = "ü" * ((MAX_RESULT_BYTES - 2) // 2) + "x" * size
    assert judge_value(umlauts).status == status


def test_a_large_result_is_left_out_of_the_small_form() -> None:
    encoded = encode_outcome(
        make_run("h"), Verdict("succeeded", result_json=b'"' + b"x" * 2000 + b'"'), TIMES
    )
    small = Outcome.model_validate_json(encoded.small)
    assert (small.status.value, small.result) == ("succeeded", None)
    assert len(encoded.small) < 1024
