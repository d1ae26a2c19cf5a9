"""Tokens that tell this process's own rows from others'."""

from __future__ import annotations

import uuid


def new_token() -> str:
    """Draw a token."""
    return uuid.uuid4().hex
