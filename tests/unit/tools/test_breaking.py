"""A document that breaks clients of the last release is found out, in every way it can."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.breaking import NOTHING_ALLOWED, Allowance, breaks, judged, main, read_allowed

ROOT = Path(__file__).parents[3]
BODY = ("paths", "/jobs", "post", "requestBody", "content", "application/json", "schema")
ANSWERS = ("paths", "/jobs", "post", "responses")
JOB = ("components", "schemas", "Job")
NEW = ("components", "schemas", "NewJob")
CALLED = ("paths", "/jobs", "post", "callbacks", "ended", "{$request.body#/url}", "post")
GONE = object()


def reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


DOCUMENT: dict[str, Any] = {
    "paths": {
        "/jobs": {
            "post": {
                "operationId": "submit",
                "tags": ["jobs"],
                "parameters": [
                    {"in": "query", "name": "wait", "schema": {"type": "integer", "maximum": 9}}
                ],
                "requestBody": {"required": True, **body(reference("NewJob"))},
                "responses": {
                    "200": {**body(reference("Job")), "headers": {"ETag": {}}},
                    "409": body({"type": "object"}),
                },
                "callbacks": {
                    "ended": {
                        "{$request.body#/url}": {
                            "post": {"requestBody": body(reference("Job")), "responses": {}}
                        }
                    }
                },
            },
            "get": {"operationId": "list", "responses": {"200": body(reference("Job"))}},
        },
        "/health": {"get": {"operationId": "health", "responses": {"200": {}}}},
    },
    "components": {
        "schemas": {
            "NewJob": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "minLength": 1, "maxLength": 9},
                    "count": {"type": "integer", "format": "int64", "default": 3},
                    "kind": {"enum": ["a", "b"]},
                    "when": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "params": {},
                    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                },
            },
            "Job": {
                "type": "object",
                "required": ["id", "status"],
                "properties": {
                    "id": {"type": "integer", "format": "int64"},
                    "status": {"type": "string", "enum": ["UP", "DOWN"]},
                    "error": {"anyOf": [reference("Failure"), {"type": "null"}]},
                    "children": {"type": "array", "items": reference("Job")},
                    "result": {},
                    "outcome": {"oneOf": [reference("Failure"), reference("Success")]},
                },
            },
            "Failure": {
                "type": "object",
                "required": ["code"],
                "properties": {"code": {"type": "string"}},
            },
            "Success": {"type": "object", "properties": {"value": {"type": "number"}}},
        }
    },
}


def changed(*changes: tuple[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Return the document with values put at, or taken from, places in it."""
    document = copy.deepcopy(DOCUMENT)
    for where, value in changes:
        node: Any = document
        for step in where[:-1]:
            node = node[step]
        if value is GONE:
            del node[where[-1]]
        else:
            node[where[-1]] = copy.deepcopy(value)
    return document


BREAKS: list[tuple[str, tuple[Any, ...], Any]] = [
    ("GET /health is gone", ("paths", "/health"), GONE),
    ("GET /jobs is gone", ("paths", "/jobs", "get"), GONE),
    ("operationId", ("paths", "/jobs", "get", "operationId"), "all_jobs"),
    ("tags", ("paths", "/jobs", "post", "tags"), ["work"]),
    ("security is now", ("paths", "/health", "get", "security"), [{"key": []}]),
    ("wait is gone", ("paths", "/jobs", "post", "parameters"), []),
    (
        "wait: maximum is now 5",
        ("paths", "/jobs", "post", "parameters", 0, "schema", "maximum"),
        5,
    ),
    ("wait is now required", ("paths", "/jobs", "post", "parameters", 0, "required"), True),
    (
        "If-Match is new and required",
        ("paths", "/jobs", "get", "parameters"),
        [{"in": "header", "name": "If-Match", "required": True, "schema": {"type": "string"}}],
    ),
    (
        "a body is now required",
        ("paths", "/jobs", "get", "requestBody"),
        {"required": True, **body({"type": "object"})},
    ),
    ("the body is gone", ("paths", "/jobs", "post", "requestBody"), GONE),
    ("body: application/json is gone", (*BODY[:-2],), GONE),
    ("answer 409 is gone", (*ANSWERS, "409"), GONE),
    ("header ETag is gone", (*ANSWERS, "200", "headers"), {}),
    ("answer 409: application/json is gone", (*ANSWERS, "409", "content"), {"text/plain": {}}),
    ("callback ended is gone", ("paths", "/jobs", "post", "callbacks"), {}),
    ("callback ended is gone", CALLED, GONE),
    ("/name is gone", (*NEW, "properties", "name"), GONE),
    ("/count is now required", (*NEW, "required"), ["name", "count"]),
    ("/count integer is gone", (*NEW, "properties", "count", "type"), "string"),
    ("/count format was int64", (*NEW, "properties", "count", "format"), "int32"),
    ("/count default was 3, is 0", (*NEW, "properties", "count", "default"), 0),
    ("/count multipleOf", (*NEW, "properties", "count", "multipleOf"), 2),
    ('/kind value "b" is gone', (*NEW, "properties", "kind", "enum"), ["a"]),
    ("/name takes listed values alone", (*NEW, "properties", "name", "enum"), ["a"]),
    ("/name maxLength is now 8", (*NEW, "properties", "name", "maxLength"), 8),
    ("/name minLength is now 2", (*NEW, "properties", "name", "minLength"), 2),
    ("/name pattern", (*NEW, "properties", "name", "pattern"), "^a"),
    ("/when null is gone", (*NEW, "properties", "when"), {"type": "string"}),
    ("/params may no longer be anything", (*NEW, "properties", "params"), {"type": "object"}),
    (
        "/labels/- string is gone",
        (*NEW, "properties", "labels", "additionalProperties"),
        {"type": "integer"},
    ),
    (
        "/labels takes fewer unknown fields",
        (*NEW, "properties", "labels", "additionalProperties"),
        False,
    ),
    ("/status is gone", (*JOB, "properties", "status"), GONE),
    ("/error is gone", (*JOB, "properties", "error"), GONE),
    ("/status may now be absent", (*JOB, "required"), ["id"]),
    ('/status value "DOWN" is gone', (*JOB, "properties", "status", "enum"), ["UP"]),
    (
        '/status value "ODD" is new',
        (*JOB, "properties", "status", "enum"),
        ["UP", "DOWN", "ODD"],
    ),
    ("/status has other values", (*JOB, "properties", "status"), {"type": "string"}),
    ("/id integer is gone", (*JOB, "properties", "id"), {"type": "string", "format": "int64"}),
    ("/id null is new", (*JOB, "properties", "id", "type"), ["integer", "null"]),
    ("/id may now be anything", (*JOB, "properties", "id"), {}),
    ("/id format was int64", (*JOB, "properties", "id", "format"), GONE),
    ("/error Failure is gone", (*JOB, "properties", "error"), {"type": "null"}),
    ("/error/code is gone", ("components", "schemas", "Failure", "properties"), {}),
    ("/children array is gone", (*JOB, "properties", "children"), {"type": "object"}),
    ("/children/- object is gone", (*JOB, "properties", "children", "items"), {"type": "null"}),
    ("/outcome Success is gone", (*JOB, "properties", "outcome"), reference("Failure")),
]


@pytest.mark.parametrize(("told", "where", "value"), BREAKS, ids=[one[0] for one in BREAKS])
def test_a_break_is_told(told: str, where: tuple[Any, ...], value: Any) -> None:
    found = breaks(DOCUMENT, changed((where, value)))
    assert any(told in one for one in found), found


HARMLESS: list[tuple[str, tuple[Any, ...], Any]] = [
    ("a path", ("paths", "/new"), {"get": {"operationId": "new", "responses": {}}}),
    ("a verb", ("paths", "/health", "post"), {"operationId": "new", "responses": {}}),
    ("an answer", (*ANSWERS, "404"), body({"type": "object"})),
    ("a header", (*ANSWERS, "200", "headers", "Location"), {}),
    (
        "an optional parameter",
        ("paths", "/jobs", "get", "parameters"),
        [{"in": "query", "name": "limit", "schema": {"type": "integer"}}],
    ),
    ("an optional field of a request", (*NEW, "properties", "more"), {"type": "string"}),
    ("a longer limit", (*NEW, "properties", "name", "maxLength"), 10),
    ("a value of a request", (*NEW, "properties", "kind", "enum"), ["a", "b", "c"]),
    ("less that is required", (*NEW, "required"), []),
    ("more that is known", (*NEW, "additionalProperties"), True),
    ("a type of a request", (*NEW, "properties", "count", "type"), ["integer", "null"]),
    ("a field of an answer", (*JOB, "properties", "more"), {"type": "string"}),
    ("a field that is always there", (*JOB, "required"), ["id", "status", "error"]),
    ("a limit of an answer", (*JOB, "properties", "id", "maximum"), 5),
    ("words", (*JOB, "properties", "id", "description"), "the key"),
    (
        "the same without its name",
        ("paths", "/jobs", "get", "responses", "200"),
        body(DOCUMENT["components"]["schemas"]["Job"]),
    ),
]


@pytest.mark.parametrize(("name", "where", "value"), HARMLESS, ids=[one[0] for one in HARMLESS])
def test_what_no_client_trips_over_is_not_told(
    name: str, where: tuple[Any, ...], value: Any
) -> None:
    assert breaks(DOCUMENT, changed((where, value))) == []


def test_what_a_callback_brings_is_read_by_the_client() -> None:
    found = breaks(DOCUMENT, changed(((*JOB, "properties", "status"), GONE)))
    assert "POST /jobs: callback ended: body: /status is gone" in found


def test_an_unchanged_document_breaks_nothing() -> None:
    assert breaks(DOCUMENT, copy.deepcopy(DOCUMENT)) == []


def typed_properties(schema: dict[str, Any]) -> list[str]:
    return [
        field
        for field, described in schema.get("properties", {}).items()
        if described.keys() & {"type", "$ref", "anyOf", "oneOf", "enum"}  # not just anything
    ]


def without_properties(schema: dict[str, Any], fields: list[str]) -> None:
    for field in fields:
        del schema["properties"][field]
    schema["required"] = [one for one in schema.get("required", []) if one not in fields]


def of_another_type(schema: dict[str, Any], fields: list[str]) -> None:
    for field in fields:
        schema["properties"][field] = {"type": "array", "items": {"type": "boolean"}}


@pytest.mark.parametrize("service", ["dispatcher", "worker"])
@pytest.mark.parametrize("change", [without_properties, of_another_type])
def test_no_field_of_the_real_documents_can_be_changed_unseen(
    service: str, change: Callable[[dict[str, Any], list[str]], None]
) -> None:
    document = json.loads((ROOT / "openapi" / f"{service}.json").read_text())
    assert breaks(document, document) == []
    tried = 0
    for name, schema in document["components"]["schemas"].items():
        if not (fields := typed_properties(schema)):
            continue
        broken = copy.deepcopy(document)
        change(broken["components"]["schemas"][name], fields)
        told = breaks(document, broken)
        for field in fields:
            assert any(f"/{field} " in one or f"/{field}/-" in one for one in told), (name, field)
        tried += len(fields)
    assert tried > 30


@pytest.mark.parametrize("service", ["dispatcher", "worker"])
def test_no_operation_or_answer_of_the_real_documents_can_go_unseen(service: str) -> None:
    document = json.loads((ROOT / "openapi" / f"{service}.json").read_text())
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            broken = copy.deepcopy(document)
            del broken["paths"][path][verb]
            assert breaks(document, broken) == [f"{verb.upper()} {path} is gone"]
            broken = copy.deepcopy(document)
            broken["paths"][path][verb]["responses"] = {}
            assert sorted(breaks(document, broken)) == sorted(
                f"{verb.upper()} {path}: answer {status} is gone"
                for status in operation["responses"]
            )


def test_a_break_may_be_allowed_with_a_reason() -> None:
    found = ["dispatcher: GET /a is gone", "dispatcher: GET /b: answer 404 is gone"]
    assert judged(found, []) == (found, [])
    assert judged(found, [Allowance("dispatcher: GET /a is gone", "unused")]) == (found[1:], [])
    assert judged(found, [Allowance("dispatcher: GET /* is gone", "unused")]) == ([], [])


def test_an_allowance_that_allows_nothing_is_told() -> None:
    assert judged([], [Allowance("worker: POST /run is gone", "why")]) == (
        [],
        ["worker: POST /run is gone"],
    )


def test_allowances_are_read_and_need_their_reason() -> None:
    assert read_allowed(NOTHING_ALLOWED) == []
    assert read_allowed('[[change]]\nwhat = "a"\nwhy = "b"\n') == [Allowance("a", "b")]
    for text in ('what = "a"', 'what = "a"\nwhy = " "', 'what = "a"\nwhy = "b"\nwho = "c"'):
        with pytest.raises(ValueError, match="`what` and `why`"):
            read_allowed(f"[[change]]\n{text}\n")


def test_the_command_fails_on_a_break_until_it_is_allowed_or_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    released = tmp_path / "released"
    released.mkdir()
    for name, path in (("DOCUMENTS", tmp_path), ("RELEASED", released)):
        monkeypatch.setattr(f"tools.breaking.{name}", path)
    allowed = released / "allowed.toml"
    monkeypatch.setattr("tools.breaking.ALLOWED", allowed)

    def told(*flags: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["breaking", *flags])
        return main(), capsys.readouterr().out

    for service in ("dispatcher", "worker"):
        (tmp_path / f"{service}.json").write_text(json.dumps(DOCUMENT))
    assert told("--release") == (0, "")
    assert told() == (0, "")

    broken = changed((("paths", "/health"), GONE))
    (tmp_path / "worker.json").write_text(json.dumps(broken))
    code, said = told()
    assert code == 1
    assert "worker: GET /health is gone" in said

    allowed.write_text('[[change]]\nwhat = "worker: GET /health is gone"\nwhy = "nobody asks"\n')
    assert told() == (0, "")
    assert told("--release") == (0, "")
    assert told() == (0, "")
    assert read_allowed(allowed.read_text()) == []
