"""Fixtures of the contract tests."""

from __future__ import annotations

import pytest

from tests.support.contract import Keyed, start_keyed
from tests.support.engines import Engine
from tests.support.processes import NewPlatform


@pytest.fixture
def keyed(sqlite_engine: Engine, new_platform: NewPlatform) -> Keyed:
    """A running platform over SQLite and Valkey whose callers need a key."""
    return start_keyed(sqlite_engine, new_platform)
