"""A handler that never lets go of the interpreter costs its worker neither lease nor life."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.scene import scene
from tests.support.wait import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
BURN_SECONDS = 60


def test_60_seconds_of_pure_python_neither_lose_the_lease_nor_look_like_death(
    tmp_path: Path,
) -> None:
    with scene(tmp_path) as one:
        job_id = one.submit("fault_burn", BURN_SECONDS * 1000, timeoutMs=BURN_SECONDS * 5_000)
        first = one.started(job_id)
        states: set[str] = set()
        leases: list[int] = []

        def burnt() -> bool:
            for item in one.platform.get("/openapi/workers")["items"]:
                if item["workerId"].startswith(first.worker):
                    states.add(item["state"])
            key = f"{one.cluster.engine.redis_prefix}:run:{job_id}:{first.trigger_ts}"
            leases.append(int(one.cluster.servers.redis.command(f"PTTL {key}")[1:]))
            return time.monotonic() > first.at + BURN_SECONDS - 1

        until(burnt, BURN_SECONDS + 20, what="the handler to burn")
        print(f"while it burnt: states {states}, shortest lease {min(leases)} ms")
        assert states == {"UP"}
        assert min(leases) > 0
        assert one.settled(120).violations == []
        assert len(one.cluster.starts(job_id)) == 1
