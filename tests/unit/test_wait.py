"""Promises of `tests.support.wait`."""

from __future__ import annotations

import pytest

from tests.support.wait import until, until_async


def test_returns_the_first_truthy_value() -> None:
    values = iter([None, 0, 3, 4])
    assert until(lambda: next(values)) == 3


def test_a_failed_connection_is_not_yet_and_another_error_is_passed_on() -> None:
    errors: list[Exception] = [ConnectionRefusedError(), KeyError("mine")]

    def fact() -> None:
        raise errors.pop(0)

    with pytest.raises(KeyError, match="mine"):
        until(fact)


def test_failure_names_what_was_waited_for_and_the_last_value() -> None:
    with pytest.raises(TimeoutError, match="a word; last seen: ''"):
        until(lambda: "", timeout=0.02, what="a word")


async def test_async_takes_plain_and_async_facts() -> None:
    async def fact() -> int:
        return 7

    assert await until_async(fact) == 7
    assert await until_async(lambda: 8) == 8
