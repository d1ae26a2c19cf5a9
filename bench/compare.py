"""Compare Oncue with what a team would build, and with a POST that does nothing, in one sitting.

    python -m bench.compare --peers FOLDER --python .venv-bench/bin/python
    python -m bench.compare              # without the stacks of peers: the no-op POST alone

Jobs are POSTed over 64 connections, and again over 128 (`--connections`): what is told of others
than 64 bears their number after its name. All stacks use the same private MariaDB (every commit
is flushed) and Redis, the same load and the same receiver. Each round starts every stack once,
one after the other, so that what disturbs the machine meets all of them; a figure is the median
of its rounds, and a ratio that of the medians. Submissions are told of one dispatcher process,
and of a process for each core, beside the no-op POST in one process and in as many. The folder
holds `common.py`, `ref_app.py` (Celery) and `ref2_app.py` (taskiq).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Final

import uvloop

from bench.cluster import servers
from bench.drive import missing
from bench.figures import Figures, json_flag, percentile
from bench.hook import Hook, listening
from bench.latency import idle
from bench.stacks import MODULES, Spread, Stack, noop, oncue, peer
from bench.throughput import WARM_UP, submitted, to_webhook
from tests.support.engines import Servers

ENGINE: Final = "mariadb+redis"
SUBMITTED, DONE, CPU, IDLE = "submissions /s", "jobs /s", "cpu us a job", "POST to webhook ms"

CORES: Final = os.cpu_count() or 1
PER_CORE: Final = f" x {CORES}"
"""What is told of as many processes as there are cores bears this after its name."""

USUAL: Final = 64
"""Connections of the load."""

Found = dict[tuple[str, str], list[float]]


async def compare(
    lent: Servers,
    peers: Path | None,
    python: Path,
    jobs: int,
    rounds: int,
    connections: Sequence[int],
) -> tuple[Found, int]:
    """Return every figure of every round, by stack and name, and how many webhooks are missing."""
    found: Found = defaultdict(list)
    lost = 0
    async with listening() as hook:
        for number in range(rounds):
            for processes in sorted({1, CORES}):
                with noop(hook.url, processes=processes) as stack:
                    await api(_named(stack, processes), found, jobs * 2)
                spread = Spread(processes=processes)
                with oncue(lent, ENGINE, hook.url, dispatch=False, spread=spread) as stack:
                    await api(_named(stack, processes), found, jobs)
            whole: list[tuple[AbstractContextManager[Stack], int]] = []
            if peers is not None:
                # Slower: fewer jobs take as long.
                whole += [
                    (peer(name, lent, peers, python, hook.url), max(500, jobs // 4))
                    for name in MODULES
                ]
            whole.append((oncue(lent, ENGINE, hook.url), jobs))
            for running, count in whole:
                with running as stack:
                    lost += await to_end(stack, hook, found, count, number, connections)
    return found, lost


def _named(stack: Stack, processes: int) -> Stack:
    return stack if processes == 1 else replace(stack, name=stack.name + PER_CORE)


async def api(stack: Stack, found: Found, jobs: int) -> None:
    """Measure how fast a stack takes jobs that it does not run."""
    await submitted(stack, "warm", WARM_UP)
    run = await submitted(stack, "api", jobs)
    found[stack.name, SUBMITTED].append(run.load.per_second)
    found[stack.name, "cpu us a POST"].append(run.cpu_us["total"])


async def to_end(
    stack: Stack,
    hook: Hook,
    found: Found,
    jobs: int,
    number: int,
    connections: Sequence[int],
) -> int:
    """Measure a stack from POST to webhook, loaded and idle; return the missing webhooks."""
    lost = 0
    await to_webhook(stack, hook, "warm", WARM_UP)
    for many in connections:
        run = await to_webhook(stack, hook, f"run-{many}", jobs, many)
        found[stack.name, DONE + over(many)].append(run.jobs_per_second)
        found[stack.name, CPU + over(many)].append(run.cpu_us["total"])
        if stack.name != "oncue":
            name = "submissions, dispatch on /s" + over(many)
            found[stack.name, name].append(run.load.per_second)
        lost += run.missing + run.load.refused
    steps = await idle(stack, hook, f"idle-{number}", 100)
    found[stack.name, IDLE].append(percentile(steps.webhook, 50))
    return lost


def over(connections: int) -> str:
    """Say over how many connections, if they are not the usual ones."""
    return "" if connections == USUAL else f", {connections} connections"


def tell(figures: Figures, found: Found) -> None:
    """Tell the medians, then Oncue's as ratios to the others."""
    medians = {key: statistics.median(values) for key, values in found.items()}
    for (stack, name), value in sorted(medians.items()):
        rounds = [float(f"{one:.4g}") for one in found[stack, name]]
        figures.tell("compare", f"{stack}: {name}", value, "", rounds=rounds)
    for own, other, name in (
        ("oncue", "noop", SUBMITTED),
        (f"oncue{PER_CORE}", "noop", SUBMITTED),
        (f"oncue{PER_CORE}", f"noop{PER_CORE}", SUBMITTED),
        *(
            ("oncue", one, name)
            for one in MODULES
            for name in sorted({name for _, name in medians if name.startswith((DONE, CPU, IDLE))})
        ),
    ):
        if (own, name) in medians and (other, name) in medians:
            ratio = medians[own, name] / medians[other, name]
            figures.tell("ratio", f"{name}: {own} / {other}", ratio, "x")


def main() -> int:
    """Read the flags, compare, and tell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, help="folder of the reference stacks")
    parser.add_argument(
        "--python",
        type=Path,
        default=Path(".venv-bench/bin/python"),
        help="the Python that the reference stacks run in (%(default)s)",
    )
    parser.add_argument("--jobs", type=int, default=6000, help="Oncue's in a run (%(default)s)")
    parser.add_argument(
        "--connections", type=int, nargs="+", default=[USUAL, 2 * USUAL], help="(%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    json_flag(parser)
    given = parser.parse_args()
    if (why := missing()) is not None:
        parser.error(why)
    peers: Path | None = given.peers
    if peers is not None and not (peers / "ref_app.py").is_file():
        parser.error(f"{peers} holds no ref_app.py")
    if peers is not None and not given.python.is_file():
        parser.error(f"{given.python} is not there: `make bench-compare` makes it")
    if peers is None:
        print("no --peers: Oncue is compared with the no-op POST alone", file=sys.stderr)
    with servers() as lent:
        work = compare(
            *(lent, peers, given.python.absolute()),
            *(given.jobs, given.rounds, given.connections),
        )
        found, lost = uvloop.run(work)
    tell(Figures(given.json), found)
    if lost:
        print(f"{lost} jobs were refused or their webhooks are missing", file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
