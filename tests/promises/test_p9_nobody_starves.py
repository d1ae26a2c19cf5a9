"""P9 nobody starves: a worker that cannot work delays nobody's jobs."""

from __future__ import annotations

from tests.support.engines import Engine
from tests.support.ports import free_port
from tests.support.processes import NewPlatform
from tests.support.wait import until


def test_a_worker_that_beats_but_cannot_take_leases_is_dealt_nothing(
    mariadb_engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(mariadb_engine).start(workers=1)
    no_redis = {"ONCUE_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0"}
    platform.worker("worker-bad", environment=no_redis, wait=False)
    until(
        lambda: len(platform.get("/openapi/workers")["items"]) == 2,
        30,
        what="the bad worker to beat",
    )
    jobs = [platform.submit("record", {"ms": 1}) for _ in range(40)]
    ended = [platform.ended(job_id) for job_id in jobs]
    assert {job["status"] for job in ended} == {"SUCCEEDED"}
    assert {line.worker for line in platform.record()} == {"worker-1"}
    assert {len(job["executions"]) for job in ended} == {1}
