"""What a handler's `params` annotation means: a value checked and converted, and its JSON Schema.

The schema is what callers see and what the dispatcher checks, so it refuses nothing that the
conversion takes; where JSON Schema cannot say exactly what pydantic does, it says less. The
conversion is pydantic's strict JSON mode: `"5"` is no integer, on either side.
"""

from __future__ import annotations

import enum
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUndefinedAnnotation
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, JsonSchemaWarningKind
from pydantic_core import PydanticSerializationError, SchemaError, core_schema, to_json

MOST_ERRORS_SHOWN: Final = 5
SAFE_NUMBER: Final = 2**53
"""Below it an integer and its float are the same number."""

_CONSTRAINTS: Final = frozenset(
    {
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "pattern",
        "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
    }
)  # fmt: skip
_EXACT: Final = frozenset({"int", "float", "str", "list", "tuple"})
"""Core schemas whose constraints JSON Schema counts as pydantic does."""
_NO_MISSING: Final = getattr(enum.Enum._missing_, "__func__", None)
_ANYTHING_CONVERTED: Final = {"description": "what a validator of the handler itself converts"}


class UnusableAnnotation(TypeError):
    """An annotation of `params` that cannot be resolved or has no JSON Schema."""


@dataclass(frozen=True, slots=True)
class FieldError:
    """What is wrong with one place in params: a JSON pointer below `/params`, and a sentence."""

    pointer: str
    detail: str


class BadParams(ValueError):
    """Params that do not fit the annotation; the message names each field."""

    def __init__(self, errors: tuple[FieldError, ...]) -> None:
        shown = "; ".join(f"{one.pointer}: {one.detail}" for one in errors[:MOST_ERRORS_SHOWN])
        more = len(errors) - MOST_ERRORS_SHOWN
        super().__init__(f"{shown}; and {more} more" if more > 0 else shown)
        self.errors = errors


@dataclass(frozen=True, slots=True)
class ParamsType:
    """A resolved annotation: `convert` makes the value that the handler is given."""

    adapter: TypeAdapter[Any] = field(repr=False)
    schema_text: str
    """The JSON Schema as it is published."""

    def convert(self, params: Any) -> Any:
        """Return the value for the handler.

        Raises:
            BadParams: the params do not fit.
        """
        try:
            return self.adapter.validate_json(json.dumps(params), strict=True)
        except ValidationError as error:
            raise BadParams(_field_errors(error)) from None


def params_type(function: Callable[..., Any], scope: Mapping[str, Any]) -> ParamsType | None:
    """Read the annotation of a handler's first argument; None when it says nothing.

    `scope` holds the names that are visible where the function was defined, beside its module's.

    Raises:
        UnusableAnnotation: it cannot be resolved, or has no JSON Schema.
    """
    annotation = _resolved(function, _annotation_of(function), scope)
    if _is_untyped(annotation):
        return None
    name = getattr(annotation, "__name__", None) or str(annotation)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        schema = adapter.json_schema(schema_generator=_DoorSchema, mode="validation")
        schema = {"$schema": GenerateJsonSchema.schema_dialect, **schema}
        schema_text = to_json(schema, inf_nan_mode="null").decode()
    except PydanticUndefinedAnnotation as error:
        raise UnusableAnnotation(f"{name} cannot be resolved: {_first_line(error)}") from error
    except (PydanticInvalidForJsonSchema, PydanticUserError, SchemaError) as error:
        raise UnusableAnnotation(
            f"{name} has no JSON Schema ({_first_line(error)}); use a pydantic model, a dataclass, "
            "a TypedDict or JSON's own types"
        ) from error
    except (PydanticSerializationError, TypeError, ValueError) as error:
        raise UnusableAnnotation(
            f"the schema of {name} is not JSON: {_first_line(error)}"
        ) from error
    return ParamsType(adapter, schema_text)


def _annotation_of(function: Callable[..., Any]) -> Any:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except NameError as error:
        raise UnusableAnnotation(f"the annotations cannot be resolved: {error}") from error
    return parameters[0].annotation if parameters else inspect.Parameter.empty


def _resolved(function: Callable[..., Any], annotation: Any, scope: Mapping[str, Any]) -> Any:
    """Resolve text (`from __future__ import annotations`), here and inside of generics."""
    plain = inspect.unwrap(function)
    while isinstance(plain, functools.partial):
        plain = plain.func
    place = plain if hasattr(plain, "__globals__") else type(plain).__call__
    names = getattr(place, "__globals__", {})
    # Only this annotation: the others may name what is imported for type checkers alone.
    holder = types.SimpleNamespace(__annotations__={"params": annotation})
    try:
        return typing.get_type_hints(holder, names, dict(scope), include_extras=True)["params"]
    except NameError as error:
        raise UnusableAnnotation(
            f"{annotation!r} cannot be resolved: {error}; define or import it before the handler"
        ) from error
    except Exception as error:
        raise UnusableAnnotation(f"{annotation!r} is no type: {_first_line(error)}") from error


def _is_untyped(annotation: Any) -> bool:
    return annotation in (inspect.Parameter.empty, Any, dict, typing.Dict, object)  # noqa: UP006


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:1])[:300] or type(error).__name__


def _field_errors(error: ValidationError) -> tuple[FieldError, ...]:
    return tuple(
        FieldError(
            "/params" + "".join(f"/{_escape(str(part))}" for part in one["loc"]),
            one["msg"].removeprefix("Value error, "),
        )
        for one in error.errors(include_url=False, include_context=False, include_input=False)
    )


def _escape(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")


class _DoorSchema(GenerateJsonSchema):
    """JSON Schema of what strict JSON mode takes, or more, never less.

    An author's own schema (`WithJsonSchema`, `json_schema_extra`, `json_schema_input_type`) is
    taken as it is.
    """

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {  # noqa: RUF012 (as the base class has it)
        "skipped-choice",
        "non-serializable-default",
    }

    def generate_inner(self, schema: Any) -> JsonSchemaValue:
        """Constraints behind another function's validator concern what that one returns."""
        updates = schema.get("metadata", {}).get("pydantic_js_updates")
        if updates and schema["type"] not in _EXACT and _CONSTRAINTS & updates.keys():
            kept = {name: value for name, value in updates.items() if name not in _CONSTRAINTS}
            schema = {**schema, "metadata": {**schema["metadata"], "pydantic_js_updates": kept}}
        found = super().generate_inner(schema)
        if found.get("format") == "fraction":
            # Some versions of pydantic take numbers, too, by a function that says only this.
            return {**found, "type": ["string", "number", "boolean"]}
        return found

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        """Floats are compared as such, and what is a multiple depends on their rounding."""
        found = super().float_schema(schema)
        found.pop("multipleOf", None)
        return {
            name: value
            for name, value in found.items()
            if name not in _CONSTRAINTS or abs(value) < SAFE_NUMBER
        }

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> JsonSchemaValue:
        """A bound of more digits than a float has is rounded, perhaps to the value itself."""
        number = self.float_schema(
            core_schema.float_schema(
                ge=_as_float(schema.get("ge", schema.get("gt"))),
                le=_as_float(schema.get("le", schema.get("lt"))),
            )
        )
        return {"anyOf": [number, {"type": "string"}]}

    def str_schema(self, schema: core_schema.StringSchema) -> JsonSchemaValue:
        """Spaces are stripped before the check, and only one regular expression engine is ours."""
        found = super().str_schema(schema)
        engine = schema.get("regex_engine") or self._config.regex_engine
        if engine == "python-re" or not isinstance(schema.get("pattern", ""), str):
            found.pop("pattern", None)
        if schema.get("strip_whitespace", self._config.str_strip_whitespace):
            found.pop("pattern", None)
            found.pop("maxLength", None)
        return found

    def bytes_schema(self, schema: core_schema.BytesSchema) -> JsonSchemaValue:
        """JSON Schema counts characters, pydantic the bytes behind them."""
        return {"type": "string", "format": super().bytes_schema(schema).get("format", "binary")}

    def url_schema(self, schema: core_schema.UrlSchema) -> JsonSchemaValue:
        return {"type": "string", "format": "uri"}

    def multi_host_url_schema(self, schema: core_schema.MultiHostUrlSchema) -> JsonSchemaValue:
        return {"type": "string", "format": "multi-host-uri"}

    def complex_schema(self, schema: core_schema.ComplexSchema) -> JsonSchemaValue:
        """Some versions of pydantic take a number, too."""
        return {"type": ["string", "number"]}

    def set_schema(self, schema: core_schema.SetSchema) -> JsonSchemaValue:
        """A list with repeats is a smaller set."""
        return _without(super().set_schema(schema), "uniqueItems", "maxItems")

    def frozenset_schema(self, schema: core_schema.FrozenSetSchema) -> JsonSchemaValue:
        return _without(super().frozenset_schema(schema), "uniqueItems", "maxItems")

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        return self._keys_converted(super().dict_schema(schema), schema)

    def frozendict_schema(self, schema: core_schema.FrozenDictSchema) -> JsonSchemaValue:
        return self._keys_converted(super().frozendict_schema(schema), schema)

    def ordered_dict_schema(self, schema: core_schema.OrderedDictSchema) -> JsonSchemaValue:
        return self._keys_converted(super().ordered_dict_schema(schema), schema)

    def counter_schema(self, schema: core_schema.CounterSchema) -> JsonSchemaValue:
        return self._keys_converted(super().counter_schema(schema), schema)

    def _keys_converted(self, found: JsonSchemaValue, schema: Any) -> JsonSchemaValue:
        """Keys are text in JSON and are converted; different ones may become one."""
        keys, values = schema.get("keys_schema", {}), schema.get("values_schema")
        if keys.get("type") != "str" or self._changes_text(keys):
            found = _without(found, "propertyNames", "maxProperties")
        if "patternProperties" in found:
            found = _without(found, "patternProperties")
            found["additionalProperties"] = True if values is None else self.generate_inner(values)
        return found

    def _changes_text(self, schema: Any) -> bool:
        names = ("strip_whitespace", "to_lower", "to_upper")
        return any(schema.get(name, getattr(self._config, f"str_{name}", None)) for name in names)

    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
        return _with_equal_numbers(super().literal_schema(schema))

    def enum_schema(self, schema: core_schema.EnumSchema) -> JsonSchemaValue:
        """An enum with `_missing_` may take any value."""
        found = _with_equal_numbers(super().enum_schema(schema))
        own = getattr(schema["cls"]._missing_, "__func__", None) is not _NO_MISSING
        return _or_anything(found) if own else found

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        """The tag has chosen: that another form would fit too is no error."""
        found = super().tagged_union_schema(schema)
        return {"anyOf" if name == "oneOf" else name: value for name, value in found.items()}

    def function_before_schema(
        self, schema: core_schema.BeforeValidatorFunctionSchema
    ) -> JsonSchemaValue:
        found = super().function_before_schema(schema)
        return found if schema.get("json_schema_input_schema") else _or_anything(found)

    def function_wrap_schema(
        self, schema: core_schema.WrapValidatorFunctionSchema
    ) -> JsonSchemaValue:
        found = super().function_wrap_schema(schema)
        return found if schema.get("json_schema_input_schema") else _or_anything(found)

    def function_plain_schema(
        self, schema: core_schema.PlainValidatorFunctionSchema
    ) -> JsonSchemaValue:
        if schema.get("json_schema_input_schema"):
            return super().function_plain_schema(schema)
        return dict(_ANYTHING_CONVERTED)

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """A model with an `__init__` of its own may be given anything."""
        found = super().model_schema(schema)
        return _or_anything(found) if schema.get("custom_init") else found

    def call_schema(self, schema: core_schema.CallSchema) -> JsonSchemaValue:
        """A named tuple is made from a list or an object."""
        return {"anyOf": [super().call_schema(schema), {"type": "object"}]}

    def named_tuple_schema(self, schema: core_schema.NamedTupleSchema) -> JsonSchemaValue:
        return {"anyOf": [super().named_tuple_schema(schema), {"type": "object"}]}

    def arguments_schema(self, schema: core_schema.ArgumentsSchema) -> JsonSchemaValue:
        return {"anyOf": [super().arguments_schema(schema), {"type": ["object", "array"]}]}

    def _named_required_fields_schema(self, named_required_fields: Any) -> JsonSchemaValue:
        """A field that has several names need not come under the one that is shown."""
        found = super()._named_required_fields_schema(named_required_fields)
        properties, required = found["properties"], found.pop("required", [])
        for name, _, one in named_required_fields:
            shown, others = self._get_alias_name(one, name), self._other_names(one, name)
            if others is None:
                continue
            required = [each for each in required if each != shown]
            for other in others - {shown}:
                properties.setdefault(other, {})
            if shown in others and shown in properties:
                properties[shown] = {}
        return {**found, "required": required} if required else found

    def _other_names(self, one: Any, name: str) -> frozenset[str] | None:
        """Return the names that may hold something else, with the shown one if it may; or None."""
        alias = one.get("validation_alias")
        by_name = self._config.validate_by_name or self._config.populate_by_name
        if alias is None or (isinstance(alias, str) and not by_name and self._reads_aliases):
            return None
        if isinstance(alias, str) and self._reads_aliases:
            return frozenset({name})
        paths = [alias] if isinstance(alias, str) else alias
        firsts = [path if isinstance(path, str) else path[0] for path in paths]
        # Of several places the first one counts, and the others may hold anything.
        return frozenset({name, self._get_alias_name(one, name), *map(str, firsts)})

    @property
    def _reads_aliases(self) -> bool:
        return self._config.validate_by_alias is not False


def _without(schema: JsonSchemaValue, *names: str) -> JsonSchemaValue:
    return {name: value for name, value in schema.items() if name not in names}


def _or_anything(schema: JsonSchemaValue) -> JsonSchemaValue:
    return schema if not schema else {"anyOf": [schema, dict(_ANYTHING_CONVERTED)]}


def _as_float(bound: Any) -> float | None:
    return None if bound is None else float(bound)


def _with_equal_numbers(schema: JsonSchemaValue) -> JsonSchemaValue:
    """To pydantic true is 1 and false is 0; to JSON Schema they are not."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    extra = [
        twin
        for twin in (True, 1, False, 0)
        if any(not isinstance(one, str) and one == twin for one in values)
        and not any(type(one) is type(twin) and one == twin for one in values)
    ]
    if not extra:
        return schema
    return {**_without(schema, "const", "type"), "enum": [*values, *extra]}
