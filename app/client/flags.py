"""What is given on a command line, read into what the client takes; else the command ends."""

from __future__ import annotations

import json
import math
import sys
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NoReturn

from app.client.talk import BAD_USAGE, end


def params_of(given: str | None) -> Any:
    """Read --params: JSON text, a file behind @, or standard input."""
    if given is None:
        return None
    try:
        if given == "-":
            text = sys.stdin.read()
        elif given.startswith("@"):
            text = Path(given[1:]).read_text(encoding="utf-8")
        else:
            text = given
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except OSError as error:
        end(BAD_USAGE, f"--params: {given[1:]}: {error.strerror}")
    except (ValueError, RecursionError) as error:
        end(BAD_USAGE, f"--params is not JSON: {error}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number


def moment_or_none(flag: str, given: str | None) -> datetime | None:
    """Read a time that may be left out."""
    return None if given is None else moment_of(flag, given)


def moment_of(flag: str, given: str) -> datetime:
    """Read a time with an offset, RFC 3339."""
    try:
        moment: datetime | None = datetime.fromisoformat(given)
    except ValueError:
        moment = None
    if moment is None or moment.utcoffset() is None:
        end(BAD_USAGE, f"{flag} is a time with an offset, as 2030-01-31T09:00:00Z, not {given!r}")
    return moment


_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "": 1.0}


def duration_of(flag: str, given: str | None) -> float | None:
    """Read a duration, as 5s, 250ms, 15m, 2h or 1d; a plain number is seconds."""
    if given is None:
        return None
    number = given.rstrip("smhd")
    try:
        return float(number) * _UNITS[given[len(number) :]]
    except (ValueError, KeyError):
        end(BAD_USAGE, f"{flag} is a duration, as 5s, 250ms, 15m, 2h or 1d, not {given!r}")


def word_of(choice: StrEnum | None) -> str | None:
    """Return the word of a choice that may be left out."""
    return None if choice is None else choice.value


def pair_of(flag: str, given: str) -> tuple[str, str]:
    """Read NAME=VALUE."""
    name, separator, value = given.partition("=")
    if not name or not separator:
        end(BAD_USAGE, f"{flag} is NAME=VALUE, not {given!r}")
    return name, value


def pairs_of(flag: str, given: list[str] | None) -> dict[str, Any]:
    """Read each NAME=VALUE of a flag that may be repeated; a name is given once."""
    pairs: dict[str, Any] = {}
    for one in given or []:
        name, value = pair_of(flag, one)
        if name in pairs:
            end(BAD_USAGE, f"{flag} {name} is given twice")
        pairs[name] = value
    return pairs


def headers_of(plain: list[str] | None, secret: list[str] | None) -> dict[str, Any] | None:
    """Read the headers of callbacks; the value of a secret one may be in a file behind @."""
    headers = pairs_of("--callback-header", plain)
    for one in secret or []:
        name, separator, value = one.partition("=")
        # What is secret is not repeated on a terminal.
        if not name or not separator:
            end(BAD_USAGE, "--callback-secret-header is NAME=VALUE")
        if name in headers:
            end(BAD_USAGE, f"--callback-secret-header {name} is given twice")
        if value.startswith("@"):
            try:
                value = Path(value[1:]).read_text(encoding="utf-8").strip()
            except OSError as error:
                end(BAD_USAGE, f"--callback-secret-header: {value[1:]}: {error.strerror}")
        headers[name] = {"secret": value}
    return headers or None
