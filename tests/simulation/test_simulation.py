"""Simulated clusters keep the promises; what they find is real, and can be played again.

`make simulate SEEDS=20000` plays more of them; docs/simulation.md tells how to look into one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing

import pytest

from tests.simulation.bugs import BUGS
from tests.simulation.many import play_all
from tests.simulation.play import LEAST_SECONDS, play
from tests.support.checker import add_up

pytestmark = pytest.mark.xdist_group("simulation")

PROCESSES = 2
SECONDS = 60
FEWEST = 4
MOST = 400
WITHIN = 500


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_no_seed_breaks_a_promise() -> None:
    seeds = range(1, MOST + 1)
    played = list(play_all(seeds, processes=PROCESSES, seconds=SECONDS, fewest=FEWEST))

    assert {one.seed: one.violations for one in played if one.violations} == {}
    assert len(played) >= FEWEST
    assert all(one.virtual_seconds >= LEAST_SECONDS for one in played)
    # Clean because much went wrong and was survived, not because nothing happened.
    total = add_up(one.report for one in played)
    assert total.jobs >= 40 * len(played)
    assert sum(sum(one.faults.values()) for one in played) >= 10 * len(played)
    assert total.run_again_after_death > 0


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [3, 20, 2143])
def test_the_same_seed_gives_the_same_history_byte_for_byte(seed: int) -> None:
    """In another process, with sets in another order, and whether somebody looks on or not."""
    first, second = (_said(seed, "--trace", "--history", hashes=one) for one in ("1", "2"))
    history = _said(seed, "--history", hashes="3")

    assert history.count("\n") > 300
    assert first.count("\n") > 2 * history.count("\n")
    assert first == second
    assert first.endswith(history)


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("bug", "promises"),
    [
        ("reports are not fenced", ("P4", "P5")),
        ("a worker cut off goes on", ("P4",)),
        ("reported before it is stored", ("P6",)),
        ("the callback outside the end's transaction", ("P7",)),
    ],
)
def test_a_planted_bug_is_found_within_500_seeds(bug: str, promises: tuple[str, ...]) -> None:
    assert bug in BUGS
    with closing(play_all(range(1, WITHIN + 1), processes=PROCESSES, bug=bug)) as all_played:
        found = any(
            violation.startswith(promises)
            for played in all_played
            for violation in played.violations
        )

    assert found


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_sqlalchemys_own_engine_is_played_as_well() -> None:
    """What is replaced for speed is not what keeps the promises."""
    quick, real = (play(3, seconds=60.0, quick=one) for one in (True, False))

    assert quick.violations == real.violations == []
    # Both tell of the same load and the same faults; only moments differ by milliseconds.
    assert quick.faults == real.faults
    assert quick.report.jobs == real.report.jobs
    assert abs(quick.steps - real.steps) < real.steps / 10


def _said(seed: int, *options: str, hashes: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--seed", str(seed), *options],
        env={**os.environ, "PYTHONHASHSEED": hashes},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
