"""A job begins at its due time: never before it, and without waiting for the next look."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

from app.lifecycle.moves.claim import Claimed, claim
from app.lifecycle.token import new_token
from tests.integration.app.rig import assignments_for, insert, new_term, opened, value_of
from tests.support.engines import Engine
from tests.support.processes import NewPlatform

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
    text = platform.http.get("/metrics").text
    (count,) = re.findall(r"^oncue_start_lateness_seconds_count (\S+)$", text, re.MULTILINE)
    assert float(count) == JOBS


async def test_a_claim_that_is_early_waits_with_its_rows_or_wins_nothing(
    migrated_engine: Engine,
) -> None:
    async with opened(migrated_engine) as database:
        term = await new_term(database)
        due = int(await value_of(database, f"SELECT {database.now_ms}")) + 300
        (job_id,) = await insert(database, due_ms=due)
        waited = []

        async def claimed_by(wait: bool) -> list[Claimed]:
            assignments = await assignments_for(database, [job_id])

            async def until_due() -> None:
                waited.append(job_id)
                while await database.now() < due:
                    pass

            return await database.write(
                lambda connection: claim(
                    connection,
                    database,
                    assignments,
                    token=new_token(),
                    term=term,
                    until_due=until_due if wait else None,
                )
            )

        assert await claimed_by(wait=False) == []
        (run,) = await claimed_by(wait=True)
        assert waited == [job_id]
        assert (run.due_ms, run.trigger_ts) == (due, due)
        assert run.claimed_at >= due
