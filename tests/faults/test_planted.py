"""The judge sees what it is there to see: each of four planted bugs, and none where none is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.scene import Scene, scene
from tests.support.checker import SAFE_SECONDS
from tests.support.wait import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


def broken(found: list[str]) -> set[str]:
    return {one.partition(":")[0] for one in found}


@pytest.mark.parametrize(("plant", "expected"), [("no_fencing", {"P5"}), ("", set())])
def test_a_late_result_that_is_taken_for_a_later_runs_is_seen(
    tmp_path: Path, plant: str, expected: set[str]
) -> None:
    with scene(tmp_path, plants={"dispatcher-1": plant}) as one:
        job_id = one.submit("fault_async", 8_000)
        first = one.started(job_id)
        mend = one.isolate(first.worker)
        one.noted(job_id, "returned")
        second = one.started(job_id, 2)
        assert second.worker != first.worker
        mend()
        report = one.settled()
        assert broken(report.violations) == expected, report.violations
        assert report.lost == 0


@pytest.mark.parametrize(("plant", "expected"), [("no_lease_stop", {"P4"}), ("", set())])
def test_a_worker_that_goes_on_though_nobody_hears_it_is_seen(
    tmp_path: Path, plant: str, expected: set[str]
) -> None:
    with scene(tmp_path, plants={"worker-1": plant, "worker-2": plant}) as one:
        job_id = one.submit("fault_async", 30_000)
        first = one.started(job_id)
        mend = one.isolate(first.worker)
        one.started(job_id, 2)
        mend()
        report = one.settled()
        assert broken(report.violations) == expected, report.violations
        assert (report.overlapping > 0) == bool(expected)


@pytest.mark.parametrize(("plant", "expected"), [("report_before_store", {"P6"}), ("", set())])
def test_an_outcome_that_is_reported_before_it_is_stored_is_seen(
    tmp_path: Path, plant: str, expected: set[str]
) -> None:
    with scene(tmp_path, plants={"worker-1": plant, "worker-2": plant}) as one:
        job_id = one.submit("fault_async", 1_000)
        first = one.started(job_id)
        mend = one.cluster.cut(f"{first.worker}>dispatcher-1")
        returned = one.noted(job_id, "returned")
        until(
            lambda: time.monotonic() > returned.at + SAFE_SECONDS,
            10,
            what="the time in which an outcome must be safe",
        )
        one.cluster.kill(first.worker)
        mend()
        report = one.settled()
        assert broken(report.violations) == expected, report.violations
        assert len(one.cluster.starts(job_id)) == 1 + len(expected)


@pytest.mark.parametrize(("plant", "expected"), [("outbox_after_commit", {"P7"}), ("", set())])
def test_a_callback_that_is_owed_outside_the_transaction_is_seen(
    tmp_path: Path, plant: str, expected: set[str]
) -> None:
    with scene(tmp_path, workers=1, plants={"dispatcher-1": plant}) as one:
        job_id = one.submit("fault_async", 1_000)
        one.started(job_id)
        one.cluster.trap("dispatcher-1").touch()
        until(lambda: one.row(job_id)["status"] == 2, 20, what="the job to have succeeded")
        _kill_and_start(one, "dispatcher-1")
        report = one.settled()
        assert broken(report.violations) == expected, report.violations
        assert report.webhooks_missing == len(expected)


def _kill_and_start(one: Scene, name: str) -> None:
    one.cluster.kill(name)
    one.cluster.trap(name).unlink()
    one.cluster.restart(name, wait=True)
