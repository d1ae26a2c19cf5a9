"""What a validator found, as pointers to fields and sentences that say what to change.

Sentences never repeat the value: params may hold what no log should see.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from jsonschema_rs import ValidationError, ValidationErrorKind

LONGEST_SENTENCE: Final = 300
_MANY: Final = 10
_WORD_OF_TYPE: Final = {
    "null": "null",
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
    "string": "text",
    "array": "a list",
    "object": "an object",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one place of params: a JSON pointer that begins with `/params`."""

    pointer: str
    detail: str


def explain(errors: Iterable[ValidationError]) -> Iterator[Fault]:
    """Say what is wrong, one fault a field; of alternatives, the one that was meant."""
    for error in errors:
        kind, place = error.kind, _pointer(error.instance_path)
        if isinstance(kind, ValidationErrorKind.Required):
            yield Fault(f"{place}/{_escape(kind.property)}", "is required")
        elif isinstance(
            kind,
            ValidationErrorKind.AdditionalProperties | ValidationErrorKind.UnevaluatedProperties,
        ):
            for name in kind.unexpected[:_MANY]:
                yield Fault(f"{place}/{_escape(name)}", "is no field of this handler's params")
        elif isinstance(kind, ValidationErrorKind.AnyOf | ValidationErrorKind.OneOfNotValid):
            yield from _explain_alternatives(error, kind.context)
        else:
            yield Fault(place, _sentence(kind)[:LONGEST_SENTENCE])


def _explain_alternatives(
    error: ValidationError, branches: Sequence[Sequence[ValidationError]]
) -> Iterator[Fault]:
    """Explain the form that was meant, if the type of the value or a tag in it tells which."""
    here = list(error.instance_path)
    of_this_type = [branch for branch in branches if not _is_of_other_type(branch, here)]
    tagged = [branch for branch in of_this_type if not _has_other_tag(branch, here)]
    meant = tagged if len(tagged) == 1 else of_this_type
    if len(meant) == 1:
        yield from explain(meant[0])
    elif of_this_type and not tagged and len(tags := _tags(of_this_type, here)) == 1:
        yield from (Fault(place, _one_of(values)) for place, values in tags.items())
    elif not of_this_type:
        types = [name for branch in branches for one in branch for name in _types(one, here)]
        yield Fault(_pointer(here), _must_be(types))
    else:
        yield Fault(_pointer(here), f"fits none of the {len(branches)} forms that are possible")


def _is_of_other_type(branch: Sequence[ValidationError], here: list[Any]) -> bool:
    return any(_types(one, here) for one in branch)


def _types(error: ValidationError, here: list[Any]) -> list[str]:
    if list(error.instance_path) != here:
        return []
    if isinstance(error.kind, ValidationErrorKind.Type):
        return error.kind.types
    if isinstance(error.kind, ValidationErrorKind.AnyOf):
        return [
            name for branch in error.kind.context for one in branch for name in _types(one, here)
        ]
    return []


def _has_other_tag(branch: Sequence[ValidationError], here: list[Any]) -> bool:
    """Tell a form whose constant field, by which forms are told apart, has another value."""
    return any(
        isinstance(one.kind, ValidationErrorKind.Constant | ValidationErrorKind.Enum)
        and len(one.instance_path) == len(here) + 1
        for one in branch
    )


def _tags(branches: Iterable[Sequence[ValidationError]], here: list[Any]) -> dict[str, list[Any]]:
    """Return the constants that are possible, by the field that has them."""
    found: dict[str, list[Any]] = {}
    for one in (one for branch in branches for one in branch):
        if len(one.instance_path) == len(here) + 1:
            values = found.setdefault(_pointer(one.instance_path), [])
            if isinstance(one.kind, ValidationErrorKind.Constant):
                values.append(one.kind.expected_value)
            elif isinstance(one.kind, ValidationErrorKind.Enum):
                values.extend(one.kind.options)
    return {place: values for place, values in found.items() if values}


def _must_be(types: Iterable[str]) -> str:
    return "must be " + " or ".join(dict.fromkeys(_WORD_OF_TYPE.get(one, one) for one in types))


def _sentence(kind: ValidationErrorKind) -> str:
    if isinstance(kind, ValidationErrorKind.Type):
        return _must_be(kind.types)
    if isinstance(kind, ValidationErrorKind.Enum):
        return _one_of(kind.options)
    if isinstance(kind, ValidationErrorKind.Constant):
        return _one_of([kind.expected_value])
    if isinstance(kind, ValidationErrorKind.Custom):
        return kind.message
    say = _SENTENCES.get(kind.name)
    return f"does not fit its schema ({kind.name})" if say is None else say(kind)


_SENTENCES: Final[dict[str, Callable[[Any], str]]] = {
    "minimum": lambda kind: f"must be at least {kind.limit}",
    "maximum": lambda kind: f"must be at most {kind.limit}",
    "exclusiveMinimum": lambda kind: f"must be more than {kind.limit}",
    "exclusiveMaximum": lambda kind: f"must be less than {kind.limit}",
    "multipleOf": lambda kind: f"must be a multiple of {kind.multiple_of}",
    "minLength": lambda kind: f"must have at least {kind.limit} characters",
    "maxLength": lambda kind: f"must have at most {kind.limit} characters",
    "minItems": lambda kind: f"must have at least {kind.limit} items",
    "maxItems": lambda kind: f"must have at most {kind.limit} items",
    "minProperties": lambda kind: f"must have at least {kind.limit} fields",
    "maxProperties": lambda kind: f"must have at most {kind.limit} fields",
    "uniqueItems": lambda _: "must not have an item twice",
    "propertyNames": lambda kind: f"has a key that {_sentence(kind.error.kind)}",
    "additionalProperties": lambda _: "has more than is allowed",
    "falseSchema": lambda _: "has more than is allowed",
}


def _one_of(options: Sequence[Any]) -> str:
    shown = ", ".join(json.dumps(one, ensure_ascii=False) for one in options[:_MANY])
    more = f" or {len(options) - _MANY} others" if len(options) > _MANY else ""
    return f"must be {shown}" if len(options) == 1 else f"must be one of {shown}{more}"


def _pointer(path: Iterable[Any]) -> str:
    return "/params" + "".join(f"/{_escape(str(part))}" for part in path)


def _escape(part: str) -> str:
    escaped = part.replace("~", "~0").replace("/", "~1")
    return escaped[:LONGEST_SENTENCE]
