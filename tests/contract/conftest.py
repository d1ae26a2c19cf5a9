"""Fixtures of the contract tests: platforms that ask for keys."""

from __future__ import annotations

import secrets

import pytest

from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform


class Keyed:
    """A running platform whose callers need a key."""

    def __init__(self, platform: Platform, api_key: str) -> None:
        self.platform = platform
        self.api_key = api_key

    @property
    def url(self) -> str:
        """Where its dispatcher listens."""
        return self.platform.url

    @property
    def worker_url(self) -> str:
        """Where its worker listens."""
        return self.platform.services["worker-1"].url


def start_keyed(engine: Engine, new_platform: NewPlatform, **environment: str) -> Keyed:
    """Start a platform whose one key is known."""
    api_key = secrets.token_hex(16)
    platform = new_platform(
        engine, environment={"ONCUE_API_KEYS": f"contract:{api_key}", **environment}
    )
    platform.http.headers["Authorization"] = f"Bearer {api_key}"
    return Keyed(platform.start(), api_key)


@pytest.fixture
def keyed(sqlite_engine: Engine, new_platform: NewPlatform) -> Keyed:
    """A running platform over SQLite and Valkey whose callers need a key."""
    return start_keyed(sqlite_engine, new_platform)
