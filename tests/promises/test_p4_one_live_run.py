"""P4, first half: what a killed worker held goes on elsewhere, once, when its death is proven."""

from __future__ import annotations

import pytest

from tests.support.engines import Engine
from tests.support.processes import NewPlatform
from tests.support.wait import until

DEATH_SECONDS = 60


def test_a_killed_workers_run_is_repeated_once_elsewhere_and_only_after_its_death(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(engine).start(workers=2)
    fields = {"maxRetry": 1}
    job_ids = [platform.submit("record", {"ms": 6000}, **fields) for _ in range(8)]

    def begun() -> dict[int, str]:
        return {line.job_id: line.worker for line in platform.record() if line.event == "start"}

    until(lambda: len(begun()) == len(job_ids), what="all runs to start")
    victim = begun()[job_ids[0]]
    lost = {job_id for job_id, worker in begun().items() if worker == victim}
    platform.services[victim].kill()

    for job_id in job_ids:
        job = platform.ended(job_id, DEATH_SECONDS)
        statuses = [one["status"] for one in reversed(job["executions"])]
        assert job["status"] == "SUCCEEDED"
        assert statuses == (["LOST", "SUCCEEDED"] if job_id in lost else ["SUCCEEDED"])
        starts = [line for line in platform.record(job_id) if line.event == "start"]
        assert [line.attempt for line in starts] == list(range(1, len(statuses) + 1))
        if job_id in lost:
            assert starts[1].worker != victim
            assert starts[1].monotonic - starts[0].monotonic > 10


def test_a_job_whose_thread_could_not_be_stopped_goes_on_when_its_worker_is_dead(
    mariadb_engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(mariadb_engine).start(workers=2)
    job_id = platform.submit(
        "stubborn_thread", {"ms": 600_000}, timeoutMs=300, maxRetry=1, retryIntervalSeconds=0
    )
    (first,) = until(lambda: platform.record(job_id))
    until(lambda: platform.job(job_id)["status"] == "WAITING")
    platform.services[first.worker].kill()
    job = platform.ended(job_id, DEATH_SECONDS)
    assert [one["status"] for one in job["executions"]] == ["TIMED_OUT", "TIMED_OUT"]
    assert platform.record(job_id)[-1].worker != first.worker


@pytest.mark.parametrize("handler", ["stubborn_thread"])
def test_no_next_attempt_starts_while_a_thread_that_cannot_be_stopped_still_runs(
    sqlite_engine: Engine, new_platform: NewPlatform, handler: str
) -> None:
    platform = new_platform(sqlite_engine).start(workers=2)
    job_id = platform.submit(
        handler, {"ms": 6000}, timeoutMs=200, maxRetry=1, retryIntervalSeconds=0
    )
    job = platform.ended(job_id)
    assert [one["status"] for one in job["executions"]] == ["TIMED_OUT", "TIMED_OUT"]
    until(lambda: len(platform.record(job_id)) == 4)
    events = [(line.event, line.attempt) for line in platform.record(job_id)]
    assert events == [("start", 1), ("returned", 1), ("start", 2), ("returned", 2)]
