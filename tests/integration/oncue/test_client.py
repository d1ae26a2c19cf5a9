"""The clients against a real platform."""

from __future__ import annotations

import asyncio
import threading
import uuid

import httpx
import pytest

from oncue import (
    AsyncClient,
    Client,
    Conflict,
    Invalid,
    JobFailed,
    NotFound,
    Retries,
    Unavailable,
    WaitTimeout,
)
from tests.support.ports import free_port
from tests.support.processes import Platform

pytestmark = pytest.mark.xdist_group("sdk")


def test_a_job_is_submitted_waited_for_and_looked_at(sdk_platform: Platform) -> None:
    with Client(sdk_platform.url) as client:
        job = client.submit("record", {"ms": 5}, name="a name", priority=9, labels={"team": "a"})
        assert not job.warnings
        ended = client.wait(job, timeout=30, check=True)
        assert ended.succeeded
        assert ended.result == {"attempt": 1}
        assert (ended.job_name, ended.priority, ended.params) == ("a name", 9, {"ms": 5})
        assert ended.finished_at is not None
        assert ended.created_at is not None
        assert ended.finished_at > ended.created_at
        assert client.get(job.job_id) == ended

        (execution,) = client.executions(job)
        assert execution == ended.executions[0]
        assert execution.status == "SUCCEEDED"
        assert execution.worker_id is not None
        assert execution.worker_id.startswith("worker-1#")


async def test_a_job_is_submitted_waited_for_and_looked_at_async(sdk_platform: Platform) -> None:
    async with AsyncClient(sdk_platform.url) as client:
        job = await client.submit("record", {"ms": 5})
        ended = await client.wait(job, timeout=30, check=True)
        assert ended.result == {"attempt": 1}
        assert await client.get(job) == ended
        assert [one.attempt async for one in client.executions(job)] == [1]
        assert "record" in [one.name async for one in client.handlers()]
        assert [one.name async for one in client.workers()] == ["worker-1"]
        counts = await client.counts(up_to=1)
        assert (counts.of("SUCCEEDED").count, counts.of("SUCCEEDED").at_least) == (1, True)
        assert counts.of("UNHEARD_OF").count == 0


async def test_many_may_wait_at_once(sdk_platform: Platform) -> None:
    async with AsyncClient(sdk_platform.url, retries=Retries(attempts=1)) as client:
        # Nobody waits for a free connection, however slow an answer may be.
        client._http.timeout = httpx.Timeout(30, pool=2.5)
        job = await client.submit("echo", delay=5)
        waits = [client.wait(job, timeout=30) for _ in range(120)]
        assert {ended.status for ended in await asyncio.gather(*waits)} == {"SUCCEEDED"}


def test_one_request_id_is_one_job(sdk_platform: Platform) -> None:
    request_id = uuid.uuid4().hex
    with Client(sdk_platform.url) as client:
        first = client.submit("echo", 1, request_id=request_id)
        assert client.submit("echo", 1, request_id=request_id).job_id == first.job_id
        assert client.submit("echo", 1).job_id != client.submit("echo", 1).job_id
        with pytest.raises(Conflict) as refused:
            client.submit("echo", 2, request_id=request_id)
    assert refused.value.code == "request_conflict"
    assert refused.value.problem["fields"] == ["params"]


def test_every_option_is_understood_by_the_server(sdk_platform: Platform) -> None:
    with Client(sdk_platform.url) as client:
        job = client.submit(
            "echo",
            {"a": [1.5, None, "é"]},
            name="all",
            delay=0.01,
            priority=1,
            timeout=2.5,
            max_retry=0,
            retry_interval=0.5,
            retry_backoff="exponential",
            callback_url="http://127.0.0.1:9/hook",
            labels={"a": "b"},
        )
        assert client.wait(job, timeout=30).result == {"a": [1.5, None, "é"]}


def test_refusals_are_errors_of_their_kind(sdk_platform: Platform) -> None:
    with Client(sdk_platform.url) as client:
        with pytest.raises(NotFound, match="job_not_found"):
            client.get(2**62)
        with pytest.raises(NotFound):
            client.wait(2**62)
        with pytest.raises(NotFound):
            list(client.executions(2**62))
        with pytest.raises(Invalid) as refused:
            client.submit("echo", labels={"not a name!": "x"})
    assert refused.value.problem["errors"][0]["pointer"].startswith("/labels")


def test_a_job_that_fails_is_told(sdk_platform: Platform) -> None:
    with Client(sdk_platform.url) as client:
        job = client.submit("fail", {"message": "boom"}, max_retry=0)
        ended = client.wait(job, timeout=30)
        assert (ended.status, ended.succeeded) == ("FAILED", False)
        with pytest.raises(JobFailed, match="boom"):
            client.wait(job, check=True)


def test_a_wait_that_is_too_short_tells_so_and_can_be_repeated(sdk_platform: Platform) -> None:
    with Client(sdk_platform.url) as client:
        job = client.submit("sleep", {"ms": 1}, delay=3600)
        with pytest.raises(WaitTimeout):
            client.wait(job, timeout=0.2)
        client.trigger(job)
        assert client.wait(job, timeout=30).succeeded


def test_pages_are_followed(sdk_platform: Platform) -> None:
    with Client(sdk_platform.url) as client:
        job = client.submit("fail", {"times": 2}, max_retry=2, retry_interval=0.0)
        assert client.wait(job, timeout=30).succeeded
        assert [one.attempt for one in client.executions(job, page_size=1)] == [3, 2, 1]
        names = [one.name for one in client.handlers(page_size=1)]
        assert names == [one.name for one in client.handlers()]
        assert len(names) > 3
        (worker,) = client.workers()
        assert (worker.state, worker.capacity) == ("UP", 10)
        assert client.counts().of("SUCCEEDED").count >= 1


def test_a_submission_outlives_a_restart_of_the_dispatcher(sdk_platform: Platform) -> None:
    dispatcher = sdk_platform.services["dispatcher-1"]
    patient = Retries(attempts=1000, seconds=60)  # the machine of the tests may be slow
    with Client(sdk_platform.url, retries=patient) as client:
        client.get(client.submit("echo").job_id)  # a connection is open, and will be found dead
        dispatcher.kill()
        starting = threading.Timer(0.3, dispatcher.start)
        starting.start()
        job = client.submit("echo", "still there")
        starting.join()
        sdk_platform.wait_for_workers(1)
        assert client.wait(job, timeout=30).result == "still there"


def test_nobody_at_the_address_is_unavailable() -> None:
    with (
        Client(f"http://127.0.0.1:{free_port()}", retries=Retries(attempts=2)) as client,
        pytest.raises(Unavailable, match="cannot be reached") as gone,
    ):
        client.submit("echo", request_id="mine")
    assert gone.value.request_id == "mine"
