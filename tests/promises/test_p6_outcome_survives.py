"""P6: a run that finished is not run again because its report, or its worker, was lost."""

from __future__ import annotations

import redis

from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform
from tests.support.wait import until

RECOVERED_SECONDS = 90
"""The quiet time of a new holder, the proof of death, and room for a slow machine."""


def test_what_finished_while_no_dispatcher_was_there_is_settled_and_not_run_again(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(engine).start(workers=2)
    job_ids = [platform.submit("record", {"ms": 4000}) for _ in range(6)]
    until(lambda: _noted(platform, "start") == set(job_ids), what="all runs to start")
    by_worker = {line.job_id: line.worker for line in platform.record()}
    victim = by_worker[job_ids[0]]

    # Nobody hears a report from here on.
    platform.services["dispatcher-1"].kill()
    until(lambda: _noted(platform, "returned") == set(job_ids), what="all runs to finish")
    until(lambda: _stored(engine) == len(job_ids), what="all outcomes to be stored")
    # One worker dies with what it has not told; the other ones tell it later.
    platform.services[victim].kill()
    platform.services["dispatcher-1"].start()

    for job_id in job_ids:
        job = platform.ended(job_id, RECOVERED_SECONDS)
        assert job["status"] == "SUCCEEDED"
        (run,) = job["executions"]
        assert run["status"] == "SUCCEEDED"
        assert run["workerId"].startswith(by_worker[job_id])
        if by_worker[job_id] == victim:
            assert run["reason"].endswith("its outcome was found under the run key")
    starts = [line.job_id for line in platform.record() if line.event == "start"]
    assert sorted(starts) == sorted(job_ids)


def _noted(platform: Platform, event: str) -> set[int]:
    return {line.job_id for line in platform.record() if line.event == event}


def _stored(engine: Engine) -> int:
    """Count the run keys that hold an outcome."""
    with redis.Redis.from_url(engine.redis_url, decode_responses=True) as client:
        keys = list(client.scan_iter(match=f"{engine.redis_prefix}:run:*"))
        return sum('"status"' in str(client.get(key)) for key in keys)
