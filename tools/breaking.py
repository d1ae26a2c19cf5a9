"""Fail when an OpenAPI document breaks a client of the last release.

`openapi/released/` holds the documents of the last release, and in `allowed.toml` the breaks that
are meant, each with its reason. `--release` makes today's documents those of the last release.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

DOCUMENTS: Final = Path(__file__).parent.parent / "openapi"
RELEASED: Final = DOCUMENTS / "released"
ALLOWED: Final = RELEASED / "allowed.toml"
NAMES: Final = ("dispatcher", "worker")
NOTHING_ALLOWED: Final = """\
# Breaks since the last release that are meant. One entry for each, or for a pattern (*) of them:
#
#   [[change]]
#   what = "dispatcher: GET /openapi/jobs: answer 200: /items/-/old is gone"
#   why = "nobody read it: ..."
"""

Schema = dict[str, Any]
Way = Literal["request", "answer"]
"""Who writes the value: a client, which must go on being understood, or the service."""

_ANNOTATIONS: Final = frozenset(
    {"title", "description", "example", "examples", "deprecated", "readOnly", "writeOnly"}
)
_LOWERED_BREAKS: Final = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_RAISED_BREAKS: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UNDERSTOOD: Final = frozenset(
    {
        *("$ref", "type", "enum", "const", "anyOf", "oneOf", "allOf", "format", "default"),
        *("properties", "required", "additionalProperties", "items"),
        *_LOWERED_BREAKS,
        *_RAISED_BREAKS,
    }
)


def breaks(old: Schema, new: Schema) -> list[str]:
    """Return what a client made from `old` could trip over in a service that follows `new`."""
    return sorted(set(_Comparison(old, new).document()))


@dataclass(frozen=True)
class Allowance:
    """A break that is meant: the sentence, or a pattern of it, and the reason."""

    what: str
    why: str


def read_allowed(text: str) -> list[Allowance]:
    """Read the file of allowed breaks. Raises ValueError for an entry without a reason."""
    found = []
    for entry in tomllib.loads(text).get("change", []):
        if set(entry) != {"what", "why"} or not all(str(one).strip() for one in entry.values()):
            raise ValueError(f"an entry has `what` and `why`, and both say something: {entry}")
        found.append(Allowance(**entry))
    return found


def judged(found: Iterable[str], allowed: Iterable[Allowance]) -> tuple[list[str], list[str]]:
    """Return the breaks that nothing allows, and the allowances that allow nothing."""
    found, allowed = list(found), list(allowed)
    bad = [one for one in found if not any(_matches(one, rule) for rule in allowed)]
    idle = [rule.what for rule in allowed if not any(_matches(one, rule) for one in found)]
    return bad, idle


def main() -> int:
    """Compare both documents with the last release; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--release", action="store_true", help="today's documents become the released ones"
    )
    if parser.parse_args().release:
        for name in NAMES:
            shutil.copyfile(DOCUMENTS / f"{name}.json", RELEASED / f"{name}.json")
        ALLOWED.write_text(NOTHING_ALLOWED)
        return 0
    found = [
        f"{name}: {one}"
        for name in NAMES
        for one in breaks(_read(RELEASED / f"{name}.json"), _read(DOCUMENTS / f"{name}.json"))
    ]
    bad, idle = judged(found, read_allowed(ALLOWED.read_text()))
    for one in bad:
        print(f"breaks clients of the last release: {one}")
    for one in idle:
        print(f"openapi/released/allowed.toml allows what does not happen: {one}")
    if bad:
        print("\nTake it back, or allow it with a reason in openapi/released/allowed.toml.")
    return 1 if bad or idle else 0


@dataclass
class _Comparison:
    """Two documents, and what is known of pairs of their named schemas."""

    old: Schema
    new: Schema
    known: dict[tuple[str, str, Way], list[str]] = field(default_factory=dict)

    def document(self) -> Iterator[str]:
        for path, operations in self.old["paths"].items():
            present = self.new["paths"].get(path, {})
            for verb, operation in operations.items():
                where = f"{verb.upper()} {path}"
                if verb not in present:
                    yield f"{where} is gone"
                else:
                    yield from self._operation(where, operation, present[verb])

    def _operation(self, where: str, old: Schema, new: Schema) -> Iterator[str]:
        for name in ("operationId", "tags"):
            if old.get(name) != new.get(name):
                yield f"{where}: {name} was {old.get(name)}, which names what generators write"
        if new.get("security") and new["security"] != old.get("security"):
            yield f"{where}: security is now {new['security']}"
        yield from self._parameters(where, old, new)
        yield from self._body(where, old.get("requestBody"), new.get("requestBody"))
        yield from self._answers(where, old["responses"], new["responses"])
        yield from self._callbacks(where, old.get("callbacks", {}), new.get("callbacks", {}))

    def _parameters(self, where: str, old: Schema, new: Schema) -> Iterator[str]:
        before = _parameters_of(old, self.old)
        after = _parameters_of(new, self.new)
        for key, parameter in before.items():
            called = f"{where}: {key[0]} parameter {key[1]}"
            if key not in after:
                yield f"{called} is gone"
                continue
            if after[key].get("required") and not parameter.get("required"):
                yield f"{called} is now required"
            for name in ("style", "explode"):
                if parameter.get(name) != after[key].get(name):
                    yield f"{called}: {name} was {parameter.get(name)}"
            yield from self._place(
                called, parameter.get("schema", {}), after[key].get("schema", {}), "request"
            )
        for key in after.keys() - before.keys():
            if after[key].get("required"):
                yield f"{where}: {key[0]} parameter {key[1]} is new and required"

    def _body(self, where: str, old: Schema | None, new: Schema | None) -> Iterator[str]:
        old, new = self._pair(old, new)
        if not old:
            if new.get("required"):
                yield f"{where}: a body is now required"
            return
        if not new:
            yield f"{where}: the body is gone"
            return
        if new.get("required") and not old.get("required"):
            yield f"{where}: the body is now required"
        yield from self._content(f"{where}: body", old, new, "request")

    def _answers(self, where: str, old: Schema, new: Schema) -> Iterator[str]:
        for status, answer in old.items():
            called = f"{where}: answer {status}"
            if status not in new:
                yield f"{called} is gone"
                continue
            before, after = self._pair(answer, new[status])
            for header in before.get("headers", {}).keys() - after.get("headers", {}).keys():
                yield f"{called}: header {header} is gone"
            yield from self._content(called, before, after, "answer")

    def _callbacks(self, where: str, old: Schema, new: Schema) -> Iterator[str]:
        for name, addresses in old.items():
            before, after = self._pair(addresses, new.get(name))
            for address, operations in before.items():
                for verb, operation in operations.items():
                    present = after.get(address, {}).get(verb)
                    called = f"{where}: callback {name}"
                    if present is None:
                        yield f"{called} is gone"
                        continue
                    # Here the client is the one who reads.
                    yield from self._content(
                        f"{called}: body",
                        operation.get("requestBody", {}),
                        present.get("requestBody", {}),
                        "answer",
                    )

    def _content(self, where: str, old: Schema, new: Schema, way: Way) -> Iterator[str]:
        for media, described in old.get("content", {}).items():
            if media not in new.get("content", {}):
                yield f"{where}: {media} is gone"
                continue
            present = new["content"][media]
            yield from self._place(
                where, described.get("schema", {}), present.get("schema", {}), way
            )

    def _pair(self, old: Schema | None, new: Schema | None) -> tuple[Schema, Schema]:
        return _resolved(old or {}, self.old), _resolved(new or {}, self.new)

    def _place(self, where: str, old: Schema, new: Schema, way: Way) -> Iterator[str]:
        for told in self._schema(old, new, way):
            yield f"{where}:{' ' if told.startswith('/') else ''}{told}"

    def _schema(self, old: Schema, new: Schema, way: Way) -> list[str]:
        """Return what breaks, each with the way to it: `/items/-/id is gone`, ` null is gone`."""
        if "$ref" not in old or "$ref" not in new:
            return list(self._options_of_both(old, new, way))
        pair = (old["$ref"], new["$ref"], way)
        if pair not in self.known:
            self.known[pair] = []  # for a schema within itself, which tells nothing more
            self.known[pair] = list(self._options_of_both(old, new, way))
        return self.known[pair]

    def _options_of_both(self, old: Schema, new: Schema, way: Way) -> Iterator[str]:
        before, after = self._options(old, self.old), self._options(new, self.new)
        if not before or not after:
            if before and way == "answer":
                yield " may now be anything"
            elif after and way == "request":
                yield " may no longer be anything"
            return
        for gone in before.keys() - after.keys():
            yield f" {gone} is gone"
        if way == "answer":
            for added in after.keys() - before.keys():
                yield f" {added} is new, which no client expects"
        for name in before.keys() & after.keys():
            yield from _values(before[name], after[name], way)
            yield from _narrower(before[name], after[name], way)
            yield from self._fields(before[name], after[name], way)
            yield from self._members(before[name], after[name], way)

    def _members(self, old: Schema, new: Schema, way: Way) -> Iterator[str]:
        if "items" in old or "items" in new:
            for told in self._schema(old.get("items", {}), new.get("items", {}), way):
                yield f"/-{told}"
        before, after = old.get("additionalProperties", True), new.get("additionalProperties", True)
        if isinstance(before, dict) and isinstance(after, dict):
            for told in self._schema(before, after, way):
                yield f"/-{told}"
        elif before != after and way == "request" and after is not True:
            yield " takes fewer unknown fields"
        elif before != after and way == "answer" and isinstance(before, dict):
            yield " has other values"

    def _fields(self, old: Schema, new: Schema, way: Way) -> Iterator[str]:
        before, after = old.get("properties", {}), new.get("properties", {})
        needed_before, needed_after = set(old.get("required", ())), set(new.get("required", ()))
        for name, schema in before.items():
            if name not in after:
                yield f"/{name} is gone"
                continue
            for told in self._schema(schema, after[name], way):
                yield f"/{name}{told}"
        if way == "request":
            for name in needed_after - needed_before:
                yield f"/{name} is now required"
        else:
            for name in (needed_before - needed_after) & after.keys():
                yield f"/{name} may now be absent"

    def _options(self, schema: Schema, document: Schema) -> dict[str, Schema]:
        """Return what a value may be, by a name: its type, or its schema's. Empty is anything."""
        schema = _resolved(schema, document)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                rest = {name: value for name, value in schema.items() if name != key}
                found: dict[str, Schema] = {}
                for option in schema[key]:
                    name = str(option.get("$ref", "")).rpartition("/")[2]
                    for kind, one in self._options({**rest, **option}, document).items():
                        found[
                            f"{name or kind}{'' if (name or kind) not in found else ' again'}"
                        ] = one
                return found
        kinds = schema.get("type", _kind_of_values(schema))
        if kinds is None:
            kinds = "object" if "properties" in schema else []
        return dict.fromkeys([kinds] if isinstance(kinds, str) else kinds, schema)


def _parameters_of(operation: Schema, document: Schema) -> dict[tuple[str, str], Schema]:
    found = (_resolved(one, document) for one in operation.get("parameters", []))
    return {(one["in"], one["name"]): one for one in found}


def _resolved(schema: Schema, document: Schema) -> Schema:
    """Follow references, and lay the parts of `allOf` over each other."""
    while "$ref" in schema:
        target: Any = document
        for step in schema["$ref"].removeprefix("#/").split("/"):
            target = target[step.replace("~1", "/").replace("~0", "~")]
        schema = {**target, **{name: one for name, one in schema.items() if name != "$ref"}}
    if "allOf" not in schema:
        return schema
    merged: Schema = {name: one for name, one in schema.items() if name != "allOf"}
    for part in schema["allOf"]:
        found = _resolved(part, document)
        properties = {**merged.get("properties", {}), **found.get("properties", {})}
        required = [*merged.get("required", []), *found.get("required", [])]
        merged = {**merged, **found}
        if properties:
            merged["properties"] = properties
        if required:
            merged["required"] = required
    return merged


def _kind_of_values(schema: Schema) -> list[str] | None:
    values = _enumerated(schema)
    if values is None:
        return None
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return sorted({names[type(value)] for value in values})


def _enumerated(schema: Schema) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _values(old: Schema, new: Schema, way: Way) -> Iterator[str]:
    """Tell of values of an enumeration: gone ones, and new ones that a client must read."""
    before, after = _enumerated(old), _enumerated(new)
    if before is not None and after is not None:
        for value in before:
            if value not in after:
                yield f" value {json.dumps(value)} is gone"
        if way == "answer":
            for value in after:
                if value not in before:
                    yield f" value {json.dumps(value)} is new, which no client expects"
    elif before is not None and way == "answer":
        yield " has other values than those listed"
    elif after is not None and way == "request":
        yield " takes listed values alone"


def _narrower(old: Schema, new: Schema, way: Way) -> Iterator[str]:
    """Tell of limits that became tighter, and of every keyword that is not understood."""
    if old.get("format") != new.get("format"):
        yield f" format was {old.get('format')}, is {new.get('format')}"
    for name in (old.keys() | new.keys()) - _UNDERSTOOD - _ANNOTATIONS:
        if old.get(name) != new.get(name) and not (way == "answer" and name == "pattern"):
            yield f" {name} was {old.get(name)}, is {new.get(name)}"
    if way == "answer":
        return
    if old.get("default") != new.get("default"):
        yield f" default was {old.get('default')}, is {new.get('default')}"
    for name in _LOWERED_BREAKS:
        if name in new and new[name] < old.get(name, float("inf")):
            yield f" {name} is now {new[name]}"
    for name in _RAISED_BREAKS:
        if name in new and new[name] > old.get(name, float("-inf")):
            yield f" {name} is now {new[name]}"


def _matches(found: str, rule: Allowance) -> bool:
    return fnmatch.fnmatchcase(found, rule.what)


def _read(path: Path) -> Schema:
    found: Schema = json.loads(path.read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
