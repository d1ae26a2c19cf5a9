"""The head of a request as the server gives it, read without the framework's objects."""

from __future__ import annotations

from starlette.types import Scope


def header_of(scope: Scope, name: bytes, default: str = "") -> str:
    """Return the first header of this name, which is in small letters."""
    for given, value in scope["headers"]:
        if given == name:
            return str(value, "latin-1")
    return default
