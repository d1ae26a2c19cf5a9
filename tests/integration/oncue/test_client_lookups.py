"""Lists, verbs, batches and look-ups of the clients against a real platform."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, timedelta

import pytest

from oncue import (
    AsyncClient,
    Client,
    Conflict,
    Invalid,
    Job,
    NewJob,
    NotFound,
)
from oncue._talk import MAX_BATCH_JOBS
from tests.support.processes import Platform
from tests.support.receiver import Receiver
from tests.support.wait import until
from tests.support.watched import AsyncWatched, Watched

pytestmark = pytest.mark.xdist_group("sdk")

LATER = timedelta(hours=1)


@pytest.fixture
def label() -> tuple[str, str]:
    """A label that no other test's jobs have."""
    return "test", uuid.uuid4().hex


async def test_lists_are_read_page_by_page_as_they_are_asked_for(
    sdk_platform: Platform, label: tuple[str, str]
) -> None:
    watched, async_watched = Watched(), AsyncWatched()
    with Client(sdk_platform.url, transport=watched) as client:
        made = [client.submit("echo", n, delay=LATER, labels=dict([label])) for n in range(3)]
        newest_first = [job.job_id for job in made][::-1]
        watched.requests.clear()
        jobs = client.list(label=label, page_size=2)
        assert not watched.requests
        assert [next(jobs).job_id, next(jobs).job_id] == newest_first[:2]
        assert len(watched.requests) == 1
        assert [job.job_id for job in jobs] == newest_first[2:]
        assert len(watched.requests) == 2
        assert {request.url.params["limit"] for request in watched.requests} == {"2"}
        listed = next(client.list(label=label))
        assert (listed.params, listed.executions, listed.omitted) == (2, (), ())
    async with AsyncClient(sdk_platform.url, transport=async_watched) as async_client:
        found = [job.job_id async for job in async_client.list(label=label, page_size=2)]
        assert found == newest_first
    assert len(async_watched.requests) == 2


def test_every_filter_of_a_list_is_understood(
    sdk_platform: Platform, label: tuple[str, str]
) -> None:
    name = f"named {label[1]}"
    with Client(sdk_platform.url) as client:
        job = client.submit("record", "x" * 2000, name=name, delay=LATER, labels=dict([label]))
        assert job.created_at is not None
        before, after = job.created_at - LATER, job.created_at + LATER
        for found in (
            client.list(label=label),
            client.list(name_prefix=name),
            client.list(request_id=job.client_request_id),
            client.list(label=label, created_from=before, created_to=after),
        ):
            assert [(one.job_id, one.omitted) for one in found] == [(job.job_id, ("params",))]
        assert list(client.list(label=label, created_to=before)) == []
        assert job.job_id in {one.job_id for one in client.list(status="WAITING")}
        assert job.job_id in {one.job_id for one in client.list(handler="record")}
        with pytest.raises(Invalid, match="at most one of"):
            next(client.list(label=label, status="WAITING"))


def test_a_job_is_found_by_its_request_id(sdk_platform: Platform) -> None:
    with Client(sdk_platform.url) as client:
        job = client.wait(client.submit("echo", "x" * 2000), timeout=30)
        assert job.client_request_id is not None
        assert client.find(job.client_request_id) == job  # whole, with its executions
        assert client.find(uuid.uuid4().hex) is None


async def test_a_job_is_found_by_its_request_id_async(sdk_platform: Platform) -> None:
    async with AsyncClient(sdk_platform.url) as client:
        job = await client.submit("echo", 1, delay=LATER)
        assert job.client_request_id is not None
        assert await client.find(job.client_request_id) == job
        assert await client.find("nobody's") is None


def test_verbs_change_the_job_and_return_it(sdk_platform: Platform) -> None:
    with Client(sdk_platform.url) as client:
        job = client.submit("echo", delay=LATER)
        assert client.pause(job).status == "PAUSED"
        assert client.resume(job.job_id).status == "WAITING"
        assert client.cancel(job).status == "CANCELLED"
        assert client.cancel(job).status == "CANCELLED"
        with pytest.raises(Conflict) as refused:
            client.pause(job)
        assert refused.value.problem["jobStatus"] == "CANCELLED"
        assert refused.value.problem["possible"] == ["retry"]
        assert client.retry(job).status != "CANCELLED"
        assert client.wait(job, timeout=30).succeeded


async def test_verbs_change_the_job_and_return_it_async(sdk_platform: Platform) -> None:
    async with AsyncClient(sdk_platform.url) as client:
        job = await client.submit("echo", delay=LATER)
        assert (await client.pause(job)).status == "PAUSED"
        assert (await client.resume(job)).status == "WAITING"
        assert (await client.cancel(job)).status == "CANCELLED"
        await client.retry(job)
        assert (await client.wait(job, timeout=30)).succeeded


def test_a_job_of_later_is_triggered(sdk_platform: Platform) -> None:
    with Client(sdk_platform.url) as client:
        job = client.submit("echo", 1, delay=LATER)
        with pytest.raises(Conflict, match="precondition_failed"):
            client.trigger(job, revision=7)
        client.trigger(job, params=None, revision=job.revision)
        ended = client.wait(job, timeout=30)
        assert (ended.params, ended.result) == (None, None)
        with pytest.raises(Conflict, match="submit a new job"):
            client.trigger(job)
        again = client.submit("echo", 1, delay=LATER)
        client.trigger(again.job_id)
        assert client.wait(again, timeout=30).result == 1
        with pytest.raises(TypeError, match="no option 'param'"):
            client.trigger(job, param=1)  # type: ignore[call-arg]


def test_a_schedule_is_triggered_once_for_each_request_id(sdk_platform: Platform) -> None:
    request_id = uuid.uuid4().hex
    with Client(sdk_platform.url) as client:
        schedule = client.submit("echo", 1, interval=LATER)
        one = client.trigger(schedule, params=2, request_id=request_id)
        assert client.trigger(schedule, params=2, request_id=request_id).job_id == one.job_id
        assert one.client_request_id == request_id
        assert client.wait(one, timeout=30).result == 2
        with pytest.raises(Conflict, match="request_conflict"):
            client.trigger(schedule, params=3, request_id=request_id)
        with pytest.raises(Invalid):
            client.trigger(client.submit("echo", 1, delay=LATER), request_id=request_id)
        client.cancel(schedule)


async def test_a_job_of_later_is_triggered_async(sdk_platform: Platform) -> None:
    async with AsyncClient(sdk_platform.url) as client:
        job = await client.submit("echo", 1, delay=LATER)
        await client.trigger(job, params={"other": "params"})
        assert (await client.wait(job, timeout=30)).result == {"other": "params"}


def test_a_job_is_revised_if_it_is_as_it_was_seen(sdk_platform: Platform) -> None:
    when = datetime(2040, 1, 31, 9, tzinfo=UTC)
    with Client(sdk_platform.url) as client:
        job = client.submit("echo", 1, delay=LATER, timeout=5, callback_url="http://127.0.0.1:9/")
        changed = client.revise(
            job,
            params={"new": "params"},
            run_at=when,
            priority=9,
            timeout=None,
            max_retry=1,
            retry_interval=timedelta(seconds=1.5),
            retry_backoff="exponential",
            callback_url=None,
        )
        assert (changed.revision, changed.params, changed.priority) == (1, {"new": "params"}, 9)
        assert (changed.next_trigger_time, changed.max_retry) == (when, 1)
        with pytest.raises(Conflict, match="precondition_failed"):
            client.revise(job, priority=1)  # as it was seen, it is no more
        assert client.revise(job.job_id, revision=1, delay=0).revision == 2
        assert client.wait(job, timeout=30).result == {"new": "params"}
        with pytest.raises(Conflict, match="verb_not_possible"):
            client.revise(client.get(job), priority=1)
        with pytest.raises(TypeError, match="or its revision"):
            client.revise(job.job_id, priority=1)


async def test_a_job_is_revised_if_it_is_as_it_was_seen_async(sdk_platform: Platform) -> None:
    async with AsyncClient(sdk_platform.url) as client:
        job = await client.submit("echo", 1, delay=LATER)
        changed = await client.revise(job, delay=timedelta(0), params=[2])
        assert changed.revision == 1
        assert (await client.wait(job, timeout=30)).result == [2]


def test_keys_are_given_changed_and_taken_away(sdk_platform: Platform) -> None:
    with Client(sdk_platform.url) as client:
        job = client.submit("echo", 1, interval=3600, concurrency_key="c", concurrency_limit=2)
        assert (job.concurrency_key, job.concurrency_limit) == ("c", 2)
        changed = client.revise(
            job,
            concurrency_key=None,
            concurrency_limit=None,
            rate_key="mail",
            rate_per_second=0.5,
        )
        assert (changed.concurrency_key, changed.concurrency_limit) == (None, None)
        assert (changed.rate_key, changed.rate_per_second) == ("mail", 0.5)
        assert client.cancel(job).status == "CANCELLED"


def test_a_deadline_and_callbacks_are_changed_and_taken_away(sdk_platform: Platform) -> None:
    deadline = datetime.now(UTC) + timedelta(hours=3)
    with Client(sdk_platform.url) as client:
        job = client.submit("echo", 1, delay=3600)
        changed = client.revise(
            job,
            expires_at=deadline,
            callback_url="https://example.com/hook",
            callback_events=["failed"],
            callback_headers={"x-team": "a"},
        )
        assert changed.expires_at is not None
        assert abs(changed.expires_at - deadline) < timedelta(milliseconds=1)
        assert changed.callback_url == "https://example.com/hook"
        assert client.revise(changed, expires_at=None).expires_at is None
        assert client.cancel(job).status == "CANCELLED"


def test_a_tenant_is_limited_in_what_it_stores(sdk_platform: Platform) -> None:
    with Client(sdk_platform.url) as client:
        limited = client.change_tenant(0, limits={"stored_bytes": 10**12})
        assert limited.limits.stored_bytes == 10**12
        assert client.change_tenant(0, limits={"stored_bytes": None}).limits.stored_bytes is None


def test_a_job_is_explained(sdk_platform: Platform) -> None:
    with Client(sdk_platform.url) as client:
        job = client.submit("fail", {"message": "boom"}, max_retry=1, retry_interval=3600)
        until(lambda: client.explain(job).reasons[0].code == "retry_wait", what="the first end")
        found = client.explain(job.job_id)
        assert (found.job_id, found.status, found.more_attempts) == (job.job_id, "WAITING", False)
        assert "boom" in found.summary
        assert found.summary == found.reasons[0].message
        assert found.next_actions == ("cancel", "pause", "trigger", "change")
        (attempt,) = found.attempts
        assert attempt.error is not None
        assert attempt.error.code == "handler_error"
        assert found.reasons[0].since == attempt.finished_at
        assert attempt.story.startswith("Attempt 1 ran on worker-1 for ")
        client.trigger(job)
        client.wait(job, timeout=30)
        ended = client.explain(job)
        assert ended.reasons[0].code == "ended_failed"
        assert ended.reasons[0].details["retryDecision"] == "budget_used_up"
        with pytest.raises(NotFound):
            client.explain(2**62)


async def test_a_job_is_explained_async(sdk_platform: Platform) -> None:
    async with AsyncClient(sdk_platform.url) as client:
        job = await client.submit("nobody offers this")
        found = await client.explain(job)
        assert [reason.code for reason in found.reasons] == ["no_live_worker"]
        assert "echo" in found.reasons[0].details["offered"]


def test_callbacks_are_listed_and_delivered_again(
    sdk_platform: Platform, receiver: Receiver
) -> None:
    with Client(sdk_platform.url) as client:
        job = client.submit("echo", callback_url=receiver.url())
        client.wait(job, timeout=30)
        receiver.wait_for(1)
        until(
            lambda: [one.status for one in client.callbacks(job)] == ["DELIVERED"],
            what="the delivery to be noted",
        )
        (callback,) = client.callbacks(job)
        assert (callback.job_id, callback.event, callback.tries) == (
            job.job_id,
            "job.succeeded",
            1,
        )
        assert client.redeliver(callback).delivery_id == callback.delivery_id
        first, second = receiver.wait_for(2)
        assert first.headers["webhook-id"] == second.headers["webhook-id"] == callback.delivery_id
        with pytest.raises(NotFound, match="callback_not_found"):
            client.redeliver("no such callback")
        assert list(client.children(job)) == []
        with pytest.raises(NotFound):
            list(client.children(2**62))


async def test_callbacks_are_listed_and_delivered_again_async(
    sdk_platform: Platform, receiver: Receiver
) -> None:
    async with AsyncClient(sdk_platform.url) as client:
        job = await client.submit("echo", callback_url=receiver.url())
        await client.wait(job, timeout=30)
        (callback,) = [one async for one in client.callbacks(job)]
        assert (await client.redeliver(callback.delivery_id)).job_id == job.job_id
        assert [one async for one in client.children(job)] == []


def test_a_batch_is_answered_job_by_job(sdk_platform: Platform) -> None:
    taken = uuid.uuid4().hex
    with Client(sdk_platform.url) as client:
        client.submit("echo", 1, request_id=taken)
        jobs = [
            NewJob("echo", 1),
            NewJob("echo", 2, request_id=taken),
            NewJob("echo", labels={"not a name!": "x"}),
            NewJob("echo", 4),
        ]
        first, second, third, fourth = client.submit_many(jobs)
        assert isinstance(first, Job)
        assert isinstance(second, Conflict)
        assert isinstance(third, Invalid)
        assert isinstance(fourth, Job)
        assert second.problem["fields"] == ["params"]
        assert client.wait(fourth, timeout=30).result == 4
        again = client.submit_many(jobs)  # the same NewJobs are the same jobs
        assert [one.job_id for one in again if isinstance(one, Job)] == [
            first.job_id,
            fourth.job_id,
        ]


@pytest.mark.parametrize(
    ("jobs", "sizes"),
    [
        ([], []),
        ([NewJob("one_ms") for _ in range(MAX_BATCH_JOBS + 1)], [MAX_BATCH_JOBS, 1]),
        ([NewJob("one_ms", "x" * 60_000) for _ in range(20)], [17, 3]),
    ],
    ids=["nothing", "many", "large"],
)
def test_jobs_are_sent_in_batches_of_a_bounded_size(
    sdk_platform: Platform, jobs: list[NewJob], sizes: list[int]
) -> None:
    watched = Watched()
    with Client(sdk_platform.url, transport=watched) as client:
        outcomes = client.submit_many(jobs)
    assert [type(one) for one in outcomes] == [Job] * len(jobs)
    assert [len(json.loads(request.content)["jobs"]) for request in watched.requests] == sizes


async def test_many_are_submitted_async(sdk_platform: Platform) -> None:
    async with AsyncClient(sdk_platform.url) as client:
        jobs = [NewJob("echo", number) for number in range(3)]
        outcomes = await client.submit_many(jobs)
        assert [one.params for one in outcomes if isinstance(one, Job)] == [0, 1, 2]
