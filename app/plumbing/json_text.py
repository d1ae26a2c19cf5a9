"""JSON as text, with integers exact and nothing that a database or a parser would refuse."""

from __future__ import annotations

import json
from typing import Any, Final

_ENCODE: Final = {
    sort_keys: json.JSONEncoder(
        ensure_ascii=False, allow_nan=False, sort_keys=sort_keys, separators=(",", ":")
    ).encode
    for sort_keys in (True, False)
}


class Unencodable(ValueError):
    """A value has no JSON form: not finite, or not text."""


def plain_json(value: Any, *, sort_keys: bool = False) -> str:
    """Write JSON without spaces; keys keep their order unless they are to be sorted.

    Raises:
        Unencodable: it holds NaN, an infinity or a lone surrogate, or is nested too deep.
    """
    try:
        text = _ENCODE[sort_keys](value)
        if not text.isascii():
            text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise Unencodable(str(error)) from None
    return text


def is_longer(text: str, most_bytes: int) -> bool:
    """Tell whether a text has more bytes than that; of a short one none are made."""
    return len(text) * 4 > most_bytes and len(text.encode()) > most_bytes
