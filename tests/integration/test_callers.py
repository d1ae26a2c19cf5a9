"""Callers and workers with keys, as processes: the first key, roles, a worker of a group, drain."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.key_commands import DevelopmentKey, NotMade, development_key
from oncue import Client, Conflict, NotFound, Unauthorized
from oncue.async_client import AsyncClient
from oncue.retries import Retries
from tests.support.cli import Told, oncue
from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform
from tests.support.receiver import Receiver
from tests.support.wait import until

OK, BAD_USAGE, REFUSED = 0, 2, 3


def told_by(platform: Platform, key: str, *words: str) -> Told:
    return oncue(*words, url=platform.url, variables={"ONCUE_API_KEY": key})


def json_by(platform: Platform, key: str, *words: str) -> Any:
    told = told_by(platform, key, *words, "--json")
    assert (told.code, told.err) == (OK, ""), told
    return json.loads(told.out)


def bootstrapped(platform: Platform) -> str:
    """Make the first key in the database, and return it once the API asks for one."""
    made = oncue("keys", "bootstrap", "--json", url="", variables=platform.engine.environment)
    assert made.code == OK, made.err
    key: str = json.loads(made.out)["key"]
    until(
        lambda: platform.http.get("/openapi/jobs").status_code == 401,
        what="the API to be closed",
    )
    platform.http.headers["Authorization"] = f"Bearer {key}"
    return key


def test_the_first_key_is_made_in_the_database_and_makes_the_others(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(engine)
    platform.dispatcher()
    assert platform.http.get("/openapi/jobs").status_code == 200  # open: there is no key
    root = bootstrapped(platform)

    tenant = json_by(platform, root, "tenants", "create", "billing")["tenantId"]
    words = ("keys", "create", "invoices", "--tenant", str(tenant), "--role", "read")
    made = json_by(platform, root, *words)
    assert (made["tenantId"], made["roles"]) == (tenant, ["read"])
    assert json_by(platform, made["key"], "list") == []
    told = told_by(platform, made["key"], "submit", "--handler", "echo")
    assert told.code == REFUSED
    assert "needs the role submit" in told.err
    told = told_by(platform, "ock_no", "list")
    assert told.code == REFUSED
    assert "ONCUE_API_KEY" in told.err

    shown = told_by(platform, root, "keys", "list")
    assert made["prefix"] in shown.out
    assert made["key"] not in shown.out
    rotated = json_by(platform, root, "keys", "rotate", str(made["keyId"]), "--overlap", "0s")
    assert told_by(platform, made["key"], "list").code == REFUSED
    assert json_by(platform, rotated["key"], "list") == []
    assert "REVOKED" in told_by(platform, root, "keys", "revoke", str(made["keyId"])).out
    assert told_by(platform, rotated["key"], "list").code == REFUSED
    assert "DISABLED" in told_by(platform, root, "tenants", "disable", str(tenant)).out
    assert "invoices" in told_by(platform, root, "tenants", "rename", str(tenant), "invoices").out

    actions = [one["action"] for one in json_by(platform, root, "audit")]
    assert actions == [
        *("tenant.change", "tenant.change", "key.revoke", "key.rotate", "key.create"),
        *("tenant.create", "key.create"),
    ]
    table = told_by(platform, root, "audit", "--target", f"tenant:{tenant}").out
    assert "name: billing -> invoices" in table
    first = json_by(platform, root, "audit", "--action", "key.create")[-1]
    assert (first["actor"], first["address"]) == ("command line", "")


def test_the_first_thing_that_looks_like_a_key_is_the_whole_key(
    sqlite_engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(sqlite_engine)
    platform.dispatcher()
    root = bootstrapped(platform)

    def lists(key: str) -> int:
        return told_by(platform, key, "list").code

    made = told_by(platform, root, "keys", "create", "--name", "app", "--role", "submit, read")
    assert "submit read" in made.out
    key_id = json_by(platform, root, "keys", "list")[0]["keyId"]
    rotated = told_by(platform, root, "keys", "rotate", str(key_id))
    another = oncue("keys", "bootstrap", url="", variables=platform.engine.environment)
    for told in (made, rotated, another):
        assert told.code == OK, told
        assert lists(re.findall(r"ock_\S+", told.out)[0]) == OK, told.out
    for words in (("create", "other"), ("rotate", str(key_id))):
        assert next(iter(json_by(platform, root, "keys", *words))) == "key"
    as_json = oncue("keys", "bootstrap", "--json", url="", variables=platform.engine.environment)
    assert next(iter(json.loads(as_json.out))) == "key"


def test_the_key_of_a_home_opens_nothing_and_closes_nothing_until_it_is_wanted(
    migrated_engine: Engine, tmp_path: Path
) -> None:
    url = migrated_engine.database_url
    drawn = development_key(url, tmp_path, wanted=False)
    assert drawn is not None
    assert not drawn.is_asked_for
    kept = tmp_path / "api-key"
    assert kept.read_text().strip() == drawn.key
    assert kept.stat().st_mode & 0o077 == 0
    assert development_key(url, tmp_path, wanted=False) == drawn

    asked = DevelopmentKey(drawn.key, is_asked_for=True)
    assert development_key(url, tmp_path, wanted=True) == asked
    assert development_key(url, tmp_path, wanted=False) == asked
    # Another home of the same database has a key of its own, or none to tell.
    (tmp_path / "other").mkdir()
    assert development_key(url, tmp_path / "other", wanted=False) is None
    assert not (tmp_path / "other" / "api-key").exists()
    other = development_key(url, tmp_path / "other", wanted=True)
    assert other is not None
    assert other.key != drawn.key

    kept.write_text("no key\n")
    with pytest.raises(NotMade, match="does not hold a key"):
        development_key(url, tmp_path, wanted=True)


def test_a_key_of_a_home_that_was_ended_is_not_told_as_one_that_works(
    sqlite_engine: Engine, new_platform: NewPlatform, tmp_path: Path
) -> None:
    platform = new_platform(sqlite_engine)
    platform.dispatcher()
    root = bootstrapped(platform)
    first = development_key(sqlite_engine.database_url, tmp_path, wanted=True)
    assert first is not None
    key_id = json_by(platform, root, "keys", "list")[0]["keyId"]
    assert told_by(platform, root, "keys", "revoke", str(key_id)).code == OK
    assert development_key(sqlite_engine.database_url, tmp_path, wanted=False) is None
    second = development_key(sqlite_engine.database_url, tmp_path, wanted=True)
    assert second is not None
    assert second.is_asked_for
    assert second.key != first.key
    assert (tmp_path / "api-key").read_text().strip() == second.key


def test_bootstrap_needs_a_schema(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/none.db"
    told = oncue("keys", "bootstrap", url="", variables={"ONCUE_DATABASE_URL": url})
    assert told.code == BAD_USAGE
    assert "oncue migrate" in told.err
    assert not (tmp_path / "none.db").exists()


async def test_both_clients_keep_keys_and_tenants(
    sqlite_engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(sqlite_engine)
    platform.dispatcher()
    root = bootstrapped(platform)
    with Client(platform.url, api_key=root, retries=Retries(attempts=1)) as client:
        tenant = client.create_tenant("one")
        with pytest.raises(Conflict, match="tenant_name_taken"):
            client.create_tenant("one")
        made = client.create_key("app", roles=["submit"], tenant_id=tenant.tenant_id)
        assert made.key not in repr(made)
        assert client.key(made).prefix == made.prefix
        assert [one.name for one in client.keys(prefix=made.prefix)] == ["app"]
        assert client.rotate_key(made, overlap_seconds=60).old_works_until is not None
        assert client.change_tenant(tenant, disabled=True).disabled
        assert [one.name for one in client.tenants()] == ["default", "one"]
        with pytest.raises(NotFound):
            client.revoke_key(9999)
        with pytest.raises(ValueError, match="give a name"):
            client.change_tenant(tenant)
        with pytest.raises(TypeError, match="no filter"):
            client.audit(who="x")  # type: ignore[call-arg]
    async with AsyncClient(platform.url, api_key=root) as async_client:
        assert (await async_client.revoke_key(made)).state == "REVOKED"
        other = await async_client.create_key("other", roles=["read"])
        actions = [one.action async for one in async_client.audit(target=f"key:{made.key_id}")]
        assert actions == ["key.revoke", "key.rotate", "key.create"]
        newest = await anext(async_client.keys())
        assert newest.key_id == other.key_id
    with (
        Client(platform.url, api_key=other.key) as reader,
        pytest.raises(Unauthorized) as refused,
    ):
        reader.create_key("mine")
    assert (refused.value.code, refused.value.status) == ("forbidden", 403)


def test_a_worker_of_a_group_runs_delivers_and_is_drained_without_the_internal_token(
    engine: Engine, new_platform: NewPlatform, receiver: Receiver
) -> None:
    platform = new_platform(engine)
    platform.dispatcher()
    root = bootstrapped(platform)
    key = json_by(platform, root, "keys", "create", "fleet", "--worker-group", "gpu")["key"]
    own = {"ONCUE_WORKER_KEY": key, "ONCUE_INTERNAL_TOKEN": ""}
    worker = platform.worker("gpu-1", environment=own)
    platform.wait_for_workers(1)
    job_id = platform.submit("echo", {"a": 1}, callbackUrl=receiver.url())
    assert platform.ended(job_id)["status"] == "SUCCEEDED"
    receiver.wait_for(1)
    # What stands at the worker's address takes neither no token nor the fleet's.
    for headers in ({}, {"Authorization": f"Bearer {platform.internal_token}"}):
        refused = httpx.post(f"{worker.url}/drain", headers=headers, trust_env=False)
        assert refused.status_code == 401
    cancelled = platform.submit("sleep", {"ms": 60_000})
    until(lambda: platform.job(cancelled)["status"] == "RUNNING", what="the run")
    assert platform.http.post(f"/openapi/jobs/{cancelled}/cancel").is_success

    told = told_by(platform, root, "drain", "gpu-1", "--wait", "--timeout", "30")
    assert (told.code, told.err) == (OK, ""), told
    assert "it can be stopped" in told.out
    until(
        lambda: platform.get("/openapi/workers")["items"][0]["state"] == "DRAINING",
        what="its beat to say so",
    )
    (entry,) = json_by(platform, root, "audit", "--action", "worker.drain")
    assert entry["target"].startswith("worker:gpu-1#")
    assert entry["after"] == {"state": "DRAINING"}


def test_a_dispatcher_that_others_reach_starts_with_keys_or_when_told_to(
    sqlite_engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(sqlite_engine)
    refused = oncue(
        *("dispatcher", "--host", "0.0.0.0", "--port", "0"),
        url="",
        variables={**sqlite_engine.environment, "ONCUE_INTERNAL_TOKEN": "token-of-tests"},
    )
    assert refused.code == BAD_USAGE
    assert "oncue keys bootstrap" in refused.err
    everywhere = ("--host", "0.0.0.0")
    told_so = platform.dispatcher(1, *everywhere, environment={"ONCUE_ALLOW_OPEN": "true"})
    assert platform.http.get("/openapi/jobs").status_code == 200
    told_so.terminate()
    made = oncue("keys", "bootstrap", "--json", url="", variables=sqlite_engine.environment)
    assert made.code == OK
    platform.dispatcher(1, *everywhere)
    assert platform.http.get("/openapi/jobs").status_code == 401
