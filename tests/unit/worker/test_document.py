"""The OpenAPI document of the worker."""

from __future__ import annotations

import json
from typing import Any

from worker.main import openapi_document


def test_the_document_needs_no_environment_and_is_the_same_each_time() -> None:
    assert json.dumps(openapi_document()) == json.dumps(openapi_document())


def test_operations_have_short_stable_names() -> None:
    found = {
        operation["operationId"]
        for path in openapi_document()["paths"].values()
        for operation in path.values()
    }
    assert found == {"run", "cancel", "deliver", "drain", "healthz", "readyz", "metrics"}


def test_what_a_run_request_holds_is_that_of_the_protocol() -> None:
    document = openapi_document()
    body = document["paths"]["/run"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["$ref"] == "#/components/schemas/RunRequest"
    runs = document["components"]["schemas"]["RunRequest"]["properties"]["runs"]
    assert runs["items"] == {"$ref": "#/components/schemas/Run"}


def test_every_integer_says_how_wide_it_is() -> None:
    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("type") == "integer":
                assert node["format"] == "int64"
            for child in node.values():
                walk(child)
        elif isinstance(node, list):
            for child in node:
                walk(child)

    walk(openapi_document()["components"])


def test_problems_are_documented_under_their_media_type() -> None:
    document = openapi_document()
    answers = document["paths"]["/run"]["post"]["responses"]
    assert {"200", "400", "401", "409", "413", "421", "422", "503"} == set(answers)
    for status in ("400", "401", "409", "413", "421", "422", "503"):
        assert list(answers[status]["content"]) == ["application/problem+json"]
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert "Problem" in document["components"]["schemas"]
