"""P4 one live run, after a crash: what an earlier send did is unknown, and is not guessed."""

from __future__ import annotations

import asyncio

from tests.integration.app.rig import change, opened
from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform
from tests.support.wait import until

ENDED_OR_TWICE_SECONDS = 60


def test_a_restarted_worker_does_not_run_what_was_sent_to_the_boot_before(
    mariadb_engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(mariadb_engine)
    dispatcher = platform.dispatcher()
    worker = platform.worker("worker-1")
    platform.wait_for_workers(1)
    job_id = _running_job(platform)
    dispatcher.kill()  # before the acceptance is noted
    worker.kill()
    worker.start(wait=False)  # on the same port, with another boot id
    dispatcher.start()
    until(
        lambda: platform.job(job_id)["status"] == "FAILED" or _starts(platform, job_id) > 1,
        ENDED_OR_TWICE_SECONDS,
        what="the run to be given up with its boot",
    )
    assert _starts(platform, job_id) == 1
    assert [one["status"] for one in platform.job(job_id)["executions"]] == ["LOST"]


def test_a_refused_repetition_of_a_crashed_dispatchers_send_starts_nothing_elsewhere(
    mariadb_engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(mariadb_engine)
    dispatcher = platform.dispatcher()
    platform.worker("worker-1")
    platform.wait_for_workers(1)
    job_id = _running_job(platform, ms=6000)
    dispatcher.kill()  # before the acceptance is noted
    # A rotation in the wrong order: the first worker refuses the new token, the second takes it.
    both = f"another,{platform.internal_token}"
    platform.dispatcher(environment={"ONCUE_INTERNAL_TOKEN": both})
    platform.worker("worker-2", environment={"ONCUE_INTERNAL_TOKEN": both})
    job = platform.ended(job_id, ENDED_OR_TWICE_SECONDS)
    assert (job["status"], _starts(platform, job_id)) == ("SUCCEEDED", 1)


def test_jobs_run_again_after_the_database_has_lost_terms(
    engine: Engine, new_platform: NewPlatform
) -> None:
    """As by a failover to a replica that was behind: workers remember a higher term."""
    platform = new_platform(engine)
    _set_term(engine, 5)
    dispatcher = platform.dispatcher()
    platform.worker("worker-1")
    platform.wait_for_workers(1)
    platform.ended(platform.submit("record", {"ms": 0}))
    dispatcher.kill()
    _set_term(engine, 3)
    dispatcher.start()
    job = platform.ended(platform.submit("record", {"ms": 0}), ENDED_OR_TWICE_SECONDS)
    assert (job["status"], _starts(platform, job["jobId"])) == ("SUCCEEDED", 1)


def _set_term(engine: Engine, term: int) -> None:
    async def set_it() -> None:
        async with opened(engine) as database:
            assert await change(database, "UPDATE dispatch_term SET term = :term", term=term) == 1

    asyncio.run(set_it())


def _running_job(platform: Platform, ms: int = 60_000) -> int:
    job_id = platform.submit("record", {"ms": ms}, maxRetry=0)
    until(lambda: _starts(platform, job_id) == 1, what="the run to start")
    return job_id


def _starts(platform: Platform, job_id: int) -> int:
    return sum(line.event == "start" for line in platform.record(job_id))
