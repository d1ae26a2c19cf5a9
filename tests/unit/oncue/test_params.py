"""Typed params: the annotation makes the value, and a wrong one is told when it is registered."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from oncue import Context, Fail, ParamsInvalid, handler
from oncue.handlers import REGISTRY
from oncue.params import UnusableAnnotation
from oncue.testing import run_handler, run_handler_async

if TYPE_CHECKING:
    from collections.abc import Callable
    from decimal import Decimal


class Customer(BaseModel):
    """Who pays."""

    email: str


class Order(BaseModel):
    """What is paid."""

    order_id: int = Field(alias="orderId")
    customer: Customer
    at: datetime | None = None


@dataclass
class Point:
    """A plain dataclass."""

    x: int
    y: int = 0


class Movie(TypedDict):
    """A typed dict."""

    title: str


def schema_of(name: str) -> Any:
    kind = REGISTRY[name].params_type
    assert kind is not None
    return json.loads(kind.schema_text)


def test_a_model_is_made_and_described_by_its_aliases() -> None:
    @handler("typed-model")
    def take(params: Order, ctx: Context) -> Any:
        assert isinstance(params, Order)
        return [params.order_id, params.customer.email, str(params.at), ctx.attempt]

    given = {"orderId": 7, "customer": {"email": "a@example.com"}, "at": "2026-01-31T09:00:00Z"}
    at = datetime(2026, 1, 31, 9, tzinfo=UTC)
    assert run_handler(take, given) == [7, "a@example.com", str(at), 1]
    schema = schema_of("typed-model")
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["orderId", "customer"]


def test_dataclasses_typed_dicts_generics_and_constraints_are_made_too() -> None:
    def point(params: Point) -> Any:
        return [params.x, params.y]

    def movie(params: Movie) -> str:
        return params["title"]

    def numbers(params: list[int]) -> int:
        return sum(params)

    def positive(params: Annotated[int, Field(gt=0)] | None) -> Any:
        return params

    assert run_handler(point, {"x": 1}) == [1, 0]
    assert run_handler(movie, {"title": "M"}) == "M"
    assert run_handler(numbers, [1, 2]) == 3
    assert run_handler(positive) is None
    with pytest.raises(ParamsInvalid, match=r"^/params/y: "):
        run_handler(point, {"x": 1, "y": "1"})
    with pytest.raises(ParamsInvalid, match=r"^/params/title: Field required$"):
        run_handler(movie, {})


def test_names_that_only_the_defining_function_knows_are_found() -> None:
    class Local(BaseModel):
        n: int

    @handler("typed-local")
    async def take(params: Local) -> int:
        return params.n

    assert run_handler("typed-local", {"n": 2}) == 2


async def test_async_handlers_are_given_the_value() -> None:
    async def take(params: Point) -> int:
        return params.x

    assert await run_handler_async(take, {"x": 3}) == 3


def test_what_does_not_fit_is_a_fail_that_names_each_field() -> None:
    def take(params: Order) -> None:
        raise AssertionError("the handler must not be called")

    with pytest.raises(ParamsInvalid) as caught:
        run_handler(take, {"orderId": "7", "customer": {"e~m/ail": 1}})
    assert isinstance(caught.value, Fail)
    assert caught.value.code == "params_invalid"
    assert [one.pointer for one in caught.value.errors] == [
        "/params/orderId",
        "/params/customer/email",
    ]
    assert "customer/email: Field required" in str(caught.value)


def test_a_sentence_never_repeats_a_value() -> None:
    def take(params: list[int]) -> None: ...

    with pytest.raises(ParamsInvalid) as caught:
        run_handler(take, ["s3cr3t"])
    assert "s3cr3t" not in str(caught.value)


def test_untyped_params_arrive_as_they_were_sent() -> None:
    def bare(params) -> Any:  # type: ignore[no-untyped-def]  # noqa: ANN001, RUF100
        return params

    def a_dict(params: dict) -> Any:  # type: ignore[type-arg]
        return params

    def anything(params: Any) -> Any:
        return params

    for function in (bare, a_dict, anything):
        assert run_handler(function, "7") == "7"
        handler(f"untyped-{function.__name__}")(function)
        assert REGISTRY[f"untyped-{function.__name__}"].params_type is None


def test_only_the_annotation_of_params_must_be_there() -> None:
    @handler("typed-others")
    def take(params: list[int], ctx: NotThere = None) -> Nowhere:  # type: ignore[name-defined]  # noqa: F821
        return params

    assert run_handler("typed-others", [1]) == [1]


def test_an_annotation_that_is_no_schema_is_told_when_it_is_registered() -> None:
    def calls(params: Callable[[int], int]) -> None: ...

    def unknown(params: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    def only_for_type_checkers(params: Decimal) -> None: ...

    def plain_class(params: Nobody) -> None: ...

    with pytest.raises(UnusableAnnotation, match=r"handler 'bad': .*Missing.*not defined"):
        handler("bad")(unknown)
    with pytest.raises(UnusableAnnotation, match="define or import it before the handler"):
        handler("bad")(only_for_type_checkers)
    with pytest.raises(UnusableAnnotation, match=r"handler 'bad': .*Callable"):
        handler("bad")(calls)
    with pytest.raises(TypeError, match=r"Nobody has no JSON Schema.*use a pydantic model"):
        handler("bad")(plain_class)
    assert "bad" not in REGISTRY


class Nobody:
    """No model of anything."""


def test_the_example_of_the_documentation_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "handlers.md").read_text()
    section = page.partition("## Typed params")[2]
    example = section.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"__name__": "documented"}
    exec(compile(example, "docs/handlers.md", "exec", dont_inherit=True), names)
    order = {"orderId": 7, "customer": {"email": "ada@example.com"}}
    assert run_handler("ship-order", order) == {"shipped": 7, "told": "ada@example.com"}
    assert run_handler("resize", {"width": 2, "height": 3}) == 6
    assert run_handler("report", {"month": "May"}) == "May"
    assert run_handler("sum", [1, 2]) == 3
    with pytest.raises(ParamsInvalid, match="customer: Field required"):
        run_handler("ship-order", {"orderId": 7})


def test_a_default_that_is_no_json_is_no_obstacle() -> None:
    class Limits(BaseModel):
        most: float = math.inf
        least: float = Field(default=0.0, ge=-math.inf)

    def take(params: Limits) -> bool:
        return math.isinf(params.most)

    assert run_handler(take, {}) is True


def test_a_child_with_untyped_handlers_never_loads_pydantic() -> None:
    program = (
        "import sys; from typing import Any; from oncue import handler\n"
        "@handler('h')\ndef h(params: Any): ...\n"
        "import worker.child; print('pydantic' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
