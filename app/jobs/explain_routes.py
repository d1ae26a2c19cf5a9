"""The route of callers that explains a job."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from app.access.caller import Caller
from app.access.keys import Gate
from app.edge.problems import problem_answers
from app.jobs.answers import JobId, json_answer
from app.jobs.documents import Explanation
from app.jobs.explain import Explainer


def explain_routes(*, keys: Gate, explainer: Explainer) -> APIRouter:
    """Return the routes, bound to the parts that serve them."""
    router = APIRouter(prefix="/openapi", tags=["jobs"])

    async def identify(request: Request) -> Caller:
        return await keys.caller(request)

    Identified = Annotated[Caller, Depends(identify)]  # noqa: N806 - a type

    @router.get(
        "/jobs/{jobId}/explain",
        response_model=Explanation,
        summary="Why is a job not running?",
        responses=problem_answers("unauthorized", "job_not_found", "validation_failed"),
    )
    async def explain_job(job_id: JobId, caller: Identified) -> Response:
        """Say what a job waits for, or who ran it when and why it ended so.

        The first reason is the most telling one. Codes are stable; sentences are for people.
        """
        return json_answer(await explainer.explain(caller, job_id))

    return router
