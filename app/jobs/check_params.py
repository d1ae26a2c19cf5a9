"""Params against the schemas that live workers published: a rule for new jobs and new params."""

from __future__ import annotations

from typing import Any

from app.edge.problems import Problem
from app.fleet.live import LiveFleet
from app.plumbing.database import DatabaseUnavailable


async def refused_params(
    fleet: LiveFleet, handler: str, params: Any, text: str | None
) -> Problem | None:
    """Return the `params_invalid` of params that no live worker would take, else None.

    `text` is their JSON. What is not offered now, or untyped by some worker, is not checked here:
    the worker that runs it checks.
    """
    try:
        offer = (await fleet.handlers()).get(handler)
    except DatabaseUnavailable:
        # What needs the database comes next, and tells the caller.
        return None
    if offer is None or not offer.checked:
        return None
    faults = offer.faults(params, len(text or ""))
    if not faults:
        return None
    first = faults[0]
    more = f" and {len(faults) - 1} more: see errors" if len(faults) > 1 else ""
    return Problem(
        "params_invalid",
        f"{first.pointer.strip('/')}: {first.detail}{more}",
        errors=[{"pointer": one.pointer, "detail": one.detail} for one in faults],
    )
