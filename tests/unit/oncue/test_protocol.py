"""Messages between dispatchers and workers: bounds hold, whatever else bounds the same field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, ValidationError

import app.main  # noqa: F401 - the documents of the API are bounded the same way
from oncue.protocol import Heartbeat, Load, Run

BOUNDS: tuple[tuple[type, str, Callable[[list[Any]], Any]], ...] = (
    (Ge, "ge", max),
    (Gt, "gt", max),
    (Le, "le", min),
    (Lt, "lt", min),
    (MinLen, "min_length", max),
    (MaxLen, "max_length", min),
)


def models(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for one in kind.__subclasses__():
        yield one
        yield from models(one)


def test_no_bound_is_overruled_by_a_wider_one_of_the_type() -> None:
    """Of several bounds of one kind the last is the one that counts."""
    seen = 0
    own = [one for one in models(BaseModel) if one.__module__.split(".")[0] in ("app", "oncue")]
    for model in own:
        for name, field in model.model_fields.items():
            for kind, attribute, narrowest in BOUNDS:
                found = [getattr(one, attribute) for one in field.metadata if type(one) is kind]
                seen += bool(found)
                assert not found or found[-1] == narrowest(found), f"{model}.{name}"
    assert seen > 20


@pytest.mark.parametrize(
    ("message", "sent"),
    [
        (Load, {"seq": -1, "active": 0}),
        (Load, {"seq": 1, "active": -1}),
        (Load, {"seq": 1, "active": 0, "queued": -1}),
        (Heartbeat, {"capacity": -1}),
        (Run, {"attempt": 0}),
    ],
)
def test_a_count_below_what_it_can_be_is_refused(
    message: type[BaseModel], sent: dict[str, int]
) -> None:
    with pytest.raises(ValidationError) as caught:
        message.model_validate(sent)
    wrong = [one["loc"][0] for one in caught.value.errors() if one["type"] != "missing"]
    assert wrong == [name for name, value in sent.items() if value < 1 and name in wrong]
    assert wrong
