"""`python -m tests.simulation`: play seeds, and show what happened."""

from __future__ import annotations

import argparse
import os
import sys
import time

PLAY = None


def main() -> int:
    """Play the seeds asked for; the exit code tells whether all were clean."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="play this one")
    parser.add_argument("--trace", action="store_true", help="with --seed: show every event")
    parser.add_argument("--seeds", type=int, default=200, help="how many to play")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets is part of a history.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    from tests.simulation.play import play

    if arguments.seed is not None:
        began = time.perf_counter()
        played = play(arguments.seed, trace=print if arguments.trace else None)
        print(played.report.table(played.faults))
        print(f"{played.virtual_seconds:.0f} virtual s, {played.steps} steps, {time.perf_counter() - began:.2f} s")
        for violation in played.violations:
            print(violation)
        return 1 if played.violations else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
