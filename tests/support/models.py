"""Models of bodies and parameters, built once for all the applications of a process.

A process of production builds its application once; tests and simulations build hundreds, and most
of what that costs is in these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

from fastapi._compat.v2 import ModelField
from pydantic.fields import FieldInfo

_BUILT: Final[dict[tuple[str, int, str], tuple[Any, Any]]] = {}
_build = ModelField.__post_init__


@contextmanager
def models_built_once() -> Iterator[None]:
    """Have a model of the same description built but once within the block."""
    with mock.patch.object(ModelField, "__post_init__", _build_once):
        yield


def _build_once(field: ModelField) -> None:
    info = field.field_info
    # What FastAPI's own kinds of `FieldInfo` say of themselves leaves out what they ask of a value.
    described = repr(list(FieldInfo.__repr_args__(info)))
    key = (field.mode, id(info.annotation), described)
    known = _BUILT.get(key)
    if known is None:
        _build(field)
        # The description is kept as well: an address in the key must not be given to another.
        _BUILT[key] = (field._type_adapter, info)
    else:
        field._type_adapter = known[0]
