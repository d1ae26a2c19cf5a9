"""P9: a tenant with a flood of work delays only itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import httpx

from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform
from tests.support.wait import until

RUN_MS = 20
SLOTS = 2
FLOOD = 1500
ROOT_KEY = "rootkey-of-the-platform"


def platform_with_keys(
    engine: Engine,
    new_platform: NewPlatform,
    *,
    capacity: int = SLOTS,
    dispatchers: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Platform:
    """Start the first dispatcher and a worker of a platform whose callers have keys."""
    told = {**(environment or {}), "ONCUE_API_KEYS": f"root:{ROOT_KEY}"}
    platform = new_platform(engine, dispatchers=dispatchers, environment=told)
    platform.http.headers["Authorization"] = f"Bearer {ROOT_KEY}"
    platform.dispatcher()
    platform.worker(capacity=capacity)
    platform.wait_for_workers(1)
    return platform


def tenant(platform: Platform, name: str, **limits: Any) -> httpx.Client:
    """Make a tenant with a key, and return its client."""
    made = platform.http.post("/openapi/tenants", json={"name": name})
    assert made.is_success, made.text
    tenant_id = made.json()["tenantId"]
    if limits:
        changed = platform.http.patch(f"/openapi/tenants/{tenant_id}", json={"limits": limits})
        assert changed.is_success, changed.text
    key = platform.http.post("/openapi/keys", json={"name": name, "tenantId": tenant_id})
    assert key.is_success, key.text
    return httpx.Client(
        base_url=platform.url,
        headers={"Authorization": f"Bearer {key.json()['key']}"},
        timeout=70,
        trust_env=False,
    )


def submit_many(client: httpx.Client, count: int, *, name: str, **fields: Any) -> list[int]:
    """Submit jobs of one tenant, a few hundred a request."""
    job_ids: list[int] = []
    while len(job_ids) < count:
        first = len(job_ids)
        jobs = [
            {
                "clientRequestId": f"{name}-{number}",
                "jobName": name,
                "jobHandler": "record",
                "params": {"ms": RUN_MS},
                **fields,
            }
            for number in range(first, min(count, first + 300))
        ]
        answer = client.post("/openapi/jobs/batch", json={"jobs": jobs})
        assert answer.is_success, answer.text
        job_ids += [item["jobId"] for item in answer.json()["items"]]
    return job_ids


def begun(platform: Platform) -> list[int]:
    """Return the jobs whose handlers have begun, in that order."""
    lines = [line for line in platform.record() if line.event == "start"]
    return [line.job_id for line in sorted(lines, key=lambda line: line.monotonic)]


def test_a_flood_of_higher_and_older_ones_delays_another_tenant_by_a_round_of_slots(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = platform_with_keys(engine, new_platform)
    with tenant(platform, "noisy") as noisy, tenant(platform, "quiet") as quiet:
        flood = set(submit_many(noisy, FLOOD, name="flood", priority=9))
        until(lambda: len(begun(platform)) >= 10, 60, what="the flood to be worked on")
        accepted_at: dict[int, float] = {}
        for number in range(5):
            (job_id,) = submit_many(quiet, 1, name=f"quiet-{number}", priority=0)
            accepted_at[job_id] = time.time()
            until(lambda one=job_id: one in begun(platform), 30, what="the other's job to begin")  # type: ignore[misc]
        started = {line.job_id: line.wall for line in platform.record() if line.event == "start"}
        for job_id, accepted in accepted_at.items():
            overtaking = [one for one in flood if accepted < started.get(one, 0) < started[job_id]]
            # One round of slots, and what was in hand on the worker.
            assert len(overtaking) <= 2 * SLOTS + 1000 // RUN_MS // 4, overtaking
        assert flood - set(begun(platform)), "the flood was over before anything was shown"


def test_with_a_weight_of_three_a_tenant_gets_three_slots_of_four(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = platform_with_keys(engine, new_platform)
    with tenant(platform, "heavy", weight=3) as heavy, tenant(platform, "light") as light:
        for number in range(3):
            submit_many(light, 300, name=f"light-{number}", priority=9)
        heavies = set(submit_many(heavy, 300, name="heavy", priority=0))
        first = until(
            lambda: next((n for n, one in enumerate(begun(platform)) if one in heavies), None),
            30,
            what="the heavier one's jobs to begin",
        )
        until(lambda: len(begun(platform)) >= first + 120, 60, what="both to be worked on")
        both = begun(platform)[first : first + 120]
        share = sum(one in heavies for one in both) / len(both)
        assert 0.68 <= share <= 0.82, share


def most_at_once(platform: Platform, job_ids: set[int]) -> int:
    """Return how many handlers of these jobs ran at once, at most."""
    lines = [one for one in platform.record() if one.job_id in job_ids]
    edges = sorted(
        # What ends and what starts at one moment did not run at once.
        (one.monotonic, 1 if one.event == "start" else -1)
        for one in lines
    )
    now = most = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


def test_a_quota_that_may_not_borrow_is_never_exceeded_and_wastes_no_time(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = platform_with_keys(engine, new_platform, capacity=8)
    limits = {"runningJobs": 2, "mayBorrow": False}
    with tenant(platform, "capped", **limits) as capped, tenant(platform, "free") as other:
        jobs = set(submit_many(capped, 100, name="capped"))
        others = set(submit_many(other, 100, name="free"))
        until(lambda: set(begun(platform)) >= jobs | others, 60, what="all to have begun")
        for job_id in jobs:
            until(lambda one=job_id: ended_of(platform, one), 30, what="all to end")  # type: ignore[misc]
    lines = [one for one in platform.record() if one.job_id in jobs and one.event == "start"]
    took = max(one.monotonic for one in lines) - min(one.monotonic for one in lines)
    assert most_at_once(platform, jobs) == 2
    # Two at once of 20 ms each; a freed slot that waited for the next look would take 50 s.
    assert took <= 25, f"{took:.1f} s for 100 jobs"


def test_a_tenant_that_has_its_all_is_served_in_the_order_of_submission(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = platform_with_keys(engine, new_platform, capacity=8)
    with tenant(platform, "capped", runningJobs=2, mayBorrow=False) as capped:
        # One after the other while two run: what is new must not pass what was held before it.
        jobs = [
            one for number in range(120) for one in submit_many(capped, 1, name=f"capped-{number}")
        ]
        until(lambda: set(begun(platform)) >= set(jobs), 60, what="all to have begun")
    assert most_at_once(platform, set(jobs)) == 2
    order = [one for one in begun(platform) if one in set(jobs)]
    # Of two that were claimed together either may be noted first.
    assert all(abs(place - jobs.index(one)) <= 2 for place, one in enumerate(order)), order


def ended_of(platform: Platform, job_id: int) -> bool:
    """Whether the job's handler has ended."""
    return any(one.event == "returned" for one in platform.record(job_id))


def test_a_quota_borrows_what_others_leave(engine: Engine, new_platform: NewPlatform) -> None:
    platform = platform_with_keys(engine, new_platform, capacity=4)
    with tenant(platform, "borrower", runningJobs=1) as borrower:
        jobs = set(submit_many(borrower, 60, name="alone"))
        until(lambda: set(begun(platform)) >= jobs, 60, what="all to have begun")
        assert most_at_once(platform, jobs) > 2
