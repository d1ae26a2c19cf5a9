"""`docs/walk.md` is true: its files exist, define what is said of them, and are all imported."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| [^|]+ \| `(?P<file>[^`]+)` \| `(?P<name>\w+)`")
STEPS = [
    (found["file"], found["name"])
    for line in (ROOT / "docs" / "walk.md").read_text().splitlines()
    if (found := ROW.match(line))
]


def test_the_walk_has_steps() -> None:
    rows = [
        line for line in (ROOT / "docs" / "walk.md").read_text().splitlines() if line[:2] == "| "
    ]
    assert len(STEPS) == len(rows) - 1, "a row of the table names no file and thing"
    assert len(STEPS) > 20


@pytest.mark.parametrize(("file", "name"), STEPS)
def test_each_file_of_the_walk_defines_what_is_said_of_it(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert name in defined


def test_every_move_and_every_part_of_dispatch_is_in_the_walk() -> None:
    named = {file for file, _ in STEPS}
    dispatch = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "app" / "dispatch").glob("*.py")
        if path.name != "__init__.py"
    }
    assert dispatch <= named
