"""What a boot of a simulated process does not build again, and what it does not build at all.

A process of production builds its application once; a simulation builds some forty of them, and
that was a fifth of what a seed cost. Models of bodies and parameters are built once for all,
routes that nobody calls in a simulation are left out, and a path that a router does not have is
not looked for in it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

from fastapi import APIRouter
from fastapi.routing import _IncludedRouter
from starlette.routing import Match

import app.main
from tests.support.models import models_built_once

CALLED: Final = frozenset(
    {
        "cancel",
        "cancel_job",
        "deliver",
        "get_job",
        "healthz",
        "heartbeat",
        "pause_job",
        "report",
        "resume_job",
        "retry_job",
        "run",
        "ship_logs",
        "submit_bulk",
        "submit_job",
        "submit_jobs",
        "trigger_job",
    }
)
"""The routes that somebody calls in a simulation, by the names of their functions."""

_LEFT_OUT: Final[dict[tuple[str, str], re.Pattern[str]]] = {}


def left_out(method: str, path: str) -> bool:
    """Tell whether a request is for a route that was left out: then it must not be."""
    return any(
        method == of_method and route.fullmatch(path) for (of_method, _), route in _LEFT_OUT.items()
    )


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


_add = APIRouter.add_api_route


def _add_if_called(
    router: APIRouter, path: str, endpoint: Callable[..., Any], **options: Any
) -> None:
    if endpoint.__name__ in CALLED:
        _add(router, path, endpoint, **options)
        return
    for method in options.get("methods") or ("GET",):
        if (method, router.prefix + path) not in _LEFT_OUT:
            pattern = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(router.prefix + path))
            _LEFT_OUT[method, router.prefix + path] = re.compile(pattern)


_include = APIRouter.include_router


def _include_if_called(router: APIRouter, other: APIRouter, **options: Any) -> None:
    if other.routes:
        _include(router, other, **options)


@contextmanager
def lean() -> Iterator[None]:
    """Have boots be as cheap as they can within the block."""
    with ExitStack() as stack:
        stack.enter_context(models_built_once())
        stack.enter_context(mock.patch.object(_IncludedRouter, "_match", _match_once))
        stack.enter_context(mock.patch.object(APIRouter, "add_api_route", _add_if_called))
        stack.enter_context(mock.patch.object(APIRouter, "include_router", _include_if_called))
        stack.enter_context(mock.patch.object(app.main, "install_document"))
        stack.enter_context(mock.patch.object(app.main, "require_roles"))
        stack.enter_context(mock.patch.object(app.main, "StandaloneDocs"))
        yield
