"""The routes of callers that change jobs."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response

from app.access.caller import Caller
from app.access.keys import Gate
from app.edge.problems import problem_answers
from app.ground import Ground
from app.jobs.answers import JobId, body_of, job_headers, json_answer, require_json
from app.jobs.backfill import backfill
from app.jobs.change import Changes
from app.jobs.documents import Backfill, Job


def change_routes(*, ground: Ground, keys: Gate, changes: Changes) -> APIRouter:
    """Return the routes, bound to the parts that serve them."""
    router = APIRouter(prefix="/openapi", tags=["jobs"])
    problems = problem_answers(
        "unauthorized", "job_not_found", "verb_not_possible", "validation_failed"
    )
    dry_run: dict[int | str, dict[str, Any]] = {
        200: {"model": Backfill, "description": "A dry run: nothing is stored"},
        202: {"description": "Stored: the fires that have no job yet will run"},
    }

    async def identify(request: Request) -> Caller:
        return await keys.caller(request)

    Identified = Annotated[Caller, Depends(identify)]  # noqa: N806 - a type

    @router.post(
        "/jobs/{jobId}/cancel", response_model=Job, summary="Cancel a job", responses=problems
    )
    async def cancel_job(
        job_id: JobId,
        caller: Identified,
        children: Annotated[
            bool, Query(description="Also end what a schedule has made and has not ended.")
        ] = False,
    ) -> Response:
        """End a job as CANCELLED at once; its worker is told to stop the run.

        A handler that is under way may go on for a while: its result is discarded, and a retry
        of the job waits until it has ended. A repeat returns the job as it is. What a schedule
        has made goes on, unless `children` is true.
        """
        return _job(await changes.cancel(caller, job_id, children=children))

    @router.post(
        "/jobs/{jobId}/pause", response_model=Job, summary="Pause a job", responses=problems
    )
    async def pause_job(job_id: JobId, caller: Identified) -> Response:
        """Keep a job that waits from running until it is resumed; its due time stays."""
        return _job(await changes.hold(caller, job_id, "pause"))

    @router.post(
        "/jobs/{jobId}/resume",
        response_model=Job,
        summary="Resume a job",
        responses=problems
        | problem_answers("invalid_json", "body_too_large", "unsupported_media_type"),
        openapi_extra=body_of("ResumeJob", required=False),
    )
    async def resume_job(request: Request, job_id: JobId, caller: Identified) -> Response:
        """Let a paused job run when it is due: at once, if that moment has passed.

        The fires that a schedule has missed are put on record as `paused`; with `catchUp` they
        are dealt with as its `misfirePolicy` says.
        """
        body = await request.body()
        if body:
            require_json(request)
        return _job(await changes.hold(caller, job_id, "resume", body))

    @router.post(
        "/jobs/{jobId}/trigger",
        response_model=Job,
        summary="Run a job now",
        responses=problems
        | problem_answers(
            "invalid_json",
            "precondition_failed",
            "body_too_large",
            "unsupported_media_type",
        ),
        openapi_extra=body_of("TriggerJob", required=False),
    )
    async def trigger_job(
        request: Request,
        job_id: JobId,
        caller: Identified,
        if_match: Annotated[
            str | None,
            Header(
                alias="If-Match", description="The ETag of the job as you saw it, if it matters."
            ),
        ] = None,
    ) -> Response:
        """Make a job that waits, for its time or for its retry, due now; `params` replace its own.

        One that is due already stays as it is (200); one that has begun is 409. A schedule makes
        a job that is due now, whatever else goes on, and the answer is that job.
        """
        body = await request.body()
        if body:
            require_json(request)
        return _job(await changes.trigger(caller, job_id, body, if_match))

    @router.post(
        "/jobs/{jobId}/retry", response_model=Job, summary="Retry a job", responses=problems
    )
    async def retry_job(job_id: JobId, caller: Identified) -> Response:
        """Run a FAILED or CANCELLED job again, now, under its id, with all its attempts anew."""
        return _job(await changes.retry(caller, job_id))

    @router.patch(
        "/jobs/{jobId}",
        response_model=Job,
        summary="Change a job",
        responses=problems
        | problem_answers(
            "invalid_json",
            "precondition_failed",
            "body_too_large",
            "unsupported_media_type",
            "precondition_required",
        ),
        openapi_extra=body_of("ChangeJob"),
    )
    async def change_job(
        request: Request,
        job_id: JobId,
        caller: Identified,
        if_match: Annotated[
            str | None,
            Header(alias="If-Match", description="The ETag of the job as you saw it. Required."),
        ] = None,
    ) -> Response:
        """Change a job that is WAITING or PAUSED and still has the revision in `If-Match`."""
        require_json(request)
        return _job(await changes.revise(caller, job_id, await request.body(), if_match))

    @router.post(
        "/jobs/{jobId}/backfill",
        status_code=202,
        response_model=Backfill,
        summary="Run past fires of a schedule",
        responses=dry_run
        | problems
        | problem_answers("invalid_json", "body_too_large", "unsupported_media_type"),
        openapi_extra=body_of("BackfillJobs"),
    )
    async def backfill_jobs(request: Request, job_id: JobId, caller: Identified) -> Response:
        """Run the fires of a range in the past that have no job, at most some at a time."""
        require_json(request)
        answer = await backfill(ground, caller, job_id, await request.body())
        return json_answer(answer, 200 if answer["backfillId"] is None else 202)

    return router


def _job(job: dict[str, Any]) -> Response:
    return json_answer(job, 200, job_headers(job))
