"""The document of a new task, made without its row, is that which its row would give."""

from __future__ import annotations

import orjson
from hypothesis import given
from hypothesis import strategies as st

from app.jobs.views import job_view, new_task_view
from app.lifecycle.moves.submit import Entered, NewJob, row_of_new_task
from app.lifecycle.reads import JobRecord

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


@given(tasks, entries, st.lists(st.dictionaries(texts, texts, max_size=2), max_size=2))
def test_a_new_task_is_shown_as_its_row_would_be(
    new: NewJob, entered: Entered, warnings: list[dict[str, str]]
) -> None:
    record = JobRecord(row_of_new_task(new, entered), (), new.params, {})
    shown = orjson.dumps(new_task_view(new, entered, warnings))
    assert shown == orjson.dumps(job_view(record, warnings))
