"""P9: the higher priority goes first, and a flood of it starves nobody."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform
from tests.support.wait import until

AGEING_SECONDS = 2.0
RUN_MS = 20
SLOTS = 2
IN_HAND_MS = 100


def batch(platform: Platform, count: int, *, priority: int, name: str) -> list[int]:
    """Submit jobs of one priority in one request."""
    body = [
        {
            "clientRequestId": f"{name}-{number}",
            "jobName": name,
            "jobHandler": "record",
            "params": {"ms": RUN_MS},
            "priority": priority,
        }
        for number in range(count)
    ]
    answer = platform.http.post("/openapi/jobs/batch", json={"jobs": body})
    assert answer.is_success, answer.text
    return [item["jobId"] for item in answer.json()["items"]]


def starts(platform: Platform) -> dict[int, float]:
    """When each job's handler began, in seconds of one clock."""
    return {line.job_id: line.monotonic for line in platform.record() if line.event == "start"}


def begun(platform: Platform, wanted: Callable[[dict[int, float]], bool], what: str) -> None:
    """Wait until the starts are so."""
    until(lambda: wanted(starts(platform)), 60, what=what)


def test_a_higher_one_goes_before_whatever_was_not_handed_over_yet(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(engine)
    platform.dispatcher()
    platform.worker(capacity=SLOTS)
    platform.wait_for_workers(1)
    low = [
        job_id
        for number in range(6)
        for job_id in batch(platform, 200, priority=0, name=f"low-{number}")
    ]
    begun(platform, lambda at: len(at) >= 10, "the backlog to be worked on")
    accepted_at: dict[int, float] = {}
    for priority in (3, 9, 5, 9):
        accepted_at[platform.submit("record", {"ms": RUN_MS}, priority=priority)] = time.time()
    for job_id in accepted_at:
        platform.ended(job_id)
    started = {line.job_id: line.wall for line in platform.record() if line.event == "start"}
    assert set(low) - set(started), "the backlog was worked off before anything could overtake it"
    for job_id, accepted in accepted_at.items():
        before = [one for one in low if accepted < started.get(one, 0) < started[job_id]]
        assert len(before) <= IN_HAND_MS / RUN_MS * SLOTS, f"{len(before)} of 0 before {job_id}"


def test_a_flood_that_is_replenished_starves_no_low_one(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(
        engine, environment={"ONCUE_PRIORITY_AGEING_SECONDS": str(AGEING_SECONDS)}
    )
    platform.dispatcher()
    platform.worker(capacity=SLOTS)
    platform.wait_for_workers(1)
    flood = [
        job_id
        for number in range(3)
        for job_id in batch(platform, 300, priority=9, name=f"flood-0-{number}")
    ]
    begun(platform, lambda at: len(at) >= 10, "the flood to be worked on")
    low = [platform.submit("record", {"ms": RUN_MS}, priority=priority) for priority in (0, 0, 4)]
    waves = 0

    def started() -> bool:
        """Whether all low ones began; keeps the flood going meanwhile."""
        nonlocal waves
        at = starts(platform)
        if len(set(flood) - set(at)) < 300:
            waves += 1
            flood.extend(batch(platform, 300, priority=9, name=f"flood-{waves}"))
        return set(low) <= set(at)

    until(started, 60, what="the low ones to begin")
    lines = {line.job_id: line for line in platform.record() if line.event == "start"}
    waited = [lines[one].wall - _seconds(platform.job(one)["createdAt"]) for one in low]
    assert min(waited) >= AGEING_SECONDS, "the flood goes first until they have aged"
    # Three of two lanes: each tenth turn of about 100 a second is theirs.
    assert max(waited) <= AGEING_SECONDS + 10, waited
    assert set(flood) - set(starts(platform)), "the flood never ended"


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
