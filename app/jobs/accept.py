"""The answers to `POST /openapi/jobs` and `POST /openapi/jobs/batch`."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Response

from app.access.keys import ApiKeys
from app.jobs.answers import job_headers, json_answer, require_json
from app.jobs.batch import submit_batch
from app.jobs.submit import Submitter


async def accept(
    keys: ApiKeys, submitter: Submitter, headers: Mapping[str, str], body: bytes
) -> Response:
    """Store a job: 202 for a new one, 200 for a repeat.

    Raises:
        Problem: what to change.
        DatabaseUnavailable: nothing is known to be stored.
    """
    caller = keys.caller(headers)
    require_json(headers)
    submitted = await submitter.submit(caller, body)
    return json_answer(
        submitted.job,
        202 if submitted.created else 200,
        {
            "Location": f"/openapi/jobs/{submitted.job['jobId']}",
            **job_headers(submitted.job),
        },
    )


async def accept_batch(
    keys: ApiKeys, submitter: Submitter, headers: Mapping[str, str], body: bytes
) -> Response:
    """Store the jobs of a batch, each answered on its own.

    Raises:
        Problem: the envelope is wrong; nothing was stored.
    """
    caller = keys.caller(headers)
    require_json(headers)
    return json_answer(await submit_batch(submitter, caller, body))
