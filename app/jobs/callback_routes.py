"""The routes of callers that have callbacks delivered again."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from app.access.caller import Caller
from app.access.keys import Gate
from app.edge.problems import problem_answers
from app.ground import Ground
from app.jobs.answers import JobId, json_answer
from app.jobs.callbacks import deliver_again, deliver_failed_again
from app.jobs.documents import Callback, Redelivered

DeliveryId = Annotated[
    str,
    Path(
        max_length=64,
        alias="deliveryId",
        description="The `deliveryId` of a callback: the `webhook-id` it is sent with.",
    ),
]


def redelivery_routes(*, ground: Ground, keys: Gate) -> APIRouter:
    """Return the routes, bound to the parts that serve them."""
    router = APIRouter(prefix="/openapi", tags=["jobs"])

    async def identify(request: Request) -> Caller:
        return await keys.caller(request)

    Identified = Annotated[Caller, Depends(identify)]  # noqa: N806 - a type

    @router.post(
        "/callbacks/{deliveryId}/redeliver",
        response_model=Callback,
        summary="Deliver a callback again",
        responses=problem_answers("unauthorized", "callback_not_found", "validation_failed"),
    )
    async def redeliver_callback(delivery_id: DeliveryId, caller: Identified) -> Response:
        """Try a callback again now, whatever became of it, with the same `webhook-id`."""
        return json_answer(await deliver_again(ground, caller, delivery_id))

    @router.post(
        "/jobs/{jobId}/callbacks/redeliver",
        response_model=Redelivered,
        summary="Deliver the failed callbacks of a job again",
        responses=problem_answers("unauthorized", "job_not_found", "validation_failed"),
    )
    async def redeliver_callbacks(job_id: JobId, caller: Identified) -> Response:
        """Try each callback of the job that has failed again now, with its `webhook-id`.

        Those that were given up, and those that wait for their next try after a failed one.
        """
        return json_answer(await deliver_failed_again(ground, caller, job_id))

    return router
