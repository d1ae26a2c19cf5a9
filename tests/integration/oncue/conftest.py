"""One running platform for all tests of the client."""

from __future__ import annotations

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
