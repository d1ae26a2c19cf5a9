"""Processes of the last release beside some that share partitions: nothing is lost or doubled."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from app.jobs.check import partition_of
from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform
from tests.support.release import Release

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
PARTITIONS = 4


def submitted(platform: Platform, name: str, count: int) -> dict[int, int]:
    """Submit jobs, and return the partition of each."""
    found = {}
    for number in range(count):
        request = f"{name}-{number}"
        job_id = platform.submit("record", {"ms": 20}, maxRetry=0, clientRequestId=request)
        found[job_id] = partition_of(0, request, PARTITIONS)
    return found


def test_an_older_dispatcher_and_an_older_worker_lose_and_double_nothing(
    engine: Engine, tmp_path: Path, new_platform: NewPlatform
) -> None:
    old = Release(tmp_path).environment
    new = {"ONCUE_DISPATCH_PARTITIONS": str(PARTITIONS)}
    platform = new_platform(engine, dispatchers=2, environment={"ONCUE_LOCK_SECONDS": "2"})
    platform.dispatcher(2, environment=old)
    platform.dispatcher(1, environment=new)
    platform.worker("older", environment=old)
    platform.wait_for_workers(1)
    # The older dispatcher holds the lock that it knows, and claims for every partition.
    first = submitted(platform, "first", 40)
    for job_id in first:
        assert platform.ended(job_id, 60)["status"] == "SUCCEEDED"

    assert platform.services["dispatcher-2"].terminate() == 0
    platform.dispatcher(2, environment=new)
    second = submitted(platform, "second", 40)
    for job_id in [one for one, partition in second.items() if partition == 0]:
        assert platform.ended(job_id, 60)["status"] == "SUCCEEDED"
    waiting = [one for one, partition in second.items() if partition != 0]
    assert waiting
    assert {platform.job(one)["status"] for one in waiting} == {"WAITING"}
    platform.worker("newer")
    for job_id in waiting:
        assert platform.ended(job_id, 60)["status"] == "SUCCEEDED"
    starts = [line for line in platform.record() if line.event == "start"]
    assert Counter(line.job_id for line in starts) == dict.fromkeys([*first, *second], 1)
    assert {line.worker for line in starts if line.job_id in waiting} == {"newer"}
