"""The routes of callers for bulk operations."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from app.access.caller import Caller
from app.access.keys import Gate
from app.edge.paging import DEFAULT_LIMIT
from app.edge.problems import problem_answers
from app.jobs.answers import Cursor, Limit, body_of, json_answer, require_json
from app.jobs.bulk import BulkDesk
from app.jobs.bulk_schemas import BulkCount, BulkOperation, BulkOperationList

OperationId = Annotated[
    str,
    Path(
        min_length=1,
        max_length=64,
        alias="operationId",
        description="The `operationId` of a bulk operation.",
    ),
]


def bulk_routes(*, keys: Gate, desk: BulkDesk) -> APIRouter:
    """Return the routes, bound to the parts that serve them."""
    router = APIRouter(prefix="/openapi", tags=["bulk"])

    async def identify(request: Request) -> Caller:
        return await keys.caller(request)

    Identified = Annotated[Caller, Depends(identify)]  # noqa: N806 - a type

    @router.post(
        "/bulk",
        status_code=202,
        response_model=BulkOperation,
        summary="Change all jobs that match",
        responses={
            200: {
                "model": BulkCount | BulkOperation,
                "description": "A dry run's count; or a repeat: this request's operation",
            },
            202: {"description": "Accepted: the operation is stored and will be carried out"},
            **problem_answers(
                "invalid_json",
                "unauthorized",
                "request_conflict",
                "body_too_large",
                "unsupported_media_type",
                "validation_failed",
            ),
        },
        openapi_extra=body_of("SubmitBulk"),
    )
    async def submit_bulk(request: Request) -> Response:
        """Cancel, retry, pause or resume all jobs that match a filter, or redeliver, at a rate.

        Jobs whose state does not allow the action do not match; those made later are not touched.
        An empty filter is refused. One `clientRequestId` is one operation.
        """
        caller = await keys.caller(request)
        require_json(request)
        asked = await desk.ask(caller, await request.body())
        location = (
            {}
            if asked.operation_id is None
            else {"Location": f"/openapi/bulk/{asked.operation_id}"}
        )
        return json_answer(asked.document, asked.status, location)

    @router.get(
        "/bulk",
        response_model=BulkOperationList,
        summary="List bulk operations",
        responses=problem_answers("unauthorized", "validation_failed"),
    )
    async def list_bulk_operations(
        caller: Identified, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None
    ) -> Response:
        """Return bulk operations, newest first."""
        return json_answer(await desk.list_page(caller, limit=limit, cursor=cursor))

    @router.get(
        "/bulk/{operationId}",
        response_model=BulkOperation,
        summary="Look at a bulk operation",
        responses=problem_answers("unauthorized", "operation_not_found", "validation_failed"),
    )
    async def get_bulk_operation(operation_id: OperationId, caller: Identified) -> Response:
        """Return how far a bulk operation is."""
        return json_answer(await desk.look(caller, operation_id))

    @router.post(
        "/bulk/{operationId}/cancel",
        response_model=BulkOperation,
        summary="Cancel a bulk operation",
        responses=problem_answers(
            "unauthorized", "operation_not_found", "operation_ended", "validation_failed"
        ),
    )
    async def cancel_bulk_operation(operation_id: OperationId, caller: Identified) -> Response:
        """End a bulk operation; what it has changed stays so. A repeat returns it as it is."""
        return json_answer(await desk.cancel(caller, operation_id))

    return router
