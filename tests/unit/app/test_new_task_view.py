"""The document of a new task, made without its row, is that which its row would give."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from app.jobs.views import job_view, new_task_view
from app.lifecycle.moves.submit import NEW_VERSION, Entered, NewJob
from app.lifecycle.reads import JobRecord
from app.lifecycle.states import JobKind, JobStatus

moments = st.integers(0, 7_258_118_400_000)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
tasks = st.builds(
    NewJob,
    tenant_id=st.integers(0, 9),
    client_request_id=texts,
    request_digest=st.just("{}"),
    submit_token=st.just("token"),
    job_name=texts,
    job_handler=texts,
    queue_id=st.integers(0, 9),
    priority=st.integers(0, 9),
    max_retry=st.integers(0, 1000),
    retry_interval_ms=st.integers(0, 86_400_000),
    retry_backoff=st.sampled_from(["fixed", "exponential"]),
    timeout_ms=st.none() | st.integers(1, 604_800_000),
    callback_url=st.none() | texts,
    callback_events=st.sampled_from([None, "failed", "succeeded,started"]),
    callback_headers=st.sampled_from([None, '{"X-A":"b"}', '{"X-A":{"sealed":"b"}}']),
    expires_at=st.none() | moments,
    params=st.none() | st.sampled_from(['{"n":1}', "[1.5]", ' {"sealed":"x"}}', "null"]),
    secret=st.integers(0, 3),
    concurrency_key=st.none() | texts,
    concurrency_limit=st.none() | st.integers(1, 1000),
    rate_key=st.none() | texts,
    rate_per_second=st.none() | st.floats(0.001, 10_000),
)
entries = st.builds(
    Entered,
    id=st.integers(1, 2**63 - 1),
    client_request_id=texts,
    submit_token=st.just("token"),
    due_ms=st.none() | moments,
    created_at=moments,
)


def row_of(job: NewJob, entered: Entered) -> dict[str, Any]:
    """The row of a task that was just inserted."""
    return {
        "id": entered.id,
        "tenant_id": job.tenant_id,
        "client_request_id": job.client_request_id,
        "parent_id": None,
        "nominal_time": None,
        "kind": int(JobKind.TASK),
        "job_name": job.job_name,
        "job_handler": job.job_handler,
        "queue_id": job.queue_id,
        "status": int(JobStatus.WAITING),
        "priority": job.priority,
        "next_trigger_time": entered.due_ms,
        "trigger_ts": 0,
        "owner_worker_id": None,
        "execution_id": None,
        "attempt": 0,
        "max_retry": job.max_retry,
        "retry_interval_ms": job.retry_interval_ms,
        "retry_backoff": job.retry_backoff,
        "timeout_ms": job.timeout_ms,
        "callback_url": job.callback_url,
        "callback_events": job.callback_events,
        "callback_headers": job.callback_headers,
        "error_code": None,
        "error_message": None,
        "version": NEW_VERSION,
        "revision": 0,
        "created_at": entered.created_at,
        "updated_at": entered.created_at,
        "finished_at": None,
        "expires_at": job.expires_at,
        "concurrency_key": job.concurrency_key,
        "concurrency_limit": job.concurrency_limit,
        "rate_key": job.rate_key,
        "rate_per_second": job.rate_per_second,
        "secret": job.secret,
    }


@given(tasks, entries, st.lists(st.dictionaries(texts, texts, max_size=2), max_size=2))
def test_a_new_task_is_shown_as_its_row_would_be(
    new: NewJob, entered: Entered, warnings: list[dict[str, str]]
) -> None:
    record = JobRecord(row_of(new, entered), (), new.params, {})
    shown = orjson.dumps(new_task_view(new, entered, warnings))
    assert shown == orjson.dumps(job_view(record, warnings))
