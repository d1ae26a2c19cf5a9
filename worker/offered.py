"""Finds the handlers that a worker offers: the built-in ones and those of the named modules."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import structlog

import oncue
from oncue.handlers import RegisteredHandler
from oncue.protocol import MAX_SCHEMA_BYTES, MAX_SCHEMAS_BYTES, OfferedHandler

log = structlog.get_logger(__name__)


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


@dataclass(frozen=True, slots=True)
class Offer:
    """The offer as beats tell it, and the schemas that a dispatcher may ask for, by digest."""

    handlers: tuple[OfferedHandler, ...]
    schemas: Mapping[str, str]


def describe_offer(offered: Mapping[str, RegisteredHandler]) -> Offer:
    """Describe handlers; one whose schema is too long is offered as untyped, with a warning.

    Its params are still checked here, when it runs.
    """
    handlers: list[OfferedHandler] = []
    schemas: dict[str, str] = {}
    for one in offered.values():
        body = None if one.params_type is None else one.params_type.schema_text
        digest = None
        if body is not None and _fits(one.name, body, schemas):
            digest = sha256(body.encode()).hexdigest()
            schemas[digest] = body
        handlers.append(
            OfferedHandler(
                name=one.name,
                isolation=one.isolation,
                description=one.description,
                params_digest=digest,
                secret_result=one.secret_result or None,
            )
        )
    return Offer(tuple(handlers), schemas)


def _fits(name: str, body: str, others: Mapping[str, str]) -> bool:
    size = len(body.encode())
    if size <= MAX_SCHEMA_BYTES and size + sum(map(_size, others.values())) <= MAX_SCHEMAS_BYTES:
        return True
    log.warning(
        "the params schema of a handler is too long to be published: submissions are not checked",
        handler=name,
        bytes=size,
        most_bytes=MAX_SCHEMA_BYTES,
        most_bytes_of_all=MAX_SCHEMAS_BYTES,
    )
    return False


def _size(body: str) -> int:
    return len(body.encode())


def _place_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    # What a decorator of ours refuses is to be mended where it was written, not here.
    own = (str(Path(__file__).parent), str(Path(oncue.__file__).parent))
    outside = [
        frame
        for frame in frames
        if "importlib" not in frame.filename and not frame.filename.startswith(own)
    ]
    if not outside:
        return ""
    return f" ({outside[-1].filename}:{outside[-1].lineno})"
