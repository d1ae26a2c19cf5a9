"""The active dispatcher stops, or dies, at the worst moments of a claim and a send."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.faults.scene import Scene, scene
from tests.support.wait import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
ASLEEP_SECONDS = 60.0
GO_ON_SECONDS = 10.0


@pytest.mark.parametrize("plant", ["stop_in_claim", "stop_before_send"])
def test_nothing_is_claimed_or_run_twice_after_a_minutes_sleep_and_others_go_on(
    tmp_path: Path, plant: str
) -> None:
    plants = dict.fromkeys(("dispatcher-1", "dispatcher-2"), plant)
    with scene(tmp_path, dispatchers=2, plants=plants) as one:
        active, other = _worst_sides(one)
        one.cluster.trap(active).touch()
        caught = one.submit("fault_async", 0, via=other)
        process = psutil.Process(one.platform.services[active].child.pid)
        until(lambda: process.status() == psutil.STATUS_STOPPED, 20, what=f"{active} to be stopped")
        stopped_at = time.monotonic()
        held = _row_is_locked(one, caught)
        assert held == (plant == "stop_in_claim"), "the scene is what it is meant to be"
        others = [one.submit("fault_async", 0, via=other) for _ in range(20)]
        begins = [one.started(job_id).at - stopped_at for job_id in others]
        print(f"{plant}: 20 other jobs began within {max(begins):.1f} s")
        assert max(begins) < GO_ON_SECONDS
        until(
            lambda: time.monotonic() > stopped_at + ASLEEP_SECONDS,
            ASLEEP_SECONDS + 5,
            what="the minute to pass",
        )
        process.resume()
        report = one.settled()
        assert report.violations == []
        assert [len(one.cluster.starts(job_id)) for job_id in [caught, *others]] == [1] * 21
        until(one.platform.services[active].ready, 20, what=f"{active} to be ready again")


@pytest.mark.parametrize("plant", ["die_before_send", "die_after_send"])
def test_a_claim_whose_dispatcher_dies_is_run_once(tmp_path: Path, plant: str) -> None:
    plants = dict.fromkeys(("dispatcher-1", "dispatcher-2"), plant)
    with scene(tmp_path, dispatchers=2, plants=plants) as one:
        active, other = one.sides()
        one.cluster.trap(active).touch()
        job_id = one.submit("fault_async", 500, via=other)
        child = one.platform.services[active].child
        until(lambda: not child.running, 20, what=f"{active} to die")
        assert one.settled().violations == []
        row = one.row(job_id)
        assert (row["status"], row["attempt"], len(one.cluster.starts(job_id))) == (2, 1, 1)


def _worst_sides(one: Scene) -> tuple[str, str]:
    """Let the dispatcher that workers report to first be the active one."""
    first, second = one.cluster.dispatchers
    if one.cluster.active_dispatcher() == second:
        one.cluster.terminate(second)
        assert one.cluster.active_dispatcher() == first
        one.cluster.restart(second, wait=True)
    return one.sides()


def _row_is_locked(one: Scene, job_id: int) -> bool:
    seen = one.cluster.rows(f"SELECT id FROM job_info WHERE id = {job_id} FOR UPDATE SKIP LOCKED")
    return not seen
