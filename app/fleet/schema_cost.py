"""How much work a JSON Schema may make, before it is trusted with any value: pure arithmetic.

Alternatives multiply: a schema of a kilobyte can ask for 2**100 comparisons of one value, and an
honest recursive union for as many of a deep one. So the comparisons that one place of a value may
need are counted for each depth below it, and what would be too much is not checked at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

MAX_DEPTH: Final = 200
"""No JSON that is nested deeper is taken by the parser of submissions."""
TOO_MUCH: Final = 1_000_000
LONGEST_CHAIN: Final = 200
PATTERN_COMPARISONS: Final = 20
"""What a regular expression counts as."""
_UNDER_WAY: Final = -1

_LISTS: Final = ("allOf", "anyOf", "oneOf")
_ONES: Final = ("not", "if", "then", "else")
_CHILDREN: Final = (
    "additionalProperties", "propertyNames", "items", "contains", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip
_REFUSED: Final = ("$dynamicRef", "$recursiveRef", "$id", "$anchor", "$dynamicAnchor")
"""Ways to name a schema that this count does not follow."""


class UnusableSchema(ValueError):
    """A schema that cannot be checked against: the message says why."""


@dataclass(frozen=True, slots=True)
class _Node:
    """One schema: its own comparisons, and the schemas that it hands a value or a child to."""

    own: int
    in_place: list[Any]
    named: list[Any]
    all_see: list[Any]


class SchemaCost:
    """Bounds the comparisons for each place of a value, by how deep the value is."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        """Count.

        Raises:
            UnusableSchema: it refers to what is not in it, or to itself without end.
        """
        self._root = root
        self._targets: dict[str, Any] = {}
        self._nodes: dict[int, _Node] = {}
        self._find_nodes()
        self._by_depth: list[int] = []
        before: dict[int, int] = {}
        for _ in range(MAX_DEPTH + 1):
            now: dict[int, int] = {}
            for key in self._nodes:
                self._count(key, before, now, 0)
            self._by_depth.append(now[id(root)])
            if now == before or self._by_depth[-1] > TOO_MUCH:
                break
            before = now

    @property
    def most(self) -> int:
        """The bound for values of any depth."""
        return self._by_depth[-1]

    def for_depth(self, depth: int) -> int:
        """The bound for values that are nested `depth` deep."""
        return self._by_depth[min(depth, len(self._by_depth) - 1)]

    def _count(self, key: int, before: Mapping[int, int], now: dict[int, int], chain: int) -> int:
        node = self._nodes.get(key)
        if node is None:
            return 1
        known = now.get(key)
        if known == _UNDER_WAY or chain > LONGEST_CHAIN:
            raise UnusableSchema("it refers to itself without end")
        if known is not None:
            return known
        now[key] = _UNDER_WAY
        total = node.own
        total += sum(self._count(id(one), before, now, chain + 1) for one in node.in_place)
        # A child meets one of the named schemas at most, and each of the others.
        total += max((before.get(id(one), 1) for one in node.named), default=0)
        total += sum(before.get(id(one), 1) for one in node.all_see)
        now[key] = total = min(total, TOO_MUCH + 1)
        return total

    def _find_nodes(self) -> None:
        waiting: list[Any] = [self._root]
        while waiting:
            schema = waiting.pop()
            if isinstance(schema, dict) and id(schema) not in self._nodes:
                self._nodes[id(schema)] = node = self._read(schema)
                waiting += [*node.in_place, *node.named, *node.all_see]

    def _read(self, schema: Mapping[str, Any]) -> _Node:
        for name in _REFUSED:
            if name in schema:
                raise UnusableSchema(f"{name} is not followed")
        in_place = [one for name in _LISTS for one in _elements(schema, name)]
        in_place += [schema[name] for name in _ONES if name in schema]
        in_place += _values(schema, "dependentSchemas")
        if "$ref" in schema:
            in_place.append(self._target(schema["$ref"]))
        return _Node(
            own=1
            + sum(len(_elements(schema, name)) for name in ("required", "enum"))
            + (PATTERN_COMPARISONS if "pattern" in schema else 0),
            in_place=in_place,
            named=[*_values(schema, "properties"), *_elements(schema, "prefixItems")],
            all_see=[
                *(schema[name] for name in _CHILDREN if name in schema),
                *_values(schema, "patternProperties"),
            ],
        )

    def _target(self, ref: Any) -> Any:
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise UnusableSchema("$ref may only name a place in the same schema")
        if ref not in self._targets:
            self._targets[ref] = self._find(ref)
        return self._targets[ref]

    def _find(self, ref: str) -> Any:
        found: Any = self._root
        for part in ref[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise UnusableSchema(f"nothing is at {ref[:100]}")
        return found


def _values(schema: Mapping[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return list(found.values()) if isinstance(found, dict) else []


def _elements(schema: Mapping[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []
