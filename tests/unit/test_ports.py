"""Promises of `tests.support.ports`."""

from __future__ import annotations

import pytest

from tests.support.ports import free_port, outside


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (32_768, 60_999, {*range(15_000, 32_000)}),
        (20_000, 60_999, {*range(15_000, 20_000)}),
        (10_000, 60_999, {*range(1_024, 10_000), *range(61_000, 65_536)}),
        (15_000, 65_000, {*range(1_024, 15_000), *range(65_001, 65_536)}),
        (1_024, 65_535, {*range(15_000, 32_000)}),  # there is no other
    ],
)
def test_ports_of_outgoing_connections_are_avoided(
    first: int, last: int, expected: set[int]
) -> None:
    assert set(outside(first, last)) == expected


def test_a_port_is_given_once() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
