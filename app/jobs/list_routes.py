"""The routes of callers that list jobs."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from app.access.caller import Caller
from app.access.keys import Gate
from app.edge.paging import DEFAULT_LIMIT
from app.edge.problems import problem_answers
from app.edge.wire import StatusWord
from app.jobs.answers import Cursor, JobId, Limit, LongCursor, json_answer
from app.jobs.backfill import list_backfills_page, list_skips_page
from app.jobs.callbacks import list_callbacks
from app.jobs.documents import BackfillList, CallbackList, JobList, SkippedList
from app.jobs.listing import list_children_page, list_jobs_page
from app.plumbing.database import Database


def list_routes(*, database: Database, keys: Gate) -> APIRouter:
    """Return the routes, bound to the parts that serve them."""
    router = APIRouter(prefix="/openapi", tags=["jobs"])

    async def identify(request: Request) -> Caller:
        return await keys.caller(request)

    Identified = Annotated[Caller, Depends(identify)]  # noqa: N806 - a type

    @router.get(
        "/jobs",
        response_model=JobList,
        summary="List jobs",
        responses=problem_answers("unauthorized", "validation_failed"),
    )
    async def list_jobs(
        *,
        request: Request,
        caller: Identified,
        status: Annotated[StatusWord | None, Query(description="Jobs in this state.")] = None,
        handler: Annotated[str | None, Query(description="Jobs of this handler.")] = None,
        name_prefix: Annotated[
            str | None, Query(alias="namePrefix", description="The start of the jobName.")
        ] = None,
        label: Annotated[str | None, Query(description="`name=value`")] = None,
        client_request_id: Annotated[
            str | None, Query(alias="clientRequestId", description="The one job of this request.")
        ] = None,
        created_from: Annotated[
            str | None,
            Query(alias="createdFrom", description="RFC 3339; created then or later."),
        ] = None,
        created_to: Annotated[
            str | None, Query(alias="createdTo", description="RFC 3339; created before that.")
        ] = None,
        finished_from: Annotated[
            str | None,
            Query(alias="finishedFrom", description="RFC 3339; finished then or later."),
        ] = None,
        finished_to: Annotated[
            str | None, Query(alias="finishedTo", description="RFC 3339; finished before that.")
        ] = None,
        limit: Limit = DEFAULT_LIMIT,
        cursor: Cursor = None,
    ) -> Response:
        """Return jobs, newest first, by at most one of the filters and one time range.

        With a range of finishing, the latest finished come first.
        A page looks through a bounded number of jobs: it may be short, even empty, while
        `nextCursor` is set. Go on until `nextCursor` is null.
        """
        query = request.query_params
        return json_answer(
            await list_jobs_page(
                database,
                caller,
                {name: query.getlist(name) for name in query},
                limit=limit,
                cursor=cursor,
            )
        )

    @router.get(
        "/jobs/{jobId}/children",
        response_model=JobList,
        summary="List a job's children",
        responses=problem_answers("unauthorized", "job_not_found", "validation_failed"),
    )
    async def get_job_children(
        job_id: JobId, caller: Identified, limit: Limit = DEFAULT_LIMIT, cursor: LongCursor = None
    ) -> Response:
        """Return the jobs that a schedule or a group made, latest first."""
        return json_answer(
            await list_children_page(database, caller, job_id, limit=limit, cursor=cursor)
        )

    @router.get(
        "/jobs/{jobId}/skips",
        response_model=SkippedList,
        summary="List the fires of a schedule that did not run",
        responses=problem_answers("unauthorized", "job_not_found", "validation_failed"),
    )
    async def get_job_skips(
        job_id: JobId, caller: Identified, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None
    ) -> Response:
        """Return what was passed over and why, latest first; the other fires are its children."""
        page = await list_skips_page(database, caller, job_id, limit=limit, cursor=cursor)
        return json_answer(page)

    @router.get(
        "/jobs/{jobId}/backfills",
        response_model=BackfillList,
        summary="List the backfills of a schedule",
        responses=problem_answers("unauthorized", "job_not_found", "validation_failed"),
    )
    async def get_job_backfills(
        job_id: JobId, caller: Identified, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None
    ) -> Response:
        """Return the backfills that were asked for, newest first, and how far each is."""
        page = await list_backfills_page(database, caller, job_id, limit=limit, cursor=cursor)
        return json_answer(page)

    @router.get(
        "/jobs/{jobId}/callbacks",
        response_model=CallbackList,
        summary="List a job's callbacks",
        responses=problem_answers("unauthorized", "job_not_found", "validation_failed"),
    )
    async def get_job_callbacks(
        job_id: JobId, caller: Identified, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None
    ) -> Response:
        """Return what the ends of a job owe or owed, newest first, and what came of each."""
        page = await list_callbacks(database, caller, job_id, limit=limit, cursor=cursor)
        return json_answer(page)

    return router
