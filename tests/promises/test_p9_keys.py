"""P9: a key of the caller's choosing bounds what runs, over dispatchers and their deaths."""

from __future__ import annotations

from itertools import pairwise

from tests.promises.test_p9_tenants import begun, ended_of, most_at_once, submit_many
from tests.support.engines import Engine
from tests.support.processes import NewPlatform
from tests.support.wait import until

LIMIT = 3
RATE = 20.0


def test_never_more_run_at_once_than_the_key_allows_though_dispatchers_are_killed(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(engine, dispatchers=2)
    platform.start(workers=0)
    platform.worker("worker-1", capacity=6)
    platform.worker("worker-2", capacity=6)
    platform.wait_for_workers(2)
    key = {"concurrencyKey": "customer-7", "concurrencyLimit": LIMIT}
    keyed = set(submit_many(platform.http, 90, name="keyed", **key))
    until(lambda: len(begun(platform)) >= 10, 60, what="some to begin")
    platform.services["dispatcher-2"].kill()
    plain = set(submit_many(platform.http, 20, name="plain"))
    until(lambda: len(begun(platform)) >= 50, 60, what="some more to begin")
    platform.services["dispatcher-2"].start()
    until(
        lambda: all(ended_of(platform, one) for one in keyed | plain), 90, what="all to have ended"
    )
    for job_id in keyed | plain:
        assert platform.ended(job_id)["status"] == "SUCCEEDED"
    assert most_at_once(platform, keyed) == LIMIT
    assert sorted(begun(platform)) == sorted(keyed | plain), "one began twice"


def test_runs_of_a_rate_key_begin_so_far_apart(engine: Engine, new_platform: NewPlatform) -> None:
    platform = new_platform(engine)
    platform.start()
    key = {"rateKey": "mail", "ratePerSecond": RATE}
    jobs = submit_many(platform.http, 40, name="mail", **key)
    until(lambda: set(begun(platform)) >= set(jobs), 60, what="all to begin")
    starts = [one for one in platform.record() if one.event == "start"]
    assert len(starts) == len(jobs)
    # None begins before the time that the key gave it.
    assert all(one.wall * 1000 >= one.trigger_ts - 20 for one in starts)
    # What found the key free began as it was submitted; it is mostly one.
    at_once = min(one.trigger_ts for one in starts)
    given = sorted(one.trigger_ts for one in starts if one.trigger_ts > at_once)
    assert len(given) >= len(jobs) / 2, given
    assert all(later - one >= 1000 / RATE - 1 for one, later in pairwise(given)), given
    times = sorted(one.monotonic for one in starts)
    took = times[-1] - times[0]
    # A run that is a second late, or less, still counts as having begun at its time.
    assert took >= (len(jobs) - 1) / RATE - 1, took
    assert took <= len(jobs) / RATE + 10, took
