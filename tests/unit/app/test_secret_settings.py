"""Keys that are set must be keys, and no setting is shown with its secret."""

from __future__ import annotations

import pytest

from app.access.keys import ApiKeys, BadKeys, InternalTokens
from app.cli import _without_password


@pytest.mark.parametrize("configured", [",", " , ", ",,"])
def test_keys_that_are_set_and_empty_open_nothing(configured: str) -> None:
    with pytest.raises(BadKeys):
        ApiKeys(configured)
    with pytest.raises(BadKeys):
        InternalTokens(configured)


@pytest.mark.parametrize(
    "address",
    [
        "redis://:hunter2@host:6379/0",
        "redis://host:6379/0?password=hunter2",
        "mysql+aiomysql://oncue:hunter2@host/oncue",
        "mysql+aiomysql://host/oncue?password=hunter2",
        "redis://:hunter2@host:port/0",
    ],
)
def test_an_address_is_shown_without_its_password(address: str) -> None:
    assert "hunter2" not in _without_password(address)
