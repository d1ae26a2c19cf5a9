"""What callers say of their callbacks: events, headers, secrets, networks; and who has a turn."""

from __future__ import annotations

import asyncio
import base64
import json
import sqlite3
from collections.abc import AsyncIterator
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from cryptography.fernet import Fernet
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.fleet import dress
from app.lifecycle.lists import JobFilter, next_matching
from app.lifecycle.moves.deliver import (
    due_hosts_sql,
    due_sql,
    give_back,
    note_tries,
    read_owed_hosts,
    take_due,
)
from app.lifecycle.moves.ending import OwedDelivery
from app.lifecycle.moves.guard import Asked
from app.lifecycle.moves.redeliver import redeliver_failed
from app.lifecycle.moves.tell_start import tell_starts
from app.lifecycle.states import ExecutionStatus, JobStatus
from app.lifecycle.webhook_secrets import NewSecret, rotate_secret, set_secret
from app.plumbing.database import Database
from app.plumbing.sealed import BadSecretKeys, CannotOpen, NoSecretKeys, Sealer
from oncue.protocol import Delivery, DeliveryResult, OfferedHandler
from tests.integration.app.rig import (
    TOKEN,
    WORKER,
    Door,
    beat_of,
    body_of,
    change,
    claimed,
    door,
    ending,
    insert,
    new_term,
    outcome_of,
    rows_of,
    running_job,
    settled,
    value_of,
)
from tests.integration.app.test_api import counted
from tests.support.engines import Engine, migrated

URL = "http://127.0.0.1:9/hook"
KEY = Fernet.generate_key().decode()
HIDDEN = "Bearer very-secret-value"
SCHEDULE = (0.0, 5.0, 15.0)


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    """An API over each engine that can keep secrets."""
    async with door(migrated_engine, secret_keys=KEY) as opened:
        yield opened


@pytest.fixture
async def bare_api(sqlite_engine: Engine) -> AsyncIterator[Door]:
    """An API that has no key to keep secrets with."""
    async with door(migrated(sqlite_engine)) as opened:
        yield opened


async def bodies_of(database: Database) -> list[dict[str, Any]]:
    """The bodies of all callbacks, in the order they were written."""
    rows = await rows_of(database, "SELECT body FROM callback_delivery ORDER BY id")
    return [json.loads(row["body"]) for row in rows]


async def dressed(api: Door, **fields: Any) -> Delivery:
    """What a worker would get of a callback."""
    owed = OwedDelivery("id", 1, URL, "{}", 0, **fields)
    (made,), closed = await api.parts.dresser.dress([owed])
    assert not closed
    return made


async def test_each_event_that_is_asked_for_is_told_once_in_a_growing_sequence(api: Door) -> None:
    database = api.database
    events = "started,retrying,failed"
    run = await running_job(database, callback_url=URL, callback_events=events, max_retry=1)
    for _ in range(2):
        await database.write(
            lambda connection: tell_starts(connection, database, {run.job_id: run.execution_id})
        )
    await settled(database, ending(run, ExecutionStatus.FAILED, error_code="e", started_at=1))
    await change(database, "UPDATE job_info SET next_trigger_time = 1")
    (again,) = await claimed(database, [run.job_id], term=await new_term(database))
    # Its start was not told when it was accepted: its end owes that too.
    await settled(database, ending(again, ExecutionStatus.FAILED, error_code="e", started_at=1))
    told = await bodies_of(database)
    assert [one["type"] for one in told] == [
        *("job.started", "job.retrying", "job.started", "job.failed")
    ]
    assert [one["data"]["status"] for one in told] == ["RUNNING", "WAITING", "RUNNING", "FAILED"]
    assert [one["data"]["attempt"] for one in told] == [1, 1, 2, 2]
    sequence = [one["data"]["sequence"] for one in told]
    assert sequence == sorted(set(sequence))
    assert told[0]["data"]["finishedAt"] is None
    assert told[1]["data"]["nextTriggerTime"] > told[1]["timestamp"]
    assert "nextTriggerTime" not in told[3]["data"]
    assert all("nominalTime" not in one["data"] for one in told)


async def test_a_run_that_is_given_back_tells_nothing(api: Door) -> None:
    run = await running_job(
        api.database, callback_url=URL, callback_events="started,retrying,failed"
    )
    await settled(api.database, ending(run, ExecutionStatus.RETURNED))
    assert await bodies_of(api.database) == []


@pytest.mark.parametrize("events", [["cancelled"], ["started", "succeeded"]])
async def test_an_end_that_is_not_asked_for_owes_nothing(api: Door, events: list[str]) -> None:
    job_id = await api.submitted(callbackUrl=URL, callbackEvents=events)
    job = (await api.client.get(f"/openapi/jobs/{job_id}")).json()
    assert sorted(job["callbackEvents"]) == sorted(events)
    await api.client.post(f"/openapi/jobs/{job_id}/cancel")
    owed = [one["type"] for one in await bodies_of(api.database)]
    assert owed == (["job.cancelled"] if "cancelled" in events else [])


async def test_jobs_that_name_no_events_tell_their_ends(api: Door) -> None:
    job_id = await api.submitted(callbackUrl=URL)
    job = (await api.client.get(f"/openapi/jobs/{job_id}")).json()
    assert job["callbackEvents"] == ["succeeded", "failed", "cancelled"]
    assert job["callbackHeaders"] is None
    assert await value_of(api.database, "SELECT callback_events FROM job_info") is None


async def test_secret_headers_are_sent_and_never_shown_or_stored_in_clear(api: Door) -> None:
    headers = {"X-Team": "billing", "Authorization": {"secret": HIDDEN}}
    job_id = await api.submitted(callbackUrl=URL, callbackHeaders=headers)
    shown = {"X-Team": "billing", "Authorization": {"secret": "********"}}
    for path in (f"/openapi/jobs/{job_id}", "/openapi/jobs"):
        answer = await api.client.get(path)
        assert HIDDEN not in answer.text
        found = answer.json()
        assert (found["items"][0] if "items" in found else found)["callbackHeaders"] == shown
    (run,) = await claimed(api.database, [job_id], term=await new_term(api.database))
    told = await api.report(outcome_of(run, 1, status="succeeded"))
    (delivery,) = told["deliveries"]
    assert delivery["headers"] == {"X-Team": "billing", "Authorization": HIDDEN}
    for table in ("job_info", "callback_delivery"):
        assert HIDDEN not in json.dumps(await rows_of(api.database, f"SELECT * FROM {table}"))


async def test_children_of_a_schedule_call_back_as_it_was_told(api: Door) -> None:
    schedule = await api.submitted(
        callbackUrl=URL,
        intervalMs=3_600_000,
        callbackEvents=["failed"],
        callbackHeaders={"X-Team": {"secret": HIDDEN}},
    )
    child = (await api.client.post(f"/openapi/jobs/{schedule}/trigger")).json()
    assert child["parentId"] == schedule
    assert child["callbackEvents"] == ["failed"]
    assert child["callbackHeaders"] == {"X-Team": {"secret": "********"}}


async def test_events_and_headers_of_a_waiting_job_can_be_changed(api: Door) -> None:
    job_id = await api.submitted(callbackUrl=URL, delayMs=1_000_000)
    changed = await api.client.patch(
        f"/openapi/jobs/{job_id}",
        json={"callbackEvents": ["started"], "callbackHeaders": {"X-A": {"secret": HIDDEN}}},
        headers={"If-Match": "*"},
    )
    assert changed.status_code == 200, changed.text
    assert changed.json()["callbackEvents"] == ["started"]
    assert changed.json()["callbackHeaders"] == {"X-A": {"secret": "********"}}


@pytest.mark.parametrize("schedule", [False, True])
async def test_secret_headers_do_not_follow_a_callback_to_another_receiver(
    api: Door, schedule: bool
) -> None:
    when = {"intervalMs": 3_600_000} if schedule else {"delayMs": 1_000_000}
    headers = {"X-Team": "billing", "Authorization": {"secret": HIDDEN}}
    job_id = await api.submitted(callbackUrl=URL, callbackHeaders=headers, **when)
    path = f"/openapi/jobs/{job_id}"

    async def patched(**fields: Any) -> httpx.Response:
        return await api.client.patch(path, json=fields, headers={"If-Match": "*"})

    assert (await patched(callbackUrl="http://127.0.0.1:9/other")).status_code == 200
    for url in ("http://127.0.0.1:8/hook", "https://127.0.0.1:9/hook", "http://example.com/"):
        refused = await patched(callbackUrl=url)
        assert refused.status_code == 422, refused.text
        assert refused.json()["errors"][0]["pointer"] == "/callbackHeaders"
    moved = await patched(callbackUrl="http://example.com/", callbackHeaders={"X-Team": "other"})
    assert moved.json()["callbackUrl"] == "http://example.com/"
    # Nothing of it is secret now.
    assert (await patched(callbackUrl=URL)).status_code == 200


@pytest.mark.parametrize("marked_by", ["job", "handler", "dead handler"])
async def test_a_secret_result_goes_to_another_receiver_by_an_admins_word_alone(
    migrated_engine: Engine, marked_by: str
) -> None:
    async with door(migrated_engine, secret_keys=KEY, api_keys="root:root-key") as api:
        root = {"Authorization": "Bearer root-key"}
        made = await api.client.post(
            "/openapi/keys", json={"name": "ops", "roles": ["operate", "submit"]}, headers=root
        )
        own = {"Authorization": f"Bearer {made.json()['key']}", "If-Match": "*"}
        if marked_by != "job":
            told = beat_of("w").model_copy(
                update={"handlers": [OfferedHandler(name="echo", secret_result=True)]}
            )
            await api.client.post(
                "/internal/heartbeat",
                content=told.model_dump_json(by_alias=True),
                headers={"Authorization": f"Bearer {TOKEN}"},
            )
        if marked_by == "dead handler":
            await change(api.database, "UPDATE worker_node SET state = 'DOWN'")
        body = body_of(callbackUrl=URL, secretResult=marked_by == "job", delayMs=1_000_000)
        job = (await api.client.post("/openapi/jobs", json=body, headers=own)).json()
        path, elsewhere = f"/openapi/jobs/{job['jobId']}", {"callbackUrl": "http://example.com/"}
        refused = await api.client.patch(path, json=elsewhere, headers=own)
        assert (refused.status_code, refused.json()["needs"]) == (403, "admin")
        same = await api.client.patch(path, json={"callbackUrl": f"{URL}/2"}, headers=own)
        assert same.status_code == 200, same.text
        done = await api.client.patch(path, json=elsewhere, headers=root | {"If-Match": "*"})
        assert done.json()["callbackUrl"] == "http://example.com/"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "a"},
        {"webhook-id": "a"},
        {"Content-Length": "1"},
        {"Transfer-Encoding": "chunked"},
        {"Proxy-Authorization": "a"},
        {"X-A": "a\r\nX-B: b"},
        {"X-A": ""},
        {"X-A": "é"},
        {"X A": "a"},
        {"X-A": "a", "x-a": "b"},
        {"X-A": {"secret": "a", "more": 1}},
        {"X-A": {"secret": "a\nb"}},
        {"X-A": "a" * 2049},
        {f"X-{number}": "a" * 1000 for number in range(5)},
        {f"X-{number}": "a" for number in range(17)},
    ],
)
async def test_headers_that_are_not_a_callers_to_set_are_refused(
    bare_api: Door, headers: dict[str, Any]
) -> None:
    answer = await bare_api.submit(callbackUrl=URL, callbackHeaders=headers)
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed")
    assert "/callbackHeaders" in answer.json()["errors"][0]["pointer"]


@pytest.mark.parametrize(
    "fields",
    [
        {"callbackEvents": ["started"]},
        {"callbackHeaders": {"X-A": "a"}},
        {"callbackUrl": URL, "callbackEvents": []},
        {"callbackUrl": URL, "callbackEvents": ["ended"]},
        {"callbackUrl": URL, "callbackEvents": ["failed", "failed"]},
    ],
)
async def test_events_and_headers_go_with_a_url(bare_api: Door, fields: dict[str, Any]) -> None:
    answer = await bare_api.submit(**fields)
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed")


async def test_without_a_key_secrets_are_refused_with_what_to_do(bare_api: Door) -> None:
    headers = {"X-A": {"secret": HIDDEN}}
    answers = [
        await bare_api.submit(callbackUrl=URL, callbackHeaders=headers),
        await bare_api.client.put("/openapi/webhook-secret"),
        await bare_api.client.post("/openapi/webhook-secret/rotate"),
    ]
    for answer in answers:
        assert (answer.status_code, answer.json()["code"]) == (422, "secret_keys_missing")
        assert "ONCUE_SECRET_KEYS" in answer.json()["detail"]
        assert HIDDEN not in answer.text


async def test_a_repeat_is_answered_though_the_key_is_gone(sqlite_engine: Engine) -> None:
    engine = migrated(sqlite_engine)
    fields = {"callbackUrl": URL, "callbackHeaders": {"X-A": {"secret": HIDDEN}}}
    async with door(engine, secret_keys=KEY) as api:
        first = await api.submit("same", **fields)
    async with door(engine) as api:
        again = await api.submit("same", **fields)
    assert (first.status_code, again.status_code) == (202, 200)
    assert first.json()["jobId"] == again.json()["jobId"]


async def test_a_secret_is_shown_once_and_rotated_with_an_overlap(api: Door) -> None:
    assert (await dressed(api)).signing is None
    first = (await api.client.put("/openapi/webhook-secret")).json()["items"]
    (told,) = first
    secret = told["secret"]
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
    looked = await api.client.get("/openapi/webhook-secret")
    assert secret not in looked.text
    assert looked.json()["items"][0]["masked"] == f"whsec_********{secret[-4:]}"
    assert (await dressed(api)).signing == [secret]
    rotated = await api.client.post(
        "/openapi/webhook-secret/rotate", json={"kind": "ed25519", "overlapSeconds": 3600}
    )
    new, old = rotated.json()["items"]
    assert (new["kind"], new["expiresAt"], old["secret"]) == ("ed25519", None, None)
    ends = datetime.fromisoformat(old["expiresAt"]) - datetime.fromisoformat(new["createdAt"])
    assert ends.total_seconds() == 3600
    assert new["publicKey"].startswith("whpk_")
    assert (await dressed(api)).signing == [new["secret"], secret]
    await change(api.database, "UPDATE webhook_secret SET expires_at = 1 WHERE expires_at > 1")
    api.parts.dresser.forget(0)
    assert (await dressed(api)).signing == [new["secret"]]
    assert (await api.client.delete("/openapi/webhook-secret")).json() == {"items": []}
    assert (await dressed(api)).signing is None
    stored = json.dumps(await rows_of(api.database, "SELECT * FROM webhook_secret"))
    assert secret not in stored
    assert new["secret"] not in stored


async def test_a_rotation_is_safe_to_repeat(api: Door) -> None:
    """Its commit may have no answer; what is tried again then must not push the old secret out."""
    database = api.database
    old, new = NewSecret("sealed-old", "old"), NewSecret("sealed-new", "new")
    await database.write(lambda connection: set_secret(connection, database, 0, old))
    for _ in range(2):
        rows = await database.write(
            lambda connection: rotate_secret(connection, database, 0, new, overlap_ms=60_000)
        )
        assert [row["shown"] for row in rows] == ["new", "old"]
        assert rows[0]["expires_at"] is None
        assert rows[1]["expires_at"] is not None


async def test_of_two_rotations_at_once_one_secret_has_no_end(api: Door) -> None:
    database = api.database
    await database.write(
        lambda connection: set_secret(connection, database, 0, NewSecret("sealed", "first"))
    )

    async def rotate(name: str) -> None:
        new = NewSecret(name, name)
        await database.write(
            lambda connection: rotate_secret(connection, database, 0, new, overlap_ms=60_000)
        )

    await asyncio.gather(*map(rotate, "abc"))
    endless = "SELECT COUNT(*) FROM webhook_secret WHERE expires_at IS NULL"
    assert await value_of(database, endless) == 1


async def test_the_operators_secret_signs_beside_a_tenants_first_one(api: Door) -> None:
    given = f"whsec_{base64.b64encode(bytes(range(24))).decode()}"
    answer = await api.client.post("/openapi/webhook-secret/rotate", json={"secret": given})
    assert [one["kind"] for one in answer.json()["items"]] == ["symmetric", "default"]
    assert (await dressed(api)).signing == [given, ""]


@pytest.mark.parametrize(
    "body",
    [
        {"secret": "whsec_short"},
        {"secret": "whsk_AAAA"},
        {"secret": "plain-text-that-is-long-enough"},
        {"secret": "whsec_" + "A" * 44, "kind": "symmetric"},
        {"kind": "rsa"},
    ],
)
async def test_a_secret_that_cannot_sign_is_refused_and_not_repeated(
    api: Door, body: dict[str, Any]
) -> None:
    answer = await api.client.put("/openapi/webhook-secret", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed")
    assert body.get("secret", "whsec_short") not in answer.text


async def test_a_secret_whose_key_is_lost_fails_the_delivery_and_says_so(
    sqlite_engine: Engine,
) -> None:
    engine = migrated(sqlite_engine)
    async with door(engine, secret_keys=KEY) as api:
        await api.client.put("/openapi/webhook-secret")
    async with door(engine, secret_keys=Fernet.generate_key().decode()) as api:
        made, closed = await api.parts.dresser.dress([OwedDelivery("id", 1, URL, "{}")])
        assert (made, [one.delivery_id for one in closed]) == ([], ["id"])


async def test_a_tenants_networks_go_with_its_deliveries(api: Door) -> None:
    assert (await api.client.get("/openapi/egress-allow")).json() == {"networks": None}
    assert (await dressed(api)).egress_allow is None
    answer = await api.client.put("/openapi/egress-allow", json={"networks": ["10.1.0.0/16"]})
    assert answer.json() == {"networks": ["10.1.0.0/16"]}
    assert (await dressed(api)).egress_allow == ["10.1.0.0/16"]
    for refused in (["10.1.0.1/16"], ["x"], None, ["10.0.0.0/8"] * 65):
        body = {} if refused is None else {"networks": refused}
        answer = await api.client.put("/openapi/egress-allow", json=body)
        assert answer.status_code == 422, answer.text


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "10.0.0.1", "[::1]"),
        *("[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "169.254.169.254", "①②⑦.⓪.⓪.①", "0"),
        *("127。0。0。1", "[2002:7f00:1::]", "[fd00:ec2::254]", "127.0.0.1."),
        *("localhost", "LocalHost.", "a.localhost", "ⓛocalhost"),
        *("256.256.256.256", "127.0.0.256", "4294967296", "a..b", "%31%32%37.0.0.1", "[v1.x]"),
        *(".127.0.0.1", "0x", "1.2.3.4.5", "b!", f"{'b' * 64}.example"),
    ],
)
async def test_a_url_that_can_never_be_called_is_refused_at_the_door(
    bare_api: Door, host: str
) -> None:
    await bare_api.beat(delivers=True, egress_allow=["192.168.7.0/24"])
    answer = await bare_api.submit(callbackUrl=f"http://{host}/hook")
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed")
    assert answer.json()["errors"][0]["pointer"] == "/callbackUrl"
    allowed = await bare_api.submit(callbackUrl="http://192.168.7.9/hook")
    assert allowed.status_code == 202
    changed = await bare_api.client.patch(
        f"/openapi/jobs/{allowed.json()['jobId']}",
        json={"callbackUrl": f"http://{host}/hook"},
        headers={"If-Match": "*"},
    )
    assert changed.status_code == 422


@pytest.mark.parametrize("host", ["example.com.", "my_host", "é.example", "[2606:4700::1111]"])
async def test_what_may_be_called_some_day_is_not_refused(bare_api: Door, host: str) -> None:
    await bare_api.beat(delivers=True, egress_allow=[])
    answer = await bare_api.submit(callbackUrl=f"http://{host}/hook")
    assert answer.status_code == 202, answer.text


async def test_without_workers_only_what_no_list_could_allow_is_refused(bare_api: Door) -> None:
    for host in ("0.0.0.0", "0", "[::]", "224.0.0.1", "255.255.255.255", "[ff02::1]", "a..b"):
        answer = await bare_api.submit(callbackUrl=f"http://{host}/hook")
        assert answer.status_code == 422, host
        assert answer.json()["errors"][0]["pointer"] == "/callbackUrl"
    for host in ("127.0.0.1", "10.0.0.1", "[::1]", "localhost"):
        answer = await bare_api.submit(callbackUrl=f"http://{host}/hook")
        assert answer.status_code == 202, host


async def test_a_tenants_own_list_decides_too_and_a_change_of_it_counts_at_once(
    api: Door,
) -> None:
    await api.beat(delivers=True, egress_allow=["127.0.0.0/8", "10.0.0.0/8"])
    loopback = "http://127.0.0.1/hook"
    waiting = await api.submit("first", callbackUrl=loopback, delayMs=60_000)
    assert waiting.status_code == 202

    async def put(networks: list[str] | None) -> None:
        answer = await api.client.put("/openapi/egress-allow", json={"networks": networks})
        assert answer.is_success, answer.text

    async def refused(url: str) -> list[bool]:
        schedule: dict[str, Any] = {"intervalMs": 60_000, "callbackUrl": url}
        answers = [
            await api.submit(callbackUrl=url),
            await api.submit(**schedule),
            await api.client.patch(
                f"/openapi/jobs/{waiting.json()['jobId']}",
                json={"callbackUrl": url},
                headers={"If-Match": "*"},
            ),
        ]
        for one in answers:
            assert one.status_code in (200, 202, 422), one.text
            if one.status_code == 422:
                assert "PUT /openapi/egress-allow" in one.json()["detail"]
        return [one.status_code == 422 for one in answers]

    await put([])
    assert await refused(loopback) == [True] * 3
    assert await refused("http://localhost/hook") == [True] * 3
    repeated = await api.submit("first", callbackUrl=loopback, delayMs=60_000)
    assert repeated.status_code == 200
    assert await refused("http://1.1.1.1/hook") == [False] * 3
    await put(["10.1.0.0/16", "127.0.0.0/8"])
    assert await refused(loopback) == [False] * 3
    assert await refused("http://10.1.2.3/hook") == [False] * 3
    assert await refused("http://10.2.2.3/hook") == [True] * 3
    await put(None)
    assert await refused("http://10.2.2.3/hook") == [False] * 3


async def test_a_tenants_list_is_read_for_an_address_that_is_not_public_alone_and_not_each_time(
    bare_api: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dress, "FRESH_SECONDS", 600.0)
    await bare_api.beat(delivers=True, egress_allow=["127.0.0.0/8"])
    with counted(bare_api.database) as statements:
        for url in ("http://1.1.1.1/hook", "http://example.com/hook"):
            assert (await bare_api.submit(callbackUrl=url)).status_code == 202
        assert [one for one in statements if "FROM egress_allow" in one] == []
        for _ in range(3):
            answer = await bare_api.submit(callbackUrl="http://127.0.0.1/hook")
            assert answer.status_code == 202
    assert len([one for one in statements if "FROM egress_allow" in one]) == 1


async def test_an_address_is_not_refused_while_a_worker_does_not_say_what_it_may_call(
    bare_api: Door,
) -> None:
    await bare_api.beat(delivers=True)
    assert (await bare_api.submit(callbackUrl="http://10.0.0.1/hook")).status_code == 202


async def test_each_try_is_on_record_with_what_was_answered(api: Door) -> None:
    run = await running_job(api.database, callback_url=URL)
    told = await api.report(outcome_of(run))
    (delivery,) = told["deliveries"]
    tried = {
        "deliveryId": delivery["deliveryId"],
        "tryNumber": 1,
        "delivered": False,
        "statusCode": 500,
        "error": "the receiver answered 500",
        "latencyMs": 12,
        "answer": "out of\u0000 order",
    }
    for _ in range(2):
        await api.report(tries=[tried])
    found = await api.client.get(f"/openapi/jobs/{run.job_id}/callbacks")
    (callback,) = found.json()["items"]
    (one,) = callback["history"]
    assert {name: one[name] for name in ("try", "statusCode", "latencyMs", "delivered")} == {
        "try": 1,
        "statusCode": 500,
        "latencyMs": 12,
        "delivered": False,
    }
    assert one["answer"] == "out of\ufffd order"
    assert one["workerId"] == WORKER


async def test_what_was_not_tried_is_due_again_uncounted_until_it_is_too_old(api: Door) -> None:
    database = api.database
    run = await running_job(database, callback_url=URL)
    (settlement,) = await settled(database, ending(run, ExecutionStatus.SUCCEEDED))
    assert settlement.delivery is not None
    back = DeliveryResult(
        delivery_id=settlement.delivery.delivery_id,
        try_number=1,
        delivered=False,
        not_tried=True,
        retry_after_ms=3000,
    )

    async def note(worker_id: str) -> int | None:
        return await database.write(
            lambda connection: note_tries(
                connection, database, [back], worker_id=worker_id, schedule_seconds=SCHEDULE
            )
        )

    assert await note("other#boot") is None
    due = await note(WORKER)
    (row,) = await rows_of(database, "SELECT * FROM callback_delivery")
    assert (row["tries"], row["status"], row["next_try_at"]) == (0, 0, due)
    assert await value_of(database, "SELECT COUNT(*) FROM callback_try") == 0
    await change(
        database,
        "UPDATE callback_delivery SET tries = 1, owner_worker_id = :worker, owed_since = 1",
        worker=WORKER,
    )
    assert await note(WORKER) is None
    assert await value_of(database, "SELECT status FROM callback_delivery") == 2


NOT_FAILED = (
    # delivered; its first try is under way; a later one is; given back untried; due already
    "status = 1",
    "tries = 1",
    "tries = 2, last_error = 'no'",
    "owner_worker_id = NULL, tries = 0, last_error = 'not tried'",
    "owner_worker_id = NULL, tries = 1, last_error = 'no', next_try_at = 1",
)


async def failed_callbacks(database: Database, count: int) -> list[int]:
    """Jobs with a callback each that has failed: in turn given up, refused by a 410, and waiting.

    Behind them are some whose callback has not.
    """
    ids = await insert(database, count + len(NOT_FAILED), callback_url=URL, max_retry=0)
    for run in await claimed(database, ids, term=await new_term(database)):
        await settled(database, ending(run, ExecutionStatus.SUCCEEDED))
    for number, job_id in enumerate(ids[:count]):
        if number % 3 < 2:
            state = f"status = {2 + number % 3}, ended_at = 1"
            await change(
                database, f"UPDATE callback_delivery SET {state} WHERE job_id = :id", id=job_id
            )
            continue
        (row,) = await rows_of(database, f"SELECT * FROM callback_delivery WHERE job_id = {job_id}")
        no = DeliveryResult(
            delivery_id=row["delivery_id"], try_number=1, delivered=False, status_code=500
        )
        await database.write(
            lambda connection, no=no: note_tries(  # type: ignore[misc]
                connection, database, [no], worker_id=WORKER, schedule_seconds=(0.0, 7200.0)
            )
        )
    for state, job_id in zip(NOT_FAILED, ids[count:], strict=True):
        await change(
            database, f"UPDATE callback_delivery SET {state} WHERE job_id = :id", id=job_id
        )
    return ids[:count]


async def test_the_failed_callbacks_of_a_job_are_delivered_again(api: Door) -> None:
    database = api.database
    failed = await failed_callbacks(database, 3)
    table = "SELECT * FROM callback_delivery ORDER BY id"
    before = {row["job_id"]: row for row in await rows_of(database, table)}
    for job_id, old in before.items():
        answer = await api.client.post(f"/openapi/jobs/{job_id}/callbacks/redeliver")
        expected = {"redelivered": int(job_id in failed)}
        assert (answer.status_code, answer.json()) == (200, expected), old
    # They are due, under the same ids, and their tries go on being counted.
    now = await value_of(database, f"SELECT {database.now_ms}")
    for row in await rows_of(database, table):
        old = before[row["job_id"]]
        if row["job_id"] not in failed:
            assert row == old
            continue
        assert (row["status"], row["owner_worker_id"], row["ended_at"]) == (0, None, None)
        assert row["next_try_at"] <= now
        assert (row["delivery_id"], row["tries"]) == (old["delivery_id"], old["tries"])
    for job_id in failed:
        again = await api.client.post(f"/openapi/jobs/{job_id}/callbacks/redeliver")
        assert again.json() == {"redelivered": 0}
    assert (await api.client.post("/openapi/jobs/999/callbacks/redeliver")).status_code == 404


@pytest.mark.parametrize("ranged", ["createdFrom", "finishedFrom"])
async def test_all_failed_callbacks_since_a_time_are_delivered_again(
    api: Door, ranged: str
) -> None:
    failed = await failed_callbacks(api.database, 7)
    before = await rows_of(api.database, "SELECT delivery_id FROM callback_delivery ORDER BY id")
    body: dict[str, Any] = {"action": "redeliver", "filter": {ranged: "2020-01-01T00:00:00Z"}}
    dry = await api.client.post("/openapi/bulk", json={**body, "dryRun": True})
    assert (dry.status_code, dry.json()["matched"]) == (200, len(failed))
    asked = await api.client.post("/openapi/bulk", json={**body, "ratePerSecond": 1000.0})
    assert asked.status_code == 202, asked.text
    term = await new_term(api.database)
    while await api.parts.sweeper.round(term) == 0:
        pass
    done = (await api.client.get(asked.headers["location"])).json()
    assert (done["status"], done["changed"]) == ("SUCCEEDED", len(failed))
    due = (
        "SELECT job_id FROM callback_delivery WHERE status = 0 AND owner_worker_id IS NULL "
        f"AND next_try_at > 1 AND next_try_at <= {api.database.now_ms} ORDER BY job_id"
    )
    assert [row["job_id"] for row in await rows_of(api.database, due)] == failed
    assert (await api.client.post("/openapi/bulk", json={**body, "dryRun": True})).json()[
        "matched"
    ] == 0
    after = await rows_of(api.database, "SELECT delivery_id FROM callback_delivery ORDER BY id")
    assert before == after


async def owe(database: Database, host: str, count: int, *, due: int = 1) -> None:
    """Owe callbacks to a host, all due since long ago."""
    await database.write(lambda connection: _insert(connection, host, count, due))


async def _insert(connection: AsyncConnection, host: str, count: int, due: int) -> None:
    await connection.execute(
        text(
            "INSERT INTO callback_delivery (delivery_id, job_id, event_type, url, body, status, "
            "tries, next_try_at, created_at, host) VALUES (:delivery, 1, 'job.failed', :url, '{}', "
            "0, 0, :due, 1, :host)"
        ),
        [
            {"delivery": f"{host}-{number}", "url": f"http://{host}/", "host": host, "due": due}
            for number in range(count)
        ],
    )


async def test_each_host_has_the_same_share_whatever_the_backlog_of_another(api: Door) -> None:
    database = api.database
    await owe(database, "dead:80", 500)
    await owe(database, "fine:80", 3, due=5)
    await owe(database, "later:80", 3, due=9_000_000_000_000)
    owed = await database.read(
        lambda connection: read_owed_hosts(connection, database, after=None, limit=10)
    )
    assert owed.due_ms == {"dead:80": 1, "fine:80": 5, "later:80": 9_000_000_000_000}
    behind = await database.read(
        lambda connection: read_owed_hosts(connection, database, after="dead:80", limit=1)
    )
    assert list(behind.due_ms) == ["fine:80"]
    taken = await database.write(
        lambda connection: take_due(
            connection, database, {"dead:80": ["a", "b"], "fine:80": ["a"]}, limit=100
        )
    )
    hosts = [one.host for one in taken]
    assert (hosts.count("dead:80"), hosts.count("fine:80")) == (50, 3)
    assert {one.worker_id for one in taken if one.host == "fine:80"} == {"a"}
    dealt = [one.worker_id for one in taken if one.host == "dead:80"]
    assert {dealt.count("a"), dealt.count("b")} == {25}


async def test_no_read_of_the_hand_over_walks_the_rows_of_a_long_backlog(
    mariadb_engine: Engine,
) -> None:
    async with door(migrated(mariadb_engine)) as api:
        database = api.database
        await owe(database, "dead:80", 20_000)
        for number in range(20):
            await owe(database, f"fine-{number}:80", 2)
        await database.write(_analyze)

        async def rows_read(connection: AsyncConnection) -> tuple[int, int]:
            begun = await _handled(connection)
            hosts = text(due_hosts_sql(database, first=True))
            await connection.execute(hosts, {"after": "", "limit": 500})
            looked = await _handled(connection)
            values = {
                "host0": "fine-3:80",
                "host1": "dead:80",
                "now": 2,
                "share0": 10,
                "share1": 10,
            }
            await connection.execute(text(due_sql(database, 2)), values)
            return looked - begun, await _handled(connection) - looked

        looked, taken = await database.read(rows_read)
        assert looked < 200
        assert taken < 60


async def test_the_failed_callbacks_of_jobs_are_found_by_their_jobs_however_many_are_owed(
    mariadb_engine: Engine,
) -> None:
    async with door(migrated(mariadb_engine)) as api:
        database = api.database
        await failed_callbacks(database, 3)
        await owe(database, "dead:80", 20_000, due=9_000_000_000_000)
        await change(
            database,
            "UPDATE callback_delivery SET job_id = 1000000 + id, tries = 1 WHERE host = 'dead:80'",
        )
        await database.write(_analyze)
        jobs = [row["id"] for row in await rows_of(database, "SELECT id FROM job_info ORDER BY id")]

        async def rows_read(connection: AsyncConnection) -> int:
            begun = await _handled(connection)
            wanted = JobFilter(failed_callbacks=True)
            found = await next_matching(
                connection,
                database,
                tenant_id=0,
                wanted=wanted,
                statuses=frozenset(JobStatus),
                after=(0, 0),
                until_id=jobs[-1],
                limit=100,
            )
            assert len(found.turns) == 3
            asked = Asked(jobs[2], 0, "token")
            assert (await redeliver_failed(connection, database, asked))[1] == 1
            return await _handled(connection) - begun

        assert await database.write(rows_read) < 300


async def _analyze(connection: AsyncConnection) -> None:
    await connection.exec_driver_sql("ANALYZE TABLE callback_delivery")


async def _handled(connection: AsyncConnection) -> int:
    """Return how many rows this session has read so far."""
    rows = await connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Handler_read%%'")
    return sum(int(row.Value) for row in rows)


def test_a_sealer_opens_what_any_of_its_keys_has_sealed() -> None:
    older, newer = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    sealed = Sealer(older).seal("clear")
    assert "clear" not in sealed
    assert Sealer(f"{newer}, {older}").open(sealed) == "clear"
    with pytest.raises(CannotOpen):
        Sealer(newer).open(sealed)
    with pytest.raises(CannotOpen):
        Sealer("").open(sealed)
    with pytest.raises(NoSecretKeys):
        Sealer("").seal("clear")
    with pytest.raises(BadSecretKeys):
        Sealer("short")


async def test_rows_that_are_named_by_their_keys_are_not_sought_among_all_that_is_owed(
    sqlite_engine: Engine,
) -> None:
    async with door(migrated(sqlite_engine)) as api:
        database = api.database
        seen: list[tuple[str, Any]] = []

        def note(_connection: Any, _cursor: Any, statement: str, given: Any, *_rest: Any) -> None:
            if "callback_delivery" in statement and not statement.startswith("INSERT"):
                seen.append((statement, given))

        def plans() -> list[str]:
            """How what was seen so far uses the index of hosts."""
            with sqlite3.connect(database.url.database or "") as connection:
                found = [
                    row[3]
                    for statement, given in seen
                    for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", given)
                ]
            seen.clear()
            return [plan for plan in found if "ix_callback_delivery_host" in plan]

        run = await running_job(database, callback_url=URL, max_retry=0)
        for engine in (database._writers.sync_engine, database._readers.sync_engine):
            event.listen(engine, "before_cursor_execute", note)
        await settled(database, ending(run, ExecutionStatus.SUCCEEDED))
        await settled(database, ending(run, ExecutionStatus.SUCCEEDED))
        (row,) = await rows_of(database, "SELECT delivery_id, id FROM callback_delivery")
        await api.beat(held_deliveries=[row["delivery_id"], *map(str, range(300))])
        failed = DeliveryResult(delivery_id=row["delivery_id"], try_number=1, delivered=False)
        await database.write(
            lambda connection: note_tries(
                connection, database, [failed], worker_id=WORKER, schedule_seconds=(0.0,)
            )
        )
        await api.client.post(f"/openapi/jobs/{run.job_id}/callbacks/redeliver")
        await api.client.post(
            "/openapi/bulk",
            json={"action": "redeliver", "filter": {"handler": "echo"}, "dryRun": True},
        )
        assert len(seen) > 6
        assert plans() == []
        await database.write(
            lambda connection: take_due(connection, database, {"127.0.0.1:9": ["w"]}, limit=5)
        )
        await database.write(
            lambda connection: give_back(
                connection, database, "w", [row["delivery_id"]], pause_ms=1
            )
        )
        # What is due at a host is found by the index, and by both of its first columns.
        used = plans()
        assert used
        assert [plan for plan in used if "host=?" not in plan] == []


async def test_how_long_callbacks_are_due_is_told_while_no_worker_delivers(api: Door) -> None:
    """The alert on their age is there above all for when nobody delivers them."""
    handover, registry = api.parts.handover, api.parts.ground.metrics.registry

    def told() -> tuple[float, float]:
        age = registry.get_sample_value("oncue_callback_backlog_age_seconds")
        hosts = registry.get_sample_value("oncue_callback_hosts_due")
        assert age is not None
        assert hosts is not None
        return age, hosts

    await owe(api.database, "a:80", 2)
    await owe(api.database, "b:80", 1)
    await owe(api.database, "later:80", 1, due=9_000_000_000_000)
    handover._lock = SimpleNamespace(term=1)  # type: ignore[assignment]
    assert handover._roster.delivering() == []
    await handover._step()
    age, hosts = told()
    assert age > 1_000_000_000
    assert hosts == 2
    # It does not freeze: what was delivered meanwhile is no longer told.
    await change(api.database, "UPDATE callback_delivery SET status = 1 WHERE host = 'b:80'")
    while told()[1] != 1:
        await handover._step()
    handover._lock = SimpleNamespace(term=None)  # type: ignore[assignment]
    await handover._step()
    assert told() == (0, 0)


async def test_a_host_that_refused_is_offered_no_more_than_it_took_and_then_twice_as_many(
    bare_api: Door,
) -> None:
    handover = bare_api.parts.handover

    def offered(count: int, taken: int) -> int | None:
        batch = [
            Delivery(delivery_id=str(number), try_number=1, url=URL, body="{}")
            for number in range(count)
        ]
        handover._adjust(batch, {str(number) for number in range(taken)})
        return handover._shares.get("127.0.0.1:9")

    assert offered(200, 200) is None
    assert offered(200, 3) == 3
    assert offered(3, 0) == 1
    shares = [offered(1, 1) for _ in range(8)]
    assert shares == [2, 4, 8, 16, 32, 64, 128, None]
