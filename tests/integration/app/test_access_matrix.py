"""Every route of callers x every role x own and other tenant: what is not allowed is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest
from cryptography.fernet import Fernet

from app.access.keys import require_roles, routes_of_callers
from app.access.roles import INCLUDES, NEEDED, Role, RouteWithoutRole
from app.lifecycle.states import ExecutionStatus
from app.main import create_app
from app.settings import Settings
from tests.integration.app.rig import Door, body_of, door, ending, running_job, settled
from tests.support.engines import Engine, migrated

ROOT_KEY = "root-key-of-tests"
ROOT = {"Authorization": f"Bearer {ROOT_KEY}"}
RANGE = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-02T00:00:00Z"}


@dataclass(frozen=True)
class Case:
    """A request of one route; `{name}` in its path is a thing of the tenant."""

    method: str
    path: str
    body: Any = None
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    by_platform: bool = False
    """Whether it is for admins of the tenant 0 alone."""


CASES = {
    "submit_job": Case("POST", "/openapi/jobs", body="job"),
    "submit_jobs": Case("POST", "/openapi/jobs/batch", body="batch"),
    "get_job": Case("GET", "/openapi/jobs/{jobId}"),
    "list_jobs": Case("GET", "/openapi/jobs"),
    "get_job_executions": Case("GET", "/openapi/jobs/{jobId}/executions"),
    "get_job_children": Case("GET", "/openapi/jobs/{scheduleId}/children"),
    "get_job_skips": Case("GET", "/openapi/jobs/{scheduleId}/skips"),
    "get_job_backfills": Case("GET", "/openapi/jobs/{scheduleId}/backfills"),
    "get_job_callbacks": Case("GET", "/openapi/jobs/{endedId}/callbacks"),
    "get_job_events": Case("GET", "/openapi/jobs/{endedId}/events"),
    "get_execution_logs": Case("GET", "/openapi/executions/{executionId}/logs"),
    "explain_job": Case("GET", "/openapi/jobs/{jobId}/explain"),
    "get_workers": Case("GET", "/openapi/workers"),
    "get_handlers": Case("GET", "/openapi/handlers"),
    "preview_cron": Case("GET", "/openapi/cron/preview", query={"expr": "* * * * *"}),
    "list_bulk_operations": Case("GET", "/openapi/bulk"),
    "get_bulk_operation": Case("GET", "/openapi/bulk/{operationId}"),
    "pause_job": Case("POST", "/openapi/jobs/{jobId}/pause"),
    "resume_job": Case("POST", "/openapi/jobs/{jobId}/resume"),
    "trigger_job": Case("POST", "/openapi/jobs/{jobId}/trigger"),
    "change_job": Case(
        "PATCH", "/openapi/jobs/{jobId}", body={"priority": 7}, headers={"If-Match": "*"}
    ),
    "backfill_jobs": Case("POST", "/openapi/jobs/{scheduleId}/backfill", body=RANGE),
    "redeliver_callback": Case("POST", "/openapi/callbacks/{deliveryId}/redeliver"),
    "redeliver_callbacks": Case("POST", "/openapi/jobs/{endedId}/callbacks/redeliver"),
    "get_webhook_secret": Case("GET", "/openapi/webhook-secret"),
    "set_webhook_secret": Case("PUT", "/openapi/webhook-secret", body={}),
    "rotate_webhook_secret": Case("POST", "/openapi/webhook-secret/rotate", body={}),
    "forget_webhook_secret": Case("DELETE", "/openapi/webhook-secret"),
    "get_egress_allow": Case("GET", "/openapi/egress-allow"),
    "set_egress_allow": Case("PUT", "/openapi/egress-allow", body={"networks": None}),
    "get_counts": Case("GET", "/openapi/counts"),
    "get_retention": Case("GET", "/openapi/retention"),
    "put_retention": Case("PUT", "/openapi/retention", body={"failedDays": 7}),
    "drain_worker": Case("POST", "/openapi/workers/{workerId}/drain", by_platform=True),
    "submit_bulk": Case(
        "POST", "/openapi/bulk", body={"action": "pause", "filter": {"handler": "none"}}
    ),
    "cancel_bulk_operation": Case("POST", "/openapi/bulk/{operationId}/cancel"),
    "cancel_job": Case("POST", "/openapi/jobs/{jobId}/cancel"),
    "retry_job": Case("POST", "/openapi/jobs/{jobId}/retry"),
    "create_key": Case("POST", "/openapi/keys", body={"name": "another"}),
    "list_keys": Case("GET", "/openapi/keys"),
    "get_key": Case("GET", "/openapi/keys/{keyId}"),
    "rotate_key": Case("POST", "/openapi/keys/{keyId}/rotate"),
    "revoke_key": Case("DELETE", "/openapi/keys/{keyId}"),
    "create_tenant": Case("POST", "/openapi/tenants", body={"name": "t"}, by_platform=True),
    "list_tenants": Case("GET", "/openapi/tenants"),
    "get_tenant": Case("GET", "/openapi/tenants/{tenantId}"),
    "change_tenant": Case(
        "PATCH", "/openapi/tenants/{tenantId}", body={"name": "u"}, by_platform=True
    ),
    "list_audit": Case("GET", "/openapi/audit"),
}


@dataclass
class Tenant:
    """A tenant with a key of each role, and a thing of each kind."""

    tenant_id: int
    keys: dict[Role, str] = field(default_factory=dict)
    things: dict[str, Any] = field(default_factory=dict)

    def bearer(self, role: Role) -> dict[str, str]:
        """Return the header of its key of this role."""
        return {"Authorization": f"Bearer {self.keys[role]}"}


async def made(api: Door, path: str, body: Any, headers: dict[str, str] = ROOT) -> dict[str, Any]:
    answer = await api.client.post(path, json=body, headers=headers)
    assert answer.status_code in (200, 201, 202), answer.text
    document: dict[str, Any] = answer.json()
    return document


async def new_tenant(api: Door, name: str) -> Tenant:
    """Make a tenant with everything that one may have."""
    tenant = Tenant((await made(api, "/openapi/tenants", {"name": name}))["tenantId"])
    for role in Role:
        body = {"name": f"{name}-{role}", "roles": [role], "tenantId": tenant.tenant_id}
        key = await made(api, "/openapi/keys", body)
        tenant.keys[role] = key["key"]
    other = {"name": f"{name}-spare", "tenantId": tenant.tenant_id}
    admin = tenant.bearer(Role.ADMIN)
    run = await running_job(
        api.database, tenant_id=tenant.tenant_id, callback_url="http://127.0.0.1:9/hook"
    )
    await settled(api.database, ending(run, ExecutionStatus.SUCCEEDED, result="1"))
    callbacks = await api.client.get(f"/openapi/jobs/{run.job_id}/callbacks", headers=admin)
    operation = {"action": "pause", "filter": {"handler": "none"}}
    schedule = body_of(cronExpr="0 3 * * *", jobName=f"a schedule of {name}")
    tenant.things = {
        "jobId": (await made(api, "/openapi/jobs", body_of(delayMs=86_400_000), admin))["jobId"],
        "scheduleId": (await made(api, "/openapi/jobs", schedule, admin))["jobId"],
        "endedId": run.job_id,
        "executionId": run.execution_id,
        "deliveryId": callbacks.json()["items"][0]["deliveryId"],
        "operationId": (await made(api, "/openapi/bulk", operation, admin))["operationId"],
        "keyId": (await made(api, "/openapi/keys", other))["keyId"],
        "tenantId": tenant.tenant_id,
        "workerId": "nobody%23boot",
    }
    return tenant


@asynccontextmanager
async def two_tenants(engine: Engine) -> AsyncIterator[tuple[Door, Tenant, Tenant]]:
    """Open a dispatcher whose database has two tenants with something of everything."""
    async with door(
        migrated(engine),
        api_keys=f"root:{ROOT_KEY}",
        most_failed_keys=100_000,
        secret_keys=Fernet.generate_key().decode(),
    ) as api:
        yield api, await new_tenant(api, "one"), await new_tenant(api, "two")


async def ask(
    api: Door, case: Case, things: dict[str, Any], headers: dict[str, str]
) -> httpx.Response:
    body = case.body
    if body == "job":
        body = body_of(delayMs=86_400_000)
    elif body == "batch":
        body = {"jobs": [body_of(delayMs=86_400_000)]}
    return await api.client.request(
        case.method,
        case.path.format(**things),
        json=body,
        params=case.query,
        headers=case.headers | headers,
    )


def test_every_route_of_callers_has_a_role_and_a_case() -> None:
    names = set(routes_of_callers(create_app(Settings.model_construct())))
    assert names == set(NEEDED) == set(CASES)


def test_a_route_without_a_role_keeps_the_application_from_starting() -> None:
    app = create_app(Settings.model_construct())

    @app.get("/openapi/new")
    async def new_route() -> None: ...

    with pytest.raises(RouteWithoutRole, match="new_route"):
        require_roles(app)


async def test_every_route_asks_for_a_key_a_role_and_the_own_tenant(
    sqlite_engine: Engine,
) -> None:
    async with two_tenants(sqlite_engine) as (api, one, two):
        for name, case in CASES.items():
            await check_route(api, name, case, one, two)


async def check_route(api: Door, name: str, case: Case, one: Tenant, two: Tenant) -> None:
    """Try one route with every key, the destructive right one last."""
    bad: tuple[dict[str, str], ...] = (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Bearer {one.keys[Role.ADMIN][:-1]}_"},
        {"Authorization": one.keys[Role.ADMIN]},
    )
    for headers in bad:
        answer = await ask(api, case, one.things, headers)
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized"), name
    for role in Role:
        allowed = NEEDED[name] in INCLUDES[role]
        if not allowed:
            answer = await ask(api, case, one.things, one.bearer(role))
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), (name, role)
            assert answer.json()["needs"] == NEEDED[name]
        elif "{" in case.path:
            answer = await ask(api, case, one.things, two.bearer(role))
            if case.by_platform:
                assert answer.status_code == 403, (name, role)
            else:
                assert answer.status_code == 404, (name, role, answer.text)
                assert answer.json()["code"].endswith("_not_found"), (name, role)
    for role in Role:
        if NEEDED[name] not in INCLUDES[role]:
            continue
        answer = await ask(api, case, one.things, one.bearer(role))
        if case.by_platform:
            assert answer.status_code == 403, (name, role)
        else:
            assert answer.status_code in (200, 201, 202, 204, 409), (name, role, answer.text)
    if case.by_platform:
        answer = await ask(api, case, one.things, ROOT)
        assert answer.status_code in (200, 201, 404), (name, answer.text)


async def listed_by(api: Door, key: dict[str, str], path: str, name: str, **query: Any) -> set[Any]:
    """Return a field of all that a list shows to a key."""
    answer = await api.client.get(path, headers=key, params={"limit": 200, **query})
    assert answer.status_code == 200, answer.text
    return {one[name] for one in answer.json()["items"]}


async def test_lists_show_what_is_the_tenants_own_alone(engine: Engine) -> None:
    async with two_tenants(engine) as (api, one, two):
        for tenant, other in ((one, two), (two, one)):
            key = tenant.bearer(Role.ADMIN)

            listed = partial(listed_by, api, key)

            own_jobs = {tenant.things[name] for name in ("jobId", "scheduleId", "endedId")}
            assert await listed("/openapi/jobs", "jobId") == own_jobs
            for narrowed, text in (("handler", "echo"), ("namePrefix", "a ")):
                assert await listed("/openapi/jobs", "jobId", **{narrowed: text}) <= own_jobs
            past = {"finishedFrom": "2020-01-01T00:00:00Z"}
            assert await listed("/openapi/jobs", "jobId", **past) == {tenant.things["endedId"]}
            assert await listed("/openapi/bulk", "operationId") == {tenant.things["operationId"]}
            assert await listed("/openapi/tenants", "tenantId") == {tenant.tenant_id}
            assert await listed("/openapi/keys", "tenantId") == {tenant.tenant_id}
            assert await listed("/openapi/keys", "keyId", tenantId=other.tenant_id) == set()
            assert await listed("/openapi/audit", "tenantId") == {tenant.tenant_id}
            assert await listed("/openapi/audit", "entryId", tenantId=other.tenant_id) == set()
            for name in ("jobId", "deliveryId", "executionId", "operationId"):
                assert tenant.things[name] != other.things[name]


async def test_one_request_id_is_one_job_in_each_tenant(engine: Engine) -> None:
    async with two_tenants(engine) as (api, one, two):
        body = body_of("order-1", delayMs=86_400_000)
        first = await made(api, "/openapi/jobs", body, one.bearer(Role.SUBMIT))
        second = await made(api, "/openapi/jobs", body, two.bearer(Role.SUBMIT))
        assert first["jobId"] != second["jobId"]
        again = await made(api, "/openapi/jobs", body, one.bearer(Role.SUBMIT))
        assert again["jobId"] == first["jobId"]
        bulk = {"action": "cancel", "filter": {"handler": "echo"}, "dryRun": True}
        counted = await made(api, "/openapi/bulk", bulk, two.bearer(Role.OPERATE))
        assert counted["matched"] == 3  # its own alone: two that wait, and the schedule


async def test_another_tenants_jobs_are_not_counted_by_explain(engine: Engine) -> None:
    async with two_tenants(engine) as (api, one, two):
        for number in range(5):
            body = body_of(f"early-{number}", priority=9)
            await made(api, "/openapi/jobs", body, one.bearer(Role.SUBMIT))
        await api.beat(capacity=0)
        own = await made(api, "/openapi/jobs", body_of("mine"), two.bearer(Role.SUBMIT))
        answer = await api.client.get(
            f"/openapi/jobs/{own['jobId']}/explain", headers=two.bearer(Role.READ)
        )
        details = [reason["details"] for reason in answer.json()["reasons"]]
        assert [one["ahead"] for one in details if "ahead" in one] == [0], answer.text


@pytest.mark.parametrize("name", ["get_job", "submit_job", "cancel_job", "list_keys"])
async def test_the_matrix_holds_over_mariadb(mariadb_engine: Engine, name: str) -> None:
    async with two_tenants(mariadb_engine) as (api, one, two):
        await check_route(api, name, CASES[name], one, two)
