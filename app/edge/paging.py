"""Lists: `{"items": [...], "nextCursor": null}` with opaque cursors."""

from __future__ import annotations

import base64
import binascii
from typing import Final

from app.edge.problems import Problem

MAX_LIMIT: Final = 200
DEFAULT_LIMIT: Final = 50


def encode_cursor(position: int) -> str:
    """Hide a position in an opaque cursor."""
    return base64.urlsafe_b64encode(f"1:{position}".encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None) -> int | None:
    """Return the position in a cursor, or None without one.

    Raises:
        Problem: `validation_failed`, it is no cursor of ours.
    """
    if cursor is None:
        return None
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        version, position = base64.urlsafe_b64decode(padded.encode()).decode("ascii").split(":")
        if version != "1" or not 0 <= int(position) < 2**63:
            raise ValueError(cursor)
        return int(position)
    except (binascii.Error, ValueError):
        raise Problem(
            "validation_failed", "cursor: use the nextCursor of an earlier answer, unchanged"
        ) from None
