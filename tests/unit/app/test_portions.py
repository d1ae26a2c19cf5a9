"""What is divided among dispatchers: all of it, evenly, and in turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.portions import TURN_MS, Portion, Use, seats_of

few = st.integers(1, 64)


@given(slots=st.integers(0, 1000), of=few, turn=st.integers(0, 10**12))
def test_in_each_turn_the_parts_are_all_slots_and_even(slots: int, of: int, turn: int) -> None:
    parts = [Portion(place, of).part(slots, turn=turn) for place in range(of)]
    assert sum(parts) == slots
    assert max(parts) - min(parts) <= 1


@given(of=few, place=st.integers(0, 63), cycle=st.integers(0, 10**12))
def test_a_single_slot_is_everybodys_in_turn(of: int, place: int, cycle: int) -> None:
    one = Portion(place % of, of)
    assert sum(one.part(1, turn=cycle * of + passed) for passed in range(of)) == 1


@pytest.mark.parametrize("of", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("period", [1, 4, 10, 16, 20, 25, 100])
def test_runs_of_any_one_length_do_not_always_end_in_the_same_ones_turn(
    of: int, period: int
) -> None:
    gets = [
        sum(
            Portion(place, of).part(1, turn=17_000_000_000 + number * period)
            for number in range(400)
        )
        for place in range(of)
    ]
    assert sum(gets) == 400
    assert min(gets) >= 400 / of / 2


@given(of=few, partitions=few)
def test_shares_of_partitions_are_all_of_them_and_even(of: int, partitions: int) -> None:
    shares = [seats_of(place, of=of, partitions=partitions) for place in range(of)]
    assert sum(shares) == partitions
    assert max(shares) - min(shares) <= 1
    assert max(shares) <= -(-partitions // of)


@given(
    capacity=st.integers(1, 50),
    of=st.integers(2, 8),
    number=st.integers(0, 2**32),
    start=st.integers(0, 10**6),
)
def test_from_idle_all_together_fill_a_worker_and_never_ask_for_more(
    capacity: int, of: int, number: int, start: int
) -> None:
    portions = [Portion(place, of) for place in range(of)]
    uses = [Use(number) for _ in portions]
    now_ms = start * TURN_MS
    free = capacity
    asked = [
        use.allowed(portion, capacity=capacity, free=free, now_ms=now_ms)
        for portion, use in zip(portions, uses, strict=True)
    ]
    assert sum(asked) == capacity


@given(capacity=st.integers(1, 20), of=st.integers(2, 8), number=st.integers(0, 2**32))
def test_one_that_has_all_the_work_gets_every_slot_within_some_turns(
    capacity: int, of: int, number: int
) -> None:
    use, portion = Use(number), Portion(0, of)
    for turn in range(2 * of * capacity + 1):
        use.own += use.allowed(
            portion, capacity=capacity, free=capacity - use.own, now_ms=turn * TURN_MS
        )
    assert use.own == capacity


def test_a_slot_that_its_owner_fills_again_and_again_is_not_lent() -> None:
    use, portion = Use(0, own=1), Portion(0, 2)
    asked = []
    for turn in range(10):
        # The other's run has ended as the turn begins; in the midst of it the next one runs.
        asked.append(use.allowed(portion, capacity=2, free=1, now_ms=turn * TURN_MS))
        asked.append(use.allowed(portion, capacity=2, free=0, now_ms=turn * TURN_MS + 50))
    assert sum(asked) == 0


def test_a_slot_that_was_lent_is_taken_by_whose_it_is_when_it_is_free_again() -> None:
    borrower, owner = Use(0), Use(0)
    turn = next(one for one in range(4) if Portion(0, 2).part(1, turn=one))
    borrower.own = 1
    assert owner.allowed(Portion(0, 2), capacity=1, free=0, now_ms=turn * TURN_MS) == 0
    borrower.own = 0
    assert owner.allowed(Portion(0, 2), capacity=1, free=1, now_ms=turn * TURN_MS) == 1
    assert borrower.allowed(Portion(1, 2), capacity=1, free=1, now_ms=turn * TURN_MS) == 0
