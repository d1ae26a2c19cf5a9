"""P4 one live run, after a crash: what an earlier send did is unknown, and is not guessed."""

from __future__ import annotations

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


def _running_job(platform: Platform, ms: int = 60_000) -> int:
    job_id = platform.submit("record", {"ms": ms}, maxRetry=0)
    until(lambda: _starts(platform, job_id) == 1, what="the run to start")
    return job_id


def _starts(platform: Platform, job_id: int) -> int:
    return sum(line.event == "start" for line in platform.record(job_id))
