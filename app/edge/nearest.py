"""The field that a caller may have meant by one that is not there. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, Final, get_args

from pydantic import BaseModel

LONGEST_NAME: Final = 64
"""A longer name is no slip of the pen, and costs the more to compare the longer it is."""


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the end of a sentence that names the nearest known field, or nothing."""
    if len(name) > LONGEST_NAME:
        return ""
    plain = {_plain(one): one for one in known}
    found = get_close_matches(_plain(name), plain, n=1)
    return f": did you mean `{plain[found[0]]}`?" if found else ""


def names_at(model: type[BaseModel], where: Sequence[int | str]) -> list[str]:
    """Return the names of the fields that a document of `model` has at a place in it."""
    models = [model]
    for part in where:
        if isinstance(part, str):
            of_name = [
                field.annotation
                for one in models
                for name, field in one.model_fields.items()
                if part == (field.alias or name)
            ]
            # The key of a mapping is no field, but what it leads to is told by the same annotation.
            models = [one for annotation in of_name for one in _models_in(annotation)] or models
    return [field.alias or name for one in models for name, field in one.model_fields.items()]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _plain(name: str) -> str:
    """What is left of a name where it is not told apart from its snake_case."""
    return name.replace("_", "").replace("-", "").lower()
