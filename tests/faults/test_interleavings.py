"""Messages that are lost, late, or overtake each other, between real processes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import redis

from oncue.protocol import LEASE_SECONDS
from tests.faults.cluster import Cluster
from tests.faults.links import Mode
from tests.faults.scene import Scene, scene
from tests.support.wait import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
CANCELLED = 5
SUCCEEDED = 2


def test_a_worker_killed_between_its_handlers_end_and_its_report_repeats_nothing(
    tmp_path: Path,
) -> None:
    with scene(tmp_path) as one:
        job_ids = [one.submit("fault_async", 1_000) for _ in range(10)]
        starts = [one.started(job_id) for job_id in job_ids]
        victim = starts[0].worker
        mend = one.cluster.cut(f"{victim}>dispatcher-1")
        own = [note.job_id for note in starts if note.worker == victim]
        for job_id in own:
            one.noted(job_id, "returned")
        until(lambda: _stored(one.cluster) >= len(own), 10, what="the outcomes to be stored")
        one.cluster.kill(victim)
        mend()
        assert one.settled().violations == []
        for job_id in job_ids:
            assert (one.row(job_id)["status"], len(one.cluster.starts(job_id))) == (SUCCEEDED, 1)


def test_a_lost_reply_and_a_flushed_redis_do_not_start_a_run_twice(tmp_path: Path) -> None:
    with scene(tmp_path, workers=1) as one:
        with one.cluster.broken("dispatchers>worker-1", Mode.DEAF):
            job_id = one.submit("fault_async", 6_000)
            one.started(job_id)
            one.cluster.flush()
            # The one that is under way fails, and the repeat as well: it was sent after the flush.
            failed = _failed_sends(one)
            until(lambda: _failed_sends(one) > failed + 1, 60, what="the send to be repeated")
        assert one.settled().violations == []
        row = one.row(job_id)
        assert (row["status"], row["attempt"], len(one.cluster.starts(job_id))) == (2, 1, 1)


def test_a_cancel_that_overtakes_its_run_lets_nothing_start(tmp_path: Path) -> None:
    with scene(tmp_path, workers=1, plants={"dispatcher-1": "hold_sends"}) as one:
        one.cluster.trap("dispatcher-1").touch()
        job_id = one.submit("fault_async", 2_000)
        until(lambda: one.row(job_id)["status"] == 1, what="the job to be claimed")
        assert one.cancel(job_id)["status"] == "CANCELLED"
        one.cluster.trap("dispatcher-1").unlink()
        after = one.submit("fault_async", 0)
        one.started(after)
        assert one.settled().violations == []
        assert (one.row(job_id)["status"], one.cluster.starts(job_id)) == (CANCELLED, [])


def test_the_report_of_a_run_that_finished_after_its_cancel_changes_nothing(
    tmp_path: Path,
) -> None:
    with scene(tmp_path, workers=1) as one:
        job_id = one.submit("fault_async", 1_500)
        one.started(job_id)
        mend = one.cluster.cut("worker-1>dispatcher-1", "dispatchers>worker-1")
        one.noted(job_id, "returned")
        assert one.cancel(job_id)["status"] == "CANCELLED"
        mend()
        report = one.settled()
        assert report.violations == []
        until(
            lambda: one.cluster.rows(
                f"SELECT id FROM job_log WHERE job_id = {job_id} AND stale_status = 'SUCCEEDED'"
            ),
            20,
            what="the late report to be recorded as stale",
        )
        assert one.row(job_id)["status"] == CANCELLED
        told = {hook.headers["webhook-id"] for hook in one.cluster.receiver.received()}
        assert len(told) == 1


def test_the_next_attempt_waits_for_a_thread_that_goes_on_after_its_timeout(
    tmp_path: Path,
) -> None:
    with scene(tmp_path) as one:
        job_id = one.submit(
            "fault_stubborn", 3_000, timeoutMs=500, maxRetry=1, retryIntervalSeconds=0
        )
        first = one.noted(job_id, "returned")
        assert one.started(job_id, 2).at > first.at
        assert one.settled().violations == []


def test_a_beat_whose_commit_failed_keeps_no_run_alive(tmp_path: Path) -> None:
    """Dispatchers answer, but cannot commit: to a worker without Redis that is silence."""
    with scene(tmp_path, dispatchers=2) as one:
        job_id = one.submit("fault_async", 40_000)
        first = one.started(job_id)
        mend = one.cluster.cut(
            "dispatcher-1>mariadb", "dispatcher-2>mariadb", f"{first.worker}>redis"
        )
        cut_at = time.monotonic()
        stopped = one.noted(job_id, "stopped", 30)
        print(f"without a committed beat the run was stopped after {stopped.at - cut_at:.1f} s")
        assert stopped.at - cut_at < LEASE_SECONDS
        mend()
        assert one.started(job_id, 2).at > stopped.at
        assert one.settled(90).violations == []


def _stored(cluster: Cluster) -> int:
    """Count the run keys that hold an outcome."""
    with redis.Redis(port=cluster.servers.redis.port, decode_responses=True) as client:
        keys = list(client.scan_iter(match=f"{cluster.engine.redis_prefix}:run:*"))
        return sum('"status"' in str(client.get(key)) for key in keys)


def _failed_sends(one: Scene) -> int:
    """Count the sends that had no answer."""
    names = [name for name in one.platform.services if name.startswith("dispatcher")]
    logs = (one.platform.services[name].child.log.read_text() for name in names)
    return sum(told.count("send_unanswered") for told in logs)
