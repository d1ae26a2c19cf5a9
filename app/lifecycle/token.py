"""Tokens that tell this process's own rows from others'."""

from __future__ import annotations

import os


def new_token() -> str:
    """Draw a token."""
    return os.urandom(16).hex()
