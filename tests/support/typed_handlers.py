"""Handlers with typed params; `ONCUE_TEST_ORDER_VERSION` chooses which orders one takes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import TypedDict

from oncue import Context, handler


class Customer(BaseModel):
    """Who pays."""

    email: str = Field(min_length=3)


class OrderV1(BaseModel):
    """What is paid."""

    model_config = ConfigDict(extra="forbid")
    order_id: int = Field(alias="orderId", ge=1)
    customer: Customer


class OrderV2(BaseModel):
    """The same in the next version."""

    model_config = ConfigDict(extra="forbid")
    number: int
    customer: Customer


@dataclass
class Point:
    """A plain dataclass."""

    x: int
    y: int = 0


class Movie(TypedDict):
    """A typed dict."""

    title: str


class Even(BaseModel):
    """What no schema says: only the worker can refuse it."""

    n: int

    @model_validator(mode="after")
    def _even(self) -> Even:
        if self.n % 2:
            raise ValueError("n must be even")
        return self


if os.environ.get("ONCUE_TEST_ORDER_VERSION", "1") == "1":

    @handler("typed_order")
    def order(params: OrderV1, ctx: Context) -> Any:
        """Take an order, in a thread."""
        return {"type": type(params).__name__, "order": params.order_id, "attempt": ctx.attempt}

else:

    @handler("typed_order")
    def next_order(params: OrderV2) -> Any:
        """Take an order of the next version, in a thread."""
        return {"type": type(params).__name__, "order": params.number}


@handler("typed_point")
async def point(params: Point) -> Any:
    """Take a dataclass, on the event loop."""
    return [type(params).__name__, params.x, params.y]


@handler("typed_movie", isolation="process")
def movie(params: Movie, ctx: Context) -> Any:
    """Take a typed dict, in a child process."""
    return [params["title"], ctx.attempt]


@handler("typed_numbers")
async def numbers(params: list[int]) -> int:
    """Take a list."""
    return sum(params)


@handler("typed_even")
async def even(params: Even) -> int:
    """Take what only a validator knows."""
    return params.n


@handler("untyped")
async def untyped(params: dict) -> Any:  # type: ignore[type-arg]
    """Take anything."""
    return params
