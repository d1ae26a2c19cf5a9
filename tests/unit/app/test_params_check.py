"""Params against a published schema: what is said of them, and that nothing can make it slow."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from app.client.schema import field_rows
from app.fleet.params_check import ParamsCheck
from app.fleet.schema_cost import TOO_MUCH, SchemaCost, UnusableSchema

LINE = {
    "type": "object",
    "required": ["sku"],
    "additionalProperties": False,
    "properties": {
        "sku": {"type": "string", "minLength": 2, "pattern": r"^\w+$"},
        "qty": {"type": "integer", "minimum": 1, "maximum": 9},
    },
}
ORDER = {
    "type": "object",
    "required": ["customer"],
    "properties": {
        "customer": {
            "type": "object",
            "required": ["email"],
            "properties": {"email": {"type": "string"}, "a/b~c": {"type": "null"}},
        },
        "lines": {"type": "array", "items": {"$ref": "#/$defs/Line"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "pay": {
            "anyOf": [
                {
                    "type": "object",
                    "required": ["kind", "number"],
                    "properties": {"kind": {"const": "card"}, "number": {"type": "string"}},
                },
                {
                    "type": "object",
                    "required": ["kind", "iban"],
                    "properties": {"kind": {"const": "bank"}, "iban": {"type": "string"}},
                },
            ]
        },
        "size": {"enum": ["s", "m", 1]},
        "both": {"anyOf": [{"type": "array"}, {"type": "object", "required": ["x"]}]},
    },
    "$defs": {"Line": LINE},
}


def told(schema: Any, params: Any) -> dict[str, str]:
    check = ParamsCheck(json.dumps(schema))
    return {
        one.pointer: one.detail for one in check.faults(params, len(json.dumps(params).encode()))
    }


def order(**fields: Any) -> dict[str, Any]:
    return {"customer": {"email": "a@example.com"}, **fields}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (order(), {}),
        (None, {"/params": "must be an object"}),
        ({}, {"/params/customer": "is required"}),
        ({"customer": {}}, {"/params/customer/email": "is required"}),
        (
            {"customer": {"email": "a", "a/b~c": 1}},
            {"/params/customer/a~1b~0c": "must be null"},
        ),
        (
            order(lines=[{"sku": "ab", "qty": 0}, {"sku": "a b", "more": 1}]),
            {
                "/params/lines/0/qty": "must be at least 1",
                "/params/lines/1/sku": "must match ^\\w+$",
                "/params/lines/1/more": "is no field of this handler's params",
            },
        ),
        (order(lines=[1, 2, 3]), {"/params/lines": "must have at most 2 items"}),
        (order(note="long"), {"/params/note": "must have at most 3 characters"}),
        (order(note=1), {"/params/note": "must be text or null"}),
        (order(size="x"), {"/params/size": 'must be one of "s", "m", 1'}),
        (order(pay={"kind": "card"}), {"/params/pay/number": "is required"}),
        (order(pay={"kind": "x"}), {"/params/pay/kind": 'must be one of "card", "bank"'}),
        (order(pay=[]), {"/params/pay": "must be an object"}),
        (order(both={}), {"/params/both/x": "is required"}),
    ],
)
def test_each_fault_has_its_place_and_says_what_to_change(
    params: Any, expected: dict[str, str]
) -> None:
    found = told(ORDER, params)
    assert {place: found.get(place) for place in expected} == expected
    assert bool(found) == bool(expected)


def test_a_sentence_never_repeats_a_value() -> None:
    secret = "s3cr3t-value"
    for params in (secret, [secret], {"customer": secret}, order(note=secret, size=secret)):
        assert secret not in json.dumps(told(ORDER, params))


def test_at_most_twenty_faults_are_told() -> None:
    assert len(told({"items": {"type": "string"}}, list(range(100)))) == 20


def test_integers_keep_all_their_digits() -> None:
    schema = {"type": "integer", "maximum": 10**30}
    assert told(schema, 10**30) == {}
    assert told(schema, 10**30 + 1) != {}
    assert told({"type": "integer"}, 10**400) == {}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"$ref": "file:///etc/passwd"},
        {"properties": {"a": {"$ref": "other.json#/x"}}},
        {"$id": "http://127.0.0.1:9/x", "$ref": "y"},
        {"$ref": "#/$defs/nobody"},
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
        {"$dynamicRef": "#a"},
        {"type": "nonsense"},
        {"required": "a"},
    ],
    ids=str,
)
def test_a_schema_that_leads_elsewhere_or_nowhere_is_not_usable(schema: Any) -> None:
    with pytest.raises(UnusableSchema):
        ParamsCheck(json.dumps(schema))


@pytest.mark.parametrize("body", ["", "[]", "1", "{", '{"minimum": NaN}', "[" * 60_000])
def test_what_is_no_json_object_is_not_usable(body: str) -> None:
    with pytest.raises(UnusableSchema):
        ParamsCheck(body)


def doubling(depth: int) -> dict[str, Any]:
    """A small schema that asks for 2**depth comparisons of one value."""
    steps: dict[str, Any] = {
        f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}, {"$ref": f"#/$defs/a{n + 1}"}]}
        for n in range(depth)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**steps, f"a{depth}": {"type": "string"}}}


def test_alternatives_that_multiply_are_counted_and_not_made() -> None:
    assert [SchemaCost(doubling(n)).most for n in (1, 3, 10)] == [6, 30, 2**12 - 2]
    # Made one by one, 2**90 of them would outlast the test's time.
    with pytest.raises(UnusableSchema, match="too many alternatives"):
        ParamsCheck(json.dumps(doubling(90)))


FORKED_TREE: dict[str, Any] = {
    "$ref": "#/$defs/Node",
    "$defs": {
        "Node": {
            "anyOf": [
                {"type": "object", "properties": {"child": {"$ref": "#/$defs/Node"}}},
                {"type": "object", "properties": {"child": {"$ref": "#/$defs/Node"}}},
                {"type": "null"},
            ]
        }
    },
}


def nested(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = {"child": leaf}
    return leaf


def test_a_recursive_union_is_checked_as_deep_as_it_is_cheap() -> None:
    assert SchemaCost(FORKED_TREE).most > TOO_MUCH
    assert told(FORKED_TREE, nested(3, None)) == {}
    assert told(FORKED_TREE, nested(3, 7)) != {}
    assert told(FORKED_TREE, nested(190, 7)) == {}, "2**190 comparisons: left to the worker"


@pytest.mark.parametrize(
    ("schema", "params"),
    [
        ({"items": {"required": [f"f{n}" for n in range(5000)]}}, [{}] * 16_000),
        ({"items": {"enum": [str(n) for n in range(5000)]}}, ["x"] * 13_000),
        ({"items": {"type": "string"}}, list(range(12_000))),
        ({"uniqueItems": True}, [{"k": n} for n in range(6000)]),
        ({"pattern": "^(a+)+$"}, "a" * 64_000 + "b"),
        ({"pattern": "(.*)*(.*)*(.*)*x$"}, "a" * 64_000),
        ({"items": {"pattern": "^" + "a?" * 400 + "a" * 400 + "$"}}, ["a" * 400] * 150),
        ({"anyOf": [{"items": {"type": "string"}}, {"items": {"type": "null"}}]}, [1] * 32_000),
    ],
    ids=["required", "enum", "errors", "unique", "nested", "stars", "optional", "alternatives"],
)
def test_no_schema_and_no_value_holds_the_dispatcher_up(schema: Any, params: Any) -> None:
    check = ParamsCheck(json.dumps(schema))
    began = time.process_time()
    check.faults(params, len(json.dumps(params)))
    # It takes a fraction of a second, and without a bound minutes or years.
    assert time.process_time() - began < 10


def test_a_pattern_of_another_engine_is_left_to_the_worker() -> None:
    assert told({"type": "string", "pattern": "^(?=a)"}, "b") == {}
    assert told({"type": "string", "pattern": r"^\d$"}, "٣") == {}
    assert told({"properties": {"pattern": {"pattern": "^a$"}}}, {"pattern": "b"}) == {
        "/params/pattern": "must match ^a$"
    }


def test_formats_are_told_and_not_checked() -> None:
    assert told({"format": "date-time"}, "2026-01-31 09:00") == {}


def test_a_schema_is_shown_as_rows() -> None:
    rows = {row.path: row for row in field_rows(ORDER)}
    assert rows["params"].kind == "object"
    assert rows["customer.email"][1:3] == ("string", "yes")
    assert rows["lines"].kind == "list of object"
    assert rows["lines[].qty"][1:] == ("integer", "", "at least 1; at most 9")
    assert rows["note"].kind == "string | null"
    assert rows["size"].kind == '"s" | "m" | 1'
    assert {"pay.number", "pay.iban"} <= rows.keys()


@pytest.mark.parametrize(
    "schema",
    [
        FORKED_TREE,
        {"items": {"$ref": "#"}},
        {"properties": [], "required": 3, "anyOf": 1, "enum": "x"},
        {"$ref": "#/a/b", "a": []},
        {"additionalProperties": {"properties": {"x": {}}}},
    ],
    ids=str,
)
def test_a_strange_schema_is_shown_too(schema: Any) -> None:
    rows = field_rows(schema)
    assert 1 <= len(rows) < 300
