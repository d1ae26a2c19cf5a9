"""One running platform for all tests of the client."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.engines import Servers
from tests.support.processes import Platform


@pytest.fixture(scope="session")
def sdk_platform(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """One dispatcher and one worker over SQLite and Valkey, shared (mark `xdist_group("sdk")`)."""
    engine = servers.engine("sqlite+valkey")
    platform = Platform(engine, tmp_path_factory.mktemp("sdk"))
    try:
        yield platform.start()
    finally:
        platform.close()
        servers.drop(engine)


@pytest.fixture(autouse=True)
def no_proxy_to_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's proxy does not know the servers of the tests."""
    monkeypatch.setenv("NO_PROXY", f"127.0.0.1,{os.environ.get('NO_PROXY', '')}".rstrip(","))
