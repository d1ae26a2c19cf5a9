"""The routes of admins: keys, tenants, the audit log."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from app.access.caller import Caller
from app.access.keys import Gate
from app.admin.audit import list_audit_page
from app.admin.drain import drain_worker as drain
from app.admin.keys import KeyDesk
from app.admin.schemas import (
    MAX_TENANT_ID,
    ApiKey,
    ApiKeyList,
    AuditList,
    Draining,
    NewApiKey,
    Tenant,
    TenantList,
)
from app.admin.tenants import TenantDesk
from app.edge.paging import DEFAULT_LIMIT
from app.edge.problems import problem_answers
from app.ground import Ground
from app.jobs.answers import Cursor, Limit, body_of, json_answer, require_json
from app.jobs.listing import moment_in
from app.lifecycle.audit import AuditFilter
from app.plumbing.database import Database

KeyId = Annotated[
    int,
    Path(
        ge=1,
        le=2**63 - 2,
        json_schema_extra={"format": "int64"},
        alias="keyId",
        description="The `keyId` of a key, not its prefix.",
    ),
]
TenantId = Annotated[
    int,
    Path(
        ge=0,
        le=MAX_TENANT_ID,
        alias="tenantId",
        description="The `tenantId` of a tenant; 0 is `default`.",
    ),
]
OfTenant = Annotated[
    int | None, Query(ge=0, le=MAX_TENANT_ID, alias="tenantId", description="Those of one tenant.")
]
WorkerId = Annotated[
    str,
    Path(
        min_length=1,
        max_length=128,
        alias="workerId",
        description="The `workerId` of a worker, its `#` written as `%23`.",
    ),
]
SECRET = {"Cache-Control": "no-store"}
_BODY = ("invalid_json", "body_too_large", "unsupported_media_type", "validation_failed")


def key_routes(*, keys: Gate, key_desk: KeyDesk) -> APIRouter:
    """Return the routes, bound to the parts that serve them."""
    router = APIRouter(prefix="/openapi", tags=["access"])

    async def identify(request: Request) -> Caller:
        return await keys.caller(request)

    Identified = Annotated[Caller, Depends(identify)]  # noqa: N806 - a type

    @router.post(
        "/keys",
        status_code=201,
        response_model=NewApiKey,
        summary="Make a key",
        responses=problem_answers("unauthorized", "tenant_not_found", *_BODY),
        openapi_extra=body_of("CreateKey"),
    )
    async def create_key(request: Request, caller: Identified) -> Response:
        """Make a key; the answer is the only place where it is ever shown."""
        require_json(request)
        made = await key_desk.create(caller, await request.body())
        return json_answer(made, 201, {"Location": f"/openapi/keys/{made['keyId']}", **SECRET})

    @router.get(
        "/keys",
        response_model=ApiKeyList,
        summary="List keys",
        responses=problem_answers("unauthorized", "validation_failed"),
    )
    async def list_keys(
        *,
        caller: Identified,
        tenant_id: OfTenant = None,
        prefix: Annotated[
            str | None, Query(max_length=16, description="How the key begins, as `ock_ab`.")
        ] = None,
        limit: Limit = DEFAULT_LIMIT,
        cursor: Cursor = None,
    ) -> Response:
        """Return keys, newest first, also those that have ended; never their secrets."""
        page = await key_desk.list_page(
            caller, tenant_id=tenant_id, prefix=prefix, limit=limit, cursor=cursor
        )
        return json_answer(page)

    @router.get(
        "/keys/{keyId}",
        response_model=ApiKey,
        summary="Look at a key",
        responses=problem_answers("unauthorized", "key_not_found", "validation_failed"),
    )
    async def get_key(key_id: KeyId, caller: Identified) -> Response:
        """Return a key, without its secret."""
        return json_answer(await key_desk.look(caller, key_id))

    @router.post(
        "/keys/{keyId}/rotate",
        response_model=NewApiKey,
        summary="Give a key a new secret",
        responses=problem_answers("unauthorized", "key_not_found", "key_revoked", *_BODY),
        openapi_extra=body_of("RotateKey", required=False),
    )
    async def rotate_key(request: Request, key_id: KeyId, caller: Identified) -> Response:
        """Draw a new secret, which works at once; the one before works for `overlapSeconds` more.

        The prefix, the roles and the expiry stay. Of three secrets the first stops at once.
        """
        body = await request.body()
        if body:
            require_json(request)
        return json_answer(await key_desk.rotate(caller, key_id, body), 200, SECRET)

    @router.delete(
        "/keys/{keyId}",
        response_model=ApiKey,
        summary="Revoke a key",
        responses=problem_answers("unauthorized", "key_not_found", "validation_failed"),
    )
    async def revoke_key(key_id: KeyId, caller: Identified) -> Response:
        """End a key for good; it stays in the list. A repeat returns it as it is."""
        return json_answer(await key_desk.revoke(caller, key_id))

    return router


def tenant_routes(*, keys: Gate, tenant_desk: TenantDesk) -> APIRouter:
    """Return the routes, bound to the parts that serve them."""
    router = APIRouter(prefix="/openapi", tags=["access"])

    async def identify(request: Request) -> Caller:
        return await keys.caller(request)

    Identified = Annotated[Caller, Depends(identify)]  # noqa: N806 - a type

    @router.post(
        "/tenants",
        status_code=201,
        response_model=Tenant,
        summary="Make a tenant",
        responses=problem_answers("unauthorized", "tenant_name_taken", *_BODY),
        openapi_extra=body_of("CreateTenant"),
    )
    async def create_tenant(request: Request, caller: Identified) -> Response:
        """Make a tenant: for admins of the tenant 0, `default`."""
        require_json(request)
        made = await tenant_desk.create(caller, await request.body())
        return json_answer(made, 201, {"Location": f"/openapi/tenants/{made['tenantId']}"})

    @router.get(
        "/tenants",
        response_model=TenantList,
        summary="List tenants",
        responses=problem_answers("unauthorized", "validation_failed"),
    )
    async def list_tenants(
        caller: Identified, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None
    ) -> Response:
        """Return tenants by id; an admin of another tenant than `default` sees its own."""
        return json_answer(await tenant_desk.list_page(caller, limit=limit, cursor=cursor))

    @router.get(
        "/tenants/{tenantId}",
        response_model=Tenant,
        summary="Look at a tenant",
        responses=problem_answers("unauthorized", "tenant_not_found", "validation_failed"),
    )
    async def get_tenant(tenant_id: TenantId, caller: Identified) -> Response:
        """Return a tenant."""
        return json_answer(await tenant_desk.look(caller, tenant_id))

    @router.patch(
        "/tenants/{tenantId}",
        response_model=Tenant,
        summary="Change a tenant",
        responses=problem_answers("unauthorized", "tenant_not_found", "tenant_name_taken", *_BODY),
        openapi_extra=body_of("ChangeTenant"),
    )
    async def change_tenant(request: Request, tenant_id: TenantId, caller: Identified) -> Response:
        """Rename a tenant, set its `limits`, refuse its callers (`disabled`), or let them in."""
        require_json(request)
        return json_answer(await tenant_desk.change(caller, tenant_id, await request.body()))

    return router


def drain_routes(*, ground: Ground, keys: Gate) -> APIRouter:
    """Return the routes, bound to the parts that serve them."""
    router = APIRouter(prefix="/openapi", tags=["fleet"])

    async def identify(request: Request) -> Caller:
        return await keys.caller(request)

    Identified = Annotated[Caller, Depends(identify)]  # noqa: N806 - a type

    @router.post(
        "/workers/{workerId}/drain",
        response_model=Draining,
        summary="Drain a worker",
        responses=problem_answers(
            "unauthorized", "worker_not_found", "worker_down", "validation_failed"
        ),
    )
    async def drain_worker(worker_id: WorkerId, caller: Identified) -> Response:
        """Let a worker take no more runs; what runs goes on. Only its restart undoes it.

        A repeat tells what it still holds. For keys of the tenant 0, `default`.
        """
        return json_answer(await drain(ground, caller, worker_id))

    return router


def audit_routes(*, database: Database, keys: Gate) -> APIRouter:
    """Return the routes, bound to the parts that serve them."""
    router = APIRouter(prefix="/openapi", tags=["access"])

    async def identify(request: Request) -> Caller:
        return await keys.caller(request)

    Identified = Annotated[Caller, Depends(identify)]  # noqa: N806 - a type

    @router.get(
        "/audit",
        response_model=AuditList,
        summary="Who changed what",
        responses=problem_answers("unauthorized", "validation_failed"),
    )
    async def list_audit(
        *,
        caller: Identified,
        tenant_id: OfTenant = None,
        actor: Annotated[
            str | None, Query(min_length=1, max_length=128, description="The name of a key.")
        ] = None,
        action: Annotated[
            str | None, Query(min_length=1, max_length=64, description="As `job.cancel`.")
        ] = None,
        target: Annotated[
            str | None, Query(min_length=1, max_length=160, description="As `job:17`.")
        ] = None,
        since: Annotated[
            str | None, Query(alias="from", description="RFC 3339; then or later.")
        ] = None,
        until: Annotated[
            str | None, Query(alias="to", description="RFC 3339; before that.")
        ] = None,
        limit: Limit = DEFAULT_LIMIT,
        cursor: Cursor = None,
    ) -> Response:
        """Return the changes that people and keys made, newest first.

        A page looks through a bounded number of entries: it may be short, even empty, while
        `nextCursor` is set. Submissions are not here: a job is its own record.
        """
        if tenant_id is None and not caller.runs_the_platform:
            tenant_id = caller.tenant_id
        wanted = AuditFilter(
            tenant_id=tenant_id,
            actor=actor,
            action=action,
            target=target,
            from_ms=_moment("from", since),
            to_ms=_moment("to", until),
        )
        return json_answer(
            await list_audit_page(database, caller, wanted, limit=limit, cursor=cursor)
        )

    return router


def _moment(name: str, given: str | None) -> int | None:
    return None if given is None else moment_in({name: [given]}, name)
