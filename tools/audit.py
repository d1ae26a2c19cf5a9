"""`make audit`: asks the OSV database which locked dependencies have known vulnerabilities.

Exit codes: 0 none is known, 1 there are some, 3 the database cannot be reached: nothing is known.
With `--if-reachable` the last is told and ends with 0: for a check that runs without a network.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
LOCKS: Final = ("requirements.lock", "requirements-dev.lock", "requirements-contract.lock")
DATABASE: Final = "https://api.osv.dev"
SECONDS: Final = 20
PER_REQUEST: Final = 500
FOUND, UNREACHABLE = 1, 3
_PIN: Final = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(?P<version>[^\s;\\]+)")


class Unreachable(Exception):
    """The database of advisories gave no answer that can be used."""


@dataclass(frozen=True, order=True)
class Pin:
    """A locked version of a package."""

    name: str
    version: str


def pins_of(lock: str) -> set[Pin]:
    """Return what a lock file pins."""
    found = (_PIN.match(line) for line in lock.splitlines())
    return {Pin(one["name"].lower(), one["version"]) for one in found if one}


def advisories(pins: Sequence[Pin], database: str = DATABASE) -> dict[Pin, list[str]]:
    """Return the ids of known advisories for each pin that has any.

    Raises:
        Unreachable: nothing is known.
    """
    known: dict[Pin, list[str]] = {}
    for start in range(0, len(pins), PER_REQUEST):
        part = pins[start : start + PER_REQUEST]
        answer = _ask(database, part)
        for pin, result in zip(part, answer, strict=True):
            ids = sorted(str(one["id"]) for one in result.get("vulns", []))
            if ids:
                known[pin] = ids
    return known


def _ask(database: str, pins: Sequence[Pin]) -> list[dict[str, Any]]:
    queries = [
        {"package": {"name": pin.name, "ecosystem": "PyPI"}, "version": pin.version} for pin in pins
    ]
    request = urllib.request.Request(  # noqa: S310 (https, or a test's own server)
        f"{database}/v1/querybatch",
        json.dumps({"queries": queries}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:  # noqa: S310
            results = json.load(reply)["results"]
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise Unreachable(f"{type(error).__name__}: {error}") from error
    if not isinstance(results, list) or len(results) != len(pins):
        raise Unreachable("its answer is for other packages")
    return results


def audit(database: str, *, if_reachable: bool) -> int:
    """Print what is known of the locked versions, and return the exit code."""
    pins = sorted(set[Pin]().union(*(pins_of((ROOT / lock).read_text()) for lock in LOCKS)))
    try:
        known = advisories(pins, database)
    except Unreachable as error:
        print(
            f"NOT AUDITED: {database} cannot be reached ({error}). Nothing is known about the "
            f"{len(pins)} locked versions: run `make audit` where there is a network."
        )
        return 0 if if_reachable else UNREACHABLE
    for pin, ids in known.items():
        print(f"{pin.name} {pin.version}: {', '.join(ids)}")
    print(f"{len(pins)} locked versions, {len(known)} with known advisories")
    return FOUND if known else 0


def main() -> int:
    """Audit the lock files of this checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--if-reachable", action="store_true")
    parser.add_argument("--database", default=DATABASE)
    given = parser.parse_args()
    return audit(given.database, if_reachable=given.if_reachable)


if __name__ == "__main__":
    sys.exit(main())
