"""Partitions: each job runs once and none is lost while dispatchers share, come, go and stop."""

from __future__ import annotations

import random
import uuid
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from app.jobs.check import partition_of
from app.lifecycle.states import ExecutionStatus
from tests.integration.app.rig import opened, rows_of
from tests.promises.test_p9_tenants import begun as begun_by
from tests.promises.test_p9_tenants import platform_with_keys, submit_many, tenant
from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform
from tests.support.wait import until, until_async

PARTITIONS = 8
LIFE = 2
SETTINGS = {
    "ONCUE_DISPATCH_PARTITIONS": str(PARTITIONS),
    "ONCUE_LOCK_SECONDS": str(LIFE),
}


def submitted(
    platform: Platform, count: int, *, partitions: int = PARTITIONS, **fields: Any
) -> list[int]:
    """Submit jobs of some milliseconds each, in any order: to each partition one at least."""
    requests = requests_in_all(count, partitions)
    with ThreadPoolExecutor(4) as pool:
        return list(
            pool.map(
                lambda number: platform.submit(
                    *("record", {"ms": 5 + number % 40}),
                    **{"maxRetry": 0, "clientRequestId": requests[number], **fields},
                ),
                range(count),
            )
        )


def requests_in_all(count: int, partitions: int) -> list[str]:
    """Draw so many ids of requests, whose jobs lie in all partitions."""
    assert count >= partitions
    drawn: list[str] = []
    for number in range(count):
        wanted = number % partitions
        while partition_of(0, one := uuid.uuid4().hex, partitions) != wanted:
            continue
        drawn.append(one)
    return drawn


def held_by(platform: Platform, number: int) -> int:
    """How many partitions a dispatcher says that it holds."""
    text = platform.http.get(f"{platform.dispatcher_urls[number - 1]}/metrics").text
    (line,) = [
        one for one in text.splitlines() if one.startswith("oncue_dispatch_partitions_held{")
    ]
    return int(float(line.split()[1]))


def shares_are(
    platform: Platform,
    expected: list[int],
    *,
    of: tuple[int, ...] = (1, 2, 3, 4),
    timeout: int = 60,
) -> None:
    """Return once these dispatchers hold so many partitions, the most first."""
    until(
        lambda: sorted((held_by(platform, one) for one in of), reverse=True) == expected,
        timeout,
        what=f"shares of {expected}",
    )


@pytest.mark.timeout(500)
async def test_each_job_runs_once_while_dispatchers_come_go_and_stand_still(
    engine: Engine, new_platform: NewPlatform
) -> None:
    dice = random.Random(8)
    platform = new_platform(engine, dispatchers=4, environment=SETTINGS).start(workers=2)
    shares_are(platform, [2, 2, 2, 2])
    # The first one is asked by this test, and stays.
    others = [platform.services[f"dispatcher-{number}"] for number in (2, 3, 4)]
    ids: list[int] = []
    ids += submitted(platform, 120)
    others[0].kill()
    ids += submitted(platform, 120)
    assert others[1].terminate() == 0
    ids += submitted(platform, 60, delayMs=dice.randrange(500, 1500))
    shares_are(platform, [4, 4], of=(1, 4))
    if engine.name == "mariadb+redis":
        # One that stands still in the middle of a write to SQLite keeps the lock of the whole file.
        others[2].freeze()
        ids += submitted(platform, 120)
        shares_are(platform, [8], of=(1,))
        others[2].thaw()
    others[0].start()
    ids += submitted(platform, 60)
    others[1].start()
    ids += submitted(platform, 120)
    shares_are(platform, [2, 2, 2, 2])

    async with opened(engine) as database:

        async def open_jobs() -> bool:
            (row,) = await rows_of(
                database, "SELECT COUNT(*) AS open FROM job_info WHERE status IN (0, 1)"
            )
            return bool(row["open"] == 0)

        await until_async(open_jobs, 120, what="every job to end")
        ended = await rows_of(database, "SELECT id, status, attempt FROM job_info ORDER BY id")
        assert [row["id"] for row in ended] == sorted(ids)
        assert {(row["status"], row["attempt"]) for row in ended} == {(2, 1)}
        starts = Counter(line.job_id for line in platform.record() if line.event == "start")
        assert starts == dict.fromkeys(ids, 1)
        parts = await rows_of(
            database,
            "SELECT q.partition_no, j.tenant_id, j.client_request_id FROM job_info AS j "
            "JOIN queue AS q ON q.id = j.queue_id",
        )
        assert {row["partition_no"] for row in parts} == set(range(PARTITIONS))
        for row in parts:
            key = (row["tenant_id"], row["client_request_id"])
            assert row["partition_no"] == partition_of(*key, PARTITIONS)


def peaks(platform: Platform) -> dict[str, int]:
    """How many runs each worker had at once at most, by what the handlers noted."""
    running: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    for line in sorted(platform.record(), key=lambda one: one.monotonic):
        running[line.worker] += 1 if line.event == "start" else -1
        peak[line.worker] = max(peak[line.worker], running[line.worker])
    return dict(peak)


@pytest.mark.timeout(300)
async def test_dispatchers_that_share_workers_use_every_slot_and_no_more(
    engine: Engine, new_platform: NewPlatform
) -> None:
    capacities = {"one": 1, "other": 1, "wide": 5}
    platform = new_platform(engine, dispatchers=4, environment=SETTINGS).start(workers=0)
    shares_are(platform, [2, 2, 2, 2])
    for name, capacity in capacities.items():
        platform.worker(name, capacity=capacity)
    platform.wait_for_workers(len(capacities))
    ids = [platform.submit("record", {"ms": 400}, maxRetry=0) for _ in range(120)]
    for job_id in ids:
        assert platform.ended(job_id, 90)["status"] == "SUCCEEDED"
    assert peaks(platform) == capacities
    starts = Counter(line.job_id for line in platform.record() if line.event == "start")
    assert starts == dict.fromkeys(ids, 1)
    async with opened(engine) as database:
        jobs = await rows_of(database, "SELECT DISTINCT attempt, returned FROM job_info")
        # What found its worker full has cost no attempt, and may be given back as often as before.
        assert jobs == [{"attempt": 1, "returned": 0}]
        (refused,) = await rows_of(
            database,
            f"SELECT COUNT(*) AS runs FROM job_log WHERE status = {int(ExecutionStatus.RETURNED)}",
        )
        assert refused["runs"] < len(ids) / 3


@pytest.mark.timeout(300)
async def test_one_partition_that_has_all_the_work_gets_every_slot(
    sqlite_engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(sqlite_engine, dispatchers=4, environment=SETTINGS).start(workers=0)
    shares_are(platform, [2, 2, 2, 2])
    platform.worker("wide", capacity=8)
    platform.wait_for_workers(1)
    requests = [f"r{number}" for number in range(600) if partition_of(0, f"r{number}", 8) == 5]
    ids = [
        platform.submit("record", {"ms": 1500}, maxRetry=0, clientRequestId=one)
        for one in requests[:24]
    ]
    for job_id in ids:
        assert platform.ended(job_id, 90)["status"] == "SUCCEEDED"
    assert peaks(platform) == {"wide": 8}


@pytest.mark.timeout(300)
async def test_jobs_of_a_partition_begin_by_priority_and_their_age(
    sqlite_engine: Engine, new_platform: NewPlatform
) -> None:
    two = {**SETTINGS, "ONCUE_DISPATCH_PARTITIONS": "2", "ONCUE_PRIORITY_AGEING_SECONDS": "0"}
    platform = new_platform(sqlite_engine, dispatchers=3, environment=two)
    platform.dispatcher(1, "--no-dispatch")
    dice = random.Random(2)
    priority: dict[int, int] = {}
    partition: dict[int, int] = {}
    for number in range(60):
        chosen = dice.randrange(10)
        request = f"p{number}"
        job_id = platform.submit("record", {"ms": 20}, priority=chosen, clientRequestId=request)
        priority[job_id], partition[job_id] = chosen, partition_of(0, request, 2)
    for number in (2, 3):
        platform.dispatcher(number)
    shares_are(platform, [1, 1], of=(2, 3))
    # Each of the two has a slot of its own.
    platform.worker(capacity=2)
    for job_id in priority:
        assert platform.ended(job_id, 60)["status"] == "SUCCEEDED"
    async with opened(sqlite_engine) as database:
        # A slot that both count on is refused by the worker, and its job is claimed once more: it
        # is the first claim that has to be in order.
        rows = await rows_of(
            database, "SELECT job_id, MIN(claimed_at) AS claimed_at FROM job_log GROUP BY job_id"
        )
    for one in (0, 1):
        # What one claim took has no order; an idle slot of the other partition may be lent.
        claims: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row in rows:
            if partition[row["job_id"]] == one:
                rank = (-priority[row["job_id"]], row["job_id"])
                claims[row["claimed_at"]].append(rank)
        in_time = [claims[moment] for moment in sorted(claims)]
        assert all(max(earlier) < min(later) for earlier, later in pairwise(in_time))


@pytest.mark.timeout(300)
async def test_tenants_get_their_shares_in_each_partition(
    sqlite_engine: Engine, new_platform: NewPlatform
) -> None:
    platform = platform_with_keys(
        sqlite_engine, new_platform, capacity=4, dispatchers=2, environment=SETTINGS
    )
    platform.dispatcher(2)
    shares_are(platform, [4, 4], of=(1, 2))
    with tenant(platform, "heavy", weight=3) as heavy, tenant(platform, "light") as light:
        for number in range(3):
            submit_many(light, 300, name=f"light-{number}", priority=9)
        heavies = set(submit_many(heavy, 300, name="heavy", priority=0))
        first = until(
            lambda: next((n for n, one in enumerate(begun_by(platform)) if one in heavies), None),
            30,
            what="the heavier one's jobs to begin",
        )
        until(lambda: len(begun_by(platform)) >= first + 120, 60, what="both to be worked on")
        both = begun_by(platform)[first : first + 120]
        share = sum(one in heavies for one in both) / len(both)
        assert 0.65 <= share <= 0.85, share


@pytest.mark.timeout(300)
async def test_jobs_of_partitions_that_a_lower_number_leaves_behind_are_run(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(engine, dispatchers=2, environment={"ONCUE_LOCK_SECONDS": str(LIFE)})
    many = {"ONCUE_DISPATCH_PARTITIONS": str(PARTITIONS)}
    platform.dispatcher(1, "--no-dispatch", environment=many)
    ids = submitted(platform, 40)
    ids.append(platform.submit("record", intervalMs=200, maxFires=3))
    platform.dispatcher(2)
    platform.worker()
    for job_id in ids:
        assert platform.ended(job_id, 60)["status"] == "SUCCEEDED"
    until(lambda: held_by(platform, 2) == PARTITIONS, what="all partitions to be held")
    assert platform.services["dispatcher-2"].terminate() == 0
    # Raised again, what is there and what comes new is run.
    platform.dispatcher(1, environment={"ONCUE_DISPATCH_PARTITIONS": "11"})
    for job_id in submitted(platform, 40, partitions=11):
        assert platform.ended(job_id, 60)["status"] == "SUCCEEDED"
    until(lambda: held_by(platform, 1) == 11, what="all partitions to be held")
    starts = Counter(line.job_id for line in platform.record() if line.event == "start")
    assert set(starts.values()) == {1}


@pytest.mark.timeout(300)
async def test_a_partition_that_another_opens_is_served_within_seconds(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(engine, dispatchers=2)
    platform.dispatcher(2)
    platform.worker()
    many = {"ONCUE_DISPATCH_PARTITIONS": str(PARTITIONS)}
    platform.dispatcher(1, "--no-dispatch", environment=many)
    platform.wait_for_workers(1)
    until(lambda: held_by(platform, 2) == 1, 30, what="the one partition to be held")
    for job_id in submitted(platform, 30):
        assert platform.ended(job_id, 20)["status"] == "SUCCEEDED"
    until(lambda: held_by(platform, 2) == PARTITIONS, what="all partitions to be held")
