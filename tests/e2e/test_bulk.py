"""Bulk operations as they are deployed: the dispatcher that carries one out is killed midway."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx

from tests.integration.app.rig import change, fill, new_jobs, opened, rows_of, value_of
from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform
from tests.support.receiver import Receiver
from tests.support.wait import until, until_async

WAITING, RUNNING_JOBS, CALLED_BACK = 5200, 4, 40


def holder(platform: Platform) -> int:
    """Return the number, from 1, of the dispatcher that has the lock."""

    def found() -> int | None:
        for number, url in enumerate(platform.dispatcher_urls, 1):
            try:
                text = httpx.get(f"{url}/metrics", timeout=5, trust_env=False).text
            except httpx.TransportError:
                continue
            if "oncue_dispatch_lock_held 1.0" in text:
                return number
        return None

    return until(found, 30, what="a dispatcher to hold the lock")


def ask(url: str) -> httpx.Response:
    """Ask a dispatcher to cancel what is named bulk."""
    body = {"action": "cancel", "filter": {"namePrefix": "bulk"}, "ratePerSecond": 1000}
    return httpx.post(f"{url}/openapi/bulk", json=body, timeout=30, trust_env=False)


async def test_over_5000_jobs_are_cancelled_once_each_though_their_dispatcher_is_killed(
    engine: Engine, new_platform: NewPlatform, receiver: Receiver
) -> None:
    platform = new_platform(engine, dispatchers=2).start()
    running = [platform.submit("record", {"ms": 600_000}) for _ in range(RUNNING_JOBS)]
    until(lambda: len(platform.record()) == RUNNING_JOBS, 30, what="the jobs to run")
    async with opened(engine) as database:
        (job,) = await new_jobs(database, 1, job_handler="absent")
        await fill(database, WAITING, status=0, queue_id=job.queue_id, priority=5, handler="absent")
        await change(
            database,
            "UPDATE job_info SET finished_at = NULL, job_name = 'bulk', callback_url = "
            f"CASE WHEN id % {WAITING // CALLED_BACK} = 0 THEN '{receiver.url()}' END "
            "WHERE job_handler = 'absent'",
        )
        await change(database, "UPDATE job_info SET job_name = 'bulk' WHERE status = 1")
        other = platform.submit("record", {"ms": 0}, delayMs=3_600_000)

        first = holder(platform)
        second = platform.dispatcher_urls[2 - first]
        asked = ask(second)
        assert asked.status_code == 202, asked.text
        path = asked.headers["location"]
        assert asked.json()["matched"] == WAITING + RUNNING_JOBS

        def told() -> dict[str, Any]:
            answer = httpx.get(f"{second}{path}", timeout=30, trust_env=False)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        until(lambda: told()["changed"] >= 200, 60, what="some jobs to be cancelled")
        platform.services[f"dispatcher-{first}"].kill()
        midway = told()
        assert midway["status"] == "RUNNING", midway
        ended = until(
            lambda: (now := told())["status"] == "SUCCEEDED" and now,
            200,
            what="another dispatcher to go on to the end",
        )
        assert (ended["changed"], ended["refused"]) == (WAITING + RUNNING_JOBS, {})
        assert ended["examined"] == ended["changed"]

        rows = await rows_of(database, "SELECT id, status, revision FROM job_info")
        own = [row for row in rows if row["id"] != other]
        # One turn each: a second one would have raised the revision again.
        assert Counter((row["status"], row["revision"]) for row in own) == {
            (5, 1): WAITING + RUNNING_JOBS
        }
        owed = await rows_of(database, "SELECT job_id FROM callback_delivery")
        wanted = "SELECT COUNT(*) FROM job_info WHERE callback_url IS NOT NULL"
        assert len({row["job_id"] for row in owed}) == len(owed) == await value_of(database, wanted)

        async def stopped() -> bool:
            return int(await value_of(database, "SELECT COUNT(*) FROM stopping_execution")) == 0

        await until_async(stopped, 40, what="the runs to be stopped")
        assert [line.event for line in platform.record(running[0])][:1] == ["start"]
        (status,) = [row["status"] for row in rows if row["id"] == other]
        assert status == 0
    receiver.wait_for(len(owed), timeout=60)
    assert {one.verified(platform.webhook_secret)["type"] for one in receiver.received()} == {
        "job.cancelled"
    }
