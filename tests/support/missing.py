"""What cannot be tested on this machine: said loudly here, a failure where it must be tested."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

NOT_TESTED_HERE = "NOT TESTED HERE: "


def must_test_everything() -> bool:
    """Whether a missing server or browser is a failure: in CI, or with ONCUE_REQUIRE_ENGINES."""
    return any(
        os.environ.get(name, "").lower() not in ("", "0", "false", "no")
        for name in ("CI", "ONCUE_REQUIRE_ENGINES")
    )


def not_tested_here(what: str, why: str) -> NoReturn:
    """Skip this test for want of a program, or fail where everything must be tested."""
    message = f"{NOT_TESTED_HERE}{what} ({why})"
    if must_test_everything():
        pytest.fail(message, pytrace=False)
    pytest.skip(message)
