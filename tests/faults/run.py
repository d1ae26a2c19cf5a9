"""`python -m tests.faults.run`: faults of a seed against a whole cluster, and the judge's table."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tests.faults.callers import Callers
from tests.faults.cluster import Cluster
from tests.faults.evidence import held_by_two, history
from tests.faults.plan import DISPATCHERS, WORKERS, Call, Plan, make_plan
from tests.faults.storm import Storm
from tests.support.checker import CancelAsked, Event, JobRow, RetryAsked, judge

SETTLE_SECONDS: Final = 240.0
ANSWER_SECONDS: Final = 60.0


def main() -> int:
    """Play one seed; the exit code is 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="make test-faults")
    parser.add_argument("--seed", type=int, default=None, help="replays the plan of that number")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults happen")
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--no-clocks", action="store_true", help="leave the clocks alone")
    parser.add_argument("--verbose", action="store_true", help="print each fault as it happens")
    given = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if given.seed is None else given.seed
    directory = Path(tempfile.mkdtemp(prefix=f"oncue-faults-{seed}-"))
    print(f"seed {seed}, {given.seconds:.0f} s, {given.jobs} jobs; kept in {directory}", flush=True)
    plan = make_plan(seed, seconds=given.seconds, jobs=given.jobs, clocks=not given.no_clocks)
    (directory / "plan.json").write_text(json.dumps(asdict(plan), default=_plain, indent=1))
    violations = play(plan, directory, _sayer(directory, verbose=given.verbose))
    for one in violations[:100]:
        print(one)
    print(f"seed {seed}: {'BROKEN' if violations else 'kept'}; see {directory}")
    return 1 if violations else 0


def play(plan: Plan, directory: Path, say: Callable[[str], None]) -> list[str]:
    """Play a plan, print the table, and return what was broken."""
    cluster = Cluster(
        directory,
        dispatchers=len(DISPATCHERS),
        workers=len(WORKERS),
        environment={"ONCUE_STALL_SECONDS": str(plan.stall_seconds)},
    )
    with cluster.running():
        callers = Callers(
            plan.calls,
            cluster.platform.dispatcher_urls,
            directory / "callers.jsonl",
            callback_url=cluster.receiver.url(),
            seed=plan.seed,
        )
        storm = Storm(cluster, plan, say)
        callers.start()
        storm.blow()
        callers.give_up_in(ANSWER_SECONDS)
        storm.heal()
        healed_at = time.monotonic()
        say("healed")
        callers.join()
        unsettled = ""
        try:
            say(f"settled after {cluster.settled(SETTLE_SECONDS):.1f} s")
        except TimeoutError as late:
            unsettled = f"P1: {late}"
        storm.end()
        events = history(cluster, callers.events, healed_at=healed_at)
        _keep(events, cluster, directory)
        report = judge(events)
        print(f"answers to callers: {dict(callers.answers)}")
        print(report.table(dict(storm.happened)))
        return [
            *report.violations,
            *held_by_two(cluster),
            *wrong_ends(events, callers.calls_of),
            *filter(None, [unsettled]),
            *(f"caller: {one}" for one in callers.wrong),
            *(f"harness: {one}" for one in storm.broken),
        ]


def wrong_ends(events: Sequence[Event], calls: dict[int, Call]) -> list[str]:
    """Name the jobs that ended otherwise than their handler and their budget allow."""
    changed = {one.job_id for one in events if isinstance(one, (CancelAsked, RetryAsked))}
    return [
        f"end: job {row.job_id} ({calls[row.job_id].body['jobHandler']}) is {row.status}"
        for row in events
        if isinstance(row, JobRow)
        and row.job_id in calls
        and row.status
        not in calls[row.job_id].ends | ({"CANCELLED"} if row.job_id in changed else set())
    ]


def _keep(events: Sequence[Event], cluster: Cluster, directory: Path) -> None:
    """Write the history and the rows beside the records, for whoever has to find out."""
    with (directory / "history.jsonl").open("w") as file:
        for event in events:
            fields = {name: getattr(event, name) for name in event.__dataclass_fields__}
            file.write(f"{json.dumps({'event': type(event).__name__, **fields})}\n")
    for table in ("job_info", "job_log", "callback_delivery", "worker_node"):
        rows = cluster.rows(f"SELECT * FROM {table}")
        (directory / f"{table}.json").write_text(json.dumps(rows, default=str, indent=0))


def _sayer(directory: Path, *, verbose: bool) -> Callable[[str], None]:
    began, lock = time.monotonic(), threading.Lock()

    def say(text: str) -> None:
        now = time.monotonic()
        line = f"{now - began:8.2f} {now:.2f} {text}"
        with lock, (directory / "faults.log").open("a") as file:
            file.write(f"{line}\n")
            if verbose:
                print(line, flush=True)

    return say


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else str(value)


if __name__ == "__main__":
    sys.exit(main())
