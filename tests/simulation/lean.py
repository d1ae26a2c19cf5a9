"""What a boot of a simulated process does not build again, and what it does not build at all.

A process of production builds its application once; a simulation builds some forty of them, and
that was a fifth of what a seed cost. Models of bodies and parameters are built once for all,
routes that nobody calls in a simulation are left out, and a path that a router does not have is
not looked for in it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

from fastapi import APIRouter
from fastapi._compat.v2 import ModelField
from fastapi.routing import _IncludedRouter
from starlette.routing import Match

import app.main

UNUSED: Final = (
    "explain_routes",
    "health_routes",
    "list_routes",
    "schedule_routes",
    "stream_routes",
)

_BUILT: Final[dict[tuple[str, int, str], tuple[Any, Any]]] = {}
_build = ModelField.__post_init__


def _build_once(field: ModelField) -> None:
    info = field.field_info
    key = (field.mode, id(info.annotation), repr(info))
    known = _BUILT.get(key)
    if known is None:
        _build(field)
        # The description is kept as well: an address in the key must not be given to another.
        _BUILT[key] = (field._type_adapter, info)
    else:
        field._type_adapter = known[0]


_match = _IncludedRouter._match


def _match_once(router: _IncludedRouter, scope: Any) -> Any:
    """Ask the routes of a router but once for what they do not have."""
    missed: set[Any] = router.__dict__.setdefault("_missed", set())
    asked = (scope["type"], scope.get("method"), scope["path"])
    if asked in missed:
        return Match.NONE, {}, None, None
    found = _match(router, scope)
    if found[0] is Match.NONE:
        missed.add(asked)
    return found


@contextmanager
def lean() -> Iterator[None]:
    """Have boots be as cheap as they can within the block."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ModelField, "__post_init__", _build_once))
        stack.enter_context(mock.patch.object(_IncludedRouter, "_match", _match_once))
        stack.enter_context(mock.patch.object(app.main, "install_document"))
        stack.enter_context(mock.patch.object(app.main, "StandaloneDocs"))
        for name in UNUSED:
            stack.enter_context(mock.patch.object(app.main, name, _no_routes))
        yield


def _no_routes(*_: Any, **__: Any) -> APIRouter:
    return APIRouter()
