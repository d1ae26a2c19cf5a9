"""Handlers whose params and results are secret; none of them says or notes what it is given."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel

from oncue import Context, handler


@handler("told")
async def told(params: Any, _: Context) -> dict[str, Any]:
    """Return what the worker's environment holds: the job says whether that is secret."""
    return {"told": os.environ["ONCUE_TEST_RESULT"] * params["times"]}


@handler("always-secret", secret_result=True)
def always_secret(params: Any) -> list[str]:
    """Return a secret whatever the job says."""
    return [os.environ["ONCUE_TEST_RESULT"]] * len(params)


@handler("secret-child", secret_result=True, isolation="process")
def secret_child(params: Any) -> dict[str, Any]:
    """Return a secret from a process of its own."""
    return {"child": os.environ["ONCUE_TEST_RESULT"], "keys": sorted(params)}


@handler("second-time", secret_result=True)
def second_time(_: Any, ctx: Context) -> str:
    """Fail once, then return a secret."""
    if ctx.attempt == 1:
        raise RuntimeError("not yet")
    return os.environ["ONCUE_TEST_RESULT"]


def _known(word: str) -> str:
    raise ValueError(f"{word} is no word that is known")


class Typed(BaseModel):
    """Params that no job has: what is wrong with them repeats them."""

    word: Annotated[str, AfterValidator(_known)]


@handler("typed")
def typed(params: Typed) -> str:
    """Return what it is given; it is never called."""
    return params.word


@handler("typed-child", isolation="process")
def typed_child(params: Typed) -> str:
    """Return what it is given; it is never called."""
    return params.word
