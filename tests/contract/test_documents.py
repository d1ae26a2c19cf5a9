"""Both documents, of today and of the last release, are OpenAPI 3.1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.contract import run_tool, tool_environment
from tests.support.processes import ROOT

DOCUMENTS = sorted((ROOT / "openapi").rglob("*.json"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=[path.stem for path in DOCUMENTS])
def test_a_document_is_openapi_3_1(document: Path, tools: Path, tmp_path: Path) -> None:
    assert json.loads(document.read_text())["openapi"].startswith("3.1.")
    told = run_tool(
        *(tools / "openapi-spec-validator", "--schema", "3.1", document),
        environment=tool_environment(tools),
        directory=tmp_path,
    )
    assert told.strip().endswith("OK")


def test_a_document_that_is_not_openapi_is_told(tools: Path, tmp_path: Path) -> None:
    document = json.loads(DOCUMENTS[0].read_text())
    del document["info"]["title"]
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(document))
    with pytest.raises(AssertionError, match=r"title. is a required property"):
        run_tool(
            *(tools / "openapi-spec-validator", "--schema", "3.1", broken),
            environment=tool_environment(tools),
            directory=tmp_path,
        )
