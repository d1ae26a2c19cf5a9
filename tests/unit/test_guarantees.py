"""`docs/guarantees.md` names every promise, and tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()


def test_every_promise_is_explained() -> None:
    assert re.findall(r"^## P(\d+)\. ", PAGE, re.MULTILINE) == [str(one) for one in range(1, 11)]


def test_every_promise_says_what_it_rests_on_what_could_break_it_and_what_tries_to() -> None:
    _, *sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    for section in sections:
        if re.match(r"P\d+\. ", section):
            for part in ("Rests on: ", "Could break it: ", "Tried by `tests/"):
                assert re.search(rf"^{re.escape(part)}", section, re.MULTILINE), (part, section)


def test_every_test_that_is_named_exists_and_has_tests() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
    assert len(named) >= 10
    for name in sorted(named):
        assert re.search(r"^(async )?def test_", (ROOT / name).read_text(), re.MULTILINE), name


def test_every_file_of_the_promises_is_named() -> None:
    files = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/promises").glob("test_*.py")
    }
    assert files <= set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
