"""Roles, keys as they are sent, and the count of wrong ones: no database, no clock."""

from __future__ import annotations

import hashlib

import pytest

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
