"""Bodies that routes read themselves: one JSON object, its integers exact."""

from __future__ import annotations

from typing import Any, Final

from pydantic_core import from_json

from app.edge.problems import Problem

MAX_DEPTH: Final = 200
"""How deep pydantic's parser lets arrays and objects stand in the object of a body."""


def parse_object(body: bytes) -> dict[str, Any]:
    """Read a body as a JSON object; integers keep all their digits.

    Raises:
        Problem: `invalid_json`.
    """
    try:
        sent = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        why = str(error)
        if why.startswith("recursion limit"):
            why = f"what is nested more than {MAX_DEPTH} deep is refused"
        raise Problem("invalid_json", f"The body must be one JSON object: {why}.") from None
    if not isinstance(sent, dict):
        raise Problem("invalid_json", "The body must be one JSON object.")
    return sent
