"""`python -m tests.simulation`: play seeds, and show what happened."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.simulation.many import play_all
from tests.simulation.play import play
from tests.support.checker import Report, add_up

SHOWN_VIOLATIONS = 3
PROGRESS_SECONDS = 15.0
FEWEST = 4


def main() -> int:
    """Play the seeds asked for; the exit code tells whether all were clean."""
    arguments = _arguments()
    if arguments.seed is not None:
        return _show(arguments.seed, trace=arguments.trace, history=arguments.history)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    return _play_all(seeds, processes=arguments.processes, seconds=arguments.seconds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument("--trace", action="store_true", help="with --seed: show all as it happens")
    parser.add_argument("--history", action="store_true", help="with --seed: print the history")
    parser.add_argument("--seeds", type=_some, default=100, help="how many to play")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--processes", type=_some, default=os.cpu_count() or 1, help="all cores")
    parser.add_argument("--seconds", type=float, help="after four seeds, begin none so late")
    return parser.parse_args()


def _some(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _show(seed: int, *, trace: bool, history: bool) -> int:
    began = time.perf_counter()
    played = play(seed, trace=_print if trace else None)
    took = time.perf_counter() - began
    if history:
        print(played.history, end="")
        return 1 if played.violations else 0
    print(played.report.table(played.faults))
    print(*played.violations, sep="\n")
    print(f"{played.virtual_seconds:.0f} virtual s with {played.steps} steps")
    print(f"{took:.1f} s", file=sys.stderr)
    return 1 if played.violations else 0


def _print(line: str) -> None:
    # A worker takes what is printed within a run for the run's own output.
    print(line, file=sys.__stdout__)


def _play_all(seeds: Sequence[int], *, processes: int, seconds: float | None) -> int:
    began = shown = time.perf_counter()
    reports: list[Report] = []
    faults: Counter[str] = Counter()
    virtual_seconds = cpu_seconds = 0.0
    broken: list[int] = []
    for played in play_all(seeds, processes=processes, seconds=seconds, fewest=FEWEST):
        reports.append(played.report)
        faults.update(played.faults)
        virtual_seconds += played.virtual_seconds
        cpu_seconds += played.cpu_seconds
        if played.violations:
            broken.append(played.seed)
            print(f"seed {played.seed}: {len(played.violations)} violations", flush=True)
            for violation in played.violations[:SHOWN_VIOLATIONS]:
                print(f"  {violation[:300]}", flush=True)
        if time.perf_counter() - shown >= PROGRESS_SECONDS:
            shown = time.perf_counter()
            print(
                f"{len(reports)} of {len(seeds)} seeds in {shown - began:.0f} s, "
                f"{len(broken)} broken",
                flush=True,
            )
    took = time.perf_counter() - began
    print(add_up(reports).table(faults))
    print(
        f"{len(reports) - len(broken)} of {len(reports)} seeds clean: "
        f"{virtual_seconds / 3600:.1f} virtual hours in {took:.0f} s on {processes} processes, "
        f"{cpu_seconds:.0f} s of processor time, {cpu_seconds / max(1, len(reports)):.1f} s a seed"
    )
    print(f"broken: {sorted(broken) or 'none'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
