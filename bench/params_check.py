"""What the check of typed params adds to a submission, and the conversion to a run.

python -m bench.params_check
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field

from app.fleet.params_check import ParamsCheck
from oncue.handlers import params_type_of

ROUNDS = 20_000


class Customer(BaseModel):
    """Who pays."""

    email: str = Field(max_length=200)
    name: str | None = None


class Line(BaseModel):
    """What is paid."""

    sku: str = Field(pattern=r"^[A-Z]{2}-\d+$")
    quantity: int = Field(ge=1)
    price: float


class Order(BaseModel):
    """A typical model: nested, with a list, an optional field and a few bounds."""

    order_id: int = Field(alias="orderId")
    customer: Customer
    currency: Literal["EUR", "USD"]
    lines: list[Line] = Field(min_length=1)
    note: str | None = None


def order(lines: int) -> dict[str, Any]:
    """Return params with so many lines."""
    line = {"sku": "AB-1234", "quantity": 2, "price": 9.95}
    customer = {"email": "ada@example.com", "name": "Ada"}
    return {"orderId": 1, "customer": customer, "currency": "EUR", "lines": [line] * lines}


def handle(params: Order) -> None:
    """Stand for a handler."""


def microseconds(work: Callable[[], object], rounds: int) -> float:
    """Return the least time of one call in five trials."""
    trials = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(rounds):
            work()
        trials.append((time.perf_counter() - began) / rounds)
    return min(trials) * 1e6


def main() -> None:
    """Print a table."""
    kind = params_type_of("order", handle, {})
    assert kind is not None
    compile_us = microseconds(lambda: ParamsCheck(kind.schema_text), 200)
    print(f"compile, once a schema and dispatcher: {compile_us:.0f} us")
    check = ParamsCheck(kind.schema_text)
    print(f"{'bytes':>8} {'check us':>9} {'refuse us':>10} {'convert us':>11}")
    for lines in (1, 5, 50, 1000):
        good = order(lines)
        bad = good | {"currency": "GBP", "customer": {}}
        size, rounds = len(json.dumps(good)), ROUNDS // lines + 20
        assert not check.faults(good, size)
        assert len(check.faults(bad, size)) in (1, 2)
        figures = (
            microseconds(functools.partial(check.faults, good, size), rounds),
            microseconds(functools.partial(check.faults, bad, size), rounds),
            microseconds(functools.partial(kind.convert, good), rounds),
        )
        print(f"{size:>8} {figures[0]:>9.1f} {figures[1]:>10.1f} {figures[2]:>11.1f}")


if __name__ == "__main__":
    main()
