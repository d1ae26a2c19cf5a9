"""The routes of callers under `/openapi`."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response

from app.access.caller import Caller
from app.access.keys import Gate
from app.edge.paging import DEFAULT_LIMIT, decode_name, encode_name
from app.edge.problems import invalid, problem_answers
from app.fleet.live import LiveFleet
from app.jobs.answers import (
    Cursor,
    JobId,
    Limit,
    LongCursor,
    body_of,
    job_headers,
    json_answer,
    require_json,
)
from app.jobs.batch import submit_batch
from app.jobs.documents import BatchAnswer, ExecutionList, HandlerList, Job, WorkerList
from app.jobs.look import list_executions, look_at_job
from app.jobs.submit import Submitter
from app.jobs.views import handler_view, worker_view
from app.jobs.wait import Waiters
from app.lifecycle.nodes import read_nodes
from app.plumbing.database import Database
from app.settings import Settings

MAX_WORKERS_LISTED = 10_000

Named = TypeVar("Named")


def job_routes(
    *,
    settings: Settings,
    database: Database,
    keys: Gate,
    submitter: Submitter,
    waiters: Waiters,
    fleet: LiveFleet,
) -> APIRouter:
    """Return the routes, bound to the parts that serve them."""
    router = APIRouter(prefix="/openapi")

    async def identify(request: Request) -> Caller:
        return await keys.caller(request)

    Identified = Annotated[Caller, Depends(identify)]  # noqa: N806 - a type

    @router.post(
        "/jobs",
        status_code=202,
        response_model=Job,
        summary="Submit a job",
        tags=["jobs"],
        responses={
            200: {"model": Job, "description": "A repeat: this request's job, as it is now"},
            202: {"description": "Accepted: the job is stored and will run"},
            **problem_answers(
                "invalid_json",
                "unauthorized",
                "request_conflict",
                "body_too_large",
                "unsupported_media_type",
                "cron_invalid",
                "schedule_never_fires",
                "validation_failed",
                "too_many_submissions",
                "overloaded",
            ),
        },
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {
                        "schema": {"$ref": "#/components/schemas/SubmitJob"},
                        "example": {
                            "clientRequestId": "order-1001-close",
                            "jobName": "close order 1001",
                            "jobHandler": "echo",
                            "params": {"orderId": 1001},
                        },
                    }
                },
            },
            "callbacks": {"jobEnded": {}},  # app/document.py writes it
        },
    )
    async def submit_job(request: Request) -> Response:
        """Store a job and return its id at once.

        One `clientRequestId` is one job: the same body again returns the same job (200), another
        body is refused (409) with the names of the fields that differ.
        """
        caller = await keys.caller(request)
        require_json(request)
        submitted = await submitter.submit(caller, await request.body())
        return json_answer(
            submitted.job,
            202 if submitted.created else 200,
            {
                "Location": f"/openapi/jobs/{submitted.job['jobId']}",
                **job_headers(submitted.job),
                **submitted.headers,
            },
        )

    @router.post(
        "/jobs/batch",
        response_model=BatchAnswer,
        summary="Submit many jobs",
        tags=["jobs"],
        responses=problem_answers(
            "invalid_json",
            "unauthorized",
            "body_too_large",
            "unsupported_media_type",
            "validation_failed",
            "overloaded",
        ),
        openapi_extra=body_of("SubmitBatch"),
    )
    async def submit_jobs(request: Request) -> Response:
        """Store up to 500 jobs; each item of the answer has its own `httpStatus`.

        An item is what `POST /openapi/jobs` would have answered: the job, or a problem. What was
        refused or is unclear (503) may be sent again, alone or with the whole batch.
        """
        caller = await keys.caller(request)
        require_json(request)
        body, stay = await request.body(), request.scope["stay"]
        answer, headers = await submit_batch(submitter, caller, body, stay.weigh)
        return json_answer(answer, 200, headers)

    @router.get(
        "/jobs/{jobId}",
        response_model=Job,
        summary="Look at a job",
        tags=["jobs"],
        responses=problem_answers("unauthorized", "job_not_found", "validation_failed"),
    )
    async def get_job(
        request: Request,
        job_id: JobId,
        caller: Identified,
        wait: Annotated[
            float,
            Query(ge=0, description="Seconds to wait for the job's end (long poll)."),
        ] = 0,
    ) -> Response:
        """Return a job with its newest executions; with `wait`, once it has ended."""
        if wait > settings.long_poll_seconds:
            raise invalid(f"at most {settings.long_poll_seconds:g} seconds", "/wait")
        job = await look_at_job(
            database,
            waiters,
            caller,
            job_id,
            wait_seconds=wait,
            lets_on=partial(keys.lets_on, request, caller),
        )
        return json_answer(job, 200, job_headers(job))

    @router.get(
        "/jobs/{jobId}/executions",
        response_model=ExecutionList,
        summary="List a job's executions",
        tags=["jobs"],
        responses=problem_answers("unauthorized", "job_not_found", "validation_failed"),
    )
    async def get_job_executions(
        job_id: JobId, caller: Identified, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None
    ) -> Response:
        """Return every attempt to run the job, newest first, with the time of each step."""
        return json_answer(
            await list_executions(database, caller, job_id, limit=limit, cursor=cursor)
        )

    @router.get(
        "/workers",
        response_model=WorkerList,
        summary="List workers",
        tags=["fleet"],
        responses=problem_answers("unauthorized", "validation_failed"),
    )
    async def get_workers(
        _caller: Identified, limit: Limit = DEFAULT_LIMIT, cursor: LongCursor = None
    ) -> Response:
        """Return the workers and their load; those that died are shown as DOWN for a day."""
        after = decode_name(cursor)
        nodes = await database.read(
            lambda connection: read_nodes(connection, include_down=True, limit=MAX_WORKERS_LISTED)
        )
        # By what no beat changes, and no death: else a page would leave some out.
        named = {node.worker_id: node for node in nodes}
        page, onward = _page(named, after, limit)
        return json_answer({"items": [worker_view(node) for node in page], "nextCursor": onward})

    @router.get(
        "/handlers",
        response_model=HandlerList,
        summary="List handlers",
        tags=["fleet"],
        responses=problem_answers("unauthorized", "validation_failed"),
    )
    async def get_handlers(
        _caller: Identified, limit: Limit = DEFAULT_LIMIT, cursor: LongCursor = None
    ) -> Response:
        """Return the handlers that live workers offer, by name."""
        after = decode_name(cursor)
        page, onward = _page(await fleet.handlers(), after, limit)
        return json_answer({"items": [handler_view(offer) for offer in page], "nextCursor": onward})

    return router


def _page(
    named: Mapping[str, Named], after: str | None, limit: int
) -> tuple[list[Named], str | None]:
    """Return those behind `after` in the order of their names, and where to go on."""
    names = sorted(name for name in named if after is None or name > after)
    page = names[:limit]
    return [named[name] for name in page], encode_name(page[-1]) if len(names) > limit else None
