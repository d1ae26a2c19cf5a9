"""JSON as text, with integers exact and nothing that a database or a parser would refuse."""

from __future__ import annotations

import json
from typing import Any, Final

import orjson

_ENCODE: Final = {
    sort_keys: json.JSONEncoder(
        ensure_ascii=False, allow_nan=False, sort_keys=sort_keys, separators=(",", ":")
    ).encode
    for sort_keys in (True, False)
}
_OPTIONS: Final = {True: orjson.OPT_SORT_KEYS, False: 0}
_SCALARS: Final = frozenset((str, bool, type(None)))
_DEEPEST: Final = 20
"""What is nested deeper is left to the encoder that says how deep is too deep."""


class Unencodable(ValueError):
    """A value has no JSON form: not finite, or not text."""


def plain_json(value: Any, *, sort_keys: bool = False) -> str:
    """Write JSON without spaces; keys keep their order unless they are to be sorted.

    Raises:
        Unencodable: it holds NaN, an infinity or a lone surrogate, or is nested too deep.
    """
    return plain_bytes(value, sort_keys=sort_keys).decode()


def plain_bytes(value: Any, *, sort_keys: bool = False) -> bytes:
    """Write the UTF-8 of `plain_json`.

    Raises:
        Unencodable: as there.
    """
    if type(value) is str or _is_written_alike(value, _DEEPEST):
        try:
            return orjson.dumps(value, option=_OPTIONS[sort_keys])
        except orjson.JSONEncodeError:
            pass
    try:
        return _ENCODE[sort_keys](value).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise Unencodable(str(error)) from None


def is_longer(text: str, most_bytes: int) -> bool:
    """Tell whether a text has more bytes than that; of a short one none are made."""
    return len(text) * 4 > most_bytes and len(text.encode()) > most_bytes


def _is_written_alike(value: Any, levels: int) -> bool:
    """Tell whether the faster encoder writes the same: it differs in floats and long integers."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is int:
        return bool(-(2**63) <= value < 2**63)
    if levels == 0 or (kind is not dict and kind is not list):
        return False
    for one in value.values() if kind is dict else value:
        if type(one) not in _SCALARS and not _is_written_alike(one, levels - 1):
            return False
    return True
