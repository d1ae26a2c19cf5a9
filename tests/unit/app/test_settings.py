"""Settings: what is wrong is said in one sentence that names the variable, and no secret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.access.keys import ApiKeys, BadKeys, InternalTokens, bearer
from app.access.tokens import digest_of
from app.settings import Settings

ROOT = Path(__file__).parents[3]


def settings(**given: Any) -> Settings:
    return Settings(_env_file=None, **given)


def oncue(*words: str, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ONCUE_")}
    return subprocess.run(
        [Path(sys.executable).with_name("oncue"), *words],
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        timeout=30,
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ONCUE_DATABASE_URL", "postgresql://user:hunter22@host/db"),
        ("ONCUE_DATABASE_URL", "mysql://user:hunter22@host/db"),
        ("ONCUE_REDIS_URL", "redis+sentinel://:hunter22@host:26379/master"),
        ("ONCUE_REDIS_URL", "host:6379"),
        ("ONCUE_REDIS_PREFIX", "two words"),
        ("ONCUE_BALANCE", "fair"),
        ("ONCUE_LOCK_SECONDS", "0"),
        ("ONCUE_CALLBACK_SCHEDULE_SECONDS", "0,soon"),
        ("ONCUE_CALLBACK_SCHEDULE_SECONDS", ",".join(["1"] * 51)),
        ("ONCUE_CALLBACK_SCHEDULE_SECONDS", "-1"),
        ("ONCUE_RETENTION_DAYS", "0"),
        ("ONCUE_LOG_LEVEL", "loud"),
    ],
)
def test_a_bad_value_ends_the_start_with_one_sentence_that_names_the_variable(
    tmp_path: Path, variable: str, value: str
) -> None:
    done = oncue("dispatcher", directory=tmp_path, **{variable: value})
    assert done.returncode == 2
    (sentence,) = done.stderr.strip().splitlines()
    assert sentence.startswith(f"oncue: {variable}")
    assert "hunter22" not in done.stderr + done.stdout


@pytest.mark.parametrize("port", ["70000", "eighty"])
def test_a_port_that_is_none_is_refused_by_the_name_of_its_variable(
    tmp_path: Path, port: str
) -> None:
    done = oncue("dispatcher", directory=tmp_path, ONCUE_PORT=port)
    assert done.returncode == 2
    assert "ONCUE_PORT" in done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com"])
def test_an_open_api_is_refused_on_an_address_that_others_reach(host: str) -> None:
    assert "ONCUE_API_KEYS" in (settings(host=host, internal_token="t").why_too_open() or "")
    keys = settings(host=host, api_keys="one:key-of-one")
    assert "ONCUE_INTERNAL_TOKEN" in (keys.why_too_open() or "")
    assert settings(host=host, api_keys="a:keykeykey", internal_token="t").why_too_open() is None
    assert settings(host=host).why_too_open(caller_keys=True, worker_keys=True) is None
    assert settings(host=host, allow_open=True, internal_token="t").why_too_open() is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_an_open_api_may_listen_on_this_machine(host: str) -> None:
    assert settings(host=host).why_too_open() is None


def test_a_dispatcher_that_would_be_open_to_others_does_not_start(tmp_path: Path) -> None:
    database = f"sqlite+aiosqlite:///{tmp_path}/oncue.db"
    done = oncue("dispatcher", "--host", "0.0.0.0", directory=tmp_path, ONCUE_DATABASE_URL=database)
    assert done.returncode == 2
    (sentence,) = done.stderr.strip().splitlines()
    assert "ONCUE_API_KEYS" in sentence


def test_the_listing_of_settings_shows_no_secret(tmp_path: Path) -> None:
    done = oncue(
        "settings",
        directory=tmp_path,
        ONCUE_DATABASE_URL="mysql+aiomysql://oncue:hunter22@host/db",
        ONCUE_REDIS_URL="redis://:hunter22@host:6379/0",
        ONCUE_API_KEYS="a:hunter22hunter22",
        ONCUE_INTERNAL_TOKEN="hunter22hunter22",
        ONCUE_WEBHOOK_SECRET="whsec_aHVudGVyMjJodW50ZXIyMg==",
    )
    assert done.returncode == 0, done.stderr
    assert "hunter22" not in done.stdout
    assert "aHVudGVyMjJ" not in done.stdout
    assert "ONCUE_DATABASE_URL=mysql+aiomysql://oncue:***@host/db" in done.stdout


@pytest.mark.parametrize("keys", ["justakey", "name:", ":longenough", "name:short"])
def test_keys_that_are_not_name_and_key_are_refused(keys: str) -> None:
    with pytest.raises(BadKeys):
        ApiKeys(keys)


def test_a_caller_is_known_by_its_key_alone() -> None:
    keys = ApiKeys("one:key-of-one, two:key:of:two")

    def name(header: str) -> str | None:
        given = bearer(header)
        return keys.name_of(digest_of(given))

    assert name("Bearer key-of-one") == "one"
    assert name("bearer key:of:two") == "two"
    for wrong in ("", "key-of-one", "Basic key-of-one", "Bearer ", "Bearer KEY-OF-ONE"):
        assert name(wrong) is None


def test_every_internal_token_is_accepted_and_the_first_is_sent() -> None:
    tokens = InternalTokens("new-token, old-token")
    assert tokens.sent == "new-token"
    for good in ("new-token", "old-token"):
        assert tokens.knows(digest_of(good))
    for bad in ("new-token, old-token", "", "other"):
        assert not tokens.knows(digest_of(bad))
