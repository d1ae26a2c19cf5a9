"""The routes of callers that tell how many jobs there are, and for how long they are kept."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from app.access.caller import Caller
from app.access.keys import Gate
from app.edge.problems import problem_answers
from app.ground import Ground
from app.jobs.answers import body_of, json_answer, require_json
from app.jobs.keeping import MOST_COUNTED, JobCounts, Keeping, counted, keep_for, kept_for


def keeping_routes(*, ground: Ground, keys: Gate) -> APIRouter:
    """Return the routes, bound to the parts that serve them."""
    router = APIRouter(prefix="/openapi", tags=["jobs"])

    async def identify(request: Request) -> Caller:
        return await keys.caller(request)

    Identified = Annotated[Caller, Depends(identify)]  # noqa: N806 - a type

    @router.get(
        "/counts",
        response_model=JobCounts,
        summary="Count jobs",
        responses=problem_answers("unauthorized", "validation_failed"),
    )
    async def get_counts(
        caller: Identified,
        up_to: Annotated[
            int,
            Query(
                alias="upTo",
                ge=1,
                le=MOST_COUNTED,
                description="Most jobs of each state that are counted.",
            ),
        ] = MOST_COUNTED,
    ) -> Response:
        """Return how many jobs are in each state, each counted up to `upTo`.

        It costs the same however many jobs are kept.
        """
        return json_answer(await counted(ground.database, caller, most=up_to))

    @router.get(
        "/retention",
        response_model=Keeping,
        summary="See how long finished jobs are kept",
        responses=problem_answers("unauthorized"),
    )
    async def get_retention(caller: Identified) -> Response:
        """Return what was chosen for the caller's jobs, and what holds where nothing was."""
        return json_answer(await kept_for(ground, caller))

    @router.put(
        "/retention",
        response_model=Keeping,
        summary="Choose how long finished jobs are kept",
        responses=problem_answers(
            "invalid_json",
            "unauthorized",
            "body_too_large",
            "unsupported_media_type",
            "validation_failed",
        ),
        openapi_extra=body_of("KeepJobs"),
    )
    async def put_retention(request: Request, caller: Identified) -> Response:
        """Replace what was chosen for the caller's jobs; it holds for those that have ended, too.

        Jobs leave some time after their days are over, never before their callbacks have ended.
        """
        require_json(request)
        return json_answer(await keep_for(ground, caller, await request.body()))

    return router
