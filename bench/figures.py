"""How every bench tells its figures: a line for people, and one of JSON for programs."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Figures:
    """Prints each figure when it is known; JSON goes to standard output, or to a file."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self.kept: list[dict[str, Any]] = []

    def tell(self, bench: str, figure: str, value: float, unit: str, **more: Any) -> None:
        """Tell one figure; `more` is what it was measured with, or what belongs to it."""
        rounded = float(f"{value:.4g}") if abs(value) < 10_000 else round(value)
        one = {"bench": bench, "figure": figure, "value": rounded, "unit": unit, **more}
        self.kept.append(one)
        beside = "  ".join(f"{name}={_short(told)}" for name, told in more.items())
        print(f"{bench:<12} {figure:<44} {rounded:>10,} {unit:<8} {beside}", file=sys.stderr)
        sys.stderr.flush()
        if self._file is None:
            print(json.dumps(one), flush=True)
        else:
            with self._file.open("a") as lines:
                lines.write(f"{json.dumps(one)}\n")


def json_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the file of the JSON lines."""
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="append the JSON lines to FILE; without it they are standard output "
        "(the table is standard error)",
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of the values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _short(told: Any) -> str:
    if isinstance(told, dict):
        return "{" + " ".join(f"{name}:{_short(one)}" for name, one in told.items()) + "}"
    return f"{told:.4g}" if isinstance(told, float) else str(told)
