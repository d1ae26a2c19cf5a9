"""Roles, keys as they are sent, and the count of wrong ones: no database, no clock."""

from __future__ import annotations

import hashlib

import pytest

from app.access import failures as failures_module
from app.access.failures import Failures
from app.access.roles import INCLUDES, NEEDED, Role, allowed
from app.access.tokens import digest_of, draw, draw_key, is_digest, read_token
from app.lifecycle.api_keys import KeyKind
from oncue.protocol import call_token


def test_what_each_role_may() -> None:
    assert INCLUDES[Role.ADMIN] == frozenset(Role)
    assert INCLUDES[Role.OPERATE] == {Role.OPERATE, Role.READ}
    assert allowed((Role.SUBMIT, Role.READ)) == {Role.SUBMIT, Role.READ}
    assert allowed(()) == frozenset()
    for name, role in NEEDED.items():
        # What is looked at takes `read`, what is changed more; nobody but admins keeps keys.
        if name.startswith(("get_job", "list_jobs", "explain")):
            assert role is Role.READ
        if "key" in name or "tenant" in name or "audit" in name:
            assert role is Role.ADMIN


@pytest.mark.parametrize(("kind", "start"), [("caller", "ock_"), ("worker", "ocw_")])
def test_a_key_is_read_as_it_was_drawn(kind: KeyKind, start: str) -> None:
    drawn = draw(kind)
    prefix, key = drawn.prefix, drawn.key
    token = read_token(key)
    assert token is not None
    assert (token.kind, token.prefix) == (kind, prefix)
    assert prefix.startswith(start)
    assert digest_of(key) == hashlib.sha256(key.encode()).hexdigest()
    assert key not in repr(token)
    assert key not in repr(drawn)
    assert len({draw_key(prefix) for _ in range(100)}) == 100
    for wrong in (key[:-1], key + "x", key.upper(), f" {key}", key.replace("_", "-", 1), ""):
        assert read_token(wrong) is None


def test_a_digest_is_that_one_alone() -> None:
    digest = digest_of("secret")
    assert is_digest(digest, digest)
    assert not is_digest(None, digest)
    assert not is_digest(digest, digest_of("other"))
    assert digest_of("\udcff")  # what no UTF-8 could be is refused, and breaks nothing


def test_a_call_token_is_derived_from_the_hash_alone() -> None:
    one, two = digest_of("one"), digest_of("two")
    assert call_token(one) == call_token(one)
    assert call_token(one) not in (call_token(two), one)
    assert len(call_token(one)) == 64


def test_too_many_wrong_keys_make_an_address_wait() -> None:
    failures = Failures(3, 60)
    for _ in range(2):
        failures.note_failure("10.0.0.1", 100)
    assert failures.wait_seconds("10.0.0.1", "d", 100) == 0
    failures.note_failure("10.0.0.1", 130)
    # The window began with the first.
    assert failures.wait_seconds("10.0.0.1", "d", 130) == 30
    assert failures.wait_seconds("10.0.0.2", "d", 130) == 0
    assert failures.wait_seconds("10.0.0.1", "d", 160) == 0
    failures.note_failure("10.0.0.1", 161)
    assert failures.wait_seconds("10.0.0.1", "d", 161) == 0


def test_what_was_right_from_an_address_stays_right_there_alone() -> None:
    failures = Failures(1, 60)
    failures.note_success("10.0.0.1", "good")
    failures.note_failure("10.0.0.1", 0)
    failures.note_failure("10.0.0.2", 0)
    assert failures.wait_seconds("10.0.0.1", "good", 1) == 0
    assert failures.wait_seconds("10.0.0.1", "other", 1) > 0
    assert failures.wait_seconds("10.0.0.2", "good", 1) > 0


def test_one_ipv6_network_is_one_address() -> None:
    failures = Failures(2, 60)
    failures.note_failure("2001:db8:1:2::1", 0)
    failures.note_failure("2001:db8:1:2:ffff::9", 0)
    assert failures.wait_seconds("2001:db8:1:2::7", "d", 1) > 0
    assert failures.wait_seconds("2001:db8:1:3::1", "d", 1) == 0
    failures.note_failure("fe80::1%eth0", 0)
    failures.note_failure("not:an:address", 0)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures_module, "MOST_ADDRESSES", 10)
    monkeypatch.setattr(failures_module, "MOST_GOOD", 5)
    failures = Failures(1, 60)
    for number in range(100):
        failures.note_failure(f"10.0.0.{number}", 0)
        failures.note_success("10.0.0.1", str(number))
    assert failures.size == 15
    assert failures.wait_seconds("10.0.0.99", "d", 1) > 0
