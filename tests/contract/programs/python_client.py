"""Drives `oncue_api`, which openapi-python-client wrote: python_client.py URL KEY."""

import datetime as dt
import sys
from http import HTTPStatus
from typing import Any

from oncue_api import AuthenticatedClient, Client
from oncue_api.api.fleet import get_workers
from oncue_api.api.jobs import get_job, list_jobs, submit_job, submit_jobs
from oncue_api.models import (
    AcceptedItem,
    BatchAnswer,
    Job,
    JobList,
    JobStatus,
    Problem,
    RefusedItem,
    SubmitBatch,
    SubmitJob,
    WorkerList,
)

PARAMS: dict[str, Any] = {"text": "Grüße", "list": [1, 2.5, None]}


def main(url: str, key: str) -> None:
    """Submit, read, and be refused; every answer must be an object, none None."""
    with AuthenticatedClient(base_url=url, token=key, timeout=40) as client:
        job = SubmitJob("py-1", "echo", "from Python", params=PARAMS)

        accepted = submit_job.sync_detailed(client=client, body=job)
        assert accepted.status_code == HTTPStatus.ACCEPTED
        submitted = accepted.parsed
        assert isinstance(submitted, Job)
        assert submitted.status is JobStatus.WAITING

        ended = get_job.sync(submitted.job_id, client=client, wait=30)
        assert isinstance(ended, Job)
        assert (ended.status, ended.result, ended.error) == (JobStatus.SUCCEEDED, PARAMS, None)
        assert isinstance(ended.created_at, dt.datetime)
        assert len(ended.executions) == 1

        repeated = submit_job.sync_detailed(client=client, body=job)
        assert repeated.status_code == HTTPStatus.OK
        assert isinstance(repeated.parsed, Job)
        assert repeated.parsed.job_id == submitted.job_id

        conflict = submit_job.sync(client=client, body=SubmitJob("py-1", "echo", "another"))
        assert isinstance(conflict, Problem)
        assert (conflict.status, conflict.code) == (409, "request_conflict")
        assert (conflict.job_id, conflict.fields) == (submitted.job_id, ["jobName", "params"])

        invalid = submit_job.sync(client=client, body=SubmitJob("py-2", "echo", ""))
        assert isinstance(invalid, Problem)
        assert (invalid.status, invalid.code) == (422, "validation_failed")
        assert isinstance(invalid.errors, list)
        assert [one.pointer for one in invalid.errors] == ["/jobName"]

        missing = get_job.sync(2**62, client=client)
        assert isinstance(missing, Problem)
        assert (missing.status, missing.code) == (404, "job_not_found")

        batch = submit_jobs.sync(
            client=client,
            body=SubmitBatch([SubmitJob("py-3", "echo", "a"), SubmitJob("py-4", "echo", "")]),
        )
        assert isinstance(batch, BatchAnswer)
        stored, refused = batch.items
        assert isinstance(stored, AcceptedItem)
        assert isinstance(refused, RefusedItem)
        assert (stored.http_status, refused.http_status) == (202, 422)

        page = list_jobs.sync(client=client, limit=1)
        assert isinstance(page, JobList)
        assert [one.job_id for one in page.items] == [stored.job_id]
        assert page.next_cursor is not None
        page = list_jobs.sync(client=client, limit=1, cursor=page.next_cursor)
        assert isinstance(page, JobList)
        assert [one.job_id for one in page.items] == [submitted.job_id]

        workers = get_workers.sync(client=client)
        assert isinstance(workers, WorkerList)
        assert [worker.state for worker in workers.items] == ["UP"]

    with Client(base_url=url) as stranger:
        keyless = get_job.sync(submitted.job_id, client=stranger)
    assert isinstance(keyless, Problem)
    assert keyless.code == "unauthorized"

    print(f"job {submitted.job_id}")


main(*sys.argv[1:])
