"""P1: a 2xx from the door means that the job is in the database and will end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx

from app.lifecycle.states import JobStatus
from tests.integration.app.rig import body_of, opened, rows_of
from tests.support.engines import Engine
from tests.support.processes import NewPlatform
from tests.support.wait import until, until_async

ENDED = "SUCCEEDED"


async def _stored(engine: Engine) -> set[int]:
    async with opened(engine) as database:
        return {row["id"] for row in await rows_of(database, "SELECT id FROM job_info")}


class _Callers:
    """Clients that submit as fast as they are answered, until told to stop."""

    def __init__(self, urls: list[str], count: int) -> None:
        self.accepted: list[int] = []
        self._urls = urls
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(count)
        self._running = [self._pool.submit(self._submit, number) for number in range(count)]

    def stop(self) -> list[int]:
        self._stop.set()
        for one in self._running:
            one.result()
        self._pool.shutdown()
        return self.accepted

    def _submit(self, number: int) -> None:
        with httpx.Client(timeout=5, trust_env=False) as client:
            while not self._stop.is_set():
                url = f"{self._urls[number % len(self._urls)]}/openapi/jobs"
                try:
                    answer = client.post(url, json=body_of(jobHandler="echo", params=number))
                except httpx.TransportError:
                    self._stop.wait(0.02)
                    continue
                if answer.status_code == 202:
                    self.accepted.append(answer.json()["jobId"])
                self._stop.wait(0.05)


async def test_a_job_accepted_right_before_a_kill_is_stored_and_ends_after_a_restart(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(engine)
    dispatcher = platform.dispatcher()
    job_id = platform.submit("echo", {"n": 1})
    dispatcher.kill()
    engine.redis.flushall()
    assert await _stored(engine) == {job_id}
    dispatcher.start(wait=False)
    platform.worker()
    dispatcher.wait_ready()
    job = platform.ended(job_id)
    assert (job["status"], job["result"]) == (ENDED, {"n": 1})


async def test_no_accepted_job_is_lost_when_both_dispatchers_are_killed_and_redis_is_flushed(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(engine, dispatchers=2)
    platform.worker(capacity=32, wait=False)
    one = platform.dispatcher(1, wait=False)
    other = platform.dispatcher(2)
    one.wait_ready()
    callers = _Callers(platform.dispatcher_urls, 16)
    for kill, least in (([one], 100), ([one, other], 200)):
        until(lambda least=least: len(callers.accepted) >= least, 30)  # type: ignore[misc]
        for dispatcher in kill:
            dispatcher.kill()
        engine.redis.flushall()
        for dispatcher in kill:
            dispatcher.start(wait=False)
        for dispatcher in kill:
            dispatcher.wait_ready()
    until(lambda: len(callers.accepted) >= 300, 30)
    accepted = callers.stop()

    assert set(accepted) <= await _stored(engine)
    assert len(set(accepted)) == len(accepted)
    async with opened(engine) as database:

        async def counts() -> set[tuple[int, int]]:
            rows = await rows_of(
                database,
                "SELECT j.id, j.status, COUNT(l.id) AS runs FROM job_info j "
                "LEFT JOIN job_log l ON l.job_id = j.id GROUP BY j.id, j.status",
            )
            return {(row["status"], row["runs"]) for row in rows}

        async def all_ended() -> bool:
            return {status for status, _ in await counts()} == {int(JobStatus.SUCCEEDED)}

        await until_async(all_ended, 60, what="all accepted jobs to end")
        assert await counts() == {(int(JobStatus.SUCCEEDED), 1)}
