"""What the environment may say."""

from __future__ import annotations

import hashlib
import ipaddress
import os
from pathlib import Path

import pytest

from oncue.protocol import call_token
from worker.settings import SettingsError, is_loopback, read_settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("ONCUE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_lists_and_labels_are_read_from_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "ONCUE_WORKER_HOST": "localhost",
        "ONCUE_WORKER_PORT": "9000",
        "ONCUE_HANDLERS": "a.b, c",
        "ONCUE_DISPATCHER_URL": "http://one:1/,https://two",
        "ONCUE_WORKER_LABELS": "zone=a, gpu=",
        "ONCUE_INTERNAL_TOKEN": "new,old",
        "ONCUE_EGRESS_ALLOW": "127.0.0.0/8,fd00::/8",
        "ONCUE_GRACE_SECONDS": "",
    }.items():
        monkeypatch.setenv(name, text)
    settings = read_settings()
    assert settings.handlers == ("a.b", "c")
    assert settings.dispatcher_url == ("http://one:1", "https://two")
    assert settings.worker_labels == {"zone": "a", "gpu": ""}
    assert [token.get_secret_value() for token in settings.internal_token] == ["new", "old"]
    assert settings.egress_allow[1] == ipaddress.ip_network("fd00::/8")
    assert settings.url == "http://localhost:9000"
    assert settings.name.endswith("-9000")
    assert settings.grace_seconds == 30
    assert not settings.delivers


def test_a_dotenv_file_is_read_and_the_environment_wins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text(
        "ONCUE_WORKER_CAPACITY=5\nONCUE_WORKER_PORT=1\nONCUE_DATABASE_URL=x\nOTHER=y\n"
    )
    monkeypatch.setenv("ONCUE_WORKER_PORT", "2")
    settings = read_settings()
    assert (settings.worker_capacity, settings.port) == (5, 2)


def test_secrets_are_in_no_text_of_the_settings() -> None:
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    settings = read_settings(internal_token="the-token", webhook_secret=secret)
    assert "the-token" not in repr(settings) + settings.model_dump_json()
    assert secret not in repr(settings) + settings.model_dump_json()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "worker.example"])
def test_a_worker_open_to_others_needs_a_token(host: str) -> None:
    with pytest.raises(SettingsError, match="ONCUE_INTERNAL_TOKEN must be set"):
        read_settings(host=host)
    assert read_settings(host=host, internal_token="x").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_hosts_may_be_open(host: str) -> None:
    assert is_loopback(host)
    assert read_settings(host=host).host == host


def test_an_error_names_the_variable_and_never_the_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONCUE_WEBHOOK_SECRET", "whsec_not-base64!")
    with pytest.raises(SettingsError) as refusal:
        read_settings()
    assert "ONCUE_WEBHOOK_SECRET" in str(refusal.value)
    assert "not-base64" not in str(refusal.value)


@pytest.mark.parametrize(
    "url", ["redis+sentinel://h", "redis+cluster://h", "rediss+cluster://h", "memcached://h", "h"]
)
def test_only_one_plain_redis_is_supported(url: str) -> None:
    with pytest.raises(SettingsError, match="ONCUE_REDIS_URL"):
        read_settings(redis_url=url)


@pytest.mark.parametrize("url", ["redis://h:1/2", "rediss://u:p@h", "unix:///tmp/s?db=1"])
def test_plain_tls_and_socket_addresses_of_redis_are_taken(url: str) -> None:
    assert read_settings(redis_url=url).redis_url == url


def test_a_key_of_a_group_takes_the_place_of_the_internal_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = "ocw_abcdefghij_" + "x" * 43
    monkeypatch.setenv("ONCUE_WORKER_KEY", key)
    monkeypatch.setenv("ONCUE_WORKER_HOST", "0.0.0.0")
    settings = read_settings()
    assert settings.sent_token == key
    assert settings.accepted_tokens == (call_token(hashlib.sha256(key.encode()).hexdigest()),)
    assert key not in repr(settings)

    monkeypatch.setenv("ONCUE_INTERNAL_TOKEN", "new,old")
    both = read_settings()
    assert both.sent_token == key
    assert both.accepted_tokens[:2] == ("new", "old")
    monkeypatch.delenv("ONCUE_WORKER_KEY")
    assert read_settings().sent_token == "new"
    assert read_settings().accepted_tokens == ("new", "old")
