"""Checks params against the JSON Schema that a worker published for its handler."""

from __future__ import annotations

from typing import Any, Final

import jsonschema_rs
from pydantic_core import SchemaError, SchemaValidator, core_schema, from_json
from pydantic_core import ValidationError as PatternMismatch

from app.fleet.params_faults import Fault, explain
from app.fleet.schema_cost import SchemaCost, UnusableSchema

MOST_COMPARISONS: Final = 5_000_000
"""What one check may take: about 0.15 s in the worst case, microseconds in all honest ones."""
MOST_EXPLAINED: Final = 50_000
"""Up to here each fault is named, which costs far more than to find that there is one."""
MOST_FAULTS: Final = 20
PATTERN: Final = "x-oncue-pattern"


class ParamsCheck:
    """One published schema, compiled; safe with whatever a worker or a caller sends."""

    def __init__(self, body: str) -> None:
        """Compile.

        Raises:
            UnusableSchema: it is no JSON Schema 2020-12, refers to another document, or may
                take too long even for plain values.
        """
        self._cost, self._validator = _compile(body)

    def faults(self, params: Any, size_bytes: int) -> list[Fault]:
        """Return what is wrong with params, nothing if they fit or are too costly to check.

        `size_bytes` is the length of their JSON text.
        """
        places = size_bytes // 2 + 1
        comparisons = self._cost.most * places
        if comparisons > MOST_COMPARISONS:
            depth, places = _measure(params)
            comparisons = self._cost.for_depth(depth) * places
            if comparisons > MOST_COMPARISONS:
                return []
        if self._validator.is_valid(params):
            return []
        if comparisons > MOST_EXPLAINED:
            comparisons = self._cost.most * _measure(params)[1]
        if comparisons > MOST_EXPLAINED:
            return [Fault("/params", "does not fit the paramsSchema of its handler")]
        faults = dict.fromkeys(explain(self._validator.iter_errors(params)))
        return list(faults)[:MOST_FAULTS]


class _Pattern:
    """`pattern` by the engine that pydantic has: linear in time, the same on both sides."""

    def __init__(self, _parent: Any, value: Any, _path: Any) -> None:
        self._pattern = str(value)
        self._text: SchemaValidator | None = None
        try:
            self._text = SchemaValidator(core_schema.str_schema(pattern=self._pattern))
        except SchemaError:
            # Another engine's syntax: the worker will check it.
            return

    def validate(self, instance: Any) -> None:
        if self._text is not None and isinstance(instance, str):
            try:
                self._text.validate_python(instance)
            except PatternMismatch:
                raise ValueError(f"must match {self._pattern}") from None


def is_object(body: str) -> bool:
    """Tell whether a text is one JSON object."""
    try:
        return isinstance(from_json(body, allow_inf_nan=False), dict)
    except ValueError:
        return False


def _compile(body: str) -> tuple[SchemaCost, jsonschema_rs.Draft202012Validator]:
    if not is_object(body):
        raise UnusableSchema("it is no JSON object")
    root = from_json(body)
    cost = SchemaCost(root)
    if cost.for_depth(0) * 64 > MOST_COMPARISONS:
        raise UnusableSchema("it has too many alternatives")
    root.pop("$schema", None)
    try:
        validator = jsonschema_rs.Draft202012Validator(
            _with_own_patterns(root),
            pattern_options=jsonschema_rs.RegexOptions(),
            keywords={PATTERN: _Pattern},
            validate_formats=False,
            offline=True,
        )
    except (ValueError, TypeError, jsonschema_rs.ReferencingError) as error:
        raise UnusableSchema(f"it is no JSON Schema: {str(error)[:200]}") from None
    return cost, validator


_MAPS: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONES: Final = (
    "not", "if", "then", "else", "items", "contains", "additionalProperties", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


def _with_own_patterns(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    changed: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "pattern":
            changed[PATTERN] = value
        elif name in _MAPS and isinstance(value, dict):
            changed[name] = {key: _with_own_patterns(one) for key, one in value.items()}
        elif name in _LISTS and isinstance(value, list):
            changed[name] = [_with_own_patterns(one) for one in value]
        elif name in _ONES:
            changed[name] = _with_own_patterns(value)
        else:
            changed[name] = value
    return changed


def _measure(params: Any) -> tuple[int, int]:
    """Return how deep params are nested, and how many values they hold."""
    depth, places, level = 0, 0, [params]
    while level:
        places += len(level)
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += one.values()
            elif isinstance(one, list):
                below += one
        depth, level = depth + bool(below), below
    return depth, places
