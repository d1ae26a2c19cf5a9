"""The audit log: every change by a person or key is on record, in the transaction of the change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from cryptography.fernet import Fernet

from app.lifecycle import audit
from app.lifecycle.audit import without_secrets
from app.lifecycle.states import ExecutionStatus
from tests.integration.app.rig import (
    Door,
    body_of,
    change,
    door,
    ending,
    rows_of,
    running_job,
    settled,
    value_of,
)
from tests.integration.app.test_api import counted
from tests.support.engines import Engine

ROOT_KEY = "root-key-of-tests"
ROOT = {"Authorization": f"Bearer {ROOT_KEY}", "X-Request-Id": "req-1"}
RANGE = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-02T00:00:00Z"}


@pytest_asyncio.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    """A dispatcher with one configured key."""
    async with door(migrated_engine, api_keys=f"root:{ROOT_KEY}") as opened:
        yield opened


async def do(api: Door, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
    return await api.client.request(method, path, json=body, headers=ROOT | headers)


async def submitted(api: Door, **fields: Any) -> int:
    answer = await do(api, "POST", "/openapi/jobs", body_of(**fields))
    assert answer.status_code == 202, answer.text
    return int(answer.json()["jobId"])


async def entries(api: Door, **query: Any) -> list[dict[str, Any]]:
    """Return the log, oldest first."""
    answer = await api.client.get("/openapi/audit", params=query, headers=ROOT)
    assert answer.status_code == 200, answer.text
    return list(reversed(answer.json()["items"]))


async def test_a_change_of_webhook_secrets_tells_what_signed_before_and_after(
    migrated_engine: Engine,
) -> None:
    sealing = {"secret_keys": Fernet.generate_key().decode()}
    async with door(migrated_engine, api_keys=f"root:{ROOT_KEY}", **sealing) as api:
        path = "/openapi/webhook-secret"
        answers = [
            await do(api, "PUT", path, {}),
            await do(api, "POST", f"{path}/rotate", {"kind": "ed25519"}),
            await do(api, "PUT", path, {}),
            await do(api, "DELETE", path),
        ]
        assert [answer.status_code for answer in answers] == [200] * 4, answers
        shown = [[one["masked"] or one["publicKey"] for one in a.json()["items"]] for a in answers]
        found = [one for one in await entries(api) if one["action"].startswith("webhook_secret.")]
        assert [one["after"]["signs"] for one in found] == shown
        assert [one["before"]["signs"] for one in found] == [[], *shown[:-1]]
        secrets = [one["secret"] for a in answers for one in a.json()["items"] if one["secret"]]
        assert len(secrets) == 3
        assert not [one for one in secrets if one in str(found)]


async def test_each_verb_of_a_job_is_one_entry(api: Door) -> None:
    job_id = await submitted(api, delayMs=86_400_000)
    path = f"/openapi/jobs/{job_id}"
    assert await entries(api) == []  # a submission is its own record
    changes = {
        "priority": 9,
        "params": {"card": "4111-1111"},
        "callbackUrl": "https://hooks.test/a?token=hidden",
        "callbackEvents": ["failed", "started"],
        "callbackHeaders": {"X-Team": "4111-2222"},
    }
    steps: list[tuple[str, str, Any, dict[str, str]]] = [
        ("POST", "/pause", None, {}),
        ("POST", "/resume", None, {}),
        ("PATCH", "", changes, {"If-Match": "*"}),
        ("POST", "/trigger", None, {}),
        ("POST", "/cancel", None, {}),
        ("POST", "/cancel", None, {}),  # it is so already
        ("POST", "/pause", None, {}),  # it is not possible
        ("POST", "/retry", None, {}),
    ]
    for method, verb, body, headers in steps:
        await do(api, method, path + verb, body, **headers)
    told = await entries(api, target=f"job:{job_id}")
    assert [one["action"] for one in told] == [
        *("job.pause", "job.resume", "job.change", "job.trigger", "job.cancel", "job.retry"),
    ]
    pause, _, revise, trigger, cancel, retry = told
    assert (pause["before"], pause["after"]) == ({"status": "WAITING"}, {"status": "PAUSED"})
    assert revise["before"] == {"priority": 5, "callbackUrl": None, "callbackEvents": None}
    assert revise["after"] == {
        "priority": 9,
        "callbackUrl": "https://hooks.test/a?...",
        "callbackEvents": ["failed", "started"],
        "callbackHeaders": "(changed)",
        "params": "(changed)",
    }
    assert trigger["before"].keys() == trigger["after"].keys() == {"nextTriggerTime"}
    assert cancel["after"] == {"status": "CANCELLED"}
    assert retry["before"]["status"] == "CANCELLED"
    for one in told:
        assert (one["actor"], one["actorKeyId"], one["tenantId"]) == ("root", None, 0)
        assert (one["requestId"], one["address"]) == ("req-1", "127.0.0.1")
    stored = str(await rows_of(api.database, "SELECT * FROM audit_log"))
    assert "4111" not in stored
    assert "hidden" not in stored
    assert ROOT_KEY not in stored


async def test_what_is_done_to_schedules_callbacks_and_many_jobs_is_on_record(api: Door) -> None:
    schedule = await submitted(api, cronExpr="0 3 * * *")
    path = f"/openapi/jobs/{schedule}"
    child = (await do(api, "POST", f"{path}/trigger")).json()["jobId"]
    await do(api, "PATCH", path, {"cronExpr": "0 4 * * *"}, **{"If-Match": "*"})
    await do(api, "POST", f"{path}/backfill", {**RANGE, "dryRun": True})
    backfill = (await do(api, "POST", f"{path}/backfill", RANGE)).json()["backfillId"]
    trigger, revise, filled = await entries(api, target=f"job:{schedule}")
    assert (trigger["action"], trigger["after"]) == ("job.trigger", {"childJobId": child})
    assert (revise["before"]["cronExpr"], revise["after"]["cronExpr"]) == ("0 3 * * *", "0 4 * * *")
    assert (filled["action"], filled["after"]["backfillId"]) == ("job.backfill", backfill)

    bulk = {"action": "pause", "filter": {"handler": "none"}, "clientRequestId": "bulk-1"}
    operation = (await do(api, "POST", "/openapi/bulk", bulk)).json()["operationId"]
    await do(api, "POST", "/openapi/bulk", bulk)  # a repeat
    await do(api, "POST", "/openapi/bulk", {**bulk, "dryRun": True})
    for _ in range(2):
        await do(api, "POST", f"/openapi/bulk/{operation}/cancel")
    asked, ended = await entries(api, target=f"bulk:{operation}")
    assert (asked["action"], asked["after"]["filter"]) == ("bulk.pause", {"handler": "none"})
    assert (ended["action"], ended["after"]) == ("bulk.cancelOperation", {"status": "CANCELLED"})

    run = await running_job(api.database, callback_url="http://127.0.0.1:9/hook")
    await settled(api.database, ending(run, ExecutionStatus.SUCCEEDED, result="1"))
    callbacks = (await do(api, "GET", f"/openapi/jobs/{run.job_id}/callbacks")).json()["items"]
    delivery = callbacks[0]["deliveryId"]
    await do(api, "POST", f"/openapi/callbacks/{delivery}/redeliver")
    (again,) = await entries(api, target=f"callback:{delivery}")
    assert (again["action"], again["after"]["jobId"]) == ("callback.redeliver", run.job_id)

    tenant = (await do(api, "POST", "/openapi/tenants", {"name": "one"})).json()["tenantId"]
    await do(api, "PATCH", f"/openapi/tenants/{tenant}", {"name": "two", "disabled": True})
    await do(api, "PATCH", f"/openapi/tenants/{tenant}", {"name": "two"})  # it is so already
    made, renamed = await entries(api, target=f"tenant:{tenant}")
    assert (made["action"], made["tenantId"]) == ("tenant.create", tenant)
    assert renamed["before"] == {"name": "one", "disabled": False}
    assert renamed["after"] == {"name": "two", "disabled": True}


async def test_a_change_that_cannot_be_put_on_record_is_not_made(api: Door) -> None:
    job_id = await submitted(api, delayMs=86_400_000)
    await change(api.database, "DROP TABLE audit_log")
    answer = await do(api, "POST", f"/openapi/jobs/{job_id}/cancel")
    assert answer.status_code >= 500
    assert await value_of(api.database, "SELECT status FROM job_info") == 0
    # A submission does not need it.
    assert await submitted(api) > job_id


async def test_a_verb_costs_one_statement_more_and_a_submission_none(api: Door) -> None:
    await submitted(api, delayMs=86_400_000)
    with counted(api.database) as statements:
        job_id = await submitted(api, delayMs=86_400_000)
    assert [one for one in statements if "audit_log" in one or "api_key" in one] == []
    with counted(api.database) as statements:
        await do(api, "POST", f"/openapi/jobs/{job_id}/pause")
    assert len([one for one in statements if "audit_log" in one]) == 1
    assert [one for one in statements if "api_key" in one] == []


async def test_the_log_is_narrowed_and_paged(api: Door) -> None:
    ids = [await submitted(api, delayMs=86_400_000) for _ in range(5)]
    for job_id in ids:
        await do(api, "POST", f"/openapi/jobs/{job_id}/pause")
        await do(api, "POST", f"/openapi/jobs/{job_id}/resume")
    assert len(await entries(api)) == 10
    paused = await entries(api, action="job.pause")
    assert [one["target"] for one in paused] == [f"job:{job_id}" for job_id in ids]
    assert len(await entries(api, actor="root")) == 10
    assert await entries(api, actor="nobody") == []
    assert await entries(api, tenantId=7) == []
    first = paused[0]["at"]
    assert await entries(api, to=first) == []
    assert len(await entries(api, **{"from": first})) == 10

    seen: list[int] = []
    cursor: str | None = None
    while True:
        query: dict[str, Any] = {"limit": 3, "action": "job.pause"} | (
            {} if cursor is None else {"cursor": cursor}
        )
        page = (await api.client.get("/openapi/audit", params=query, headers=ROOT)).json()
        seen += [one["entryId"] for one in page["items"]]
        if (cursor := page["nextCursor"]) is None:
            break
    assert seen == [one["entryId"] for one in reversed(paused)]
    for wrong in ("from=yesterday", "cursor=x", "limit=0"):
        bad = await api.client.get(f"/openapi/audit?{wrong}", headers=ROOT)
        assert bad.status_code == 422


async def test_a_page_looks_through_a_bounded_number_of_entries(
    api: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "WALK_ROWS", 4)
    job_id = await submitted(api, delayMs=86_400_000)
    await do(api, "PATCH", f"/openapi/jobs/{job_id}", {"priority": 1}, **{"If-Match": "*"})
    for verb in ("pause", "resume") * 4:
        await do(api, "POST", f"/openapi/jobs/{job_id}/{verb}")
    found: list[str] = []
    cursor: str | None = None
    pages = 0
    while pages < 9:
        query = {"action": "job.change"} | ({} if cursor is None else {"cursor": cursor})
        page = (await api.client.get("/openapi/audit", params=query, headers=ROOT)).json()
        found += [one["action"] for one in page["items"]]
        pages += 1
        if (cursor := page["nextCursor"]) is None:
            break
    assert found == ["job.change"]
    assert pages == 3


async def test_old_entries_leave(api: Door) -> None:
    job_id = await submitted(api, delayMs=86_400_000)
    await do(api, "POST", f"/openapi/jobs/{job_id}/pause")
    await do(api, "POST", f"/openapi/jobs/{job_id}/resume")
    year = 366 * 24 * 3600 * 1000
    await change(api.database, f"UPDATE audit_log SET at = at - {year} WHERE id = 1")
    retention = api.parts.retention
    assert await retention.prune_audit(await api.database.now()) == 1
    assert [one["action"] for one in await entries(api)] == ["job.resume"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://a.test/x", "https://a.test/x"),
        ("https://u:p@a.test:8443/x?k=v#f", "https://a.test:8443/x?..."),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
