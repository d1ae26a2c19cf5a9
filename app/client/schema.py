"""A JSON Schema told to people: one row for each field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

MOST_ROWS: Final = 200
DEEPEST: Final = 6
_MANY: Final = 12
_BOUNDS: Final = {
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "more than",
    "exclusiveMaximum": "less than",
    "multipleOf": "multiple of",
    "minLength": "min. length",
    "maxLength": "max. length",
    "minItems": "min. items",
    "maxItems": "max. items",
    "pattern": "matches",
    "format": "format",
}


class FieldRow(NamedTuple):
    """A field: its path (`lines[].sku`), what it is, whether it must be there, and what is said."""

    path: str
    kind: str
    required: str
    notes: str


def field_rows(schema: Mapping[str, Any]) -> list[FieldRow]:
    """Return the fields of a schema, parents first; the first row is the value itself."""
    rows: list[FieldRow] = []
    for row in _rows("params", schema, "yes", schema, ()):
        rows.append(row)
        if len(rows) == MOST_ROWS:
            rows.append(FieldRow("...", "", "", "more: --json shows all"))
            break
    return rows


def _rows(
    path: str, schema: Any, required: str, root: Mapping[str, Any], above: tuple[int, ...]
) -> Iterator[FieldRow]:
    found = _target(schema, root)
    yield FieldRow(path, _kind(schema, root), required, _notes(schema, found))
    if id(found) in above or len(above) >= DEEPEST:
        return
    for suffix, inner in _inner(found, root):
        yield from _fields(path + suffix, inner, root, (*above, id(found), id(inner)))


def _fields(
    path: str, schema: Mapping[str, Any], root: Mapping[str, Any], above: tuple[int, ...]
) -> Iterator[FieldRow]:
    prefix = "" if path == "params" else f"{path}."
    needed = schema.get("required", ())
    for name, one in _map(schema, "properties").items():
        yield from _rows(prefix + name, one, "yes" if name in needed else "", root, above)


def _inner(
    schema: Any, root: Mapping[str, Any], depth: int = 0
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Find the objects whose fields belong to this place: itself, its items, its alternatives."""
    found = _target(schema, root)
    if not isinstance(found, dict) or depth > DEEPEST:
        return
    if _map(found, "properties"):
        yield "", found
    for suffix, child in (("[]", "items"), (".*", "additionalProperties")):
        for more, inner in _inner(found.get(child), root, depth + 1):
            yield suffix + more, inner
    for one in _alternatives(found):
        yield from _inner(one, root, depth + 1)


def _map(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = schema.get(name)
    return found if isinstance(found, dict) else {}


def _alternatives(schema: Mapping[str, Any]) -> list[Any]:
    lists = (schema.get("anyOf"), schema.get("oneOf"))
    return [one for found in lists if isinstance(found, list) for one in found]


def _target(schema: Any, root: Mapping[str, Any]) -> Any:
    for _ in range(DEEPEST):
        if not isinstance(schema, dict) or not str(schema.get("$ref", "")).startswith("#/"):
            break
        found: Any = root
        for part in schema["$ref"][2:].split("/"):
            found = found if isinstance(found, dict) else {}
            found = found.get(part.replace("~1", "/").replace("~0", "~"), {})
        schema = found
    return schema


def _kind(schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    found = _target(schema, root)
    if not isinstance(found, dict) or depth > DEEPEST:
        return "any"
    choices = found.get("enum", [found["const"]] if "const" in found else None)
    if isinstance(choices, list):
        more = " ..." if len(choices) > _MANY else ""
        return " | ".join(json.dumps(one, ensure_ascii=False) for one in choices[:_MANY]) + more
    if branches := _alternatives(found):
        return " | ".join(dict.fromkeys(_kind(one, root, depth + 1) for one in branches))
    kind = found.get("type", "any")
    if isinstance(kind, list):
        return " | ".join(map(str, kind))
    if kind == "array":
        return f"list of {_kind(found.get('items'), root, depth + 1)}"
    return str(kind)


def _notes(schema: Any, found: Any) -> str:
    told: list[str] = []
    merged = {
        **(found if isinstance(found, dict) else {}),
        **(schema if isinstance(schema, dict) else {}),
    }
    if "description" in merged:
        told.append(" ".join(str(merged["description"]).split()))
    told += [f"{word} {merged[name]}" for name, word in _BOUNDS.items() if name in merged]
    if merged.get("additionalProperties") is False:
        told.append("no other fields")
    if merged.get("default") is not None:
        told.append(f"default {json.dumps(merged['default'], ensure_ascii=False)}")
    return "; ".join(told)
