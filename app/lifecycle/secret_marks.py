"""What of a job is secret: the bits of `job_info.secret`, set when it is submitted."""

from __future__ import annotations

from typing import Final

SECRET_PARAMS: Final = 1
SECRET_RESULT: Final = 2


def marks(*, params: bool, result: bool) -> int:
    """Return the bits of what is secret."""
    return SECRET_PARAMS * params | SECRET_RESULT * result
