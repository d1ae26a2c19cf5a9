"""What of a job is secret: the bits of `job_info.secret`, set when it is submitted."""

from __future__ import annotations

from typing import Final

SECRET_PARAMS: Final = 1
SECRET_RESULT: Final = 2


REPEAT_PARAMS: Final = frozenset({"echo", "sleep"})
"""The built-in handlers whose result is (of) their params: where these are secret, so is it."""


def marks(*, handler: str, params: bool, result: bool) -> int:
    """Return the bits of what is secret of a job, by what its submission says."""
    repeated = params and handler in REPEAT_PARAMS
    return SECRET_PARAMS * params | SECRET_RESULT * (result or repeated)
