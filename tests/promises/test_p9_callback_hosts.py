"""P9 and P7 for callbacks: hosts that are ill delay only themselves, and nothing owed is lost."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

import httpx

from tests.support.engines import Engine
from tests.support.hosts import Host, Manner, open_hosts
from tests.support.processes import NewPlatform, Platform
from tests.support.wait import until_async

MANNERS: Sequence[Manner] = ("silent", "error", "busy", "reset", *("healthy",) * 4)
QUICK = {
    "ONCUE_CALLBACK_SCHEDULE_SECONDS": ",".join(["0"] + ["1"] * 25 + ["10"] * 24),
    "ONCUE_CALLBACK_TIMEOUT_SECONDS": "3",
    "ONCUE_CALLBACK_BREAKER_SECONDS": "1",
}


async def submitted(platform: Platform, hosts: Sequence[Host], jobs: int) -> dict[int, Host]:
    """Submit jobs whose callbacks go to the hosts in turn; return the host of each."""
    turn = [hosts[number % len(hosts)] for number in range(jobs)]
    body = {
        "jobs": [
            {
                "clientRequestId": secrets.token_hex(8),
                "jobName": "a job",
                "jobHandler": "echo",
                "retryIntervalSeconds": 1,
                "callbackUrl": host.url,
            }
            for host in turn
        ]
    }
    async with httpx.AsyncClient(base_url=platform.url, timeout=60) as client:
        answer = await client.post("/openapi/jobs/batch", json=body)
    assert answer.status_code == 200, answer.text
    items = answer.json()["items"]
    return {item["jobId"]: host for item, host in zip(items, turn, strict=True)}


def missing(owed: dict[int, Host], *, healthy: bool = False) -> int:
    """How many jobs have no accepted callback."""
    delivered = {host: host.delivered() for host in set(owed.values())}
    return sum(
        job_id not in delivered[host]
        for job_id, host in owed.items()
        if host.manner == "healthy" or not healthy
    )


def check_ids(hosts: Sequence[Host]) -> None:
    """Each job has one webhook-id in all its tries, and each request was verified."""
    assert [reason for host in hosts for reason in host.refused] == []
    assert all(len(ids) == 1 for host in hosts for ids in host.ids().values())


async def test_ill_hosts_delay_only_themselves_and_all_arrives_once_they_heal(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(engine, environment=QUICK).start()
    async with open_hosts(MANNERS, platform.webhook_secret) as hosts:
        owed = await submitted(platform, hosts, 240)
        await until_async(lambda: not missing(owed, healthy=True), 30, what="the healthy hosts")
        ill = [host for host in hosts if host.manner != "healthy"]
        assert not any(host.delivered() for host in ill)
        await until_async(lambda: all(host.arrivals for host in ill), 30, what="tries at the ill")
        for host in hosts:
            host.healed.set()
        await until_async(lambda: not missing(owed), 60, what="all that is owed")
        check_ids(hosts)


async def test_no_callback_is_missing_though_workers_are_killed_while_they_deliver(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(engine, environment=QUICK).start(workers=2)
    manners: Sequence[Manner] = ("silent", "error", *("healthy",) * 4)
    async with open_hosts(manners, platform.webhook_secret) as hosts:
        owed = await submitted(platform, hosts, 150)
        await until_async(lambda: all(host.arrivals for host in hosts), 30, what="deliveries")
        for name in ("worker-1", "worker-2"):
            await asyncio.to_thread(platform.services[name].kill)
            await asyncio.to_thread(platform.worker, name)
        for host in hosts:
            host.healed.set()
        await until_async(lambda: not missing(owed), 100, what="all that is owed")
        check_ids(hosts)
