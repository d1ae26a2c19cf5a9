"""The reasons of explain: each is documented, published, and brought about by a test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from app.jobs.reason_codes import MEANING, ReasonCode, reason_table
from app.jobs.stories import span
from app.lifecycle.requirement import asked_labels, requirement_of
from app.main import openapi_document

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests" / "integration" / "app" / "test_explain.py"


def declared_by_tests() -> dict[str, list[str]]:
    """Return the reasons that each test declares with `explains`."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(TESTS.read_text()).body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test_"):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "explains":
                    found[node.name] = [ast.unparse(one) for one in decorator.args]
    return found


def test_every_reason_is_brought_about_by_a_test() -> None:
    tested = {name for names in declared_by_tests().values() for name in names}
    assert {f"_C.{code.name}" for code in ReasonCode} == tested


def test_every_reason_has_a_meaning_and_a_line_in_the_docs() -> None:
    assert set(MEANING) == set(ReasonCode)
    assert reason_table() in (ROOT / "docs" / "reasons.md").read_text()


def test_the_codes_are_published_in_the_document() -> None:
    schemas = openapi_document()["components"]["schemas"]
    assert schemas["ReasonCode"]["enum"] == [str(code) for code in ReasonCode]


@pytest.mark.parametrize(
    ("milliseconds", "words"),
    [
        (-5, "0 s"),
        (4, "0.004 s"),
        (1234, "1.23 s"),
        (59_400, "59.4 s"),
        (59_600, "1 min"),
        (60_000, "1 min"),
        (61_000, "1 min 1 s"),
        (3_599_700, "1 h"),
        (7_800_000, "2 h 10 min"),
        (86_400_000, "1 d"),
        (273_600_000, "3 d 4 h"),
    ],
)
def test_a_time_is_written_for_people(milliseconds: int, words: str) -> None:
    assert span(milliseconds) == words


@pytest.mark.parametrize("value", ["eu", "a=b", "a,b", "50%", "%2C", "two words", ""])
def test_a_requirement_is_told_as_it_was_asked(value: str) -> None:
    assert asked_labels(requirement_of({"worker.zone": value})) == {"zone": value}
