"""Finds the handlers that a worker offers: the built-in ones and those of the named modules."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from oncue.handlers import RegisteredHandler
from oncue.protocol import OfferedHandler


class HandlersNotLoaded(Exception):
    """A module of handlers cannot be imported; the message says which one and why."""


def import_handlers(modules: Sequence[str]) -> None:
    """Import modules, so that their handlers register themselves.

    Raises:
        HandlersNotLoaded: one of them failed.
    """
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise HandlersNotLoaded(
                f"the handlers of {module!r} cannot be imported: "
                f"{type(error).__name__}: {' '.join(str(error).split())}{_place_of(error)}"
            ) from error


def offer(
    built_in: Mapping[str, RegisteredHandler], own: Mapping[str, RegisteredHandler]
) -> dict[str, RegisteredHandler]:
    """All handlers by name; one that a team registered wins over a built-in one."""
    return {**built_in, **own}


def describe_offer(offered: Mapping[str, RegisteredHandler]) -> tuple[OfferedHandler, ...]:
    """The offer as a beat tells it."""
    return tuple(
        OfferedHandler(name=one.name, isolation=one.isolation, description=one.description)
        for one in offered.values()
    )


def _place_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if "importlib" not in frame.filename]
    if len(outside) < 2:
        return ""
    return f" ({outside[-1].filename}:{outside[-1].lineno})"
