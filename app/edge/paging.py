"""Lists: `{"items": [...], "nextCursor": null}` with opaque cursors."""

from __future__ import annotations

import base64
import json
from typing import Final

from app.edge.problems import Problem, invalid

MAX_LIMIT: Final = 200
DEFAULT_LIMIT: Final = 50
MAX_KEY: Final = 128
DELETE: Final = 0x7F


def encode_cursor(position: int) -> str:
    """Hide a position in an opaque cursor."""
    return _hide(f"1:{position}")


def encode_place(nominal_time: int, shard_index: int, child_key: str) -> str:
    """Hide a place among the children of a job in an opaque cursor."""
    return _hide(json.dumps([nominal_time, shard_index, child_key]))


def decode_place(cursor: str | None) -> tuple[int, int, str] | None:
    """Return the place in a cursor, or None without one.

    Raises:
        Problem: `validation_failed`, it is no cursor of ours.
    """
    if cursor is None:
        return None
    try:
        nominal, shard, key = json.loads(_found_in(cursor))
        if not (type(nominal) is int and type(shard) is int and type(key) is str):
            raise ValueError(cursor)
        key.encode()  # a lone surrogate is in no key
        if max(abs(nominal), abs(shard)) >= 2**63 or len(key) > MAX_KEY or _has_controls(key):
            raise ValueError(cursor)
        return nominal, shard, key
    except (ValueError, TypeError, RecursionError):
        raise _foreign() from None


def decode_cursor(cursor: str | None) -> int | None:
    """Return the position in a cursor, or None without one.

    Raises:
        Problem: `validation_failed`, it is no cursor of ours.
    """
    if cursor is None:
        return None
    try:
        version, position = _found_in(cursor).split(":")
        # What follows the highest position must fit into a column, too.
        if version != "1" or not 0 <= int(position) < 2**63 - 1:
            raise ValueError(cursor)
        return int(position)
    except ValueError:
        raise _foreign() from None


def encode_end(finished_at: int, job_id: int) -> str:
    """Hide a place among jobs in the order of their ends in an opaque cursor."""
    return _hide(f"2:{finished_at}:{job_id}")


def decode_end(cursor: str | None) -> tuple[int, int] | None:
    """Return the (finished at, id) in a cursor, or None without one.

    Raises:
        Problem: `validation_failed`, it is no cursor of ours.
    """
    if cursor is None:
        return None
    try:
        version, end, job = _found_in(cursor).split(":")
        if version != "2" or not (0 <= int(end) < 2**62 and 0 <= int(job) < 2**63):
            raise ValueError(cursor)
        return int(end), int(job)
    except ValueError:
        raise _foreign() from None


def encode_name(name: str) -> str:
    """Hide the last name of a page, in a list that is in the order of its names."""
    return _hide(f"3:{name}")


def decode_name(cursor: str | None) -> str | None:
    """Return the name in a cursor, or None without one.

    Raises:
        Problem: `validation_failed`, it is no cursor of ours.
    """
    if cursor is None:
        return None
    try:
        version, colon, name = _found_in(cursor).partition(":")
        if version != "3" or not colon or not 1 <= len(name) <= MAX_KEY:
            raise ValueError(cursor)
        return name
    except ValueError:
        raise _foreign() from None


def _hide(place: str) -> str:
    return base64.urlsafe_b64encode(place.encode()).decode().rstrip("=")


def _found_in(cursor: str) -> str:
    """Return what a cursor hides; a ValueError tells that nothing of ours could be."""
    padded = cursor + "=" * (-len(cursor) % 4)
    return base64.urlsafe_b64decode(padded.encode()).decode()


def _has_controls(key: str) -> bool:
    # No `isprintable`: keys may have wide spaces, and what joins emoji.
    return any(ord(one) < ord(" ") or ord(one) == DELETE for one in key)


def _foreign() -> Problem:
    return invalid("use the nextCursor of an earlier answer, unchanged", "/cursor")
