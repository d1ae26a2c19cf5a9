"""The routes of callers for what is said of a tenant's callbacks as a whole."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from app.access.caller import Caller
from app.access.keys import Gate
from app.callbacks.schemas import EgressAllow, WebhookSecretList
from app.callbacks.secrets import SecretDesk
from app.edge.problems import problem_answers
from app.jobs.answers import body_of, json_answer, require_json


def callback_routes(*, keys: Gate, desk: SecretDesk) -> APIRouter:
    """Return the routes, bound to the part that serves them."""
    router = APIRouter(prefix="/openapi", tags=["webhooks"])
    problems = problem_answers(
        "invalid_json",
        "unauthorized",
        "body_too_large",
        "unsupported_media_type",
        "validation_failed",
    )

    async def identify(request: Request) -> Caller:
        return await keys.caller(request)

    Identified = Annotated[Caller, Depends(identify)]  # noqa: N806 - a type

    @router.get(
        "/webhook-secret",
        response_model=WebhookSecretList,
        summary="Look at the webhook secrets",
        responses=problem_answers("unauthorized"),
    )
    async def get_webhook_secret(caller: Identified) -> Response:
        """Return what signs this tenant's callbacks now, masked."""
        return json_answer(await desk.look(caller))

    @router.put(
        "/webhook-secret",
        response_model=WebhookSecretList,
        summary="Set the webhook secret",
        responses=problems,
        openapi_extra=body_of("SetWebhookSecret", required=False),
    )
    async def set_webhook_secret(request: Request, caller: Identified) -> Response:
        """Let one secret alone sign this tenant's callbacks, given or drawn; it is shown once.

        Receivers that know only the one before refuse at once: rotate to give them time.
        """
        body = await request.body()
        if body:
            require_json(request)
        return json_answer(await desk.set(caller, body))

    @router.post(
        "/webhook-secret/rotate",
        response_model=WebhookSecretList,
        summary="Rotate the webhook secret",
        responses=problems,
        openapi_extra=body_of("RotateWebhookSecret", required=False),
    )
    async def rotate_webhook_secret(request: Request, caller: Identified) -> Response:
        """Sign with a new secret too; the one before signs beside it for `overlapSeconds`."""
        body = await request.body()
        if body:
            require_json(request)
        return json_answer(await desk.rotate(caller, body))

    @router.delete(
        "/webhook-secret",
        response_model=WebhookSecretList,
        summary="Forget the webhook secrets",
        responses=problem_answers("unauthorized"),
    )
    async def forget_webhook_secret(caller: Identified) -> Response:
        """Let the secret that the operator has set for all sign again, alone and at once."""
        return json_answer(await desk.forget(caller))

    @router.get(
        "/egress-allow",
        response_model=EgressAllow,
        summary="Look at the networks that callbacks may reach",
        responses=problem_answers("unauthorized"),
    )
    async def get_egress_allow(caller: Identified) -> Response:
        """Return this tenant's own list."""
        return json_answer(await desk.look_at_networks(caller))

    @router.put(
        "/egress-allow",
        response_model=EgressAllow,
        summary="Set the networks that callbacks may reach",
        responses=problems,
        openapi_extra=body_of("SetEgressAllow"),
    )
    async def set_egress_allow(request: Request, caller: Identified) -> Response:
        """Narrow what ONCUE_EGRESS_ALLOW of the workers lets this tenant's callbacks reach."""
        require_json(request)
        return json_answer(await desk.set_networks(caller, await request.body()))

    return router
