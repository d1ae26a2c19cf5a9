"""Which reasons a test has seen: a new code without a test of its own is found by that."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec

import httpx

from app.jobs.reason_codes import ReasonCode

Arguments = ParamSpec("Arguments")
_SEEN: set[str] = set()


def explains(
    *codes: ReasonCode,
) -> Callable[[Callable[Arguments, Awaitable[None]]], Callable[Arguments, Awaitable[None]]]:
    """Declare the reasons that a test brings about; it fails unless each was answered in it."""

    def declare(
        test: Callable[Arguments, Awaitable[None]],
    ) -> Callable[Arguments, Awaitable[None]]:
        @functools.wraps(test)
        async def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
            _SEEN.clear()
            await test(*args, **kwargs)
            assert set(codes) <= _SEEN, "a reason that the test declares was not answered"

        return run

    return declare


async def explained(client: httpx.AsyncClient, job_id: int) -> dict[str, Any]:
    """Return the explanation of a job, and note its reasons."""
    answer = await client.get(f"/openapi/jobs/{job_id}/explain")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["summary"] == found["reasons"][0]["message"]
    _SEEN.update(codes_of(found))
    return found


def codes_of(found: dict[str, Any]) -> list[str]:
    """Return the codes of an explanation, in order."""
    return [reason["code"] for reason in found["reasons"]]
