"""A job begins at its due time: never before it, and without waiting for the next look."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Any

from app.lifecycle.moves.claim import Claimed, claim
from app.lifecycle.token import new_token
from app.plumbing.times import rfc3339
from tests.integration.app.rig import (
    assignments_for,
    change,
    insert,
    new_term,
    opened,
    value_of,
)
from tests.support.engines import Engine
from tests.support.processes import NewPlatform
from tests.support.wait import until

JOBS = 40


def test_jobs_of_random_moments_begin_at_their_times(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(engine)
    platform.dispatcher()
    platform.worker()
    platform.wait_for_workers(1)
    base = round(time.time() * 1000) + 500
    due: dict[int, int] = {}
    for number in range(JOBS):
        at = base + (number * 7919) % 3000
        when = datetime.fromtimestamp(at / 1000, UTC).isoformat(timespec="milliseconds")
        due[platform.submit("record", runAt=when, priority=number % 10)] = at
    for job_id in due:
        job = platform.ended(job_id)
        assert (job["status"], job["attempt"]) == ("SUCCEEDED", 1)
    started = {line.job_id: line.wall for line in platform.record() if line.event == "start"}
    early = [job_id for job_id, at in due.items() if started[job_id] * 1000 < at]
    assert not early

    def all_are_measured() -> bool:
        text = platform.http.get("/metrics").text
        (count,) = re.findall(r"^oncue_start_lateness_seconds_count (\S+)$", text, re.MULTILINE)
        return float(count) == JOBS

    until(all_are_measured, what="the lateness of all")


def test_fires_of_random_moments_begin_at_their_times(
    engine: Engine, new_platform: NewPlatform
) -> None:
    """They are jobs before, and yet none begins before its nominal time."""
    platform = new_platform(engine)
    platform.dispatcher()
    platform.worker()
    platform.wait_for_workers(1)
    base = round(time.time() * 1000) + 500
    schedules = [
        platform.submit(
            "record",
            intervalMs=700 + number,
            startAt=rfc3339(base + (number * 7919) % 1000),
            overlapPolicy=("allow", "skip", "queue", "replace")[number % 4],
            maxFires=4,
        )
        for number in range(16)
    ]

    def all_ended() -> dict[int, dict[str, Any]] | None:
        over = all(platform.job(one)["status"] == "SUCCEEDED" for one in schedules)
        # After that, so that none of their fires is missing.
        made = {
            child["jobId"]: child
            for schedule in schedules
            for child in platform.get(f"/openapi/jobs/{schedule}/children")["items"]
        }
        ended = all(one["finishedAt"] for one in made.values())
        return made if made and ended and over else None

    made = until(all_ended, 60, what="the fires")
    started = {line.job_id: line.wall for line in platform.record() if line.event == "start"}
    early = [
        child["jobId"]
        for child in made.values()
        if child["jobId"] in started
        and started[child["jobId"]] < datetime.fromisoformat(child["nominalTime"]).timestamp()
    ]
    assert not early
    assert started.keys() <= made.keys()


def test_the_loop_decides_fires_before_their_time(
    engine: Engine, new_platform: NewPlatform
) -> None:
    """However often the machine stalls, sometimes it is there in time."""
    platform = new_platform(engine)
    platform.dispatcher()
    schedule = platform.submit("record", intervalMs=500, overlapPolicy="allow")

    def is_ahead() -> bool:
        made = platform.get(f"/openapi/jobs/{schedule}/children")["items"]
        return any(one["createdAt"] < one["nominalTime"] for one in made)

    until(is_ahead, 60, what="a fire that was decided before its time")


async def test_a_claim_ahead_of_time_is_asked_for(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        term = await new_term(database)
        due = int(await value_of(database, f"SELECT {database.now_ms}")) + 60_000
        job_id, expiring = await insert(database, 2, due_ms=due)
        await change(
            database, "UPDATE job_info SET expires_at = :due WHERE id = :id", due=due, id=expiring
        )

        async def claimed(ahead_ms: int) -> list[Claimed]:
            assignments = await assignments_for(database, [job_id, expiring])
            return await database.write(
                lambda connection: claim(
                    connection,
                    database,
                    assignments,
                    token=new_token(),
                    term=term,
                    ahead_ms=ahead_ms,
                )
            )

        assert await claimed(0) == []
        assert await claimed(30_000) == []
        (run,) = await claimed(60_000)
        assert (run.job_id, run.due_ms, run.trigger_ts) == (job_id, due, due)
        assert run.claimed_at < due
