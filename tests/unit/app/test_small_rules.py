"""Small pure rules: requirements, cursors, digests, times, JSON text."""

from __future__ import annotations

import hashlib
import json
import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.edge.paging import decode_cursor, encode_cursor
from app.edge.problems import STATUS_OF, TITLE_OF, Problem, problem_response, validation_problem
from app.jobs.digest import differing_fields, kept_digest, request_digest
from app.jobs.requests import SubmitJob
from app.lifecycle import tables
from app.lifecycle.requirement import MAX_LENGTH, RequirementTooLong, meets, requirement_of
from app.plumbing.database import keep_first
from app.plumbing.json_text import Unencodable, plain_bytes, plain_json
from app.plumbing.sealed import Sealer, draw_key
from app.plumbing.times import epoch_ms, rfc3339

words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
labels = st.dictionaries(st.text("abc", min_size=1, max_size=3), words, max_size=4)
documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(labels, labels)
def test_a_requirement_is_met_exactly_by_workers_that_have_all_its_labels(
    asked: dict[str, str], own: dict[str, str]
) -> None:
    requirement = requirement_of({f"worker.{name}": value for name, value in asked.items()})
    assert meets(requirement, own) == (asked.items() <= own.items())
    assert meets(requirement, {**own, **asked})


@given(labels)
def test_other_labels_ask_nothing_of_a_worker(asked: dict[str, str]) -> None:
    assert requirement_of(asked) == ""
    assert meets("", {})


@given(labels, labels)
def test_different_requirements_are_different_queues_also_for_mysql(
    one: dict[str, str], other: dict[str, str]
) -> None:
    texts = [
        requirement_of({f"worker.{name}": value for name, value in asked.items()})
        for asked in (one, other)
    ]
    # MySQL compares without trailing spaces.
    assert (texts[0].rstrip(" ") == texts[1].rstrip(" ")) == (one == other)


def test_a_requirement_that_no_queue_could_hold_is_refused() -> None:
    with pytest.raises(RequirementTooLong):
        requirement_of({f"worker.{number}": "x" * 100 for number in range(3)})
    assert len(requirement_of({"worker.a": "x" * (MAX_LENGTH - 2)})) == MAX_LENGTH


@given(st.integers(0, 2**63 - 2))
def test_a_cursor_comes_back_as_it_was(position: int) -> None:
    assert decode_cursor(encode_cursor(position)) == position


@given(
    st.text() | st.sampled_from(["", "MTo", "MTotMQ", "Mjox", "MTo5OTk5OTk5OTk5OTk5OTk5OTk5OTk"])
)
def test_a_foreign_cursor_is_refused_or_read_but_never_a_fault(cursor: str) -> None:
    try:
        position = decode_cursor(cursor)
    except Problem as refused:
        code = refused.code
    else:
        assert position is not None
        assert 0 <= position < 2**63
        code = "validation_failed"
    assert code == "validation_failed"


@given(st.dictionaries(st.text("abcd", min_size=1), documents, max_size=5))
def test_a_digest_does_not_depend_on_the_order_of_keys_nor_on_nulls(
    sent: dict[str, Any],
) -> None:
    other = dict(reversed([*sent.items(), ("zzz", None)]))
    assert request_digest(sent) == request_digest(other)
    assert differing_fields(request_digest(sent), request_digest(other)) == []


def test_a_digest_of_every_field_fits_its_column_half_of_them_keyed() -> None:
    fields = [str(field.alias) for field in SubmitJob.model_fields.values()]
    assert "clientRequestId" in fields
    digest = request_digest(dict.fromkeys(fields, 1))
    kept = kept_digest(digest, fields[::2], "1:" + "x" * 128, Sealer(draw_key()))
    assert kept.count(".") >= len(fields) // 2
    room = tables.job_info.c.request_digest.type.length  # type: ignore[attr-defined]
    assert len(kept) <= room


def test_a_digest_tells_which_fields_differ() -> None:
    before = request_digest({"a": 1, "b": [1], "c": "x"})
    now = request_digest({"a": 1, "b": [2], "d": "x"})
    assert differing_fields(before, now) == ["b", "c", "d"]


@pytest.mark.parametrize(("one", "other"), [(1, "1"), (1, True), (0, False), ([], {}), ("", [])])
def test_values_of_other_types_are_other_values(one: Any, other: Any) -> None:
    assert differing_fields(request_digest({"a": one}), request_digest({"a": other})) == ["a"]


@given(documents)
def test_json_text_comes_back_exactly(value: Any) -> None:
    assert json.loads(plain_json(value)) == value


@given(
    st.recursive(
        documents | st.integers(-(2**65), 2**65) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    ),
    st.booleans(),
)
def test_json_text_is_that_of_the_standard_library(value: Any, sort_keys: bool) -> None:
    """Digests of old requests were made of it."""
    text = json.dumps(
        value, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys, separators=(",", ":")
    )
    assert plain_json(value, sort_keys=sort_keys) == text
    assert plain_bytes(value, sort_keys=sort_keys) == text.encode()


@pytest.mark.parametrize(
    "value", ["", '\x00\x1f\x7f\x80\u2028\U0001f600\\"/', 2**63 - 1, 2**63, 1e16, -0.0]
)
@pytest.mark.parametrize("levels", [0, 19, 20, 21, 22, 199, 300])
def test_json_text_is_the_same_however_deep(value: Any, levels: int) -> None:
    for _ in range(levels):
        value = {"b": [value], "a": 1}
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    assert plain_json(value, sort_keys=True) == text


@pytest.mark.parametrize("name", ["jobHandler", "callbackUrl", "params"])
@given(value=documents)
def test_a_digest_is_of_the_sorted_text_of_each_field(name: str, value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert json.loads(request_digest({name: value})) == ({} if value is None else {name: digest})


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, "\ud800", {"\udfff": 1}, [[math.nan]], object(), {1, 2}],
)
def test_what_has_no_json_form_is_refused(value: Any) -> None:
    with pytest.raises(Unencodable):
        plain_json(value)


def test_what_is_nested_too_deep_is_refused() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(Unencodable):
        plain_json(value)
    while value:
        value = value.pop()


@given(st.integers(0, 7_258_118_400_000))
def test_a_time_comes_back_as_it_was(at: int) -> None:
    text = rfc3339(at)
    assert epoch_ms(datetime.fromisoformat(text)) == at
    assert len(text) == len("2026-01-31T09:00:00.000Z")


@given(
    st.datetimes(datetime(1970, 1, 3), datetime(2200, 1, 1)),  # noqa: DTZ001 (a zone is added)
    st.integers(-14 * 60, 14 * 60),
)
def test_no_moment_is_rounded_to_an_earlier_one(naive: datetime, minutes: int) -> None:
    moment = naive.replace(tzinfo=timezone(timedelta(minutes=minutes)))
    exact = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert exact <= epoch_ms(moment) * 1000 < exact + 1000


def test_every_problem_has_a_status_and_a_title() -> None:
    assert STATUS_OF.keys() == TITLE_OF.keys()
    assert all(400 <= status < 600 for status in STATUS_OF.values())


@pytest.mark.parametrize("code", sorted(STATUS_OF))
def test_a_problem_is_problem_json_and_says_when_to_come_again(code: str) -> None:
    answer = problem_response(Problem(code, "what to change", extra=1))
    document = json.loads(bytes(answer.body))
    assert answer.headers["content-type"] == "application/problem+json"
    assert document["status"] == answer.status_code == STATUS_OF[code]
    assert (document["code"], document["detail"], document["extra"]) == (code, "what to change", 1)
    assert ("retry-after" in answer.headers) == (answer.status_code in (429, 503))
    assert ("www-authenticate" in answer.headers) == (answer.status_code == 401)


def test_a_complaint_about_broken_text_is_itself_whole() -> None:
    problem = validation_problem(
        [{"type": "value_error", "loc": ("a/b~\ud800",), "msg": "Value error, bad \udfff"}]
    )
    answer = problem_response(problem)
    (error,) = json.loads(bytes(answer.body))["errors"]
    assert error["pointer"] == "/a~1b~0\\ud800"


def test_a_taken_key_never_sets_the_column_that_mysql_counts_itself() -> None:
    """MySQL, and not MariaDB, answers 1869 to `id = id` where others of the batch are new."""
    assert keep_first(False, "job_info.created_at").endswith("created_at = job_info.created_at")
    for column in ("id", "job_info.id"):
        with pytest.raises(ValueError, match="AUTO_INCREMENT"):
            keep_first(False, column)
