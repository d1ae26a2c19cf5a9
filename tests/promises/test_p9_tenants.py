"""P9: a tenant with a flood of work delays only itself."""

from __future__ import annotations

from typing import Any

import httpx

from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform
from tests.support.wait import until

RUN_MS = 20
SLOTS = 2
FLOOD = 600
ROOT_KEY = "rootkey-of-the-platform"


def platform_with_keys(engine: Engine, new_platform: NewPlatform) -> Platform:
    """Start a platform whose callers have keys."""
    platform = new_platform(engine, environment={"ONCUE_API_KEYS": f"root:{ROOT_KEY}"})
    platform.http.headers["Authorization"] = f"Bearer {ROOT_KEY}"
    platform.dispatcher()
    platform.worker(capacity=SLOTS)
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
        own = []
        for number in range(5):
            before = len(begun(platform))
            (job_id,) = submit_many(quiet, 1, name=f"quiet-{number}", priority=0)
            own.append(job_id)
            until(lambda: own[-1] in begun(platform), 30, what="the other's job to begin")
            order = begun(platform)
            overtaking = order[before : order.index(job_id)]
            # Some of the flood began while the request was on its way; then one round of slots,
            # and what was in hand on the worker.
            assert len(overtaking) <= 2 * SLOTS + 1000 // RUN_MS // 4, overtaking
        assert flood - set(begun(platform)), "the flood was over before anything was shown"


def test_with_a_weight_of_three_a_tenant_gets_three_slots_of_four(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = platform_with_keys(engine, new_platform)
    with tenant(platform, "heavy", weight=3) as heavy, tenant(platform, "light") as light:
        submit_many(light, 300, name="light", priority=9)
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
