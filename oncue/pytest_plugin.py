"""A pytest fixture with a platform for each test.

In `conftest.py`:

    pytest_plugins = ["oncue.pytest_plugin"]

It is no plugin that pytest loads by itself: a project that does not name it pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oncue.testing import Handlers, Platform


@pytest.fixture
def oncue_handlers() -> Handlers:
    """What `oncue_platform` offers: all registered handlers, unless you override this fixture."""
    return None


@pytest.fixture
def oncue_platform(oncue_handlers: Handlers) -> Iterator[Platform]:
    """A platform that runs for the length of one test."""
    with Platform(oncue_handlers) as platform:
        yield platform
