"""The document that `/docs` shows: nothing is left for a caller to guess."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from app.document import _REQUESTS, EXAMPLES
from app.main import openapi_document

MODELS = {model.__name__: model for model in _REQUESTS}


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every operation of callers, by its name."""
    for path, found in openapi_document()["paths"].items():
        if path.startswith("/openapi/"):
            for operation in found.values():
                yield operation["operationId"], operation


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_would_be_taken(name: str) -> None:
    model: type[BaseModel] = MODELS[name]
    assert model.model_validate(EXAMPLES[name]).model_fields_set


def test_every_body_has_an_example() -> None:
    for name, operation in operations():
        if "requestBody" in operation:
            assert operation["requestBody"]["content"]["application/json"]["example"], name


def test_every_operation_and_parameter_is_described() -> None:
    for name, operation in operations():
        assert operation["summary"], name
        assert operation["description"], name
        for parameter in operation.get("parameters", []):
            assert parameter.get("description"), (name, parameter["name"])


def test_an_answer_declares_when_to_try_again_and_where_things_are() -> None:
    found = dict(operations())
    for name, operation in found.items():
        for status in operation["responses"].keys() & {"429", "503"}:
            assert "Retry-After" in operation["responses"][status]["headers"], (name, status)
    assert {"Location", "ETag", "RateLimit"} <= found["submit_job"]["responses"]["202"][
        "headers"
    ].keys()
    for name in ("create_key", "create_tenant"):
        assert "Location" in found[name]["responses"]["201"]["headers"]
    assert "ETag" in found["get_job"]["responses"]["200"]["headers"]
