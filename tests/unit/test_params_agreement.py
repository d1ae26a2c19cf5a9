"""The door and the worker agree: what a handler takes is never refused when it is submitted."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import (
    AliasChoices,
    AliasPath,
    AnyUrl,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    HttpUrl,
    Json,
    PlainValidator,
    RootModel,
    SecretStr,
    StringConstraints,
    WrapValidator,
    create_model,
    model_validator,
)
from typing_extensions import TypedDict

from app.fleet.params_check import ParamsCheck
from oncue.handlers import params_type_of
from oncue.params import BadParams, ParamsType


class Colour(enum.Enum):
    """Text."""

    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    """Numbers that are true and false, too."""

    LOW = 0
    HIGH = 1


class Forgiving(enum.Enum):
    """Takes what it does not know."""

    ONE = "one"

    @classmethod
    def _missing_(cls, value: object) -> Forgiving:
        return cls.ONE


class Pair(NamedTuple):
    """A tuple with names."""

    left: int
    right: str = ""


@dataclasses.dataclass
class Point:
    """A plain dataclass."""

    x: int
    y: float = 0.0


class Movie(TypedDict, total=False):
    """A typed dict."""

    title: str
    year: int


class Renamed(BaseModel):
    """One that reads an old name."""

    new: int

    @model_validator(mode="before")
    @classmethod
    def _old(cls, value: Any) -> Any:
        return {"new": value["old"]} if isinstance(value, dict) and "old" in value else value


class OwnInit(BaseModel):
    """One that makes its fields itself."""

    total: int

    def __init__(self, **given: Any) -> None:
        super().__init__(total=given.get("a", 0) if isinstance(given.get("a", 0), int) else 0)


class Stripped(BaseModel):
    """One whose text is stripped first."""

    model_config = ConfigDict(str_strip_whitespace=True)
    name: str = Field(max_length=2)
    keys: dict[str, int] = Field(default_factory=dict, max_length=1)


class Python(BaseModel):
    """One with Python's regular expressions."""

    model_config = ConfigDict(regex_engine="python-re")
    code: str = Field(pattern=r"^(?=a).\d$")


class ByName(BaseModel):
    """One that may be filled by alias and by name, and by nothing else."""

    model_config = ConfigDict(populate_by_name=True, extra="forbid")
    order_id: int = Field(alias="orderId")


class OnlyByName(BaseModel):
    """One whose alias is not read."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=False)
    order_id: int = Field(alias="orderId")


class Choices(BaseModel):
    """One that looks in several places."""

    model_config = ConfigDict(extra="forbid")
    n: int = Field(validation_alias=AliasChoices("a", AliasPath("b", 0), "c"))


class Tree(BaseModel):
    """One that contains itself."""

    value: int
    children: list[Tree] = Field(default_factory=list)


class Cat(BaseModel):
    """A form with a tag."""

    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    """Another."""

    kind: Literal["dog", True]
    good: bool


def _is_list(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


def _wrapped(value: Any, inner: Callable[[Any], Any]) -> Any:
    return 0 if value == "none" else inner(value)


def _plain(value: Any) -> Any:
    return value


NUMBERS = st.one_of(
    st.integers(-3, 12),
    st.sampled_from([2**53, 2**53 + 1, 10**30, 10**30 + 1, -(10**30), 5.0, 0.1, 0.3, -0.0, 1e30]),
    st.floats(allow_nan=False, allow_infinity=False),
)
TEXTS = st.one_of(
    st.text(max_size=4),
    st.sampled_from(
        [
            "", "a", " a ", "red", "one", "none", "A1", "a1", "a1\n", "1", "1.50", "1e5", "NaN",
            "1,2", "2026-01-31", "2026-01-31T09:00:00Z", "10:00", "P1DT2H", "1700000000",
            "true", "٣", "12",
            "00000000-0000-0000-0000-000000000000", "0" * 32, "1.1.1.1", "http://x", "1GB", "/a/b",
            "éé", "1+2j", "[1]", "cat", "dog",
        ]
    ),
)  # fmt: skip
NAMES = st.sampled_from(
    [
        "a", "b", "c", "x", "y", "value", "children", "kind", "lives", "good", "left", "right", "n",
        "orderId", "order_id", "title", "year", "new", "old", "name", "keys", "code", "1", "01",
        "red",         "true", " a", "A", "field", "Field", "other", "0",
    ]
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=8,
)
TYPES: Sequence[Any] = (
    int, float, bool, str, bytes, decimal.Decimal, None, list, tuple, set, object,
    dt.datetime, dt.date, dt.time, dt.timedelta, uuid.UUID, complex,
    ipaddress.IPv4Address, ipaddress.IPv6Network, pathlib.Path, fractions.Fraction,
    re.Pattern, AnyUrl, HttpUrl, ByteSize, SecretStr, Json[int],
    Colour, Level, Forgiving, Pair, Point, Movie, Renamed, OwnInit, Stripped, Python, ByName,
    OnlyByName, Choices, Tree, RootModel[list[int]],
    Literal[1, "a"], Literal[True], Literal[0, None], Cat | Dog,
    Annotated[Cat | Dog, Field(discriminator="kind")],
    Annotated[int, Field(ge=2, le=10**30)], Annotated[int, Field(multiple_of=3)],
    Annotated[float, Field(gt=0.1, multiple_of=0.1)], Annotated[float, Field(ge=10**30)],
    Annotated[decimal.Decimal, Field(gt=decimal.Decimal("0.09999999999999999999"))],
    Annotated[decimal.Decimal, Field(ge=10**30 + 1)],
    Annotated[decimal.Decimal, Field(lt=3, max_digits=2, decimal_places=1)],
    Annotated[str, StringConstraints(strip_whitespace=True, max_length=1, pattern="^a$")],
    Annotated[str, StringConstraints(min_length=1, max_length=2, pattern=r"^\w+$", to_upper=True)],
    Annotated[str, Field(pattern=re.compile(r"^a(?!b)"))], Annotated[str, Field(pattern=r"^\d$")],
    Annotated[bytes, Field(min_length=4, max_length=4)],
    Annotated[set[int], Field(max_length=1)], Annotated[frozenset[int], Field(min_length=1)],
    Annotated[list[int], Field(min_length=1, max_length=2)],
    Annotated[list[int], BeforeValidator(_is_list)], Annotated[int, WrapValidator(_wrapped)],
    Annotated[int, PlainValidator(_plain)],
    Annotated[int, BeforeValidator(lambda v: v * 2 if isinstance(v, int) else v), Field(ge=5)],
    Annotated[set[int] | None, Field(max_length=1)], Annotated[int | str, Field(ge=1)],
    dict[str, int], dict[int, int], dict[Level, int], dict[Colour, str], dict[uuid.UUID, int],
    dict[bool, int], Annotated[dict[int, int], Field(max_length=1)],
    dict[Annotated[str, Field(pattern="^a")], int], collections.Counter[str],
    collections.deque[int], Annotated[collections.deque[int], Field(max_length=1)],
    tuple[int, str], tuple[int, ...], collections.OrderedDict[str, int], Sequence[int],
    dict[Annotated[str, StringConstraints(to_lower=True, max_length=1)], int],
)  # fmt: skip
ANY_TYPE = st.recursive(
    st.sampled_from(TYPES),
    lambda inner: st.one_of(
        inner.map(lambda one: list[one]),  # type: ignore[valid-type]
        inner.map(lambda one: dict[str, one]),  # type: ignore[valid-type]
        st.tuples(inner, inner).map(lambda both: both[0] | both[1] if _joins(*both) else both[0]),
        inner.map(lambda one: one | None if _joins(one, None) else one),
        st.tuples(inner, inner, st.sampled_from(["ignore", "forbid", "allow"])).map(
            lambda given: _model(*given)
        ),
    ),
    max_leaves=3,
)


def _joins(left: Any, right: Any) -> bool:
    try:
        left | right
    except TypeError:
        return False
    return True


def _model(required: Any, optional: Any, extra: str) -> Any:
    return create_model(
        "Made",
        __config__=ConfigDict(extra=extra),  # type: ignore[typeddict-item]
        field=(required, Field(alias="Field")),
        other=(optional, None),
    )


def typed(annotation: Any) -> ParamsType:
    def function(params: Any) -> None: ...

    function.__annotations__["params"] = annotation
    found = params_type_of("h", function, {})
    assert found is not None
    return found


def taken(kind: ParamsType, params: Any) -> bool:
    try:
        kind.convert(params)
    except (BadParams, TypeError):  # TypeError: a constraint that does not fit all of a union
        return False
    return True


def refused(kind: ParamsType, params: Any) -> list[Any]:
    return list(ParamsCheck(kind.schema_text).faults(params, len(json.dumps(params))))


@settings(max_examples=700)
@given(ANY_TYPE.filter(lambda one: one is not object), VALUES)
@example(Annotated[set[int], Field(max_length=1)], [1, 1])
@example(Level, True)
@example(dict[Level, int], {"1": 1})
@example(ByName, {"order_id": 1})
@example(Choices, {"b": [1]})
@example(OnlyByName, {"order_id": 1, "orderId": "x"})
@example(Renamed, {"old": 1})
@example(Stripped, {"name": "  ab  ", "keys": {"a": 1, " a": 2}})
@example(Annotated[bytes, Field(min_length=4, max_length=4)], "éé")
@example(Annotated[str, Field(pattern=r"^\d$")], "٣")
@example(Pair, {"left": 1})
@example(collections.Counter[str], {"a": 1})
def test_what_the_handler_takes_is_never_refused_at_the_door(annotation: Any, params: Any) -> None:
    kind = typed(annotation)
    if taken(kind, params):
        assert refused(kind, params) == []


PLAIN = st.recursive(
    st.sampled_from(
        [bool, str, None, Colour, Point, Movie, Tree, Cat, Annotated[str, Field(max_length=2)]]
    ),
    lambda inner: st.one_of(
        inner.map(lambda one: list[one]),  # type: ignore[valid-type]
        inner.map(lambda one: dict[str, one]),  # type: ignore[valid-type]
        st.tuples(inner, inner).map(lambda both: both[0] | both[1] if _joins(*both) else both[0]),
        st.tuples(inner, inner, st.just("forbid")).map(lambda given: _model(*given)),
    ),
    max_leaves=3,
)
NO_INTEGRAL_FLOATS = VALUES.filter(lambda value: ".0" not in json.dumps(value))


@settings(max_examples=500)
@given(PLAIN, NO_INTEGRAL_FLOATS)
def test_for_json_s_own_types_the_door_refuses_all_that_the_handler_would(
    annotation: Any, params: Any
) -> None:
    kind = typed(annotation)
    if "e+" not in json.dumps(params):
        assert taken(kind, params) == (refused(kind, params) == [])


@pytest.mark.parametrize(
    "annotation",
    # Numbers: the text of some annotations differs from process to process.
    [pytest.param(one, id=str(place)) for place, one in enumerate(TYPES) if one is not object],
)
def test_every_type_has_a_schema_that_can_be_checked(annotation: Any) -> None:
    ParamsCheck(typed(annotation).schema_text)
